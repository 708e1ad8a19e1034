"""Judges what accelerators are here and whether their drivers answer: one plain function per question."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from preflight import wheels
from preflight.console import gib
from preflight.findings import Finding, Level, quote
from preflight.gpus import Accelerators, Gpu, PciCard, Trouble, kind_of_program, usable_gpus
from preflight.hardware.capability import capability_of, completed, parsed
from preflight.hardware.kernel_log import KernelLog
from preflight.hardware.nvidia import short_bus_id
from preflight.hardware.torch_state import TorchState
from preflight.host import Host

DRIVER_SOURCE = "facts/cuda_driver.json (NVIDIA CUDA toolkit release notes, CUDA Compatibility guide)"
NVML_SOURCE = "facts/xid.json related_strings (NVML return codes, nvidia-smi messages)"
AGAIN = "run `python gpu_probe.py` again"


@dataclass(frozen=True)
class DriverHints:
    """Looked at only where the driver does not run: why its module may not be loaded.

    `module_for_kernel` says whether a module was built for the running kernel; `profile` is what prime-select reports,
    `modules` which drivers of NVIDIA cards lsmod lists.
    """

    secure_boot: bool | None = None
    module_for_kernel: bool | None = None
    module_refused: bool | None = None
    profile: str | None = None
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Seen:
    """Everything that was looked at; the checks read nothing else."""

    accelerators: Accelerators = field(default_factory=Accelerators)
    host: Host = field(default_factory=Host)
    log: KernelLog = field(default_factory=KernelLog)
    torch: TorchState = field(default_factory=TorchState)
    visible_devices: str | None = None
    replayed: bool = False
    cann: str | None = None
    acl_json: bool | None = None
    hints: DriverHints = field(default_factory=lambda: DriverHints())
    device_files: bool | None = None
    recorded_elsewhere: bool = False
    libcuda: tuple[str, ...] = ()
    library_path: str | None = None
    choice: wheels.Choice | None = None
    target: wheels.Target | None = None

    @property
    def system(self) -> str:
        """Linux, Windows or Darwin; from the driver model where the platform was not recorded."""
        if self.host.system:
            return self.host.system
        if any(gpu.vendor == "apple" for gpu in self.accelerators.gpus):
            return "Darwin"
        windows = any(gpu.driver_model for gpu in self.accelerators.gpus)
        return "Windows" if windows or "windows adapters" in dict(self.accelerators.asked) else "Linux"

    @property
    def usable(self) -> list[Gpu]:
        """What a training process can use."""
        return [completed(gpu) for gpu in usable_gpus(self.accelerators)]

    @property
    def nvidia(self) -> list[Gpu]:
        """The usable NVIDIA devices; those that torch names where no tool was asked."""
        found = [gpu for gpu in self.usable if gpu.vendor == "nvidia"]
        if found or self.accelerators.gpus or self.torch.hip:
            return found
        return [
            Gpu(number, name=d.get("name"), total_bytes=d.get("total_memory"), compute_capability=str(d["capability"]))
            for number, d in enumerate(self.torch.devices)
            if parsed(str(d.get("capability")))
        ]

    def trouble(self, kind: str) -> Trouble | None:
        """The first trouble of this kind that nvidia-smi reported."""
        return next((t for t in self.accelerators.troubles if t.kind == kind and t.tool.endswith("nvidia-smi")), None)

    def cards(self, vendor: str) -> tuple[PciCard, ...]:
        """The vendor's cards on the PCI bus."""
        return tuple(card for card in self.accelerators.pci if card.vendor == vendor)


def again(*first: str) -> tuple[str, ...]:
    """The fixes, ended with how to see whether they helped."""
    return (*first, AGAIN)[:3]


def count(things: int, noun: str) -> str:
    """ "1 card", "2 cards"."""
    return f"{things} {noun}" if things == 1 else f"{things} {noun}s"


# --- what is here


