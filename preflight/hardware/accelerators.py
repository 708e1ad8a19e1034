"""Asks every vendor's tool on this machine and puts the answers together."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from preflight.gpus import Accelerators, Driver, Gpu, GpuProcess, PciCard, Trouble, merged
from preflight.hardware import nvidia, nvidia_log, other_vendors
from preflight.host import parse_meminfo, read_platform
from preflight.machine import Answer, Machine

# nvidia-smi normally answers within a second; with many cards and no persistence daemon it can take ten.
NVIDIA_SMI_LIMIT_S = 15.0


@dataclass
class _Looking:
    """What has been gathered so far."""

    machine: Machine
    gpus: list[Gpu] = field(default_factory=list)
    slices: list[Gpu] = field(default_factory=list)
    processes: list[GpuProcess] = field(default_factory=list)
    driver: Driver = field(default_factory=Driver)
    pci: list[PciCard] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)

    def run(self, command: Sequence[str], timeout_s: float = 10.0) -> Answer:
        """Ask a tool; a time-out is noted as trouble."""
        answer = self.machine.run(command, timeout_s)
        if answer.trouble == "timeout":
            self.asked[command[0]] = "timeout"
            self.troubles.append(Trouble(command[0], "timeout", f"no answer within {timeout_s:.0f} s"))
        return answer


def read(machine: Machine) -> Accelerators:
    """Everything the vendor tools on this machine say."""
    looking = _Looking(machine)
    _nvidia(looking)
    _tegra(looking)
    _other(looking, "amd", ("amd-smi", "rocm-smi"), _ask_amd)
    _other(looking, "ascend", ("npu-smi",), _ask_npu)
    _other(looking, "intel", ("xpu-smi",), _ask_xpu)
    _apple(looking)
    _pci(looking)
    looking.gpus = _unified(looking)
    return Accelerators(
        gpus=tuple(other_vendors.with_roles(looking.gpus)),
        slices=tuple(_completed_slices(looking)),
        processes=tuple(looking.processes),
        driver=looking.driver,
        pci=tuple(looking.pci),
        troubles=tuple(looking.troubles),
        asked=tuple(sorted(looking.asked.items())),
    )


# --- NVIDIA


def _nvidia(looking: _Looking) -> None:
    answers = _recorded_nvidia(looking.machine) if looking.machine.replayed else _live_nvidia(looking)
    readings: list[tuple[int, nvidia.Reading]] = []
    troubles: list[Trouble] = []
    answered = timed_out = False
    for question, answer in answers:
        if answer.trouble == "timeout":
            timed_out = True
            if looking.machine.replayed:
                troubles.append(Trouble("nvidia-smi", "timeout", "no answer within its limit"))
        if answer.trouble == "absent":
            troubles.append(Trouble("nvidia-smi", "absent"))
        if not (answer.text + answer.errors).strip() and not answer.trouble:
            troubles.append(Trouble("nvidia-smi", "failed", "it said nothing"))
        for text in (answer.text, answer.errors):
            if not text.strip():
                continue
            answered = True
            rank, reading = classify(text, question)
            trouble = nvidia.parse_failure(text, answer.exit_code)
            if trouble and rank == _GUESSED:
                reading = None
            if reading is not None:
                readings.append((rank, reading))
            looking.driver = nvidia.joined_driver(looking.driver, Driver(library=nvidia.parse_library_version(text)))
            # One cell of a good answer may hold the words of a failure; only a lost card shows beside good rows.
            if re.search(r"(?i)cuda(?: umd)?[ _]version(?:\s*:\s*|>)(?:N/A|ERR!|Not Found)", text):
                troubles.append(Trouble("nvidia-smi", "no-cuda", "CUDA Version: N/A"))
            corrupt = re.findall(r"(?i)infoROM is corrupted at gpu (\S+)", text)
            if corrupt:
                troubles.append(Trouble("nvidia-smi", "inforom", text.strip().splitlines()[0], tuple(corrupt)))
            if trouble and trouble.kind != "bad-field" and (trouble.kind == "lost" or reading is None):
                troubles.append(trouble)
            elif reading is None and not trouble and not _OTHER_REPORTS.search(text):
                troubles.append(Trouble("nvidia-smi", "truncated" if _began(text) else "failed", text.strip()[:400]))
    seen_by_nvml = _ask_nvml(looking, answers)
    if seen_by_nvml.gpus:
        readings.append((0, seen_by_nvml))
    if answers:
        absent = any(trouble.kind == "absent" for trouble in troubles) and not readings
        looking.asked["nvidia-smi"] = (
            "timeout" if timed_out else "absent" if absent else "answered" if answered else "silent"
        )
    seen = nvidia.joined(reading for _, reading in sorted(readings, key=lambda pair: pair[0]))
    looking.gpus, looking.slices, looking.processes = seen.gpus, seen.slices, seen.processes
    looking.driver = nvidia.joined_driver(looking.driver, seen.driver)
    if not seen.complete:
        troubles.append(Trouble("nvidia-smi", "truncated", "the output ends in the middle"))
    if any(trouble.kind == "lost" for trouble in troubles):
        lost = {bus for trouble in troubles for bus in trouble.bus_ids}
        looking.gpus = [
            replace(gpu, lost=True) if gpu.pci_bus_id and nvidia.short_bus_id(gpu.pci_bus_id) in lost else gpu
            for gpu in looking.gpus
        ]
    waiting = [gpu for gpu in looking.gpus if any("requires reset" in cell.lower() for cell in gpu.unavailable)]
    if waiting:
        where = tuple(nvidia.short_bus_id(gpu.pci_bus_id) if gpu.pci_bus_id else f"GPU {gpu.index}" for gpu in waiting)
        troubles.append(Trouble("nvidia-smi", "needs-reset", "GPU requires reset", where))
        looking.gpus = [replace(gpu, needs_reset=True) if gpu in waiting else gpu for gpu in looking.gpus]
    kinds: dict[tuple[str, str], Trouble] = {}
    for trouble in troubles:
        old = kinds.get((trouble.tool, trouble.kind))
        if old is None or (trouble.bus_ids and not old.bus_ids):
            kinds[(trouble.tool, trouble.kind)] = trouble
    if readings:
        kinds.pop(("nvidia-smi", "absent"), None)
    looking.troubles += [trouble for trouble in kinds.values() if trouble not in looking.troubles]
    looking.driver = nvidia.joined_driver(
        looking.driver, nvidia.parse_proc_version(looking.machine.read("/proc/driver/nvidia/version").text)
    )


# nvidia-smi topo, nvlink, pmon, dmon: reports that say nothing of what is looked for here.
_OTHER_REPORTS = re.compile(r"CPU Affinity|GPU instances?:|GPU instance profiles:|^#\s*gpu\s|Link \d+: ", re.MULTILINE)


def _ask_nvml(looking: _Looking, answers: Sequence[tuple[str, Answer]]) -> nvidia.Reading:
    """The cards through the driver's library, where nvidia-smi is not installed but the driver is (some containers)."""
    machine = looking.machine
    if not machine.replayed:
        absent = all(answer.absent for _, answer in answers)
        if not absent or not (machine.list("/dev/nvidia[0-9]*") or machine.list(r"C:\Windows\System32\nvml.dll")):
            return nvidia.Reading()
    answer = machine.ask("ask_nvml", sys.executable, timeout_s=10.0)
    reading = nvidia.parse_nvml(answer.lines_of_json())
    if reading.gpus:
        looking.asked["NVML"] = "answered"
    return reading


