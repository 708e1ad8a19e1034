"""Judges whether the accelerators are healthy and how much of them and of the host is really usable now."""

from __future__ import annotations

import re
from typing import Any

from preflight.console import gib
from preflight.findings import Finding, Level, quote
from preflight.gpus import Gpu, GpuProcess, kind_of_program
from preflight.hardware.gpu_checks import AGAIN, Seen, again, count
from preflight.hardware.kernel_log import KernelLog, Xid, meaning
from preflight.host import Host

XID_SOURCE = "facts/xid.json (NVIDIA Xid catalog)"

# --- the kernel log

# How the classes of facts/xid.json are told to people, the gravest first.
_CLASSES = {
    "pcie": "PCIe link",
    "memory": "memory hardware",
    "hardware": "hardware",
    "power": "power",
    "nvlink": "NVLink",
    "hardware_or_driver": "hardware or driver",
    "driver_or_hardware": "driver or hardware",
    "driver": "driver",
    "virtualisation": "virtualisation",
    "unknown": "unknown",
    "application": "application",
    "consequence": "consequence of another error",
    "meta": "recovery action",
    "other": "other",
}
_MILD = ("application", "consequence", "meta", "other")


def xids_by_gpu(xids: tuple[Xid, ...]) -> dict[str, dict[str, Any]]:
    """Per card (short bus id): its Xid codes, the class of the gravest, and the one action to take."""
    found: dict[str, dict[str, Any]] = {}
    for bus in dict.fromkeys(xid.bus_id for xid in xids):
        mine = [xid for xid in xids if xid.bus_id == bus]
        codes = sorted({xid.code for xid in mine})
        rows = [meaning(code) for code in codes]
        gravest = max(rows, key=lambda row: (_weight(row), -list(_CLASSES).index(str(row["cls"]))))
        found[bus] = {
            "xids": codes,
            "class": _class_name(gravest, mine),
            "severity": gravest["severity"],
            "action": _action(codes, gravest, mine),
            "processes": sorted({xid.process for xid in mine if xid.process}),
            "count": sum(xid.count for xid in mine),
            "without_number": any(not xid.numbered for xid in mine),
        }
    return found


def _weight(row: dict[str, Any]) -> int:
    if row["cls"] in _MILD:
        return 0
    return {"fatal": 4, "error": 3, "unknown": 2, "warn": 2, "info": 1}.get(str(row["severity"]), 2)


def _class_name(row: dict[str, Any], xids: list[Xid]) -> str:
    if row["code"] == 79:
        bare = any(not xid.numbered for xid in xids)
        return "fallen off the bus" + (" (the log line has no Xid number)" if bare else "")
    if row["code"] == 94:
        return "contained ECC error"
    return _CLASSES.get(str(row["cls"]), str(row["cls"]))


def _action(codes: list[int], gravest: dict[str, Any], xids: list[Xid]) -> str:
    recovery = next((xid.text for xid in xids if xid.code == 154), None)
    if recovery:
        return f"the driver itself says: {quote(recovery, 120)}"
    if gravest["code"] == 79:
        return "power-cycle the machine; check PCIe slot, riser, power cables, heat and overclock"
    if 63 in codes and {48, 63} & set(codes) and gravest["cls"] == "memory" and gravest["code"] != 94:
        return "reset the GPU (or reboot) to activate the row remap, then test again"
    if gravest["code"] == 94:
        return "restart the affected process; reset the GPU when convenient"
    if gravest["cls"] == "application":
        return "look for a bug in the program (bad kernel, index out of range); not a reason to replace the card"
    return str(gravest["advice"])


