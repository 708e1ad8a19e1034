"""Puts what was seen of the hardware together for the checks, and works out which machine a torch build must fit."""

from __future__ import annotations

import re
from dataclasses import replace

from preflight import wheels
from preflight.facts import table
from preflight.gpus import Accelerators, usable_gpus
from preflight.hardware.capability import completed, parsed
from preflight.hardware.gpu_checks import DriverHints, Seen
from preflight.hardware.kernel_log import KernelLog
from preflight.hardware.torch_state import TorchState
from preflight.host import Host
from preflight.machine import Machine


def together(machine: Machine, accelerators: Accelerators, host: Host, log: KernelLog, torch: TorchState) -> Seen:
    """What the checks judge."""
    seen = Seen(
        accelerators=accelerators,
        host=host,
        log=log,
        torch=torch,
        visible_devices=machine.variable("CUDA_VISIBLE_DEVICES"),
        replayed=machine.replayed,
        cann=_cann(machine, accelerators),
        acl_json=_acl_json(machine, accelerators),
        recorded_elsewhere=bool(machine.recorded(r"(?i)event|registry|^reg\b|reliability")),
        libcuda=_libcuda(machine) if host.wsl else (),
        library_path=machine.variable("LD_LIBRARY_PATH"),
        device_files=bool(machine.list("/dev/nvidia[0-9]*")) if not accelerators.gpus else None,
    )
    if seen.trouble("no-driver") or seen.trouble("no-devices"):
        seen = replace(seen, hints=_hints(machine))
    aim = target_of(seen)
    if accelerators.vendor("ascend"):
        return seen  # torch_npu pairs with torch by its own rule, not by the wheel table
    if old_jetson(dict(accelerators.asked).get("tegra")):
        return replace(seen, target=aim)  # its torch comes from NVIDIA, for this JetPack
    if machine.replayed and aim.accelerator == "cpu" and not accelerators.asked and not host.system:
        return seen  # nothing was recorded from which a build could be chosen
    return replace(seen, target=aim, choice=wheels.choose(aim))


def old_jetson(l4t: str | None) -> bool:
    """Whether this is a Jetson before JetPack 7 (L4T R38), which unified the stack with that of ARM servers."""
    return l4t is not None and int(re.sub(r"\D.*", "", l4t.removeprefix("L4T ")) or 0) < 38


def _libcuda(machine: Machine) -> tuple[str, ...]:
    """Where the dynamic linker finds libcuda."""
    text = machine.run(["ldconfig", "-p"], timeout_s=5.0).text
    return tuple(re.findall(r"libcuda\.so\.1 .*=> (\S+)", text))


def _hints(machine: Machine) -> DriverHints:
    """Why the driver's module is not loaded. Nothing is loaded or changed to find out."""

    def ask(*command: str) -> str:
        answer = machine.run(command, timeout_s=5.0)
        return f"{answer.text}\n{answer.errors}"

    boot = ask("mokutil", "--sb-state")
    profile = re.search(r"\b(intel|nvidia|on-demand)\b", ask("prime-select", "query"))
    module = ask("modinfo", "nvidia") + "\n".join(answer.text for _, answer in machine.recorded("modprobe|insmod|dkms"))
    built: bool | None = None
    if re.search(r"Module nvidia not found|could not find module", module, re.IGNORECASE):
        built = False
    elif re.search(r"^filename:.*nvidia", module, re.MULTILINE):
        built = True
    return DriverHints(
        secure_boot=True if "SecureBoot enabled" in boot else False if "SecureBoot disabled" in boot else None,
        module_for_kernel=built,
        module_refused=True if re.search(r"Key was rejected|Required key not available", module) else None,
        profile=profile.group(1) if profile else None,
        modules=frozenset(
            re.findall(r"^(nouveau|vfio_pci|nvidia)\s", _loaded_modules(machine).replace("vfio-pci", "vfio_pci"), re.M)
        ),
    )


def _loaded_modules(machine: Machine) -> str:
    """The list of loaded kernel modules; /proc/modules and lsmod begin their lines alike."""
    told = [answer.text for _, answer in machine.recorded(r"lsmod")]
    return "\n".join([machine.read("/proc/modules").text, *told])