def _began(text: str) -> bool:
    return bool(re.search(r"NVIDIA-SMI|NVSMI LOG|<\?xml|nvidia_smi_log", text))


def classify(text: str, question: str = "") -> tuple[int, nvidia.Reading | None]:
    """Which of nvidia-smi's outputs a text is, and its reading; the lower the number, the more it tells."""
    if "<nvidia_smi_log" in text or "<gpu id=" in text:
        return 0, nvidia_log.parse_xml(text)
    if "NVSMI LOG" in text or re.search(r"^GPU [0-9A-Fa-f]{8}:", text, re.MULTILINE):
        return 1, nvidia_log.parse_log(text)
    if "NVIDIA-SMI" in text and re.search(r"^\s*\|", text, re.MULTILINE):
        return 3, nvidia.parse_table(text)
    if re.search(r"^GPU \d+: ", text, re.MULTILINE):
        return 4, nvidia.parse_list(text)
    processes = nvidia.parse_query_processes(text)
    if processes:
        return 5, nvidia.Reading(processes=processes)
    reading = nvidia.parse_query(text, question)
    return (_GUESSED, reading) if reading.gpus else (9, None)


# Comma-separated values: the only form that a message in prose could be taken for.
_GUESSED = 2


def _live_nvidia(looking: _Looking) -> list[tuple[str, Answer]]:
    smi = "nvidia-smi"
    log = looking.run([smi, "-q", "-x"], NVIDIA_SMI_LIMIT_S)
    if log.absent:
        # Windows keeps it off PATH with some drivers, and WSL puts it where some shells do not look.
        for place in (r"C:\Windows\System32\nvidia-smi.exe", "/usr/lib/wsl/lib/nvidia-smi"):
            if looking.machine.list(place):
                smi, log = place, looking.run([place, "-q", "-x"], NVIDIA_SMI_LIMIT_S)
                break
    found = [("nvidia-smi -q -x", log)]
    if log.absent or log.trouble:
        return found
    if "<nvidia_smi_log" not in log.text:
        found.append(("nvidia-smi", looking.run([smi], NVIDIA_SMI_LIMIT_S)))
        return found
    for fields in ((*nvidia.QUERY_FIELDS, "compute_cap"), nvidia.QUERY_FIELDS):
        command = [smi, f"--query-gpu={','.join(fields)}", "--format=csv"]
        answer = looking.run(command, NVIDIA_SMI_LIMIT_S)
        found.append((" ".join(command), answer))
        if answer.trouble or answer.exit_code == 0:
            break
    return found