def check_kernel_log(seen: Seen) -> list[Finding]:
    """Xid errors, told apart: the program's fault, the card's, the link's."""
    log = seen.log
    found: list[Finding] = []
    by_gpu = xids_by_gpu(log.xids)
    # A lost card that the driver's tool named too has its finding already.
    named = {bus.rpartition(".")[0] for trouble in seen.accelerators.troubles for bus in trouble.bus_ids}
    grave = {
        bus: row for bus, row in by_gpu.items() if not _is_mild(row) and not (bus in named and row["xids"] == [79])
    }
    mild = {bus: row for bus, row in by_gpu.items() if _is_mild(row)}
    if grave:
        lost = [bus for bus, row in grave.items() if 79 in row["xids"]]
        only_lost = len(lost) == len(grave)
        level = (
            Level.FAIL
            if any(row["severity"] in ("fatal", "error", "unknown") for row in grave.values())
            else Level.WARN
        )
        found.append(
            Finding(
                "gpu-lost" if only_lost else "hardware-xid" if level is Level.FAIL else "driver-xid",
                level,
                "The kernel log holds errors of the card or its link: "
                + "; ".join(_told(b, r) for b, r in grave.items())
                + ".",
                " ".join(_meant(row) for row in grave.values()),
                tuple(dict.fromkeys(f"{bus}: {row['action']}" for bus, row in grave.items()))[:3],
                XID_SOURCE,
            )
        )
    if mild:
        application = {bus: row for bus, row in mild.items() if row["class"] == "application"}
        found.append(
            Finding(
                "application-xid",
                Level.WARN if application else Level.OK,
                "The kernel log holds errors that programs caused: "
                + "; ".join(_told(b, r) for b, r in mild.items())
                + ".",
                "These point to the program (an illegal address, an index out of range, or its end by a signal), "
                "not to a broken card.",
                ("run the program again with `CUDA_LAUNCH_BLOCKING=1` to find the failing operation", "keep the card")
                if application
                else (),
                XID_SOURCE,
            )
        )
    if log.out_of_memory_killed:
        found.append(
            Finding(
                "host-memory-killed",
                Level.WARN,
                f"The kernel ended programs because the system's memory was full: "
                f"{', '.join(map(quote, log.out_of_memory_killed))}.",
                "That is RAM, not GPU memory: loading a checkpoint or too many data workers.",
                ("load with `low_cpu_mem_usage=True` and safetensors, use fewer workers, or add swap",),
                "kernel log (OOM killer)",
            )
        )
    if log.nvswitch_errors:
        fatal = any(re.search(r"(?<!Non-)Fatal", line) for line in log.nvswitch_errors)
        found.append(
            Finding(
                "nvswitch-error",
                Level.FAIL if fatal else Level.WARN,
                f"The NVSwitch fabric logged errors: {quote(log.nvswitch_errors[0], 160)}",
                "SXid lines are of the switch between the cards, not of one card: training on several cards will "
                "stop or hang.",
                again(
                    "restart the fabric manager: `sudo systemctl restart nvidia-fabricmanager`",
                    "reset all cards, or reboot the machine",
                ),
                "NVIDIA fabric manager user guide, SXid errors",
            )
        )
    if log.gsp_timeouts and not log.xids:
        found.append(
            Finding(
                "gpu-firmware-stopped",
                Level.FAIL,
                f"The card's own firmware (GSP) stopped answering: {quote(log.gsp_timeouts[0], 160)}",
                "Programs on that card fail with 'busy or unavailable' or hang until it is reset; no Xid was logged.",
                again(
                    "reset it with no program on it: `sudo nvidia-smi --gpu-reset`, or reboot",
                    "if it comes back: update the driver; on cards that allow it, run without GSP "
                    "(`NVreg_EnableGpuFirmware=0`)",
                ),
                "kernel log (NVRM, GSP)",
            )
        )
    if log.amd_errors:
        found.append(
            Finding(
                "amdgpu-errors",
                Level.WARN,
                f"The kernel log holds amdgpu errors: {quote(log.amd_errors[0], 160)}",
                "Ring timeouts and resets mean that a kernel hung or that the card or its driver is unstable.",
                again("update the amdgpu driver and firmware", "remove overclocking and look at the temperature"),
                "kernel log",
            )
        )
    if log.readable and not found and seen.accelerators.gpus:
        found.append(Finding("no-xid", Level.OK, "The kernel log of this boot holds no GPU errors."))
    return found


