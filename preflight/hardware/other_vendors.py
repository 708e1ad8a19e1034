"""AMD, Huawei Ascend, Intel, Apple and NVIDIA Jetson: what their tools print, and what the PCI bus shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from preflight.gpus import Gpu, GpuProcess, PciCard, merged
from preflight.hardware.readings import csv_rows, missing, number, size_bytes, whole

# GPUs that are part of a processor. Source: LLVM AMDGPU processor table (llvm.org/docs/AMDGPUUsage.html), APU rows.
APU_GFX = (
    *("gfx700", "gfx801", "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037"),
    *("gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
)
_APU_NAME = re.compile(
    r"\b(Raphael|Phoenix|Hawk ?Point|Rembrandt|Renoir|Lucienne|Cezanne|Barcelo|Picasso|Raven|Van ?Gogh|Mendocino|"
    r"Granite Ridge|Strix|Krackan|Radeon(?: \(TM\))? Graphics|Radeon \d{3}M|Radeon 8\d{3}S)\b",
    re.IGNORECASE,
)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a JSON value with their paths; {"value": 3, "unit": "MB"} is one leaf, "3 MB"."""
    if isinstance(value, Mapping):
        if "value" in value and set(value) <= {"value", "unit"}:
            unit = value.get("unit") or ""
            yield path, f"{value['value']} {unit}".strip()
            return
        for key, item in value.items():
            yield from flat(item, f"{path}/{key}".lower().lstrip("/"))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from flat(item, f"{path}/{position}")
    else:
        yield path, value


