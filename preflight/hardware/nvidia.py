"""NVIDIA's own words, parsed: nvidia-smi's table, -L, -q, -q -x and --query-gpu output, and its one-line failures.

Both generations of the banner are read: from driver R610 on it says KMD Version and CUDA UMD Version
(facts/cuda_driver.json, nvidia_smi_header_change).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from preflight.gpus import Driver, Gpu, GpuProcess, Trouble
from preflight.hardware.readings import csv_rows, missing, number, size_bytes, whole


@dataclass
class Reading:
    """What one output told. `complete` is False when the text ends in the middle."""

    gpus: list[Gpu] = field(default_factory=list)
    slices: list[Gpu] = field(default_factory=list)
    processes: list[GpuProcess] = field(default_factory=list)
    driver: Driver = field(default_factory=Driver)
    complete: bool = True


_BUS_ID = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]"

# How nvidia-smi says that it cannot work; first match wins. Source: facts/xid.json related_strings, NVML return codes.
_FAILURES: tuple[tuple[str, str], ...] = (
    ("mismatch", r"driver/library version mismatch|NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
    ("no-runtime", r"could not select device driver|unknown or invalid runtime name: nvidia|unresolvable CDI devices"),
    ("needs-reset", r"gpu requires reset|NVML_ERROR_RESET_REQUIRED"),
    ("lost", r"gpu is lost|unable to determine the device handle|fallen off the bus"),
    ("power", r"insufficient external power|insufficient power"),
    ("no-devices", r"no devices were found|no nvidia gpus? (?:found|detected)"),
    ("no-driver", r"couldn'?t communicate with the nvidia driver|driver not loaded|driver is not loaded"),
    ("no-library", r"couldn'?t find (?:the )?(?:libnvidia-ml|nvml)|libnvidia-ml\.so|nvml shared library|nvml\.dll"),
    ("permission", r"insufficient permissions|failed to initialize nvml: .*permission|permission denied"),
    ("bad-field", r"is not a valid field to query|option .* is not recognized|invalid combination of input arg"),
    ("blocked", r"gpu access blocked by the operating system"),
    ("unknown-error", r"failed to initialize nvml: unknown error|failed to initialize nvml: *$"),
    ("failed", r"failed to initialize nvml|nvidia-smi has failed|unable to (?:query|open)"),
    (
        "absent",
        r"command not found|not recognized as (?:an internal|the name of)|no such file or directory|: not found"
        r"|is not installed|cannot find (?:the )?(?:file|path)|executable file not found",
    ),
)


def parse_failure(text: str, exit_code: int | None = 0) -> Trouble | None:
    """Why nvidia-smi did not work, from its own words; None when they name no failure."""
    # A healthy answer may hold cells like [Unknown Error], so cells do not count, only lines of prose.
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    plain = [re.sub(r"\[[^\]]*\]", "", line) for line in lines if not line.startswith(("|", "+", "<"))]
    for kind, pattern in _FAILURES:
        for line in plain if len(plain) < 40 else plain[:5]:
            if re.search(pattern, line, re.IGNORECASE):
                said = " ".join(plain[:4])
                lost = re.findall(_BUS_ID, line) if kind in ("lost", "needs-reset") else []
                for other in plain:
                    if kind == "lost" and re.search(r"lost|device handle", other, re.IGNORECASE):
                        lost += re.findall(_BUS_ID, other)
                return Trouble("nvidia-smi", kind, said, tuple(dict.fromkeys(short_bus_id(bus) for bus in lost)))
    # Shells say "not found" in every language: bash ends with 127, cmd.exe quotes the name first and ends with 9009.
    if exit_code in (127, 9009) or (exit_code and plain and plain[0].startswith(("'nvidia-smi", '"nvidia-smi'))):
        return Trouble("nvidia-smi", "absent", " ".join(plain[:2]))
    return None


def short_bus_id(bus_id: str) -> str:
    """ "00000000:02:00.0" as "0000:02:00.0", the form of lspci and the kernel log."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if rest else bus_id