def _is_mild(row: dict[str, Any]) -> bool:
    rows = [meaning(code) for code in row["xids"]]
    return all(str(entry["cls"]) in _MILD for entry in rows)


def _told(bus: str, row: dict[str, Any]) -> str:
    codes = ", ".join(str(code) for code in row["xids"])
    by = f", seen in {', '.join(map(quote, row['processes']))}" if row["processes"] else ""
    return f"{bus} Xid {codes} ({row['class']}{by})"


def _meant(row: dict[str, Any]) -> str:
    rows = [meaning(code) for code in row["xids"]]
    return " ".join(f"Xid {entry['code']}: {entry['summary']}." for entry in rows)


# --- what the card reports of itself


def _fabric_waits(gpu: Gpu) -> bool:
    """Whether the card waits for the fabric manager; cards without NVSwitch say N/A."""
    state, status = (gpu.fabric_state or "").lower(), (gpu.fabric_status or "").lower()
    return state in ("in progress", "not started") or (state == "completed" and "fail" in status)


def check_memory_errors(seen: Seen) -> list[Finding]:
    """ECC errors, row remapping, retired pages and the recovery that the driver asks for."""
    found = []
    for gpu in seen.accelerators.gpus:
        name = f"GPU {gpu.index} ({quote(gpu.name)})"
        reset = f"`sudo nvidia-smi --gpu-reset -i {gpu.index}` with no program on it, or reboot"
        if gpu.vendor != "nvidia":
            continue
        if gpu.row_remap_failed:
            found.append(
                _memory_finding(
                    "row-remap-failed",
                    Level.FAIL,
                    f"{name}: remapping a broken memory row failed.",
                    "Its spare rows are used up: the card is to be replaced.",
                    ("replace the card (RMA)",),
                )
            )
        if gpu.ecc_uncorrected_volatile:
            found.append(
                _memory_finding(
                    "ecc-uncorrected",
                    Level.FAIL,
                    f"{name}: {count(gpu.ecc_uncorrected_volatile, 'uncorrectable memory error')} since the "
                    f"driver was loaded.",
                    "What was computed while they happened cannot be trusted.",
                    (reset, AGAIN),
                )
            )
        elif gpu.row_remap_pending or gpu.retirement_pending:
            found.append(
                _memory_finding(
                    "row-remap-pending",
                    Level.WARN,
                    f"{name}: a broken memory row waits to be taken out of use.",
                    "The replacement becomes active only with a reset; until then the broken row may be used.",
                    (reset, AGAIN),
                )
            )
        elif gpu.ecc_uncorrected_aggregate or gpu.remapped_rows_uncorrectable or gpu.retired_pages:
            seen_before = ", ".join(
                f"{value} {what}"
                for value, what in (
                    (gpu.ecc_uncorrected_aggregate, "uncorrectable errors in its life"),
                    (gpu.remapped_rows_uncorrectable, "rows remapped"),
                    (gpu.retired_pages, "pages retired"),
                )
                if value
            )
            found.append(
                _memory_finding(
                    "memory-repaired",
                    Level.OK,
                    f"{name}: {seen_before}, none since the driver was loaded.",
                    "The broken places were taken out of use; watch whether the numbers grow.",
                    (),
                )
            )
        if _fabric_waits(gpu):
            found.append(
                Finding(
                    "fabric-not-ready",
                    Level.FAIL,
                    f"{name}: its NVLink fabric is not ready (state {quote(gpu.fabric_state)}, status "
                    f"{quote(gpu.fabric_status or 'not told')}).",
                    "On machines with NVSwitch (HGX, DGX) CUDA starts only after the fabric manager has registered the "
                    "card; until then it fails with error 802, system not yet initialized.",
                    again(
                        "start it in the driver's own version: `sudo systemctl enable --now nvidia-fabricmanager`",
                        "see why it stopped: `sudo journalctl -u nvidia-fabricmanager -b`",
                    ),
                    "nvidia-smi -q (Fabric); NVIDIA fabric manager user guide",
                )
            )
        if gpu.recovery_action and gpu.recovery_action.lower() not in ("none", "n/a"):
            found.append(
                _memory_finding(
                    "recovery-needed",
                    Level.FAIL,
                    f"{name}: the driver asks for a recovery: {quote(gpu.recovery_action)}.",
                    "It reports an error that only this action clears.",
                    (reset,),
                )
            )
    return found


