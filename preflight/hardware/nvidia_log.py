"""nvidia-smi -q and -q -x: the long log as text and as XML, both turned into one tree and read by one function."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from preflight.gpus import Driver, Gpu, GpuProcess
from preflight.hardware.nvidia import Reading, parse_banner
from preflight.hardware.readings import missing, number, size_bytes, whole


@dataclass
class Node:
    """One entry of the log: its name in snake_case, its value, and what is indented under it."""

    key: str
    value: str = ""
    children: list[Node] = field(default_factory=list)

    def all(self, *path: str) -> Iterator[Node]:
        """The nodes at `path` below this one."""
        here = [self]
        for step in path:
            here = [child for node in here for child in node.children if child.key == step]
        yield from here

    def text(self, *paths: str) -> str | None:
        """The first value among slash-separated paths that is not one of the spellings of "not available"."""
        for path in paths:
            for node in self.all(*path.split("/")):
                if not missing(node.value):
                    return node.value.strip()
        return None


def snake(name: str) -> str:
    """ "FB Memory Usage" as fb_memory_usage."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def parse_log(text: str) -> Reading:
    """`nvidia-smi -q` as text."""
    seen = Reading(driver=parse_banner(text))
    root, cards = _tree_of_text(text)
    smi = root.text("driver_version", "kmd_version")
    seen.driver = Driver(
        version=smi or seen.driver.version, cuda=root.text("cuda_version", "cuda_umd_version") or seen.driver.cuda
    )
    expected = whole(root.text("attached_gpus") or "")
    for index, card in enumerate(cards):
        _read_card(seen, card, index, card.value)
    if expected is not None and expected != len(cards):
        seen.complete = False
    return seen