def check_devices(seen: Seen) -> list[Finding]:
    """What can be trained on; or that there is only the CPU."""
    usable = seen.usable
    if usable:
        names = [quote(gpu.name or f"{gpu.vendor} device") for gpu in usable]
        listed = ", ".join(
            name if names.count(name) == 1 else f"{names.count(name)} x {name}" for name in dict.fromkeys(names)
        )
        sizes = {gpu.total_bytes for gpu in usable}
        size = sizes.pop() if len(sizes) == 1 else None
        devices = count(len(usable), "device")
        if size is None:
            said = f"{devices} can be trained on: {listed}."
        elif len(usable) == 1:
            said = f"{devices} can be trained on: {listed} with {gib(size)}."
        else:
            said = f"{devices} can be trained on: {listed} with {gib(size)} each."
        if not any(trouble.kind in _FATAL for trouble in seen.accelerators.troubles):
            return [Finding("gpu-usable", Level.OK, said)]
        return []
    if seen.accelerators.gpus or any(trouble.kind != "absent" for trouble in seen.accelerators.troubles):
        return []  # devices or tools that do not work have findings of their own
    if any(card.vendor in ("nvidia", "amd", "ascend") for card in seen.accelerators.pci):
        return []
    if seen.torch.devices or seen.torch.mps or seen.torch.xpu:
        return []
    looked = [tool for tool, _ in seen.accelerators.asked]
    if seen.replayed and not looked:
        if seen.log.readable or seen.torch.asked or seen.recorded_elsewhere:
            return []
        return [
            Finding(
                "accelerators-not-recorded",
                Level.UNKNOWN,
                "Could not tell which accelerators this machine has: the recording holds no answer of any "
                "vendor's tool.",
                "What was not recorded is not the same as what is not there.",
                ("record the machine: `python gpu_probe.py --record FOLDER`",),
                "preflight/machine.py",
            )
        ]
    if seen.device_files:
        return [_container_without_tools(seen)]
    where = "this container" if seen.host.in_container else "this machine"
    igpu = next((card for card in seen.accelerators.pci if card.vendor == "intel"), None)
    fixes = [
        "train a small model on the CPU (up to some 500 million parameters with LoRA), or rent a GPU machine",
    ]
    if seen.host.in_container:
        fixes.insert(
            0,
            "if the host has a GPU, start the container with it: `docker run --gpus all …` (NVIDIA), "
            "`--device /dev/kfd --device /dev/dri` (AMD)",
        )
    if seen.host.wsl:
        fixes.insert(
            0, "if Windows has an NVIDIA card, update its Windows driver and run `wsl --update`, then `wsl --shutdown`"
        )
    return [
        Finding(
            "no-gpu",
            Level.WARN,
            f"No accelerator in {where}: only the CPU can train here.",
            f"Asked: {', '.join(looked) or 'every vendor tool'}; none is here or sees a device"
            + (f" ({quote(igpu.name)} is an integrated GPU that torch's XPU build may use)." if igpu else "."),
            tuple(fixes[:3]),
            "what the tools answered",
        )
    ]


_FATAL = (
    "lost",
    "mismatch",
    "no-devices",
    "no-driver",
    "unknown-error",
    "no-library",
    "permission",
    "blocked",
    "timeout",
)


def _container_without_tools(seen: Seen) -> Finding:
    return Finding(
        "container-without-driver-tools",
        Level.FAIL,
        "GPU device files are here (/dev/nvidia*), but neither nvidia-smi nor the driver's libraries are.",
        "In a container the NVIDIA container toolkit brings them in from the host; it was not used, or without "
        "the utility capability.",
        again("start it with `docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …`"),
        NVML_SOURCE,
    )


# --- what kind of device it is


def check_unified_memory(seen: Seen) -> list[Finding]:
    """GPUs that share the system's memory."""
    found = []
    for gpu in seen.usable:
        if not gpu.unified_memory or gpu.vendor == "amd" or gpu.role == "integrated, ignore":
            continue
        found.append(
            Finding(
                "unified-memory",
                Level.OK,
                f"{quote(gpu.name or 'The GPU')} has no memory of its own: it shares the system's "
                f"{gib(gpu.total_bytes)}, "
                f"of which {gib(gpu.free_bytes)} is available now.",
                "Data on the CPU side, page cache and model come out of the same memory, so the budget is "
                "MemAvailable of "
                "/proc/meminfo, once; nvidia-smi shows none and cudaMemGetInfo reports too little.",
                (),
                "facts/FACTS.md section 4",
            )
        )
    return found