def json_documents(text: str) -> list[Any]:
    """The JSON values in a text; tools put warnings before or after their document."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    position = 0
    while True:
        start = min((at for at in (text.find("{", position), text.find("[", position)) if at >= 0), default=-1)
        if start < 0:
            return found
        try:
            value, position = decoder.raw_decode(text, start)
            found.append(value)
        except ValueError:
            position = start + 1
        except RecursionError:
            return found


def _first(leaves: Mapping[str, Any], *patterns: str) -> Any:
    for pattern in patterns:
        for path, value in leaves.items():
            if re.search(pattern, path) and not missing(value):
                return value
    return None


# --- AMD


def parse_amd(text: str) -> list[Gpu]:
    """amd-smi (JSON, CSV, its table) and rocm-smi (CSV, JSON, GPU[0] lines, concise table)."""
    documents = [value for value in json_documents(text) if isinstance(value, (dict, list)) and value]
    for document in documents:
        found = _amd_json(document)
        if found:
            return found
    for reader in (_amd_csv, _rocm_lines, _amd_table, _rocm_concise, _amd_text):
        found = reader(text)
        if found:
            return found
    return []


def _amd_json(document: Any) -> list[Gpu]:
    if isinstance(document, Mapping) and "gpu_data" in document:
        document = document["gpu_data"]
    if isinstance(document, Mapping):
        cards = {key: value for key, value in document.items() if re.match(r"card\d+$", str(key))}
        return [_amd_gpu(int(key[4:]), dict(flat(value))) for key, value in cards.items() if isinstance(value, Mapping)]
    found = []
    for position, item in enumerate(document if isinstance(document, list) else []):
        if isinstance(item, Mapping) and ("gpu" in item or "device" in item):
            index = whole(item.get("gpu", item.get("device")))
            found.append(_amd_gpu(position if index is None else index, dict(flat(item))))
    return found


def _amd_gpu(index: int, leaves: Mapping[str, Any]) -> Gpu:
    leaves = {path.lower(): value for path, value in leaves.items()}
    total = _amd_size(
        leaves, r"vram total memory", r"total_vram$", r"vram_total$", r"vram/size$", r"^vram_size", r"mem_total"
    )
    used = _amd_size(leaves, r"vram total used memory", r"used_vram$", r"vram_used$", r"mem_used")
    free = _amd_size(leaves, r"free_vram$", r"vram_free$")
    if free is None and total is not None and used is not None:
        free = max(0, total - used)
    gfx = _first(leaves, r"gfx version", r"target_graphics_version", r"gfx_version", r"target_gfx")
    name = _first(
        leaves, r"market_name", r"product_name", r"card series", r"device name", r"card model", r"gpu_name", r"^name$"
    )
    ecc = _first(leaves, r"total_uncorrectable_count", r"ecc.*uncorrectable")
    return Gpu(
        index,
        name=None if name is None else str(name),
        vendor="amd",
        total_bytes=total,
        used_bytes=used,
        free_bytes=free,
        gfx=None if gfx is None else str(gfx).split(":")[0].lower(),
        pci_bus_id=_first(leaves, r"bus/bdf", r"^bdf$", r"pci bus"),
        temperature_c=number(
            _first(leaves, r"temperature.*hotspot", r"temperature.*junction", r"temperature.*edge", r"hotspot_temp")
        ),
        power_draw_w=number(
            _first(leaves, r"power/socket_power", r"power.*\(w\)", r"^power_usage", r"current_socket_power")
        ),
        power_limit_w=number(_first(leaves, r"max_power", r"power_limit", r"power_cap")),
        utilization_pct=number(_first(leaves, r"gfx_activity", r"gpu use", r"^gfx$", r"gfx_util")),
        ecc_uncorrected_volatile=whole(ecc),
    )


def _amd_size(leaves: Mapping[str, Any], *patterns: str) -> int | None:
    for pattern in patterns:
        for path, value in leaves.items():
            if re.search(pattern, path) and not missing(value):
                return size_bytes(value, "B" if "(b)" in path else "MB")
    return None


def _amd_csv(text: str) -> list[Gpu]:
    lines = [line for line in text.splitlines() if "," in line]
    start = next((at for at, line in enumerate(lines) if re.match(r"(device|gpu)\s*,", line, re.IGNORECASE)), None)
    if start is None:
        return []
    found = []
    columns, *rows = csv_rows("\n".join(lines[start:]))
    for row in rows:
        values = {column: row[at] for at, column in enumerate(columns[: len(row)])}
        who = row[0].lower()
        number_in_name = re.search(r"\d+", who)
        if re.match(r"(card|gpu)?\d+$", who) and number_in_name:
            found.append(_amd_gpu(int(number_in_name.group()), values))
    return found


def _rocm_lines(text: str) -> list[Gpu]:
    cards: dict[int, dict[str, Any]] = {}
    for index, name, value in re.findall(r"^GPU\[(\d+)\]\s*:\s*([^:\n]+):\s*(.*)$", text, re.MULTILINE):
        cards.setdefault(int(index), {})[name.strip()] = value.strip()
    return [_amd_gpu(index, leaves) for index, leaves in sorted(cards.items())]


def _amd_table(text: str) -> list[Gpu]:
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.lstrip().startswith("|")]
    found: list[Gpu] = []
    for above, below in zip(rows, rows[1:]):  # noqa: B905, RUF007 (Python 3.9 reads this)
        who = re.match(r"\s*([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)\s+(.*\S)\s*$", above[0])
        index = re.match(r"\s*(\d+)\s", below[0])
        memory = re.search(r"(\d+)\s*/\s*(\d+)\s*MB", below[-1])
        if not (who and index):
            continue
        power = re.search(r"(\d+|N/A)\s*/\s*(\d+|N/A)\s*W", above[-1])
        heat = re.search(r"(\d+)\s*°?C", above[-1])
        total = size_bytes(memory.group(2)) if memory else None
        used = size_bytes(memory.group(1)) if memory else None
        found.append(
            Gpu(
                int(index.group(1)),
                name=who.group(2),
                vendor="amd",
                pci_bus_id=who.group(1),
                total_bytes=total,
                used_bytes=used,
                free_bytes=total - used if total is not None and used is not None else None,
                temperature_c=number(heat.group(1)) if heat else None,
                power_draw_w=number(power.group(1)) if power else None,
                power_limit_w=number(power.group(2)) if power else None,
            )
        )
    return found


def _rocm_concise(text: str) -> list[Gpu]:
    # The concise table gives shares of the memory, not sizes: the sizes stay unknown.
    if "Concise Info" not in text and "VRAM%" not in text:
        return []
    rows = re.findall(r"^(\d+)\s.*?(\d+(?:\.\d+)?)\s?(?:°|c|C).*$", text, re.MULTILINE)
    return [Gpu(int(index), vendor="amd", temperature_c=float(heat)) for index, heat in rows]


def _amd_text(text: str) -> list[Gpu]:
    # amd-smi static|metric|list without --json: "GPU: 0" and indented "NAME: value"
    found: list[Gpu] = []
    for block in re.split(r"^GPU:\s*", text, flags=re.MULTILINE)[1:]:
        index = re.match(r"\d+", block)
        pairs = re.findall(r"^\s+([A-Za-z_ ]+):[ \t]*(\S.*)$", block, re.MULTILINE)
        leaves = {name.strip().lower().replace(" ", "_"): value.strip() for name, value in reversed(pairs)}
        if "size" in leaves and re.search(r"VRAM:", block):
            size = re.search(r"VRAM:.*?SIZE:\s*([^\n]+)", block, re.DOTALL)
            leaves["vram_size"] = size.group(1) if size else leaves["size"]
        if index and leaves:
            found.append(_amd_gpu(int(index.group()), leaves))
    return found


def parse_rocminfo(text: str) -> list[Gpu]:
    """GPU agents of rocminfo: gfx name and marketing name, numbered in HIP's order."""
    found: list[Gpu] = []
    for block in re.split(r"^\*+\s*\nAgent \d+\s*\n\*+", text, flags=re.MULTILINE)[1:]:
        gfx = re.search(r"^\s*Name:\s+(gfx\w+)", block, re.MULTILINE)
        name = re.search(r"Marketing Name:\s+(\S.*)", block)
        if gfx and re.search(r"Device Type:\s+GPU", block):
            found.append(Gpu(len(found), name.group(1).strip() if name else None, "amd", gfx=gfx.group(1)))
    return found


