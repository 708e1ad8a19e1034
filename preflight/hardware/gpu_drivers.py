"""Why a vendor's tool or driver does not work: each failure told apart, with its own way out."""

from __future__ import annotations

import re

from preflight import wheels
from preflight.findings import Finding, Level, quote
from preflight.gpus import Trouble
from preflight.hardware.capability import capability_from_name
from preflight.hardware.gpu_checks import AGAIN, DRIVER_SOURCE, NVML_SOURCE, Seen, again, count
from preflight.hardware.nvidia import short_bus_id


def check_driver_answers(seen: Seen) -> list[Finding]:
    """Why NVIDIA's tool or driver does not work, told apart by its own words."""
    found: list[Finding] = []
    for kind, judge in (
        ("timeout", _hangs),
        ("mismatch", _mismatch),
        ("needs-reset", _needs_reset),
        ("lost", _lost),
        ("power", _no_power),
        ("no-devices", _no_devices),
        ("no-driver", _no_driver),
        ("no-runtime", _no_runtime),
        ("inforom", _inforom),
        ("no-cuda", _no_cuda),
        ("unknown-error", _unknown_error),
        ("no-library", _no_library),
        ("permission", _permission),
        ("blocked", _blocked),
        ("truncated", _truncated),
        ("failed", _failed),
        ("absent", _absent),
    ):
        trouble = seen.trouble(kind)
        if trouble is not None:
            finding = judge(seen, trouble)
            if finding is not None:
                found.append(finding)
    if not found and seen.log.mismatch and not seen.nvidia:
        found += [f for f in [_mismatch(seen, Trouble("kernel log", "mismatch"))] if f]
    if not any(f.code == "gpu-lost" for f in found):  # a card that waits for a reset has its own finding
        lost = [gpu for gpu in seen.accelerators.gpus if gpu.lost]
        if lost:
            buses = tuple(short_bus_id(gpu.pci_bus_id) for gpu in lost if gpu.pci_bus_id)
            found.append(_lost(seen, Trouble("nvidia-smi", "lost", "", buses)))
    return found


def _hangs(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "nvidia-smi-hangs",
        Level.FAIL,
        f"nvidia-smi does not answer ({quote(trouble.text)}) and was given up.",
        "The driver waits for a card that does not respond: a hung kernel, a card that fell off the bus, or a "
        "driver being reloaded. "
        "CUDA programs hang in the same place.",
        again(
            "look for the reason: `sudo dmesg | grep -iE 'xid|nvrm'`",
            "reboot (power-cycle when the driver cannot be unloaded)",
        ),
        NVML_SOURCE,
    )


def _mismatch(seen: Seen, trouble: Trouble) -> Finding | None:
    if seen.host.wsl:
        return None  # there the client and the Windows driver differ by design
    driver = seen.accelerators.driver
    library = driver.library or (seen.log.mismatch[0] if seen.log.mismatch else None)
    module = driver.kernel_module or (seen.log.mismatch[1] if seen.log.mismatch else None)
    versions = f" (library {library or 'unknown'}, loaded kernel module {module or 'unknown'})"
    inside = seen.host.in_container
    return Finding(
        "driver-library-mismatch",
        Level.FAIL,
        f"The NVIDIA driver was updated but the old kernel module is still loaded{versions}: the card is there "
        f"and cannot be used.",
        "User-space library and kernel module must be the same version; an unattended upgrade replaces the first "
        "and not the second.",
        (
            "reboot" + (" the host (not the container)" if inside else ""),
            "or reload the modules with no program on the card: `sudo rmmod nvidia_drm nvidia_modeset nvidia_uvm "
            "nvidia && "
            "sudo modprobe nvidia`",
            "if it comes back, hold driver upgrades: `sudo apt-mark hold 'nvidia-*' 'libnvidia-*'`",
        ),
        NVML_SOURCE,
    )