def check_mig(seen: Seen) -> list[Finding]:
    """Cards cut into MIG slices: one process uses one slice."""
    found = []
    for card in seen.accelerators.gpus:
        if card.mig_mode != "enabled":
            continue
        parts = [part for part in seen.accelerators.slices if part.parent == card.index]
        if not parts:
            found.append(
                Finding(
                    "mig-no-instances",
                    Level.FAIL,
                    f"GPU {card.index} ({quote(card.name)}) is in MIG mode and has no MIG instance: CUDA cannot "
                    f"use it.",
                    "In MIG mode a program can only run on an instance.",
                    again(
                        "create one: `sudo nvidia-smi mig -cgi 0 -C` (profile 0 is the whole card)",
                        "or switch MIG off: `sudo nvidia-smi -i " + str(card.index) + " -mig 0`",
                    ),
                    "NVIDIA MIG user guide",
                )
            )
            continue
        best = max(parts, key=lambda part: (part.free_bytes or 0, part.total_bytes or 0))
        room = (
            f"the freest has {gib(best.free_bytes)} of {gib(best.total_bytes)}"
            if best.free_bytes is not None
            else (f"the largest has at most {gib(best.total_bytes)}")
        )
        found.append(
            Finding(
                "mig-enabled",
                Level.WARN,
                f"GPU {card.index} ({quote(card.name)}) is cut into {count(len(parts), 'MIG slice')}: {room}.",
                "One CUDA process uses one slice; slices do not add up, and the whole card's memory is not available "
                "to it.",
                (
                    "choose a slice: `export CUDA_VISIBLE_DEVICES=MIG-<uuid>` with a UUID from `nvidia-smi -L`",
                    "for the whole card ask the administrator to switch MIG off",
                ),
                "NVIDIA MIG user guide",
            )
        )
    return found


def check_missing_cards(seen: Seen) -> list[Finding]:
    """NVIDIA cards on the bus that nvidia-smi does not list."""
    listed = {
        short_bus_id(gpu.pci_bus_id) for gpu in seen.accelerators.gpus if gpu.vendor == "nvidia" and gpu.pci_bus_id
    }
    named = {bus for trouble in seen.accelerators.troubles for bus in trouble.bus_ids}
    if not listed:
        return []
    missing = [
        card
        for card in seen.cards("nvidia")
        if short_bus_id(card.slot if card.slot.count(":") == 2 else f"0000:{card.slot}") not in listed | named
        and card.module != "vfio-pci"
    ]
    if not missing:
        return []
    dead = [card for card in missing if not card.answers]
    return [
        Finding(
            "gpu-lost" if dead else "card-not-listed",
            Level.FAIL if dead else Level.WARN,
            f"nvidia-smi lists {count(len(listed), 'card')}, the bus has {count(len(missing), 'more NVIDIA card')}: "
            f"{', '.join(f'{card.slot} ({quote(card.name)})' for card in missing)}.",
            "It no longer answers on PCIe: power, riser, heat or the slot."
            if dead
            else "The driver does not drive it: it failed to start, the driver does not support it, or it fell "
            "off the bus.",
            again(
                "see why: `sudo dmesg | grep -i nvrm`",
                "power the machine off and on, check the card's power cables and its slot",
            ),
            "lspci or /sys/bus/pci against nvidia-smi",
        )
    ]