def parse_banner(text: str) -> Driver:
    """The versions in nvidia-smi's first box, or in the head of -q; both header generations."""
    smi = re.search(r"NVIDIA-SMI\s+(?:version\s*:?\s*)?(\d[\d.]*)", text)
    driver = re.search(r"(?:Driver|KMD)\s+Version\s*:\s*(\d[\d.]*)", text, re.IGNORECASE)
    cuda = re.search(r"CUDA(?:\s+UMD)?\s+Version\s*:\s*(\d+\.\d+)", text, re.IGNORECASE)
    return Driver(
        version=driver.group(1) if driver else None,
        cuda=cuda.group(1) if cuda else None,
        nvidia_smi=smi.group(1) if smi else None,
    )


def parse_library_version(text: str) -> str | None:
    """The NVML library's version that newer drivers print under a mismatch."""
    found = re.search(r"NVML library version\s*:\s*(\d[\d.]*)", text)
    return found.group(1) if found else None


def parse_proc_version(text: str) -> Driver:
    """/proc/driver/nvidia/version: the version of the module that is loaded in the kernel, and which flavour."""
    line = next((line for line in text.splitlines() if "NVRM version" in line), "")
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", line)
    if not found:
        return Driver()
    return Driver(kernel_module=found.group(1), open_module="open kernel module" in line.lower())


def parse_list(text: str) -> Reading:
    """`nvidia-smi -L`: whole names, and MIG devices with their profile."""
    seen = Reading()
    for line in text.splitlines():
        card = re.match(r"\s*GPU (\d+): (.+?)(?:\s+\(UUID: .*)?$", line)
        part = re.match(r"\s+MIG\s+(\S+)\s+Device\s+(\d+):", line)
        if card:
            seen.gpus.append(Gpu(int(card.group(1)), name=card.group(2).strip()))
        elif part and seen.gpus:
            owner = seen.gpus[-1]
            seen.gpus[-1] = replace(owner, mig_mode="enabled")
            seen.slices.append(
                Gpu(
                    len(seen.slices),
                    name=f"{owner.name} MIG {part.group(1)}",
                    parent=owner.index,
                    mig_device=int(part.group(2)),
                    mig_profile=part.group(1),
                    total_bytes=_profile_bytes(part.group(1)),
                )
            )
    return seen


def _profile_bytes(profile: str) -> int | None:
    # "3g.40gb" names its memory in rounded GB: an upper bound on the slice, used only where nothing exact is known.
    found = re.search(r"\.(\d+)gb", profile)
    return int(found.group(1)) << 30 if found else None


_WHO = re.compile(
    rf"^\s*(\d+)\s+(.*?)\s+(On|Off|N/A|WDDM|TCC|MCDM|WDM|ERR!|Enabled|Disabled|Not Supported|\[N/A\])\s*$"
    rf"|^\s*(\d+)\s+(.*\S)\s*$(?!{_BUS_ID})"
)
_BUS = re.compile(rf"({_BUS_ID})\s+(On|Off|N/A|ERR!)?")
_STATE = re.compile(
    r"^\s*(ERR!|N/A|\d+\s?%|\[[^]]*\])\s+(ERR!|N/A|-|\d+\s?C|\[[^]]*\])\s+(P\d+|ERR!|N/A|\[[^]]*\])\s*(.*)$"
)
_SLICE = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+|N/A)\s+(\d+)\s*$")
_PROCESS = re.compile(
    r"^\s*(\d+)\s+(?:(N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+([CGM](?:\+[CGM])*|N/A)\s+(.*?)\s+"
    r"(\d+\s?MiB|N/A|Not Available|Insufficient.*)\s*$"
)


