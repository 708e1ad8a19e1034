"""What accelerators are here: the plain data that every vendor's parser fills, and a quick look without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from preflight.machine import Machine


@dataclass(frozen=True)
class Gpu:
    """One accelerator as its tool lists it, or one MIG slice. None means that the tool could not say.

    Sizes in bytes. `total_bytes`, `used_bytes` and `free_bytes` are device memory; with `unified_memory` they are the
    system's (MemTotal and MemAvailable), which CPU and GPU share. `compute_capability` is NVIDIA's ("8.6").
    `parent` is the index of the card that a MIG slice is cut from.
    """

    index: int
    name: str | None = None
    vendor: str = "nvidia"
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None
    compute_capability: str | None = None
    architecture: str | None = None
    unified_memory: bool | None = None
    integrated: bool | None = None
    lost: bool = False
    needs_reset: bool = False
    pci_bus_id: str | None = None
    parent: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    mig_device: int | None = None
    mig_profile: str | None = None
    mig_mode: str | None = None
    virtualization: str | None = None
    license: str | None = None
    driver_model: str | None = None
    persistence_mode: bool | None = None
    display_active: bool | None = None
    compute_mode: str | None = None
    performance_state: str | None = None
    utilization_pct: float | None = None
    fan_pct: float | None = None
    temperature_c: float | None = None
    temperature_limit_c: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    ecc_mode: str | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    ecc_corrected_volatile: int | None = None
    remapped_rows_uncorrectable: int | None = None
    row_remap_pending: bool | None = None
    row_remap_failed: bool | None = None
    retired_pages: int | None = None
    retirement_pending: bool | None = None
    recovery_action: str | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    encoder_sessions: int | None = None
    encoder_pct: float | None = None
    decoder_pct: float | None = None
    gfx: str | None = None
    chip: int | None = None
    physical_id: int | None = None
    health: str | None = None
    role: str | None = None
    sensor_errors: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The fields as plain JSON data; those of another kind of device are left out when they are None."""
        # "lost" is told only of a card that is.
        always = {"index", "name", "vendor", "total_bytes", "used_bytes", "free_bytes"}
        common = always | _COMMON.get(self.vendor, set()) | ({"mig_mode"} if self.vendor == "nvidia" else set())
        seen = {key: value for key, value in asdict(self).items() if value not in (None, ()) or key in common}
        for name in ("lost", "needs_reset"):
            if not seen.get(name):
                seen.pop(name, None)
        return {
            _JSON_NAMES.get(key, key): list(value) if isinstance(value, tuple) else value for key, value in seen.items()
        }


_JSON_NAMES = {
    "total_bytes": "memory_total_bytes",
    "used_bytes": "memory_used_bytes",
    "free_bytes": "memory_free_bytes",
    "reserved_bytes": "memory_reserved_bytes",
}
_COMMON = {
    "nvidia": {"compute_capability", "fan_pct", "temperature_c", "power_draw_w", "power_limit_w", "pci_bus_id"}
    | {"persistence_mode", "mig_mode", "ecc_mode", "ecc_uncorrected_volatile", "utilization_pct", "sensor_errors"},
    "amd": {"gfx", "integrated", "role"},
    "ascend": {"chip", "physical_id", "health", "power_draw_w", "temperature_c"},
}


@dataclass(frozen=True)
class GpuProcess:
    """A program that holds GPU memory. `memory_bytes` is None where the driver does not say (WDDM, WSL, containers)."""

    gpu: int | None
    pid: int | None
    name: str | None
    kind: str | None = None
    memory_bytes: int | None = None
    gpu_instance: int | None = None


@dataclass(frozen=True)
class PciCard:
    """A graphics or accelerator device on the PCI bus, seen without any vendor tool.

    `answers` is False when its configuration space reads as ones (revision ff): off the bus or powered off.
    """

    slot: str
    vendor: str
    name: str
    pci_id: str | None = None
    answers: bool = True
    module: str | None = None