def check_vgpu(seen: Seen) -> list[Finding]:
    """Virtual GPUs and their licence."""
    found = []
    for gpu in seen.accelerators.gpus:
        virtual = gpu.virtualization == "vGPU" or re.search(r"\b[A-Z]+\d+\w*-\d+[ABCQ]\b", gpu.name or "")
        if not virtual:
            continue
        unlicensed = gpu.license is not None and re.search(r"unlicen|expired|restricted", gpu.license, re.IGNORECASE)
        if unlicensed:
            found.append(
                Finding(
                    "vgpu-unlicensed",
                    Level.WARN,
                    f"{quote(gpu.name)} is a virtual GPU without a licence: {quote(gpu.license)}.",
                    "An unlicensed vGPU is slowed down after a while and CUDA work on it starts to fail; the "
                    "stress test may pass "
                    "in its first minutes.",
                    (
                        "get a licence: check the token in /etc/nvidia/ClientConfigToken and `systemctl status "
                        "nvidia-gridd`",
                    ),
                    "NVIDIA virtual GPU client licensing guide",
                )
            )
        else:
            found.append(
                Finding(
                    "vgpu",
                    Level.OK,
                    f"{quote(gpu.name)} is a virtual GPU with {gib(gpu.total_bytes)}.",
                    "It is a share of a board: its own memory counts, not the board's; temperature and power "
                    "belong to the host.",
                    (),
                    "NVIDIA virtual GPU documentation",
                )
            )
    return found


def check_wsl(seen: Seen) -> list[Finding]:
    """Linux under Windows: where its driver lives."""
    if "wsl1" in seen.host.environments:
        return [
            Finding(
                "wsl1",
                Level.FAIL,
                "This is WSL 1, which cannot use a GPU.",
                "GPU support needs WSL 2 with its own kernel.",
                ("convert it on Windows: `wsl --set-version <distribution> 2`",),
                "CUDA on WSL user guide",
            )
        ]
    if "wsl2" not in seen.host.environments or not seen.nvidia:
        return []
    driver = seen.accelerators.driver
    differ = driver.nvidia_smi and driver.version and driver.nvidia_smi != driver.version
    return [
        Finding(
            "wsl2",
            Level.OK,
            f"WSL 2: the driver is the Windows one ({driver.version or 'version not told'})"
            + (
                f"; nvidia-smi {driver.nvidia_smi} is its Linux client, and the two differ by design."
                if differ
                else "."
            ),
            "Update the driver on Windows and never install a Linux NVIDIA driver inside. The Windows desktop "
            "shares this memory and "
            "Windows may page it out; memory per process and Xid errors cannot be seen from here.",
            (),
            "CUDA on WSL user guide",
        )
    ]


def check_libraries(seen: Seen) -> list[Finding]:
    """A libcuda that hides the right one: a Linux driver inside WSL, the toolkit's stub, a cuda-compat package."""
    found = []
    foreign = [path for path in seen.libcuda if "/usr/lib/wsl/" not in path]
    if seen.host.wsl and foreign:
        found.append(
            Finding(
                "wsl-linux-driver",
                Level.WARN,
                f"A Linux NVIDIA driver is installed inside WSL: {quote(foreign[0])}.",
                "It hides the Windows driver's library in /usr/lib/wsl/lib, and CUDA then finds no card.",
                ("remove it: `sudo apt purge 'nvidia-*' 'libnvidia-*'`, then `wsl --shutdown` on Windows",),
                "CUDA on WSL user guide",
            )
        )
    parts = (seen.library_path or "").split(":")
    stubs = [part for part in parts if "stubs" in part.split("/")]
    compat = [part for part in parts if part.rstrip("/").endswith("/compat") and "cuda" in part]
    if stubs or compat:
        found.append(
            Finding(
                "libcuda-hidden",
                Level.WARN,
                f"LD_LIBRARY_PATH holds {quote((stubs or compat)[0])}, whose libcuda is found before the driver's.",
                "A stub only links and fails when it runs (error 34)."
                if stubs
                else "A cuda-compat library works with data-centre cards only (errors 803 and 804 elsewhere).",
                ("take it out of LD_LIBRARY_PATH: torch's wheels need nothing there",),
                DRIVER_SOURCE,
            )
        )
    return found