def _memory_finding(code: str, level: Level, what: str, why: str, fix: tuple[str, ...]) -> Finding:
    return Finding(
        code, level, what, why, fix, "nvidia-smi -q (ECC Errors, Remapped Rows, Retired Pages); facts/xid.json"
    )


def check_sensors(seen: Seen) -> list[Finding]:
    """Sensors that fail, and fields that a tool could not give."""
    found = []
    broken = [gpu for gpu in seen.accelerators.gpus if gpu.sensor_errors and not gpu.lost]
    for gpu in broken:
        others = [gpu_.index for gpu_ in seen.accelerators.gpus if not gpu_.sensor_errors]
        found.append(
            Finding(
                "sensor-error",
                Level.WARN,
                f"GPU {gpu.index} ({quote(gpu.name)}) cannot read its {' and '.join(gpu.sensor_errors)} "
                f"sensor{'s' if len(gpu.sensor_errors) > 1 else ''} (ERR!).",
                "A fault of the driver or of the board's sensor; the card may still compute. Without a fan "
                "reading it may overheat." + (f" GPU {', '.join(map(str, others))} reads well." if others else ""),
                (
                    "check its power cable and fan",
                    f"run `python gpu_probe.py --stress-test --device cuda:{gpu.index}` and watch its temperature",
                    "reboot or update the driver if the reading does not come back",
                ),
                "nvidia-smi",
            )
        )
    lacking = [gpu for gpu in seen.accelerators.gpus if gpu.unavailable and not gpu.unified_memory]
    if lacking:
        said = "; ".join(f"GPU {gpu.index}: {', '.join(map(quote, gpu.unavailable))}" for gpu in lacking)
        grave = any(
            re.search(r"memory\.|unknown error|permission", text, re.I) for gpu in lacking for text in gpu.unavailable
        )
        found.append(
            Finding(
                "some-fields-unavailable",
                Level.WARN if grave else Level.OK,
                f"Some readings are not available: {said}.",
                "They are unknown, not zero. Cards without a fan or power meter say so; [Unknown Error] is a "
                "failing sensor, "
                "[Insufficient Permissions] hides memory use from this user.",
                ("ask again as an administrator where permissions are missing: `sudo nvidia-smi`",) if grave else (),
                "nvidia-smi --query-gpu",
            )
        )
    return found