def _lost(seen: Seen, trouble: Trouble) -> Finding:
    revision_ff = [card.slot for card in seen.cards("nvidia") if not card.answers]
    buses = list(trouble.bus_ids) or revision_ff
    others = [card for card in seen.cards("nvidia") if card.answers]
    others_said = (
        f" The other {count(len(others), 'card')} on the bus still answer{'s' if len(others) == 1 else ''}."
        if others
        else ""
    )
    logged = any(xid.code == 79 for xid in seen.log.xids)
    keep = "until then use only the cards that answer: set CUDA_VISIBLE_DEVICES"
    return Finding(
        "gpu-lost",
        Level.FAIL,
        f"A card is there but no longer answers on PCIe ({', '.join(buses) or 'bus id not told'}): the GPU is "
        f"lost.{others_said}",
        ("The kernel log has Xid 79 for it. " if logged else "")
        + "The link to the card broke while it ran: power, cable or riser, slot, heat, overclock or PCIe power "
        "saving. This is not a "
        "timeout (TDR), and nothing that is installed with pip can change it.",
        (
            "power the machine off and on (a warm reboot often does not bring the card back)",
            "then check power supply and cables, riser, slot and temperature" + (f"; {keep}" if others else ""),
            "if it comes back under load: lower the power limit with `sudo nvidia-smi -pl WATTS`, try another "
            "slot, remove overclocking",
        ),
        "facts/xid.json Xid 79; NVML_ERROR_GPU_IS_LOST",
    )


def _needs_reset(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "gpu-needs-reset",
        Level.FAIL,
        f"The driver refuses a card until it is reset ({', '.join(trouble.bus_ids) or 'bus id not told'}).",
        "An error on the card left it in a state that only a reset clears. It still answers, so it is not lost.",
        again(
            "end every program that uses the card, then `sudo nvidia-smi --gpu-reset -i NUMBER`, or reboot",
            "see which error it was: `sudo dmesg | grep -iE 'xid|nvrm'`",
        ),
        "NVML_ERROR_RESET_REQUIRED",
    )


def _no_power(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "gpu-without-power",
        Level.FAIL,
        f"A card has no external power ({', '.join(trouble.bus_ids) or 'bus id not told'}).",
        "The driver sees it on the bus and refuses to start it: its power cables are not plugged in, or the supply "
        "gives too little.",
        again("power off, plug in all of the card's power cables, each from the supply itself, and start again"),
        "NVML_ERROR_INSUFFICIENT_POWER",
    )


def _no_devices(seen: Seen, trouble: Trouble) -> Finding:
    cards, log = seen.cards("nvidia"), seen.log
    named = ", ".join(quote(card.name) for card in cards)
    ids = ", ".join(card.pci_id for card in cards if card.pci_id)
    chips = [capability for card in cards if (capability := capability_from_name(card.name))]
    blackwell = any(wheels.numbers(capability) >= (10, 0) for capability in chips)
    if log.init_failed or log.needs_open_module or (cards and blackwell and log.proprietary_module):
        opened = log.needs_open_module or (blackwell and log.proprietary_module is not False)
        version = f" {log.module_version}" if log.module_version else ""
        which = f"{named or 'seen in the kernel log'}{', ' + ids if ids else ''}"
        what = f"The NVIDIA driver{version} cannot initialise the card ({which})"
        if opened:
            return Finding(
                "adapter-init-failed",
                Level.FAIL,
                f"{what}: it needs the open kernel modules and the proprietary ones are loaded.",
                "Blackwell and newer cards are driven by NVIDIA's open kernel modules only; RmInitAdapter fails "
                "with the others.",
                again(
                    "install the open flavour of the same driver, for example `sudo apt install nvidia-open` or "
                    "the -open package of "
                    "your distribution, and reboot",
                    "if it still fails with the open module: enable Above 4G Decoding and Resizable BAR in the "
                    "firmware",
                ),
                "NVIDIA open-gpu-kernel-modules README; kernel log",
            )
        return Finding(
            "adapter-init-failed",
            Level.FAIL,
            f"{what}: RmInitAdapter failed.",
            "The module is loaded and the card is on the bus, but bringing it up failed: firmware settings (BAR "
            "space), power, "
            "a driver too old for the card, or a fault of the card.",
            again(
                "enable Above 4G Decoding and Resizable BAR in the firmware and update it",
                "power off completely, reseat the card and its power cables",
            ),
            "kernel log (NVRM RmInitAdapter)",
        )
    if cards:
        dead = [card.slot for card in cards if not card.answers]
        if dead:
            return _lost(seen, trouble)
    if log.legacy_branch or log.unsupported_card:
        last = (
            f"the branch {quote(log.legacy_branch)} is the last for it"
            if log.legacy_branch
            else "it is too new or too old"
        )
        branch = log.legacy_branch or "that NVIDIA's driver search names for this card"
        return Finding(
            "card-not-supported",
            Level.FAIL,
            f"The loaded NVIDIA driver does not support the card{f' ({named})' if named else ''}: {last}.",
            "The driver itself says so in the kernel log and leaves the card alone.",
            again(
                f"install the driver branch {quote(branch)}",
                "look it up on nvidia.com/drivers; a card that only a legacy branch drives needs an old torch, too",
            ),
            "kernel log (NVRM, not supported by)",
        )
    if cards:
        old = [capability for capability in chips if wheels.driver_for(capability)[1]]
        return Finding(
            "no-devices-found",
            Level.FAIL,
            f"The NVIDIA driver runs but drives no card, although one is on the bus: {named}.",
            "The driver does not support this card (too old or too new a branch"
            + (f": branch {wheels.driver_for(old[0])[1]} is the last for it" if old else "")
            + "), another driver holds it (nouveau, vfio-pci), or its start failed.",
            again("see why: `sudo dmesg | grep -i nvrm`", "install the driver branch that supports the card"),
            NVML_SOURCE,
        )
    where = " The machine is a container: the devices were not passed in." if seen.host.in_container else ""
    return Finding(
        "no-devices-found",
        Level.FAIL,
        "The NVIDIA driver runs and says that no devices were found.",
        "The driver's module is loaded, so a card was expected: it is switched off, held by another driver, "
        "passed to a virtual "
        f"machine, or failed to start; the bus was not listed here.{where}",
        again("see what the bus shows: `lspci -nnk -d 10de:`", "see why: `sudo dmesg | grep -i nvrm`"),
        NVML_SOURCE,
    )