def with_roles(gpus: Sequence[Gpu]) -> list[Gpu]:
    """AMD and Intel devices marked integrated or not; an integrated one beside a discrete one is to be ignored."""
    marked = [replace(gpu, integrated=_is_integrated(gpu)) if gpu.vendor in ("amd", "intel") else gpu for gpu in gpus]
    discrete = any(gpu.integrated is False for gpu in marked)
    found = []
    for gpu in marked:
        if gpu.vendor == "amd" or gpu.vendor == "intel":
            role = "integrated, ignore" if gpu.integrated and discrete else "training"
            gpu = replace(gpu, role=role, unified_memory=True if gpu.integrated else gpu.unified_memory)
        found.append(gpu)
    return found


def _is_integrated(gpu: Gpu) -> bool:
    if gpu.vendor == "intel":
        return bool(re.search(r"UHD|HD Graphics|Iris|Arc\(TM\) Graphics|Arc Graphics|Intel Graphics", gpu.name or ""))
    if gpu.gfx in APU_GFX:
        return True
    if gpu.gfx is None and gpu.name and _APU_NAME.search(gpu.name):
        return True
    # No discrete card that ROCm drives has under 2 GiB; what firmware carves out for an integrated one is that small.
    return gpu.total_bytes is not None and gpu.total_bytes < 2 << 30


# --- Huawei Ascend


