"""What training needs beside the GPU: RAM of the host while it loads and offloads, and disk for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from preflight.findings import Finding, Level
from preflight.host import Host
from preflight.launch import GPUS_PER_MACHINE, machines_of
from preflight.memory.closed_form import NoEstimate, trained_sizes
from preflight.model_shape import ModelShape
from preflight.plan import Plan

CHECKPOINTS = 2  # kept by a recipe (save_total_limit); one more exists while the newest is written
BUFFERS = 1.5  # DeepSpeed's own factor for buffers, in its estimators
LOADING = (
    "transformers modeling_utils.py and accelerate utils/fsdp_utils.py: from_pretrained, cpu_ram_efficient_loading"
)
ZERO = "deepspeed runtime/zero/stage_1_and_2.py and stage3.py: estimate_zero*_model_states_mem_needs"
SAVING = "transformers trainer.py: weights or adapter, optimizer.pt, scheduler.pt in each checkpoint"


@dataclass(frozen=True)
class Need:
    """One item: bytes, and the product that they come from."""

    what: str
    bytes: int
    formula: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dict(vars(self))


def host_needs(shape: ModelShape, plan: Plan, on_cpu: bool = False) -> dict[str, list[Need]] | None:
    """RAM and disk of each machine by item, at most; None when the parameters could not be counted.

    RAM: what `from_pretrained` holds while the weights are on their way to the GPU, and what offloading keeps there.
    Safetensors are mapped, so pages of files can be dropped and it may be less; pickles are read whole. On the CPU the
    weights are part of training itself and not counted again. Disk: checkpoints of the kind that a recipe writes, and
    the merged model.
    """
    try:
        trained, states = trained_sizes(shape, plan)
    except NoEstimate:
        return None
    count = shape.parameters
    if count is None:
        return None
    return {
        "ram": [] if on_cpu else [*_loading(shape, plan, count), *_offloaded(plan, count, trained, states)],
        "disk": _disk(plan, count, trained, states),
    }


def _loading(shape: ModelShape, plan: Plan, count: int) -> list[Need]:
    width = 4 if plan.weight_dtype == "fp32" else 2
    here = min(plan.gpus, GPUS_PER_MACHINE)
    if plan.parallel == "zero3":
        if plan.offload:
            return []  # the estimators count loading in
        largest = max((module.weights for module, _, _ in shape.occurrences()), default=0)
        size = int(largest * 4 * here * BUFFERS)
        return [Need("weights on their way, matrix by matrix", size, f"{largest} x 4 B x {here} x {BUFFERS}", ZERO)]
    if plan.quantised:
        largest = max((module.weights for module, _, _ in shape.occurrences()), default=0)
        text = f"{largest} x {width} B x {here}"
        return [Need("the largest matrix, quantised on the GPU", largest * width * here, text, LOADING)]
    copies = 1 if plan.parallel.startswith("fsdp") else here
    what = "weights read by one process" if copies == 1 else "weights read by each process"
    return [Need(what, count * width * copies, f"{count} x {width} B x {copies}", LOADING)]


def _offloaded(plan: Plan, count: int, trained: int, states: int) -> list[Need]:
    if not plan.offload:
        return []
    machines = machines_of(plan)
    if plan.parallel == "zero3":
        size = int(count * 18 / machines * BUFFERS)
        return [Need("parameters, gradients and states", size, f"{count} x 18 B / {machines} x {BUFFERS}", ZERO)]
    if plan.parallel in ("zero1", "zero2"):
        each = max(4 * plan.gpus, 16)
        text = f"{count} x {each} B x {BUFFERS}"
        return [Need("gradients and states in 32 bit", int(count * each * BUFFERS), text, ZERO)]
    width = 4 if plan.weight_dtype == "fp32" else 2
    return [
        Need("parameters", count * width // machines, f"{count} x {width} B / {machines}", LOADING),
        Need("gradients and states", (trained + states) // machines, f"({trained} + {states}) B / {machines}", LOADING),
    ]


def _disk(plan: Plan, count: int, trained: int, states: int) -> list[Need]:
    kept = CHECKPOINTS + 1
    each = trained + states
    found = [Need("checkpoints", each * kept, f"({trained} B of weights + {states} B of states) x {kept}", SAVING)]
    if plan.adapters:
        found.append(Need("the merged model", count * 2, f"{count} x 2 B", SAVING))
    return found


def judge_host(needs: dict[str, list[Need]], host: Host | None) -> list[Finding]:
    """Whether this machine has that RAM and disk; only what is needed where the plan is for another machine."""
    ram, disk = (sum(need.bytes for need in needs[name]) for name in ("ram", "disk"))
    listed = "; ".join(f"{need.what}: {_gib(need.bytes)}" for name in ("ram", "disk") for need in needs[name])
    found = []
    place = next((one for one in host.disks if one.purpose == "checkpoints"), None) if host else None
    if host and host.ram_available_bytes is not None and ram > host.ram_available_bytes:
        found.append(
            Finding(
                "host-ram-short",
                Level.WARN,
                f"Loading may take up to {_gib(ram)} of the host's RAM, {_gib(host.ram_available_bytes)} is available.",
                "Files that are mapped can be dropped from memory, so it may still go through; when it does not, the "
                "kernel ends the program without a message of Python's.",
                (
                    "load straight to the GPU: `device_map={'': 0}`, from safetensors files",
                    "close programs, raise the container's memory limit, or add swap",
                ),
                LOADING,
            )
        )
    if place and place.free_bytes is not None and disk > place.free_bytes:
        found.append(
            Finding(
                "checkpoint-disk-short",
                Level.WARN,
                f"Checkpoints and the result take up to {_gib(disk)} of disk, and {_gib(place.free_bytes)} is free.",
                f"{CHECKPOINTS} checkpoints are kept, and the newest is written before the oldest goes; a full disk "
                "ends the training at a save.",
                (
                    "name an output folder on a larger disk",
                    "keep fewer: `save_total_limit: 1`, `save_only_model: true`",
                ),
                SAVING,
            )
        )
    if not found:
        what = f"Beside the GPU, training takes up to {_gib(ram)} of the host's RAM and {_gib(disk)} of disk."
        if not needs["ram"]:
            what = f"Training takes up to {_gib(disk)} of disk."
        found.append(Finding("host-needs", Level.OK, what, f"{listed}.", source=LOADING))
    return found


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