def check_throttling(seen: Seen) -> list[Finding]:
    """Heat, power and clocks that are held back now."""
    found = []
    hard = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"}
    for gpu in seen.accelerators.gpus:
        name = f"GPU {gpu.index} ({quote(gpu.name)})"
        reasons = sorted(hard & set(gpu.throttle_reasons or ()))
        if reasons:
            heat = any("thermal" in reason for reason in reasons)
            at = f" at {gpu.temperature_c:.0f} °C" if gpu.temperature_c is not None else ""
            found.append(
                Finding(
                    "throttled",
                    Level.WARN,
                    f"{name} is slowed down now{at}: {', '.join(reason.replace('_', ' ') for reason in reasons)}.",
                    "Too hot: training will be slower than the card can be."
                    if heat
                    else "The power supply or its cables ask the card to use less.",
                    (
                        "clean fans and give the card air" if heat else "check the power cables and the power supply",
                        "or lower the power limit: `sudo nvidia-smi -pl WATTS`",
                    ),
                    "NVML clocks event reasons",
                )
            )
        elif gpu.temperature_c is not None and gpu.temperature_c >= (gpu.temperature_limit_c or 90.0):
            found.append(
                Finding(
                    "too-hot",
                    Level.WARN,
                    f"{name} is at {gpu.temperature_c:.0f} °C.",
                    f"It slows down at {gpu.temperature_limit_c or 90.0:.0f} °C.",
                    ("clean fans and give the card air",),
                    "nvidia-smi temperature",
                )
            )
        limit, default = gpu.power_limit_w, gpu.power_limit_default_w
        if limit and default and limit < 0.75 * default:
            found.append(
                Finding(
                    "power-limit-low",
                    Level.OK,
                    f"{name} is limited to {limit:.0f} W of its {default:.0f} W.",
                    "Somebody lowered the limit (or a laptop does): throughput is lower, the results are the same.",
                    (),
                    "nvidia-smi power limits",
                )
            )
    return found


def check_pcie(seen: Seen) -> list[Finding]:
    """The PCIe link now against what card and slot can do. An idle card lowers its generation: that says nothing."""
    found = []
    for gpu in seen.accelerators.gpus:
        idle = (gpu.utilization_pct or 0) < 10 or gpu.performance_state not in (None, "P0", "P1", "P2")
        narrow = gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max
        slow = (
            gpu.pcie_gen is not None and gpu.pcie_gen_max is not None and gpu.pcie_gen < gpu.pcie_gen_max and not idle
        )
        if not narrow and not slow:
            continue
        width = f"x{gpu.pcie_width} of x{gpu.pcie_width_max}"
        grave = narrow and (gpu.pcie_width or 16) <= 2
        found.append(
            Finding(
                "pcie-link-reduced",
                Level.WARN if grave else Level.OK,
                f"GPU {gpu.index} ({quote(gpu.name)}) runs its PCIe link at generation {gpu.pcie_gen} of "
                f"{gpu.pcie_gen_max}, {width}.",
                "Training on one card hardly crosses PCIe; loading, offloading and several cards without NVLink "
                "do. The slot, a riser or a "
                "dirty contact limits the width.",
                ("put the card into a x16 slot without a riser, and reseat it",) if grave else (),
                "nvidia-smi -q (GPU Link Info)",
            )
        )
    return found


# --- who holds the memory


def check_persistence(seen: Seen) -> list[Finding]:
    """Linux unloads an unused card's state when persistence mode is off. A note: training runs all the same."""
    if seen.system != "Linux" or seen.host.wsl:
        return []
    # A display server holds the card open, so that the mode changes nothing there.
    off = [gpu for gpu in seen.usable if gpu.persistence_mode is False and not gpu.display_active]
    if not off:
        return []
    cards = len({gpu.index if gpu.parent is None else gpu.parent for gpu in off})
    fix = "keep the driver's state: `sudo systemctl enable --now nvidia-persistenced`"
    on_the_host = "keep the driver's state, on the host: `sudo systemctl enable --now nvidia-persistenced`"
    return [
        Finding(
            "persistence-off",
            Level.OK,
            f"Persistence mode is off on {count(cards, 'card')}.",
            "When its last program ends, the driver lets the card go: the next start waits seconds for it, and power "
            "and clock limits that were set are lost. Training itself is not slower.",
            (on_the_host if seen.host.in_container else fix, "or only until the next boot: `sudo nvidia-smi -pm 1`"),
            "https://docs.nvidia.com/deploy/driver-persistence/",
        )
    ]