@dataclass(frozen=True)
class Trouble:
    """A vendor tool that did not do its work: which, how it ended and what it said.

    `kind` is one of: absent, timeout, mismatch, lost, no-devices, no-driver, no-runtime, unknown-error, no-library,
    permission, blocked, bad-field, inforom, no-cuda, truncated, failed.
    """

    tool: str
    kind: str
    text: str = ""
    bus_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver. `cuda` is the newest CUDA driver API it knows by itself: not an installed toolkit."""

    version: str | None = None
    cuda: str | None = None
    nvidia_smi: str | None = None
    library: str | None = None
    kernel_module: str | None = None
    open_module: bool | None = None
    model: str | None = None


@dataclass(frozen=True)
class Accelerators:
    """Everything the vendor tools said. `asked` names the tools that were asked and whether each one answered."""

    gpus: tuple[Gpu, ...] = ()
    slices: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    driver: Driver = field(default_factory=Driver)
    pci: tuple[PciCard, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()

    def vendor(self, name: str) -> tuple[Gpu, ...]:
        """The devices of one vendor."""
        return tuple(gpu for gpu in self.gpus if gpu.vendor == name)


def read_gpus(machine: Machine) -> list[Gpu]:
    """The devices that a training process can use, quickly and without torch.

    A card in MIG mode is replaced by its slices; lost cards, integrated GPUs beside a discrete one, and cards that
    CUDA_VISIBLE_DEVICES hides by number are left out.
    """
    found = usable_gpus(read_accelerators(machine))
    visible = machine.variable("CUDA_VISIBLE_DEVICES")
    if visible is None or not re.fullmatch(r"\s*(?:-?\d+\s*(?:,\s*-?\d+\s*)*)?", visible):
        return found  # not set, or named by UUID, which nothing else here knows
    wanted = [int(word) for word in re.findall(r"-?\d+", visible)]
    if -1 in wanted:  # CUDA stops reading at the first number that is no card
        wanted = wanted[: wanted.index(-1)]
    return [gpu for gpu in found if gpu.vendor != "nvidia" or gpu.parent is not None or gpu.index in wanted]


def usable_gpus(seen: Accelerators) -> list[Gpu]:
    """The devices among `seen` that a training process can use."""
    found: list[Gpu] = []
    for gpu in seen.gpus:
        if gpu.lost or gpu.needs_reset or gpu.role == "integrated, ignore":
            continue
        if gpu.mig_mode == "enabled":
            found += [part for part in seen.slices if part.parent == gpu.index]
        else:
            found.append(gpu)
    return found


def read_accelerators(machine: Machine) -> Accelerators:
    """Ask every vendor's tool that is here. What is absent costs nothing."""
    from preflight.hardware import accelerators

    return accelerators.read(machine)


def merged(gpus: Sequence[Gpu], more: Sequence[Gpu]) -> list[Gpu]:
    """`gpus`, each completed by what `more` knows of the device with the same index; devices only in `more` follow.

    A value already there is kept, except that a whole name replaces one that a table cut off with dots.
    """
    by_index = {gpu.index: gpu for gpu in gpus}
    for other in more:
        gpu = by_index.get(other.index)
        if gpu is None:
            by_index[other.index] = other
            continue
        filled: dict[str, Any] = {}
        for name, value in vars(other).items():
            have = getattr(gpu, name)
            if (have is None and value is not None) or (have in ((), False) and value):
                filled[name] = value
        if other.name and (not gpu.name or gpu.name.rstrip().endswith("...")) and not other.name.endswith("..."):
            filled["name"] = other.name
        by_index[other.index] = replace(gpu, **filled)
    return [by_index[index] for index in sorted(by_index)]


_HOLDERS: tuple[tuple[str, str], ...] = (
    ("game engine", r"unity|unreal|ue[45]editor|godot|cryengine|blender|omniverse|maya|3dsmax|houdini"),
    ("browser", r"chrome|chromium|firefox|msedge|brave|opera|safari|webview2|electron"),
    (
        "desktop",
        r"xorg|xwayland|gnome-shell|kwin|plasmashell|mutter|sway|hyprland|dwm\.exe|explorer\.exe|lockapp|/x$|cinnamon"
        r"|shellexperience|searchhost|startmenu|textinput|nvcontainer|systemsettings|compiz|budgie",
    ),
    ("game or its launcher", r"steam|epicgames|battle\.net|\\games?\\|/games?/|wine|proton|minecraft|riot|gamebar"),
    ("media or call", r"obs(?:64)?\b|ffmpeg|vlc|mpv|zoom|teams|discord|slack|resolve|premiere|afterfx|photoshop"),
    (
        "inference server",
        r"ollama|llama-server|llama_server|vllm|sglang|text-generation|triton|lmstudio|lm studio|koboldcpp|comfyui",
    ),
    ("Python program", r"python|jupyter|ipython|torchrun|accelerate"),
)


def kind_of_program(name: str | None) -> str | None:
    """What sort of program holds GPU memory, from its name; None when it is none of the known."""
    for kind, pattern in _HOLDERS:
        if name and re.search(pattern, name, re.IGNORECASE):
            return kind
    return None