def _recorded_nvidia(machine: Machine) -> list[tuple[str, Answer]]:
    found = machine.recorded(r"(?i)nvidia-?smi|nvml")
    hint = "\n".join(answer.text for kind, answer in machine.recorded(r"(?i)\b(?:command|cmd)\b"))
    known = {kind for kind, _ in found}
    for kind, answer in machine.recorded(""):
        if kind not in known and _began(answer.text) and classify(answer.text)[1]:
            found.append((kind, answer))
    return [(kind if "--query-gpu=" in kind else f"{kind}\n{hint}", answer) for kind, answer in found]


def _completed_slices(looking: _Looking) -> list[Gpu]:
    by_index = {gpu.index: gpu for gpu in looking.gpus}
    return [
        replace(
            part,
            compute_capability=by_index[part.parent].compute_capability,
            architecture=by_index[part.parent].architecture,
        )
        if part.parent in by_index
        else part
        for part in looking.slices
    ]


def _tegra(looking: _Looking) -> None:
    machine = looking.machine
    release = machine.read("/etc/nv_tegra_release").text
    model = machine.read("/proc/device-tree/model").text or machine.read("/sys/firmware/devicetree/base/model").text
    stats = ""
    if machine.replayed:
        stats = "\n".join(answer.text for _, answer in machine.recorded("tegrastats|jtop"))
    tegra = other_vendors.parse_tegra(release, model, stats)
    if tegra is None:
        return
    name = looking.gpus[0].name if looking.gpus else None
    looking.gpus = merged([other_vendors.tegra_gpu(tegra, name)], looking.gpus)
    looking.asked["tegra"] = f"L4T {tegra.l4t}" if tegra.l4t else "answered"
    looking.troubles = [t for t in looking.troubles if t.kind != "absent"]