def _no_driver(seen: Seen, trouble: Trouble) -> Finding:
    cards, log = seen.cards("nvidia"), seen.log
    named = f" ({', '.join(quote(card.name) for card in cards)})" if cards else ""
    base = f"nvidia-smi is installed but the NVIDIA kernel driver is not running{named}"
    source = NVML_SOURCE
    dead = [card.slot for card in cards if not card.answers]
    modules = {card.module for card in cards if card.module} | seen.hints.modules
    if seen.host.wsl:
        return Finding(
            "driver-not-running",
            Level.FAIL,
            "nvidia-smi in WSL cannot reach the Windows driver.",
            "In WSL the driver is the Windows one; a Linux NVIDIA driver installed inside hides it.",
            again(
                "update the NVIDIA driver on Windows and run `wsl --update`, then `wsl --shutdown`",
                "remove any Linux NVIDIA driver from this distribution",
            ),
            "CUDA on WSL user guide",
        )
    if log.signature_rejected or seen.hints.module_refused:
        return Finding(
            "driver-module-rejected",
            Level.FAIL,
            f"{base}: Secure Boot refused to load its module.",
            "The kernel log says that the module's key is not enrolled. The driver itself is installed.",
            again(
                "enrol the key: `sudo mokutil --import /var/lib/shim-signed/mok/MOK.der`, reboot and confirm in "
                "the blue menu",
                "or switch Secure Boot off in the firmware",
            ),
            "kernel log",
        )
    if dead:
        return Finding(
            "gpu-powered-off",
            Level.FAIL,
            f"{base}: the card in slot {', '.join(dead)} is switched off (revision ff).",
            "On laptops with two GPUs the power-saving profile switches the NVIDIA card off; on a desktop the "
            "card is lost.",
            again(
                "switch it on: `sudo prime-select on-demand` (or `nvidia`) and reboot; with bbswitch `echo ON | "
                "sudo tee /proc/acpi/bbswitch`",
                "on a desktop: power off completely and check the card's cables",
            ),
            "lspci revision ff; Optimus power management",
        )
    if "nouveau" in modules or log.nouveau:
        return Finding(
            "nouveau-in-use",
            Level.FAIL,
            f"{base}: the nouveau driver holds the card.",
            "Only one driver can own the card, and CUDA needs NVIDIA's.",
            again(
                "block it: `echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/blacklist-nouveau.conf && sudo "
                "update-initramfs -u`, reboot"
            ),
            "lspci -k; kernel log",
        )
    if "vfio-pci" in modules:
        return Finding(
            "gpu-passed-through",
            Level.FAIL,
            f"{base}: the card is reserved for a virtual machine (vfio-pci).",
            "A card bound to vfio-pci is not the host's to use.",
            again("run the training inside that machine, or unbind the card from vfio-pci"),
            "lspci -k",
        )
    if seen.hints.profile == "intel":
        return Finding(
            "gpu-powered-off",
            Level.FAIL,
            f"{base}: the laptop is in its power-saving profile (prime-select: intel), which switches the NVIDIA "
            f"card off.",
            "In that profile the driver is not loaded and the card has no power.",
            again("switch it on: `sudo prime-select on-demand` (or `nvidia`) and reboot"),
            "prime-select query",
        )
    if seen.hints.module_for_kernel is False:
        return Finding(
            "driver-module-not-built",
            Level.FAIL,
            f"{base}: no nvidia module was built for the kernel that runs.",
            "After a kernel update DKMS has to build the module again; the kernel's headers or the build failed.",
            again(
                "install the headers and build it: `sudo apt install linux-headers-$(uname -r) && sudo dkms "
                "autoinstall`, reboot",
                "or boot the kernel that it was built for",
            ),
            "modinfo / modprobe / dkms status",
        )
    optimus = seen.cards("intel") or seen.cards("amd")
    hint = (
        "on a laptop with two GPUs first switch the NVIDIA one on: `sudo prime-select on-demand`, then reboot"
        if optimus
        else "if the machine boots with Secure Boot, see whether the module was refused: `sudo dmesg | grep -i "
        "'module verification'`"
    )
    return Finding(
        "driver-not-running",
        Level.FAIL,
        f"{base}.",
        "Its module is not loaded: most often the kernel was updated and the module was not rebuilt for it "
        "(DKMS), or the card "
        "is switched off.",
        again(
            "rebuild and load it: `sudo dkms autoinstall && sudo modprobe nvidia`, or reinstall the driver "
            "package and reboot",
            hint,
        ),
        source,
    )