def parse_npu(text: str) -> tuple[list[Gpu], list[GpuProcess]]:
    """`npu-smi info`: one device per chip (a 910C board has two), with its HBM; processes by NPU and chip."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.lstrip().startswith("|")]
    head = " ".join(cell for row in rows[:4] for cell in row)
    has_hbm, has_physical = "HBM-Usage" in head, "Phy-ID" in head or re.search(r"Chip\s+Device", head) is not None
    gpus: list[Gpu] = []
    processes: list[GpuProcess] = []
    pending: tuple[int, str, list[str]] | None = None
    in_processes = False
    for row in rows:
        if "Process id" in " ".join(row):
            in_processes, pending = True, None
            continue
        first = row[0].split()
        if in_processes:
            if len(row) >= 3 and len(first) >= 2 and row[1].strip().isdigit():
                key = (whole(first[0]), whole(first[1]))
                owner = next((g.index for g in gpus if (g.parent, g.chip) == key), None)
                processes.append(
                    GpuProcess(owner, int(row[1]), row[2].strip() or None, None, size_bytes(row[-1].strip(), "MB"))
                )
            continue
        if len(row) != 3 or not first or not first[0].isdigit():
            continue
        if pending is None:
            if len(first) >= 2 and not re.search(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:", row[1]):
                pending = (int(first[0]), " ".join(first[1:]), row)
            continue
        gpus.append(_chip(len(gpus), pending, first, row, has_hbm, has_physical))
        pending = None
    return gpus, processes


def _chip(
    index: int, above: tuple[int, str, list[str]], first: list[str], row: list[str], has_hbm: bool, has_physical: bool
) -> Gpu:
    npu, name, upper = above
    words = upper[2].split()
    pairs = re.findall(r"(\d+)\s*/\s*(\d+)", row[2])
    memory = pairs[-1] if pairs and (has_hbm or len(pairs) == 1) else (pairs[0] if pairs else None)
    used = size_bytes(memory[0], "MB") if memory else None
    total = size_bytes(memory[1], "MB") if memory else None
    if total == 0:
        used = total = None
    return Gpu(
        index,
        name=f"Ascend {name}" if not name.lower().startswith("ascend") else name,
        vendor="ascend",
        parent=npu,
        chip=int(first[0]),
        physical_id=int(first[1]) if has_physical and len(first) > 1 and first[1].isdigit() else None,
        health=upper[1].strip() or None,
        pci_bus_id=row[1].strip() or None,
        power_draw_w=number(words[0]) if words else None,
        temperature_c=number(words[1]) if len(words) > 1 else None,
        utilization_pct=number(row[2].split()[0]) if row[2].split() else None,
        used_bytes=used,
        total_bytes=total,
        free_bytes=total - used if total is not None and used is not None else None,
    )


def parse_cann_version(text: str) -> str | None:
    """The toolkit's version in version.cfg or ascend_toolkit_install.info.

    "runtime_running_version=[7.6.0.1.220:8.2.RC1]" holds the component's own number first and CANN's behind the colon.
    """
    behind = re.search(r"version\s*=\s*\[[^\]:]*:\s*([0-9][\w.]*)", text, re.IGNORECASE)
    plain = re.search(r"^\[?\w*version\]?\s*=\s*\[?\s*([0-9][\w.]*)", text, re.MULTILINE | re.IGNORECASE)
    found = behind or plain
    return found.group(1) if found else None


# --- Intel


def parse_xpu(text: str) -> list[Gpu]:
    """`xpu-smi discovery|stats`, as JSON or as a table."""
    found: list[Gpu] = []
    for document in json_documents(text):
        found = merged(found, _xpu_json(document))
    return found or _xpu_table(text)


def _xpu_json(document: Any) -> list[Gpu]:
    if not isinstance(document, Mapping):
        return []
    devices = document.get("device_list")
    if isinstance(devices, list):
        return [_xpu_gpu(item, position) for position, item in enumerate(devices) if isinstance(item, Mapping)]
    return [_xpu_gpu(document, 0)] if "device_id" in document or "device_name" in document else []


def _xpu_gpu(item: Mapping[str, Any], position: int) -> Gpu:
    index = whole(item.get("device_id", position))
    metrics = {
        str(entry.get("metrics_type", "")): entry.get("value")
        for group in ("device_level", "data_list")
        for entry in (item.get(group) or [])
        if isinstance(entry, Mapping)
    }
    total = size_bytes(item.get("memory_physical_size_byte"), "B")
    used = size_bytes(metrics.get("XPUM_STATS_MEMORY_USED"), "MiB")
    free = size_bytes(item.get("memory_free_size_byte"), "B")
    if used is None and total is not None and free is not None:
        used = total - free
    if free is None and total is not None and used is not None:
        free = max(0, total - used)
    name = item.get("device_name")
    return Gpu(
        position if index is None else index,
        name=str(name) if not missing(name) else None,
        vendor="intel",
        total_bytes=total,
        used_bytes=used,
        free_bytes=free,
        pci_bus_id=item.get("pci_bdf_address"),
        temperature_c=number(metrics.get("XPUM_STATS_GPU_CORE_TEMPERATURE")),
        power_draw_w=number(metrics.get("XPUM_STATS_POWER")),
        utilization_pct=number(metrics.get("XPUM_STATS_GPU_UTILIZATION")),
    )


def _xpu_table(text: str) -> list[Gpu]:
    found: list[Gpu] = []
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 2:
            continue
        head = re.match(r"Device ID$", cells[0])
        if cells[0].isdigit() and ":" in cells[1]:
            found.append(Gpu(int(cells[0]), vendor="intel"))
        elif head and cells[1].isdigit():
            found.append(Gpu(int(cells[1]), vendor="intel"))
        if not found:
            continue
        for name, value in [*re.findall(r"([A-Za-z][^:|]*):\s*([^|]+)", cells[1]), (cells[0], cells[1])]:
            found[-1] = _xpu_value(found[-1], name.strip(), value.strip())
    return found


def _xpu_value(gpu: Gpu, name: str, value: str) -> Gpu:
    if name == "Device Name":
        return replace(gpu, name=value)
    if name == "PCI BDF Address":
        return replace(gpu, pci_bus_id=value)
    if name == "Memory Physical Size":
        total = size_bytes(value)
        return replace(
            gpu,
            total_bytes=total,
            free_bytes=None if gpu.used_bytes is None or total is None else total - gpu.used_bytes,
        )
    if name.startswith("GPU Memory Used"):
        used = size_bytes(value)
        left = gpu.total_bytes - used if gpu.total_bytes is not None and used is not None else gpu.free_bytes
        return replace(gpu, used_bytes=used, free_bytes=left)
    if name.startswith("GPU Core Temperature"):
        return replace(gpu, temperature_c=number(value))
    return gpu


# --- Jetson


@dataclass(frozen=True)
class Tegra:
    """An NVIDIA Jetson: its board, L4T release and what tegrastats says of the memory that CPU and GPU share."""

    model: str | None = None
    l4t: str | None = None
    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    gpu_load_pct: float | None = None
    temperature_c: float | None = None


# Compute capability by Jetson module. Source: developer.nvidia.com/cuda-gpus, Jetson table.
_TEGRA_CAPABILITY = (
    ("thor", "11.0"),
    ("orin", "8.7"),
    ("xavier", "7.2"),
    ("tx2", "6.2"),
    ("nano", "5.3"),
    ("tx1", "5.3"),
)


def parse_tegra(release: str, model: str, stats: str) -> Tegra | None:
    """Out of /etc/nv_tegra_release, /proc/device-tree/model and tegrastats; None when this is no Jetson."""
    l4t = re.search(r"R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)", release)
    board = model.replace("\x00", "").strip()
    ram = re.search(r"\bRAM (\d+)/(\d+)MB", stats)
    if not (l4t or re.search(r"jetson|tegra|orin|xavier", board, re.IGNORECASE) or (ram and "GR3D_FREQ" in stats)):
        return None
    load = re.search(r"GR3D_FREQ (\d+)%", stats)
    heat = re.search(r"\b(?:GPU|gpu)@([\d.]+)C", stats)
    return Tegra(
        model=board or None,
        l4t=f"{l4t.group(1)}.{l4t.group(2)}" if l4t else None,
        ram_used_bytes=size_bytes(ram.group(1), "MB") if ram else None,
        ram_total_bytes=size_bytes(ram.group(2), "MB") if ram else None,
        gpu_load_pct=float(load.group(1)) if load else None,
        temperature_c=float(heat.group(1)) if heat else None,
    )


def tegra_gpu(tegra: Tegra, name: str | None = None) -> Gpu:
    """The Jetson's GPU: it has no memory of its own."""
    known = f"{tegra.model or ''} {name or ''}".lower()
    capability = next((value for word, value in _TEGRA_CAPABILITY if word in known), None)
    return Gpu(
        0,
        name=tegra.model or name or "NVIDIA Jetson",
        total_bytes=tegra.ram_total_bytes,
        used_bytes=tegra.ram_used_bytes,
        unified_memory=True,
        integrated=True,
        compute_capability=capability,
        utilization_pct=tegra.gpu_load_pct,
        temperature_c=tegra.temperature_c,
    )