def parse_table(text: str) -> Reading:
    """nvidia-smi's table of any generation: two or three lines a card, MIG slices, processes."""
    seen = Reading(driver=parse_banner(text))
    head, _, tail = text.partition("Processes:")
    cards, _, parts = head.partition("MIG devices:")
    rows = [_cells(line) for line in cards.splitlines() if line.lstrip().startswith("|")]
    windows = "Driver-Model" in text or re.search(r"TCC/WDDM", text) is not None
    current: int | None = None
    stage = 0
    for cells in rows:
        if len(cells) >= 3 and re.match(r"^\s*\d+\s+\S", cells[0]):
            seen.gpus.append(_first_line(cells, windows))
            current, stage = len(seen.gpus) - 1, 1
        elif current is not None and len(cells) >= 3 and stage == 1 and not set(cells[0].strip()) <= set("=-+"):
            seen.gpus[current] = _second_line(seen.gpus[current], cells)
            stage = 2
        elif current is not None and len(cells) >= 3 and stage == 2:
            word = cells[2].strip().lower()
            if word.rstrip("*") in ("enabled", "disabled"):
                seen.gpus[current] = replace(seen.gpus[current], mig_mode=word.rstrip("*"))
            stage = 3
    seen.gpus = [_mark_lost(gpu) for gpu in seen.gpus]
    seen.slices = _table_slices(parts, seen.gpus)
    for line in tail.splitlines():
        process = _PROCESS.match(line.strip().strip("|"))
        if process:
            seen.processes.append(
                GpuProcess(
                    gpu=int(process.group(1)),
                    pid=int(process.group(3)),
                    kind=process.group(4),
                    name=process.group(5).strip() or None,
                    memory_bytes=size_bytes(process.group(6)),
                    gpu_instance=whole(process.group(2)),
                )
            )
    if seen.driver.version or seen.gpus:
        said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING:")]
        last = said[-1] if said else ""
        seen.complete = last.startswith("+") and last.endswith("+") and not (seen.gpus and stage == 1)
    return seen


def _cells(line: str) -> list[str]:
    return line.strip().strip("|").split("|")


def _first_line(cells: list[str], windows: bool) -> Gpu:
    # A Jetson has no bus: its cell says N/A.
    bus = _BUS.search(cells[1])
    who = _WHO.match(cells[0])
    index = re.match(r"\s*(\d+)", cells[0])
    name = (who.group(2) or who.group(5) or "") if who else ""
    mode = (who.group(3) or "") if who else ""
    model = mode if mode in ("WDDM", "TCC", "MCDM", "WDM") else None
    ecc = cells[2].strip()
    lost = bool(re.search(r"\bERR!", cells[1])) and "ERR!" in cells[0]
    return Gpu(
        int(index.group(1)) if index else 0,
        name=None if missing(name) else name.strip(),
        pci_bus_id=bus.group(1) if bus else None,
        display_active={"On": True, "Off": False}.get((bus.group(2) or "") if bus else ""),
        driver_model=model,
        persistence_mode=None if windows or model else {"On": True, "Off": False}.get(mode),
        # The cell is a count when ECC is on; "Off" when it is off; "On" on a card in MIG mode, whose slices count.
        ecc_mode="on" if ecc.isdigit() or ecc == "On" else "off" if ecc == "Off" else None,
        ecc_uncorrected_volatile=int(ecc) if ecc.isdigit() else None,
        sensor_errors=("ecc",) if ecc == "ERR!" else (),
        lost=lost,
    )