def check_memory_in_use(seen: Seen) -> list[Finding]:
    """Free memory now and who holds the rest."""
    found = []
    for gpu in seen.usable:
        if gpu.vendor == "ascend" or gpu.unified_memory or gpu.free_bytes is None or not gpu.total_bytes:
            continue
        used = gpu.total_bytes - gpu.free_bytes
        taken = used - (gpu.reserved_bytes or 0)
        # Under WDDM and X the desktop always holds some; what the driver reserves is nobody's.
        if taken < max(512 << 20, 0.05 * gpu.total_bytes):
            continue
        tight = gpu.free_bytes < 0.1 * gpu.total_bytes
        name = f"{'MIG slice' if gpu.parent is not None else 'GPU'} {gpu.index} ({quote(gpu.name)})"
        found.append(
            Finding(
                "memory-in-use",
                Level.WARN if tight else Level.OK,
                f"{name}: {gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} is free; other programs hold {gib(taken)}.",
                _holders(seen, gpu),
                (
                    "end the programs that hold the memory (`nvidia-smi` lists them), or choose another card with "
                    "CUDA_VISIBLE_DEVICES",
                )
                if tight
                else (),
                "nvidia-smi memory usage",
            )
        )
    return found


def _holders(seen: Seen, gpu: Gpu) -> str:
    owner = gpu.index if gpu.parent is None else gpu.parent
    mine = [p for p in seen.accelerators.processes if p.gpu in (owner, None)]
    if gpu.parent is not None:
        mine = [p for p in mine if p.gpu_instance in (None, gpu.gpu_instance)]
    if not mine:
        return (
            "The list of processes is empty: they run in another container or namespace, belong to another user, "
            "or a dead program "
            "left the memory held. Free memory is what counts, not the total."
        )
    told = [_program(process) for process in sorted(mine, key=lambda p: -(p.memory_bytes or 0))[:6]]
    unknown = all(process.memory_bytes is None for process in mine)
    note = " The driver does not say how much each one holds here." if unknown else ""
    return f"Held by: {', '.join(told)}.{note} Closing them frees it for training."


def _program(process: GpuProcess) -> str:
    kind = kind_of_program(process.name)
    name = re.split(r"[\\/]", process.name or "unnamed")[-1]
    size = f" {gib(process.memory_bytes)}" if process.memory_bytes is not None else ""
    return f"{quote(name, 40)}{f' ({kind})' if kind else ''}{size}"


# --- the host


def check_host(seen: Seen) -> list[Finding]:
    """RAM, CPUs, shared memory and disk, after the limits of the container or job."""
    host = seen.host
    found = []
    if host.ram_total_bytes is not None:
        limited = host.ram_limit_bytes is not None and host.ram_installed_bytes is not None
        note = (
            f" The container's limit counts, not the {gib(host.ram_installed_bytes)} of the machine." if limited else ""
        )
        low = host.ram_available_bytes is not None and host.ram_available_bytes < 4 << 30
        cpus = f"{host.cpus:g} CPUs" if host.cpus is not None else "CPUs unknown"
        found.append(
            Finding(
                "low-memory" if low else "host",
                Level.WARN if low else Level.OK,
                f"Host: {gib(host.ram_available_bytes)} of {gib(host.ram_total_bytes)} RAM available, {cpus}"
                + (f", {gib(host.swap_free_bytes)} swap free." if host.swap_free_bytes is not None else "."),
                (
                    "Loading a checkpoint needs its size in RAM; under 4 GiB the kernel may end the program."
                    if low
                    else ""
                )
                + note,
                ("close programs, raise the container's memory limit, or add swap",) if low else (),
                "/proc/meminfo and cgroup limits" if host.system == "Linux" else "the operating system",
            )
        )
    if host.shm_total_bytes is not None and host.shm_total_bytes < 512 << 20 and host.system in ("Linux", None):
        found.append(
            Finding(
                "small-shared-memory",
                Level.WARN,
                f"/dev/shm has only {gib(host.shm_total_bytes)}.",
                "Data loader workers and NCCL pass tensors through it; with Docker's default of 64 MiB they die "
                "with 'bus error'.",
                ("start the container with `--shm-size=8g` or `--ipc=host`, or use num_workers=0",),
                "facts/FACTS.md section 17",
            )
        )
    found += _disk_findings(seen)
    return found