def check_compute_mode(seen: Seen) -> list[Finding]:
    """Cards whose compute mode keeps programs out."""
    found = []
    for gpu in seen.usable:
        mode = (gpu.compute_mode or "").lower()
        if mode.startswith("prohibited"):
            found.append(
                Finding(
                    "compute-prohibited",
                    Level.FAIL,
                    f"GPU {gpu.index} ({quote(gpu.name)}) is in compute mode Prohibited: no CUDA program may use it.",
                    "An administrator set it.",
                    again(f"set it back: `sudo nvidia-smi -i {gpu.index} -c DEFAULT`"),
                    "nvidia-smi, compute mode",
                )
            )
        elif mode.startswith(("e. process", "exclusive")):
            busy = any(p.gpu == gpu.index and (p.kind or "").startswith("C") for p in seen.accelerators.processes)
            found.append(
                Finding(
                    "compute-exclusive",
                    Level.WARN if busy else Level.OK,
                    f"GPU {gpu.index} ({quote(gpu.name)}) admits one program at a time"
                    + (", and one is running." if busy else "."),
                    "A second one fails with 'all CUDA-capable devices are busy or unavailable'.",
                    ("wait until that program ends, or choose another card with CUDA_VISIBLE_DEVICES",) if busy else (),
                    "nvidia-smi, compute mode",
                )
            )
    return found


def check_driver_model(seen: Seen) -> list[Finding]:
    """WDDM, TCC or MCDM on Windows."""
    found = []
    for model in dict.fromkeys(gpu.driver_model for gpu in seen.accelerators.gpus if gpu.driver_model):
        if model == "WDDM":
            found.append(
                Finding(
                    "wddm",
                    Level.OK,
                    "Windows drives the card as a display device (WDDM).",
                    "The desktop shares its memory and each program's share cannot be told (N/A), so only the "
                    "card's own total counts. "
                    "Over-allocation may spill into system memory and become slow instead of failing; kernels "
                    "longer than TdrDelay "
                    "(2 s by default) reset the driver.",
                    (),
                    "facts/FACTS.md section 1 (NVML driver models, Microsoft TDR documentation)",
                )
            )
        else:
            found.append(
                Finding(
                    "compute-driver-model",
                    Level.OK,
                    f"Windows drives the card as a compute device ({quote(model)}).",
                    "No display hangs on it. TCC is deprecated in favour of MCDM."
                    if model in ("TCC", "WDM")
                    else "MCDM is the successor of TCC for cards without a display.",
                    (),
                    "facts/FACTS.md section 1",
                )
            )
    return found


def check_mixed_cards(seen: Seen) -> list[Finding]:
    """Cards of different kinds in one machine."""
    cards = [gpu for gpu in seen.usable if gpu.vendor in ("nvidia", "amd") and gpu.parent is None]
    if len(cards) < 2:
        return []
    kinds = {(gpu.vendor, gpu.compute_capability or gpu.gfx) for gpu in cards}
    sizes = [gpu.total_bytes for gpu in cards if gpu.total_bytes]
    uneven = bool(sizes) and max(sizes) > 1.15 * min(sizes)
    if len(kinds) < 2 and not uneven:
        return []
    listed = ", ".join(f"{gpu.index}: {quote(gpu.name)} ({gib(gpu.total_bytes)})" for gpu in cards)
    return [
        Finding(
            "mixed-cards",
            Level.OK,
            f"The cards differ: {listed}.",
            "Data-parallel training is as fast and as roomy as its weakest card, all cards need one torch build, "
            "and number formats go "
            "by the oldest. CUDA numbers cards fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set, so its "
            "numbers may "
            "differ from nvidia-smi's.",
            (),
            "CUDA programming guide, environment variables",
        )
    ]


def check_visible_devices(seen: Seen) -> list[Finding]:
    """CUDA_VISIBLE_DEVICES and its kin: what programs started here see."""
    value = seen.visible_devices
    if value is None or not seen.accelerators.vendor("nvidia"):
        return []
    hidden = value.strip() in ("", "-1")
    return [
        Finding(
            "cuda-visible-devices",
            Level.WARN if hidden else Level.OK,
            f"CUDA_VISIBLE_DEVICES is {quote(value)!r}: programs started here see "
            + ("no card." if hidden else "only those cards, numbered anew from 0."),
            "It hides every card, also from training."
            if hidden
            else "Job systems set it; the other cards were looked at all the same.",
            ("`unset CUDA_VISIBLE_DEVICES`",) if hidden else (),
            "CUDA programming guide, environment variables",
        )
    ]