def _second_line(gpu: Gpu, cells: list[str]) -> Gpu:
    state = _STATE.match(cells[0])
    fan, temperature, level, power = state.groups() if state else ("", "", "", "")
    draw, _, limit = power.partition("/")
    used, _, total = cells[1].partition("/")
    usage = re.match(r"\s*(\d+\s?%|N/A|ERR!|\[[^]]*\])?\s*(.*)$", cells[2])
    util, mode = usage.groups() if usage else (None, None)
    errors = [
        name
        for name, cell in (("fan", fan), ("temperature", temperature), ("power", draw), ("utilization", util or ""))
        if "ERR!" in cell or "Unknown Error" in cell
    ]
    used_bytes, total_bytes = size_bytes(used), size_bytes(total)
    free = total_bytes - used_bytes if total_bytes is not None and used_bytes is not None else None
    return replace(
        gpu,
        fan_pct=number(fan),
        temperature_c=number(temperature),
        performance_state=None if missing(level) else level,
        power_draw_w=number(draw),
        power_limit_w=number(limit),
        used_bytes=used_bytes if total_bytes is not None else None,
        total_bytes=total_bytes,
        free_bytes=free,
        unified_memory=True if "not supported" in cells[1].lower() else gpu.unified_memory,
        utilization_pct=number(util),
        compute_mode=None if mode is None or missing(mode) else mode.strip(),
        sensor_errors=(*gpu.sensor_errors, *errors),
    )


def _mark_lost(gpu: Gpu) -> Gpu:
    # Only fan and power in error is a sensor fault; name, temperature and utilisation all gone is a lost card.
    return replace(gpu, lost=True) if {"temperature", "utilization"} <= set(gpu.sensor_errors) else gpu


def _table_slices(text: str, gpus: list[Gpu]) -> list[Gpu]:
    slices: list[Gpu] = []
    for line in text.splitlines():
        cells = _cells(line)
        part = _SLICE.match(cells[0]) if len(cells) >= 3 else None
        if not part:
            continue
        used, _, total = cells[1].partition("/")
        used_bytes, total_bytes = size_bytes(used), size_bytes(total)
        parent = int(part.group(1))
        owner = next((gpu for gpu in gpus if gpu.index == parent), None)
        uncorrected = re.search(r"(\d+)\s*$", cells[2].strip())
        slices.append(
            Gpu(
                len(slices),
                name=f"{owner.name} MIG slice" if owner and owner.name else "MIG slice",
                parent=parent,
                gpu_instance=int(part.group(2)),
                compute_instance=whole(part.group(3)),
                mig_device=int(part.group(4)),
                total_bytes=total_bytes,
                used_bytes=used_bytes,
                free_bytes=total_bytes - used_bytes if total_bytes is not None and used_bytes is not None else None,
                ecc_uncorrected_volatile=int(uncorrected.group(1)) if uncorrected else None,
            )
        )
    return slices


# --query-gpu: column -> field. Units may stand in the header ("memory.total [MiB]") or behind each value.
_SIZES = {
    "memory.total": "total_bytes",
    "memory.used": "used_bytes",
    "memory.free": "free_bytes",
    "memory.reserved": "reserved_bytes",
}
_NUMBERS = {
    "fan.speed": "fan_pct",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_draw_w",
    "power.draw.instant": "power_draw_w",
    "power.limit": "power_limit_w",
    "enforced.power.limit": "power_limit_w",
    "power.default_limit": "power_limit_default_w",
    "utilization.gpu": "utilization_pct",
    "clocks.sm": "sm_clock_mhz",
    "clocks.current.sm": "sm_clock_mhz",
    "clocks.max.sm": "sm_clock_max_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.current.memory": "memory_clock_mhz",
}
_COUNTS = {
    "ecc.errors.uncorrected.volatile.total": "ecc_uncorrected_volatile",
    "ecc.errors.uncorrected.aggregate.total": "ecc_uncorrected_aggregate",
    "ecc.errors.corrected.volatile.total": "ecc_corrected_volatile",
    "pcie.link.gen.current": "pcie_gen",
    "pcie.link.gen.gpucurrent": "pcie_gen",
    "pcie.link.gen.max": "pcie_gen_max",
    "pcie.link.width.current": "pcie_width",
    "pcie.link.width.max": "pcie_width_max",
    "encoder.stats.sessioncount": "encoder_sessions",
    "remapped_rows.uncorrectable": "remapped_rows_uncorrectable",
}
_WORDS = {
    "name": "name",
    "gpu_name": "name",
    "compute_cap": "compute_capability",
    "pci.bus_id": "pci_bus_id",
    "gpu_bus_id": "pci_bus_id",
    "pstate": "performance_state",
    "driver_model.current": "driver_model",
    "compute_mode": "compute_mode",
}
_SWITCHES = {
    "mig.mode.current": "mig_mode",
    "ecc.mode.current": "ecc_mode",
}
QUERY_FIELDS = ("index", "name", "pci.bus_id", "driver_version", "memory.total", "memory.used", "memory.free")