def _tree_of_text(text: str) -> tuple[Node, list[Node]]:
    root = Node("log")
    cards: list[Node] = []
    stack: list[tuple[int, Node]] = [(-1, root)]
    for line in text.expandtabs(4).splitlines():
        if not line.strip() or line.lstrip().startswith("="):
            continue
        indent = len(line) - len(line.lstrip())
        bus = re.match(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s*$", line)
        name, colon, value = line.strip().partition(" : ")
        if not colon and line.rstrip().endswith(" :"):
            name = line.strip()[:-1]
        while stack[-1][0] >= indent:
            stack.pop()
        node = Node("gpu", bus.group(1)) if bus else Node(snake(name), value.strip())
        stack[-1][1].children.append(node)
        if bus:
            cards.append(node)
        # "Processes" of old drivers stands with a colon and no value, and holds what is indented under it
        stack.append((indent, node))
    return root, cards


def parse_xml(text: str) -> Reading:
    """`nvidia-smi -q -x`. A text that ends in the middle gives what came before the end, marked incomplete."""
    root, complete = _tree_of_xml(text)
    log = next(root.all("nvidia_smi_log"), root)
    seen = Reading(
        driver=Driver(
            version=log.text("driver_version", "kmd_version"), cuda=log.text("cuda_version", "cuda_umd_version")
        ),
        complete=complete,
    )
    cards = list(log.all("gpu"))
    for index, card in enumerate(cards):
        _read_card(seen, card, index, card.value)
    expected = whole(log.text("attached_gpus") or "")
    if expected is not None and expected != len(cards):
        seen.complete = False
    return seen


def _tree_of_xml(text: str) -> tuple[Node, bool]:
    root = Node("xml")
    stack = [root]

    def begin(tag: str, attributes: dict[str, str]) -> None:
        node = Node(snake(tag), attributes.get("id", ""))
        stack[-1].children.append(node)
        stack.append(node)

    def words(data: str) -> None:
        if data.strip():
            stack[-1].value = (stack[-1].value + data).strip() if not stack[-1].children else stack[-1].value

    def end(tag: str) -> None:
        stack.pop()

    def refuse(*_: object) -> None:  # a hostile file could expand entities without end
        raise expat.ExpatError("entities are not read")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler, parser.EntityDeclHandler = words, refuse
    # A redacted recording holds <uuid> and its like where values stood, which are no tags.
    text = re.sub(r"<(redacted|host|token|email|mac|unique-id|user)>|(?<=-)<(uuid)>", r"[\1\2]", text)
    start = text.find("<")
    try:
        parser.Parse(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", " ", text[max(start, 0) :]), True)
    except (expat.ExpatError, UnicodeError, ValueError):
        return root, False
    return root, True


def _read_card(seen: Reading, card: Node, position: int, bus_id: str) -> None:
    index = position
    seen.gpus.append(_gpu(card, index, bus_id))
    for part in [*card.all("mig_device"), *card.all("mig_devices", "mig_device")]:
        total = size_bytes(part.text("fb_memory_usage/total"))
        used = size_bytes(part.text("fb_memory_usage/used"))
        seen.slices.append(
            Gpu(
                len(seen.slices),
                name=f"{seen.gpus[-1].name} MIG slice",
                parent=index,
                mig_device=whole(part.text("index")),
                gpu_instance=whole(part.text("gpu_instance_id")),
                compute_instance=whole(part.text("compute_instance_id")),
                total_bytes=total,
                used_bytes=used,
                free_bytes=size_bytes(part.text("fb_memory_usage/free")),
                reserved_bytes=size_bytes(part.text("fb_memory_usage/reserved")),
                architecture=seen.gpus[-1].architecture,
            )
        )
    seen.processes += _processes(card, index)
    if seen.driver.model is None:
        seen.driver = Driver(seen.driver.version, seen.driver.cuda, model=seen.gpus[-1].driver_model)


def _processes(card: Node, index: int) -> list[GpuProcess]:
    found: list[GpuProcess] = []
    for info in card.all("processes", "process_info"):
        found.append(
            GpuProcess(
                index,
                whole(info.text("pid")),
                info.text("process_name", "name"),
                info.text("type"),
                size_bytes(info.text("used_memory", "used_gpu_memory")),
                whole(info.text("gpu_instance_id")),
            )
        )
    if found:
        return found
    # As text each process is a run of lines that begins with its GPU instance or its number.
    runs: list[dict[str, str]] = [{}]
    for node in (node for group in card.all("processes") for node in _flat(group)):
        if node.key in runs[-1] and node.key in ("process_id", "gpu_instance_id"):
            runs.append({})
        runs[-1][node.key] = node.value
    return [
        GpuProcess(
            index, whole(run["process_id"]), run.get("name"), run.get("type"), size_bytes(run.get("used_gpu_memory"))
        )
        for run in runs
        if run.get("process_id", "").isdigit()
    ]


def _flat(node: Node) -> Iterator[Node]:
    for child in node.children:
        yield child
        yield from _flat(child)


def _gpu(card: Node, index: int, bus_id: str) -> Gpu:
    memory = "fb_memory_usage"
    total, used = size_bytes(card.text(f"{memory}/total")), size_bytes(card.text(f"{memory}/used"))
    free = size_bytes(card.text(f"{memory}/free"))
    power = ("gpu_power_readings", "power_readings", "module_power_readings")
    link = ("pci/gpu_link_info", "pci/pci_gpu_link_info", "gpu_link_info")
    volatile = list(card.all("ecc_errors", "volatile"))
    aggregate = list(card.all("ecc_errors", "aggregate"))
    mig = card.text("mig_mode/current", "mig_mode/current_mig")
    licence = card.text(
        "vgpu_software_licensed_product/license_status", "grid_licensed_product/license_status", "license_status"
    )
    virtualization = card.text(
        "gpu_virtualization_mode/virtualization_mode", "virtualization_mode/virtualization_mode", "virtualization_mode"
    )
    return Gpu(
        index,
        name=card.text("product_name"),
        architecture=card.text("product_architecture"),
        total_bytes=total,
        used_bytes=used,
        free_bytes=free if free is not None else (total - used if total is not None and used is not None else None),
        reserved_bytes=size_bytes(card.text(f"{memory}/reserved")),
        compute_capability=card.text("cuda_compute_capability", "compute_capability"),
        unified_memory=True if _says(card, f"{memory}/total", "not supported", "n/a") and _integrated(card) else None,
        pci_bus_id=bus_id or card.text("pci/bus_id", "pci/pci_bus_id"),
        mig_mode=None if mig is None else mig.lower(),
        virtualization=_virtualization(virtualization),
        license=licence,
        driver_model=card.text("driver_model/current", "driver_model/current_dm"),
        persistence_mode={"enabled": True, "disabled": False}.get((card.text("persistence_mode") or "").lower()),
        display_active={"enabled": True, "disabled": False, "yes": True, "no": False}.get(
            (card.text("display_active") or "").lower()
        ),
        compute_mode=card.text("compute_mode"),
        performance_state=card.text("performance_state"),
        utilization_pct=number(card.text("utilization/gpu", "utilization/gpu_util")),
        encoder_pct=number(card.text("utilization/encoder", "utilization/encoder_util")),
        decoder_pct=number(card.text("utilization/decoder", "utilization/decoder_util")),
        encoder_sessions=whole(card.text("encoder_stats/active_sessions", "encoder_stats/session_count")),
        fan_pct=number(card.text("fan_speed")),
        temperature_c=number(card.text("temperature/gpu_current_temp", "temperature/gpu_temp")),
        # Only an absolute threshold: the T.Limit fields of newer drivers are offsets in degrees, not temperatures.
        temperature_limit_c=number(card.text("temperature/gpu_slowdown_temp", "temperature/gpu_temp_slow_threshold")),
        power_draw_w=number(
            card.text(
                *[
                    f"{group}/{name}"
                    for group in power
                    for name in (
                        "instant_power_draw",
                        "instantaneous_power_draw",
                        "power_draw",
                        "average_power_draw",
                    )
                ]
            )
        ),
        power_limit_w=number(
            card.text(
                *[
                    f"{group}/{name}"
                    for group in power
                    for name in ("current_power_limit", "requested_power_limit", "power_limit", "enforced_power_limit")
                ]
            )
        ),
        power_limit_default_w=number(card.text(*[f"{group}/default_power_limit" for group in power])),
        pcie_gen=whole(
            card.text(
                *[f"{at}/{name}" for at in link for name in ("pcie_generation/current", "pcie_gen/current_link_gen")]
            )
        ),
        pcie_gen_max=whole(
            card.text(
                *[
                    f"{at}/{name}"
                    for at in link
                    for name in ("pcie_generation/max", "pcie_generation/device_max", "pcie_gen/max_link_gen")
                ]
            )
        ),
        pcie_width=whole(
            card.text(
                *[f"{at}/{name}" for at in link for name in ("link_width/current", "link_widths/current_link_width")]
            )
        ),
        pcie_width_max=whole(
            card.text(*[f"{at}/{name}" for at in link for name in ("link_width/max", "link_widths/max_link_width")])
        ),
        sm_clock_mhz=number(card.text("clocks/sm", "clocks/sm_clock")),
        sm_clock_max_mhz=number(card.text("max_clocks/sm", "max_clocks/sm_clock")),
        memory_clock_mhz=number(card.text("clocks/memory", "clocks/mem_clock")),
        throttle_reasons=_throttles(card),
        ecc_mode={"enabled": "on", "disabled": "off"}.get(
            (card.text("ecc_mode/current", "ecc_mode/current_ecc") or "").lower()
        ),
        ecc_uncorrected_volatile=_uncorrected(volatile),
        ecc_uncorrected_aggregate=_uncorrected(aggregate),
        ecc_corrected_volatile=_sum(
            volatile, ("sram_correctable", "dram_correctable", "sram_corrected", "dram_corrected")
        ),
        remapped_rows_uncorrectable=whole(
            card.text("remapped_rows/uncorrectable_error", "remapped_rows/remapped_row_unc")
        ),
        row_remap_pending=_yes(card.text("remapped_rows/pending", "remapped_rows/remapped_row_pending")),
        row_remap_failed=_yes(
            card.text("remapped_rows/remapping_failure_occurred", "remapped_rows/remapped_row_failure")
        ),
        retired_pages=_retired(card),
        retirement_pending=_yes(
            card.text(
                "retired_pages/pending_page_blacklist",
                "retired_pages/pending",
                "retired_pages/pending_blacklist",
                "retired_pages/pending_retirement",
            )
        ),
        recovery_action=card.text("gpu_recovery_action", "gpu_reset_status/gpu_recovery_action"),
        fabric_state=card.text("fabric/state"),
        fabric_status=card.text("fabric/status"),
        sensor_errors=_sensor_errors(card),
    )


def _says(card: Node, path: str, *words: str) -> bool:
    return any(node.value.strip().lower().strip("[]") in words for node in card.all(*path.split("/")))


def _integrated(card: Node) -> bool:
    # Device memory that is "N/A" on a whole card means the GPU shares the system's (GB10, Jetson); on a vGPU or a card
    # in MIG mode it means something else.
    mig = (card.text("mig_mode/current", "mig_mode/current_mig") or "").lower()
    return mig != "enabled" and card.text("product_name") is not None


def _virtualization(word: str | None) -> str | None:
    known = {"vgpu": "vGPU", "pass-through": "Pass-Through", "none": None, "host vgpu": "Host vGPU"}
    return None if word is None else known.get(word.lower(), word)


def _yes(word: str | None) -> bool | None:
    return None if word is None else {"yes": True, "no": False}.get(word.lower())


def _sum(nodes: list[Node], names: tuple[str, ...]) -> int | None:
    counts = [whole(node.text(name)) for node in nodes for name in names]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _uncorrected(nodes: list[Node]) -> int | None:
    split = _sum(
        nodes,
        (
            "sram_uncorrectable",
            "dram_uncorrectable",
            "sram_uncorrectable_parity",
            "sram_uncorrectable_sec_ded",
            "sram_uncorrectable_secded",
        ),
    )
    if split is not None:
        return split
    return _sum([part for node in nodes for part in node.all("double_bit")], ("total",))


def _retired(card: Node) -> int | None:
    return _sum(list(card.all("retired_pages")), ("single_bit_ecc", "double_bit_ecc")) or _sum(
        [
            *card.all("retired_pages", "multiple_single_bit_retirement"),
            *card.all("retired_pages", "double_bit_retirement"),
        ],
        ("retired_count",),
    )


def _throttles(card: Node) -> tuple[str, ...] | None:
    reasons = [
        node
        for group in ("clocks_event_reasons", "clocks_throttle_reasons")
        for top in card.all(group)
        for node in _flat(top)
    ]
    if not reasons:
        return None
    active = [re.sub(r"^clocks_(?:event|throttle)_reason_", "", n.key) for n in reasons if n.value.lower() == "active"]
    return tuple(active)


def _sensor_errors(card: Node) -> tuple[str, ...]:
    places = {"fan": "fan_speed", "temperature": "temperature/gpu_current_temp", "power": "power_readings/power_draw"}
    more = {"temperature": "temperature/gpu_temp", "power": "gpu_power_readings/power_draw"}
    return tuple(
        name
        for name, path in places.items()
        if any(_says(card, at, "unknown error", "err!", "error") for at in (path, more.get(name, path)))
    )