def _no_runtime(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "container-runtime-missing",
        Level.FAIL,
        f"The container cannot be given a GPU: {quote(trouble.text, 160)}",
        "Docker on the host does not know NVIDIA's runtime: the NVIDIA container toolkit is missing or not "
        "configured. The image and "
        "what is installed in it do not matter.",
        again(
            "on the host: `sudo apt install nvidia-container-toolkit && sudo nvidia-ctk runtime configure "
            "--runtime=docker && "
            "sudo systemctl restart docker`"
        ),
        "NVIDIA container toolkit installation guide",
    )


def _no_cuda(seen: Seen, trouble: Trouble) -> Finding:
    inside = seen.host.in_container
    return Finding(
        "cuda-library-missing",
        Level.FAIL,
        "The driver answers, but its CUDA library is missing: nvidia-smi gives no CUDA version.",
        "libcuda belongs to the driver, not to the toolkit or to torch. In a container it is brought in only "
        "with the driver "
        "capability `compute`.",
        again(
            "start the container with `-e NVIDIA_DRIVER_CAPABILITIES=compute,utility`"
            if inside
            else "install the driver's compute libraries (package libnvidia-compute or nvidia-compute-utils) in "
            "the driver's version",
            "then `ldconfig -p | grep libcuda` must show libcuda.so.1",
        ),
        "NVIDIA container toolkit documentation, driver capabilities",
    )


def _inforom(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "inforom-corrupted",
        Level.WARN,
        f"The card's own memory of its settings and errors (infoROM) is damaged: {quote(', '.join(trouble.bus_ids))}.",
        "The card computes, but its ECC, serial and error counts cannot be trusted, and some drivers refuse features.",
        (
            "run `python gpu_probe.py --stress-test`",
            "ask the vendor for a firmware repair (nvflash is theirs) or a replacement",
        ),
        "nvidia-smi warning",
    )


def _unknown_error(seen: Seen, trouble: Trouble) -> Finding:
    inside = seen.host.in_container
    return Finding(
        "nvml-unknown-error",
        Level.FAIL,
        f"nvidia-smi fails with '{quote(trouble.text, 120)}'"
        + (" in this container: it lost its access to the card." if inside else "."),
        "In a container this happens when systemd reloads on the host and rewrites the device cgroup: programs "
        "that already run go "
        "on, new ones see no card. Outside a container it is a driver that does not start.",
        again(
            "restart the container" + ("" if inside else " (or, outside a container, reboot)"),
            "to keep it from coming back: run with `--device /dev/nvidia0 --device /dev/nvidiactl --device "
            "/dev/nvidia-uvm`, or set "
            '"exec-opts": ["native.cgroupdriver=cgroupfs"] in Docker\'s daemon.json',
        ),
        "NVIDIA container toolkit, troubleshooting (containers losing access to GPUs)",
    )