def _unified(looking: _Looking) -> list[Gpu]:
    """Where GPU and CPU share memory the budget is the system's: total MemTotal, free MemAvailable.

    cudaMemGetInfo and nvidia-smi under-report or refuse there. Source: facts/FACTS.md section 4.
    """
    if not any(gpu.unified_memory for gpu in looking.gpus):
        return looking.gpus
    memory = parse_meminfo(looking.machine.read("/proc/meminfo").text)
    if not memory and not looking.machine.replayed:
        from preflight.host import read_host

        host = read_host(looking.machine)
        memory = {
            name: value
            for name, value in (("MemTotal", host.ram_total_bytes), ("MemAvailable", host.ram_available_bytes))
            if value is not None
        }
    found = []
    for gpu in looking.gpus:
        if gpu.unified_memory and gpu.vendor in ("nvidia", "apple"):
            total = memory.get("MemTotal", gpu.total_bytes)
            free = memory.get("MemAvailable")
            if free is None and gpu.total_bytes is not None and gpu.used_bytes is not None:
                free = gpu.total_bytes - gpu.used_bytes
            gpu = replace(
                gpu,
                total_bytes=total,
                free_bytes=free,
                used_bytes=total - free if total is not None and free is not None else None,
            )
        found.append(gpu)
    return found


# --- the others


def _other(
    looking: _Looking,
    vendor: str,
    tools: tuple[str, ...],
    ask: Callable[[_Looking], list[tuple[str, Answer]]],
) -> None:
    machine = looking.machine
    answers = machine.recorded("(?i)" + "|".join(tools)) if machine.replayed else ask(looking)
    found: list[Gpu] = []
    for question, answer in answers:
        tool = next((name for name in tools if name in question), tools[0])
        text = answer.text
        gpus: list[Gpu] = []
        if vendor == "amd":
            gpus = other_vendors.parse_amd(text)
        elif vendor == "ascend":
            gpus, processes = other_vendors.parse_npu(text)
            looking.processes += processes
        elif vendor == "intel":
            gpus = other_vendors.parse_xpu(text)
        found = merged(found, gpus)
        if answer.absent or answer.exit_code == 127:
            looking.asked.setdefault(tool, "absent")
        elif gpus:
            looking.asked[tool] = "answered"
        elif answer.trouble != "timeout":
            said = " ".join((answer.text + " " + answer.errors).split())[:300]
            looking.asked.setdefault(tool, "no devices")
            if said and not re.search(
                r"(?i)no \w* ?\w* ?(?:devices?|gpus?|npus?)\b.*(?:discovered|found|detected)", said
            ):
                looking.troubles.append(Trouble(tool, "failed", said))
    if found:  # a tool that could not tell what another one of the same vendor could is no trouble
        looking.troubles = [t for t in looking.troubles if t.tool not in tools or t.kind == "timeout"]
    if vendor == "amd":
        for _, answer in machine.recorded("rocminfo"):
            found = merged(found, other_vendors.parse_rocminfo(answer.text))
    if looking.gpus and found:
        base = max(gpu.index for gpu in looking.gpus) + 1 if any(g.vendor == vendor for g in looking.gpus) else 0
        found = [replace(gpu, index=gpu.index + base) for gpu in found]
    looking.gpus += found


def _ask_amd(looking: _Looking) -> list[tuple[str, Answer]]:
    if looking.machine.list("/dev/kfd") == [] and looking.machine.list("/sys/module/amdgpu") == []:
        return []
    found = []
    for part in ("static", "metric"):
        answer = looking.run(["amd-smi", part, "--json"], 20.0)
        found.append((f"amd-smi {part} --json", answer))
        if not answer.ok:
            break
    if not found[0][1].ok:
        command = ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--csv"]
        found.append((" ".join(command), looking.run(command, 20.0)))
    return found