# --- Apple


def parse_mac(text: str) -> list[Gpu]:
    """`system_profiler SPDisplaysDataType` or sysctl's machdep.cpu.brand_string: the GPU of an Apple chip."""
    found = re.search(
        r"Chipset Model:\s*(Apple M\d\S*(?: \w+)?)|^(?:machdep\.cpu\.brand_string:\s*)?(Apple M\d.*)$", text, re.M
    )
    if not found:
        return []
    name = (found.group(1) or found.group(2)).strip()
    return [Gpu(0, name=name, vendor="apple", unified_memory=True, integrated=True)]


# --- the PCI bus

_VENDORS = {"10de": "nvidia", "1002": "amd", "8086": "intel", "19e5": "ascend"}
_VENDOR_NAMES = (
    ("nvidia", "nvidia"),
    ("advanced micro devices", "amd"),
    ("ati technologies", "amd"),
    ("intel", "intel"),
    ("huawei", "ascend"),
)


def parse_lspci(text: str) -> list[PciCard]:
    """`lspci -nnk` (or any lspci): displays, 3D controllers and accelerators of the vendors we know."""
    found: list[PciCard] = []
    inside = False
    for line in text.splitlines():
        card = re.match(
            r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]) (.*?)(?: \[(\w{4})\])?: (.*)$", line
        )
        if card:
            slot, kind, number_of_class, rest = card.groups()
            wanted = (number_of_class or "").startswith(("03", "12")) or re.search(
                r"VGA compatible|3D controller|Display controller|Processing accelerators", kind
            )
            pci_id = re.search(r"\[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\]", rest)
            vendor = _VENDORS.get(pci_id.group(1).lower()) if pci_id else None
            vendor = vendor or next((short for word, short in _VENDOR_NAMES if word in rest.lower()), None)
            inside = bool(wanted and vendor)
            if inside and vendor:
                name = re.sub(r"\s*\[[0-9a-fA-F]{4}:[0-9a-fA-F]{4}\]|\s*\((?:rev|prog-if) [^)]*\)", "", rest).strip()
                found.append(
                    PciCard(
                        slot,
                        vendor,
                        name,
                        pci_id.group().strip("[]").lower() if pci_id else None,
                        "(rev ff)" not in line,
                    )
                )
        elif inside and "Kernel driver in use:" in line:
            found[-1] = replace(found[-1], module=line.rpartition(":")[2].strip())
    return found


def parse_windows_adapters(text: str) -> list[PciCard]:
    """Names of Win32_VideoController, one a line or as "Name : …" of a list."""
    found = []
    for line in text.splitlines():
        name = re.sub(r"^\s*(?:Name|Caption|Description|Card name)\s*[:=]\s*", "", line).strip()
        vendor = next(
            (
                short
                for word, short in (("nvidia", "nvidia"), ("radeon", "amd"), ("amd", "amd"), ("intel", "intel"))
                if word in name.lower()
            ),
            None,
        )
        if vendor and len(name) < 120:
            found.append(PciCard("", vendor, name))
    return found