def _no_library(seen: Seen, trouble: Trouble) -> Finding:
    inside = seen.host.in_container
    return Finding(
        "nvml-library-missing",
        Level.FAIL,
        "nvidia-smi is here but the driver's library libnvidia-ml is not.",
        "The driver's user-space part is missing or not on the library path"
        + (
            ": in a container the NVIDIA container toolkit brings it in."
            if inside
            else "; the installation is incomplete."
        ),
        again(
            "start the container with `--gpus all`"
            if inside
            else "reinstall the driver package (user-space libraries included)",
            "then `sudo ldconfig`",
        ),
        NVML_SOURCE,
    )


def _permission(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "gpu-permission-denied",
        Level.FAIL,
        "nvidia-smi has no permission to talk to the driver.",
        "The card and its driver are there. The device files /dev/nvidia* are not readable for this user, or, in a "
        "container, its isolation (SELinux, a rootless runtime, the device cgroup) refuses them.",
        again(
            "look at them: `ls -l /dev/nvidia*`, and add the user to the group that owns them (video or render)",
            "in a container: pass the card in anew (`--gpus all`, Podman `--device nvidia.com/gpu=all`); with SELinux "
            "`sudo setsebool -P container_use_devices 1` on the host, rootless Podman `--group-add keep-groups`",
        ),
        NVML_SOURCE,
    )


def _blocked(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "gpu-access-blocked",
        Level.FAIL,
        "The operating system blocks access to the GPU ('GPU access blocked by the operating system').",
        "In WSL 2 this means that Windows and WSL do not fit each other, or that a Linux driver was installed "
        "inside WSL.",
        again(
            "on Windows run `wsl --update`, then `wsl --shutdown`, and update the NVIDIA driver there",
            "remove any Linux NVIDIA driver from this distribution: `sudo apt purge 'nvidia-*' 'libnvidia-*'`",
        ),
        NVML_SOURCE,
    )


def _truncated(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "tool-output-truncated",
        Level.UNKNOWN,
        "nvidia-smi's output ends in the middle: what follows could not be told.",
        "Cards or fields after that place are missing here, which does not mean that the machine lacks them.",
        (f"{AGAIN} on the machine itself, or record it with `--record FOLDER`",),
        "nvidia-smi",
    )


def _failed(seen: Seen, trouble: Trouble) -> Finding | None:
    if seen.usable:
        return None
    return Finding(
        "nvidia-smi-failed",
        Level.UNKNOWN,
        f"Could not tell what nvidia-smi means: {quote(trouble.text, 200)}",
        "It is none of the failures that are known here.",
        again("see what the kernel says: `sudo dmesg | grep -i nvrm`"),
        "nvidia-smi",
    )


def _absent(seen: Seen, trouble: Trouble) -> Finding | None:
    cards = seen.cards("nvidia")
    if not cards or seen.nvidia:
        return None
    named = ", ".join(quote(card.name) for card in cards)
    capability = next((value for card in cards if (value := capability_from_name(card.name))), None)
    if seen.host.in_container:
        return Finding(
            "container-without-gpu",
            Level.FAIL,
            f"The host has an NVIDIA card ({named}), but this container was started without it.",
            "Driver and devices come into a container from the host, by the NVIDIA container toolkit; installing "
            "a driver inside does not help.",
            again(
                "start it with `docker run --gpus all …` (Podman: `--device nvidia.com/gpu=all`)",
                "on the host install the toolkit first: `sudo apt install nvidia-container-toolkit`",
            ),
            "NVIDIA container toolkit documentation",
        )
    least, last = wheels.driver_for(capability) if capability else (None, None)
    branch = f" of branch {last}" if last else f" of branch {max(least or 0, 580)} or newer"
    how = {
        "Windows": "download it from nvidia.com/drivers, install, and open a new terminal",
        "Linux": "on Ubuntu `sudo ubuntu-drivers install`, elsewhere the distribution's nvidia package, then reboot",
    }.get(seen.system, "install it")
    nouveau = any(card.module == "nouveau" for card in cards)
    return Finding(
        "driver-missing",
        Level.FAIL,
        f"An NVIDIA card is here ({named}) but no NVIDIA driver: nvidia-smi is not installed.",
        "Without the driver nothing can use the card"
        + (" (the nouveau driver that holds it has no CUDA)." if nouveau else ".")
        + " The CUDA toolkit (nvcc) is not needed: torch's wheels bring their own CUDA libraries.",
        again(f"install an NVIDIA driver{branch}: {how}"),
        DRIVER_SOURCE,
    )