def parse_query(text: str, question: str = "") -> Reading:
    """`nvidia-smi --query-gpu=… --format=csv`, with or without header and units.

    `question` is the command that was run (or a text that holds it); without a header it names the columns.
    """
    rows = csv_rows(text)
    seen = Reading()
    if not rows:
        return seen
    asked = _asked_columns(question)
    if _is_header(rows[0]):
        columns, rows = [_column(cell) for cell in rows[0]], rows[1:]
    elif asked:
        columns = asked
    else:
        seen.gpus = [gpu for position, row in enumerate(rows) if (gpu := _nameless_row(row, position)) is not None]
        return seen
    for position, row in enumerate(rows):
        if len(row) > len(columns) and "name" in columns:  # a comma inside a name
            at = columns.index("name")
            extra = len(row) - len(columns)
            row = [*row[:at], ", ".join(row[at : at + extra + 1]), *row[at + extra + 1 :]]
        if len(row) < min(2, len(columns)):
            continue
        seen.complete = seen.complete and len(row) == len(columns)
        values = {column: row[at] for at, column in enumerate(columns[: len(row)])}
        seen.gpus.append(_query_row(values, position))
        version = values.get("driver_version")
        if version and not missing(version):
            seen.driver = Driver(version=version, model=seen.gpus[-1].driver_model)
    return seen


_KNOWN = {*_SIZES, *_NUMBERS, *_COUNTS, *_WORDS, *_SWITCHES, "index", "driver_version", "uuid", "persistence_mode"}


def _is_header(row: list[str]) -> bool:
    return sum(_column(cell) in _KNOWN for cell in row) * 2 >= len(row)


def _asked_columns(question: str) -> list[str]:
    for asked in re.finditer(r"--query-gpu[= ]\"?([A-Za-z0-9_.,]+)", question):
        columns = [_column(cell) for cell in asked.group(1).split(",") if cell.strip()]
        if columns and sum(column in _KNOWN for column in columns) * 2 >= len(columns):
            return columns
    return []


def _nameless_row(row: list[str], position: int) -> Gpu | None:
    """A row of which nobody knows the columns: only what its own form gives away."""
    name = next((cell for cell in row if re.search(r"\b(?:nvidia|geforce|tesla|quadro|rtx|gtx) ", cell, re.I)), None)
    values = [cell for cell in row if re.fullmatch(r"\[?[\d.]+\s?(?:MiB|%|W|C)?\]?", cell)]
    if name is None or len(name) > 60 or not values:
        return None
    sizes = [size for cell in row if re.search(r"\d\s*MiB$", cell) and (size := size_bytes(cell)) is not None]
    capability = next((cell for cell in row if re.fullmatch(r"\d{1,2}\.\d", cell)), None)
    index = int(row[0]) if row[0].isdigit() else position
    return Gpu(index, name, total_bytes=max(sizes, default=None), compute_capability=capability)


def _column(cell: str) -> str:
    return re.sub(r"\s*\[.*\]$", "", cell.strip()).lower()