_NEEDED = {
    "packages": 8 << 30,
    "wheel cache": 4 << 30,
    "model cache": 16 << 30,
    "checkpoints": 4 << 30,
    "temporary files": 4 << 30,
}


def _disk_findings(seen: Seen) -> list[Finding]:
    disks = [disk for disk in seen.host.disks if disk.free_bytes is not None]
    if not disks:
        return []
    short = [disk for disk in disks if (disk.free_bytes or 0) < _NEEDED.get(disk.purpose, 0)]
    if not short:
        least = min(disks, key=lambda disk: disk.free_bytes or 0)
        return [
            Finding(
                "disk",
                Level.OK,
                f"At least {gib(least.free_bytes)} of disk is free wherever packages, models and checkpoints go.",
            )
        ]
    said = ", ".join(f"{disk.purpose} {gib(disk.free_bytes)}" for disk in short)
    return [
        Finding(
            "disk-low",
            Level.WARN,
            f"Little free disk: {said}.",
            "A CUDA build of torch unpacks to some 8 GiB, a 7-billion-parameter model in 16 bits is 14 GiB, and "
            "each checkpoint of a full "
            "fine-tuning several times that.",
            (
                "free space, or move the caches: `export HF_HOME=/big/disk PIP_CACHE_DIR=/big/disk/pip "
                "TMPDIR=/big/disk/tmp`",
            ),
            "measured sizes: torch CUDA wheels with their nvidia-* packages; Qwen2-7B",
        )
    ]


_PLACES = {
    "colab": "Google Colab: its driver is fixed and was checked like any other; machine and disk go with the session.",
    "kaggle": "Kaggle: its driver is fixed and was checked like any other; a P100 needs cu126, a T4 has no bf16.",
    "docker": "Docker container: driver and cards come from the host.",
    "podman": "Podman container: driver and cards come from the host.",
    "container": "A container: driver and cards come from the host.",
    "kubernetes": "Kubernetes: the cards are those that the pod asked for; memory and CPU limits are the pod's.",
    "slurm": "A Slurm job: the cards are those of the job (CUDA_VISIBLE_DEVICES); a login node has none.",
    "sagemaker": "Amazon SageMaker: the driver belongs to the instance's image.",
    "databricks": "Databricks: the driver belongs to the cluster's runtime.",
    "azure-ml": "Azure ML: the driver belongs to the compute image.",
    "vertex-ai": "Vertex AI: the driver belongs to the training image.",
}


def check_place(seen: Seen) -> list[Finding]:
    """Where this runs: notebooks, containers, job systems."""
    places = [_PLACES[name] for name in seen.host.environments if name in _PLACES]
    if not places:
        return []
    names = ", ".join(name for name in seen.host.environments if name in _PLACES)
    return [Finding("place", Level.OK, f"Runs in: {names}.", " ".join(places), (), "facts/FACTS.md section 13")]


def host_json(host: Host) -> dict[str, Any]:
    """The host's facts, for the report. Paths are left out: they name people."""
    found = {
        key: list(value) if isinstance(value, tuple) else value for key, value in vars(host).items() if key != "disks"
    }
    found["disks"] = [
        {"purpose": disk.purpose, "free_bytes": disk.free_bytes, "total_bytes": disk.total_bytes} for disk in host.disks
    ]
    return found


def kernel_log_json(log: KernelLog) -> dict[str, Any]:
    """What the kernel log told, for the report."""
    return {
        "readable": log.readable,
        "by_gpu": xids_by_gpu(log.xids),
        "xid": sorted({xid.code for xid in log.xids}),
        "init_failed": list(log.init_failed),
        "amd_errors": [quote(line) for line in log.amd_errors],
        "pcie_errors": [quote(line) for line in log.pcie_errors],
    }