def check_other_vendors_answer(seen: Seen) -> list[Finding]:
    """AMD, Ascend and Intel devices on the bus that no tool answers for, and tools that fail."""
    found: list[Finding] = []
    for trouble in seen.accelerators.troubles:
        if trouble.tool.endswith("nvidia-smi"):
            continue
        hang = trouble.kind == "timeout"
        if not hang and re.search(r"amdgpu not found in modules|/sys/module/amdgpu", trouble.text):
            found.append(_amdgpu_not_loaded(seen, trouble))
            continue
        found.append(
            Finding(
                f"{trouble.tool}-{'hangs' if hang else 'failed'}",
                Level.FAIL if not seen.usable else Level.UNKNOWN,
                f"{trouble.tool} {'does not answer' if hang else 'found no device'}: {quote(trouble.text, 200)}",
                "The tool is installed, so a device was expected: its driver does not run or refuses this user.",
                again(*_VENDOR_FIXES.get(trouble.tool, ("see what the kernel says: `sudo dmesg | tail -50`",))),
                trouble.tool,
            )
        )
    amd = [card for card in seen.cards("amd") if not re.search(r"Audio|Host", card.name)]
    if amd and not seen.accelerators.vendor("amd") and not seen.nvidia and not found:
        named = ", ".join(quote(card.name) for card in amd)
        found.append(
            Finding(
                "rocm-missing",
                Level.WARN,
                f"An AMD GPU is here ({named}) but neither amd-smi nor rocm-smi answers.",
                "torch's ROCm wheels need the amdgpu kernel driver and permission for /dev/kfd and /dev/dri; the "
                "tools come with ROCm."
                + (" On Windows PyTorch's own index has no ROCm build." if seen.system == "Windows" else ""),
                again(
                    "install ROCm's kernel driver and tools (rocm.docs.amd.com), and `sudo usermod -aG "
                    "render,video $USER`"
                ),
                "AMD ROCm installation guide",
            )
        )
    if seen.cards("ascend") and not seen.accelerators.vendor("ascend") and not found:
        found.append(
            Finding(
                "npu-driver-missing",
                Level.FAIL,
                "A Huawei device is on the bus but npu-smi does not answer.",
                "The Ascend driver and firmware are not installed or not running.",
                again("install the Ascend HDK driver and firmware, then `npu-smi info`"),
                "facts/FACTS.md section 9",
            )
        )
    return found


def _amdgpu_not_loaded(seen: Seen, trouble: Trouble) -> Finding:
    return Finding(
        "amdgpu-not-loaded",
        Level.FAIL if not seen.usable else Level.UNKNOWN,
        f"{trouble.tool} is installed but the amdgpu kernel driver is not loaded.",
        "Without that module there is no /dev/kfd, and torch sees no card. ROCm's packages do not bring it.",
        again(
            "load it: `sudo modprobe amdgpu`, and see `sudo dmesg | grep -i amdgpu` if that fails",
            "where the kernel has none for this card: install amdgpu-dkms (rocm.docs.amd.com) and reboot",
        ),
        trouble.tool,
    )


_VENDOR_FIXES = {
    "npu-smi": (
        "the device is used by another container or the user is not in HwHiAiUser: check with `npu-smi info` as root",
    ),
    "amd-smi": ("add the user to the groups: `sudo usermod -aG render,video $USER`, and log in again",),
    "rocm-smi": ("add the user to the groups: `sudo usermod -aG render,video $USER`, and log in again",),
    "xpu-smi": ("install the Intel GPU driver (intel-opencl-icd, level-zero) and add the user to the group render",),
}