def _query_row(values: dict[str, str], position: int) -> Gpu:
    fields: dict[str, Any] = {}
    unavailable, errors = [], []
    for column, text in values.items():
        size, amount = _SIZES.get(column), _NUMBERS.get(column)
        count, word, switch = _COUNTS.get(column), _WORDS.get(column), _SWITCHES.get(column)
        name = size or amount or count or word or switch or column
        if missing(text):
            unavailable.append(f"{column}: {text.strip('[]') or 'empty'}")
            if re.search(r"unknown error|err!", text, re.IGNORECASE):
                errors.append(name.removesuffix("_pct").removesuffix("_w").removesuffix("_c"))
            continue
        if size:
            fields[size] = size_bytes(text)
        elif amount:
            fields.setdefault(amount, number(text))
        elif count:
            fields.setdefault(count, whole(text))
        elif word:
            fields.setdefault(word, text)
        elif switch:
            fields[switch] = _switch(switch, text)
        elif column == "persistence_mode":
            fields["persistence_mode"] = {"enabled": True, "disabled": False}.get(text.lower())
        elif column == "display_active":
            fields["display_active"] = {"enabled": True, "disabled": False}.get(text.lower())
    index = whole(values.get("index", "")) if "index" in values else position
    total, used = fields.get("total_bytes"), fields.get("used_bytes")
    if "free_bytes" not in fields and total is not None and used is not None and "memory.free" not in values:
        fields["free_bytes"] = total - used
    return Gpu(
        position if index is None else index, **fields, unavailable=tuple(unavailable), sensor_errors=tuple(errors)
    )


def _switch(name: str, text: str) -> str | None:
    state = {"enabled": True, "on": True, "disabled": False, "off": False}.get(text.strip().lower())
    if state is None:
        return None
    return ("enabled" if state else "disabled") if name == "mig_mode" else ("on" if state else "off")


def parse_query_processes(text: str) -> list[GpuProcess]:
    """`nvidia-smi --query-compute-apps=pid,process_name,used_gpu_memory --format=csv`, with its header."""
    rows = csv_rows(text)
    columns = [_column(cell) for cell in rows[0]] if rows else []
    if "pid" not in columns or not {"process_name", "name"} & set(columns):
        return []
    found = []
    for row in rows[1:]:
        values = {column: row[at] for at, column in enumerate(columns[: len(row)])}
        memory = size_bytes(values.get("used_gpu_memory", values.get("used_memory", "")))
        name = values.get("process_name", values.get("name"))
        if whole(values.get("pid", "")) is not None:
            found.append(GpuProcess(None, whole(values["pid"]), name or None, "C", memory))
    return found


def parse_nvml(lines: Iterable[Mapping[str, Any]]) -> Reading:
    """What preflight/children/ask_nvml.py wrote: the driver, then one line a device."""
    seen = Reading()
    for line in lines:
        if "driver" in line:
            seen.driver = Driver(version=line.get("driver"), cuda=line.get("cuda"))
        index = line.get("device")
        if not isinstance(index, int):
            continue
        seen.gpus.append(
            Gpu(
                index,
                name=line.get("name"),
                lost="error" in line,
                total_bytes=line.get("total_bytes"),
                used_bytes=line.get("used_bytes"),
                free_bytes=line.get("free_bytes"),
                compute_capability=line.get("compute_capability"),
                pci_bus_id=line.get("pci_bus_id"),
                driver_model=line.get("driver_model"),
                mig_mode=line.get("mig_mode"),
            )
        )
    return seen


def joined(readings: Iterable[Reading]) -> Reading:
    """One reading out of several, the most telling first: each later one only fills what is still unknown."""
    from preflight.gpus import merged

    whole_reading = Reading()
    for seen in readings:
        whole_reading.gpus = merged(whole_reading.gpus, seen.gpus)
        if not whole_reading.slices or all(part.used_bytes is None for part in whole_reading.slices):
            whole_reading.slices = seen.slices or whole_reading.slices
        whole_reading.processes = whole_reading.processes or seen.processes
        whole_reading.driver = joined_driver(whole_reading.driver, seen.driver)
        whole_reading.complete = whole_reading.complete and seen.complete
    return whole_reading


def joined_driver(one: Driver, other: Driver) -> Driver:
    """`one`, completed by what only `other` knows."""
    return Driver(**{name: value if value is not None else getattr(other, name) for name, value in vars(one).items()})