def target_of(seen: Seen) -> wheels.Target:
    """The machine as the wheel table sees it. Where several vendors' cards are here NVIDIA's decide."""
    usable = [completed(gpu) for gpu in usable_gpus(seen.accelerators)]
    vendors = {gpu.vendor for gpu in usable}
    accelerator = next(
        (
            name
            for vendor, name in (("nvidia", "cuda"), ("amd", "rocm"), ("intel", "xpu"), ("apple", "mps"))
            if vendor in vendors
        ),
        "cpu",
    )
    capabilities = [cc for gpu in usable if gpu.vendor == "nvidia" and (cc := gpu.compute_capability) and parsed(cc)]
    driver = seen.accelerators.driver.version
    if driver is not None and not re.match(r"\d{3}\.\d", driver):
        driver = None  # not a version: a damaged answer
    native = wheels.numbers(seen.accelerators.driver.cuda)[:1]
    floor = wheels.driver_floor(native[0], "Linux") if native else None
    if (
        driver
        and floor
        and any(gpu.unified_memory for gpu in usable)
        and wheels.numbers(driver) < wheels.numbers(floor)
    ):
        driver = floor  # JetPack calls its driver 580.00; the CUDA version beside it is what it can do
    if accelerator == "cpu" and any(device.get("capability") for device in seen.torch.devices) and not seen.torch.hip:
        accelerator = "cuda"
        capabilities = [str(d["capability"]) for d in seen.torch.devices if parsed(str(d.get("capability")))]
        driver = driver or _driver_that_torch_proves(seen.torch, capabilities)
    elif accelerator == "cpu" and seen.torch.cuda and (told := _driver_that_torch_names(seen.torch)):
        accelerator, driver = "cuda", told
    machine = {"amd64": "x86_64", "AMD64": "x86_64", "ARM64": "arm64"}.get(seen.host.machine or "", seen.host.machine)
    system = seen.system
    if machine == "arm64" and system == "Linux":
        machine = "aarch64"
    if machine is None and any(gpu.vendor == "nvidia" and gpu.unified_memory for gpu in usable):
        machine = "aarch64"  # Jetson, Thor and GB10 are the only ones, and all of them are ARM
    return wheels.Target(
        accelerator=accelerator,
        capabilities=tuple(dict.fromkeys(capabilities)),
        driver=driver if accelerator == "cuda" else None,
        python=seen.torch.python or _our_python(seen),
        glibc=seen.host.glibc if system == "Linux" else None,
        system=system,
        machine=machine or ("arm64" if system == "Darwin" else "x86_64"),
        gfx=tuple(dict.fromkeys(gpu.gfx for gpu in usable if gpu.vendor == "amd" and gpu.gfx)),
        macos=seen.host.release if system == "Darwin" and seen.replayed else None,
    )


def _driver_that_torch_proves(state: TorchState, capabilities: list[str]) -> str | None:
    """The oldest driver that could have made this torch see these cards, where no tool told the driver's version."""
    major = wheels.numbers(state.cuda)[:1]
    if not state.available or not major:
        return None
    floor = wheels.driver_floor(major[0], "Linux")
    first = max((branch for cc in capabilities if (branch := wheels.driver_for(cc)[0])), default=0)
    return str(first) if floor is None or wheels.numbers(floor)[0] < first else floor


def _driver_that_torch_names(state: TorchState) -> str | None:
    """A driver of the branch that "driver … is too old (found version 12040)" means: 12040 is CUDA 12.4, branch 550."""
    found = re.search(r"too old \(found version (\d{4,5})\)", " ".join([*state.warnings, state.said]))
    if found is None:
        return None
    cuda = f"{int(found.group(1)) // 1000}.{int(found.group(1)) % 1000 // 10}"
    branches: dict[str, str] = table("cuda_driver")["driver_branch_native_cuda"]
    return next((f"{branch}.99" for branch, native in branches.items() if native == cuda), None)


def _our_python(seen: Seen) -> str | None:
    import sys

    return None if seen.replayed else f"{sys.version_info[0]}.{sys.version_info[1]}"


def _cann(machine: Machine, accelerators: Accelerators) -> str | None:
    """The CANN toolkit's version: old and new layout."""
    from preflight.hardware.other_vendors import parse_cann_version

    if not accelerators.vendor("ascend") and not machine.replayed:
        return None
    homes = [machine.variable("ASCEND_HOME_PATH"), machine.variable("ASCEND_TOOLKIT_HOME")]
    homes += ["/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"]
    paths = [f"{home}/{name}" for home in homes if home for name in ("version.cfg", "version.info")]
    for home in homes:
        if home:
            paths += machine.list(f"{home}/*-linux/ascend_toolkit_install.info")
    for path in paths:
        found = parse_cann_version(machine.read(path).text)
        if found:
            return found
    for _, answer in machine.recorded(r"(?i)ascend|cann"):
        found = parse_cann_version(answer.text)
        if found:
            return found
    return None


def _acl_json(machine: Machine, accelerators: Accelerators) -> bool | None:
    if not accelerators.vendor("ascend"):
        return None
    return bool(machine.list("acl.json")) or bool(machine.recorded(r"acl\.json"))