def _ask_npu(looking: _Looking) -> list[tuple[str, Answer]]:
    if looking.machine.list("/dev/davinci*") == [] and looking.machine.list("/usr/local/Ascend") == []:
        return []
    return [("npu-smi info", looking.run(["npu-smi", "info"], 20.0))]


def _ask_xpu(looking: _Looking) -> list[tuple[str, Answer]]:
    if looking.machine.list("/sys/module/xe") == [] and looking.machine.list("/sys/module/i915") == []:
        return []
    listing = looking.run(["xpu-smi", "discovery", "-j"], 15.0)
    found = [("xpu-smi discovery -j", listing)]
    for gpu in other_vendors.parse_xpu(listing.text):
        for part in ("discovery", "stats"):
            command = ["xpu-smi", part, "-d", str(gpu.index), "-j"]
            found.append((" ".join(command), looking.run(command, 15.0)))
    return found


def _apple(looking: _Looking) -> None:
    machine = looking.machine
    if machine.replayed:
        texts = [answer.text for _, answer in machine.recorded(r"sysctl|system_profiler|sw_vers")]
    elif read_platform(machine).get("system") == "Darwin":
        texts = [looking.run(["sysctl", "-n", "machdep.cpu.brand_string"]).text]
    else:
        return
    for text in texts:
        if not any(gpu.vendor == "apple" for gpu in looking.gpus):
            looking.gpus += other_vendors.parse_mac(text)
            size = re.search(r"hw\.memsize:?\s*(\d+)", text)
            if size and looking.gpus:
                looking.gpus[-1] = replace(looking.gpus[-1], total_bytes=int(size.group(1)))


def _pci(looking: _Looking) -> None:
    """What the bus shows; asked only when no tool found a device, because listing it takes longer than they do."""
    machine = looking.machine
    if machine.replayed:
        for _, answer in machine.recorded(r"(?i)lspci"):
            looking.pci += other_vendors.parse_lspci(answer.text)
            looking.asked["lspci"] = "answered" if answer.exit_code == 0 else "absent"
        for _, answer in machine.recorded(r"(?i)videocontroller|dxdiag|wmic"):
            looking.pci += other_vendors.parse_windows_adapters(answer.text)
            looking.asked["windows adapters"] = "answered"
        return
    where = read_platform(machine)
    if looking.gpus and not looking.troubles:
        # A card that fell off the bus may be missing from the tool's list; /sys still shows it and costs nothing.
        if where.get("system") == "Linux":
            looking.pci += _sysfs(machine)
        return
    if where.get("system") == "Windows":
        command = ["powershell", "-NoProfile", "-Command", "(Get-CimInstance Win32_VideoController).Name"]
        answer = looking.run(command, 20.0)
        looking.pci += other_vendors.parse_windows_adapters(answer.text)
        looking.asked["windows adapters"] = "absent" if answer.absent else "answered"
        return
    if where.get("system") != "Linux":
        return
    answer = looking.run(["lspci", "-nnk"])
    looking.asked["lspci"] = "absent" if answer.absent else "answered"
    looking.pci += other_vendors.parse_lspci(answer.text)
    if answer.absent:
        looking.pci += _sysfs(machine)


def _sysfs(machine: Machine) -> list[PciCard]:
    """The same out of /sys, where lspci is not installed (most containers)."""
    found = []
    for path in machine.list("/sys/bus/pci/devices/*/class"):
        if not machine.read(path).text.startswith(("0x03", "0x12")):
            continue
        folder = path.rpartition("/")[0]
        vendor = machine.read(f"{folder}/vendor").text.strip().removeprefix("0x")
        device = machine.read(f"{folder}/device").text.strip().removeprefix("0x")
        answers = machine.read(f"{folder}/config", 4).text[:1] != "\ufffd"
        name = {"10de": "nvidia", "1002": "amd", "8086": "intel", "19e5": "ascend"}.get(vendor)
        if name:
            found.append(PciCard(folder.rpartition("/")[2], name, f"{name} device", f"{vendor}:{device}", answers))
    return found