def as_json(seen: Seen) -> dict[str, Any]:
    """The facts about devices and drivers, for the report and `--json`."""
    from dataclasses import asdict

    accelerators = seen.accelerators
    driver = accelerators.driver
    return {
        "gpu_present": _is_present(seen),
        "vendors": sorted({gpu.vendor for gpu in accelerators.gpus} | {card.vendor for card in accelerators.pci}),
        "gpu_count": len(accelerators.gpus),
        "driver": driver.version or driver.kernel_module or seen.log.module_version,
        "cuda_max": driver.cuda,
        "nvidia_smi_version": driver.nvidia_smi,
        "nvml_library_version": driver.library,
        "kernel_module_version": driver.kernel_module,
        "open_kernel_module": driver.open_module,
        "driver_model": next((gpu.driver_model for gpu in accelerators.gpus if gpu.driver_model), None),
        "gpus": [_gpu_json(completed(gpu)) for gpu in accelerators.gpus],
        "mig_enabled": any(gpu.mig_mode == "enabled" for gpu in accelerators.gpus),
        "mig_devices": [completed(part).as_json() for part in accelerators.slices],
        "budget_bytes_for_one_process": max(
            (gpu.free_bytes for gpu in seen.usable if gpu.free_bytes is not None), default=None
        ),
        "processes": [{**asdict(p), "program": kind_of_program(p.name)} for p in accelerators.processes],
        "pci": [asdict(card) for card in accelerators.pci],
        "lspci_rev_ff": [card.slot for card in accelerators.pci if not card.answers],
        "lost_bus_ids": sorted({bus for t in accelerators.troubles if t.kind == "lost" for bus in t.bus_ids}),
        "troubles": [{"tool": t.tool, "kind": t.kind, "text": quote(t.text)} for t in accelerators.troubles],
        "asked": dict(accelerators.asked),
        "needs_open_kernel_modules": seen.log.needs_open_module,
        "proprietary_module_loaded": seen.log.proprietary_module,
        "cann": seen.cann,
        "acl_json": seen.acl_json,
    }


def _is_present(seen: Seen) -> bool | None:
    """Whether a card is in the machine; None where a vendor's tool is here but could not look."""
    accelerators = seen.accelerators
    if (
        any(gpu.role != "integrated, ignore" for gpu in accelerators.gpus)
        or any(card.vendor in ("nvidia", "amd", "ascend") for card in accelerators.pci)
        or seen.torch.devices
        or any(t.kind in ("mismatch", "lost", "needs-reset", "power", "no-devices") for t in accelerators.troubles)
        or seen.log.xids
        or seen.log.gsp_timeouts
    ):
        return True
    return None if any(t.kind != "absent" for t in accelerators.troubles) else False


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    able = capability_of(gpu.compute_capability)
    found = gpu.as_json()
    if gpu.unified_memory and gpu.vendor in ("nvidia", "apple"):
        found["memory_source"] = "system memory (unified)"
    if able is not None:
        from dataclasses import asdict

        found["capability"] = {**asdict(able), "sdpa": list(able.sdpa)}
        found["bf16_native"] = able.bf16_native
    return found


def is_usable(seen: Seen, findings: Iterable[Finding]) -> bool | None:
    """Whether a training process can use an accelerator here; None where nothing could be told."""
    stops = {f.code for f in findings if f.level is Level.FAIL and f.code in _STOPS}
    if stops:
        return False
    if seen.usable:
        return True
    if seen.torch.devices and seen.torch.available:
        return True
    return False if any(f.code == "no-gpu" for f in findings) else None


_STOPS = {
    *("driver-library-mismatch", "adapter-init-failed", "no-devices-found", "driver-not-running", "driver-missing"),
    *("driver-module-rejected", "gpu-powered-off", "nouveau-in-use", "gpu-passed-through", "nvml-unknown-error"),
    *("nvml-library-missing", "gpu-permission-denied", "gpu-access-blocked", "container-without-gpu", "wsl1"),
    *("container-without-driver-tools", "torch-arch-missing", "torch-no-kernel-image", "driver-card-mismatch"),
    *("cuda-library-missing", "compute-prohibited", "mig-no-instances", "npu-driver-missing", "nvidia-smi-hangs"),
    *("fabric-not-ready", "amdgpu-not-loaded", "card-not-supported"),
}
