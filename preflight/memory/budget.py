"""Does it fit? The interval of an estimate against the memory that is free: yes, marginal or no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from preflight.findings import Finding, Level
from preflight.memory.closed_form import MemoryEstimate

GIB = 2**30


@dataclass(frozen=True)
class Budget:
    """What one GPU offers. `free_bytes` None: nothing is known about the card.

    `assumed`: the figures are those of a card that was named, not of one that was asked.
    `cpu`: the memory is this machine's RAM, because training would run on the CPU.
    """

    free_bytes: int | None
    total_bytes: int | None = None
    others_bytes: int | None = None
    assumed: bool = False
    unified_memory: bool = False
    mig: bool = False
    windows: bool = False
    wsl: bool = False
    cpu: bool = False
    name: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dict(vars(self))


def named_card(vram_gib: float) -> Budget:
    """The budget of a card sold with so many GiB: 1.5 % of it is not visible (firmware, ECC, page tables).

    Source: T4 sold as 16 GB shows 14.56 GiB, A100 80 GB 79.1, RTX 4090 24 GB 23.6, RTX 4080 16 GB 15.99.
    """
    total = int(vram_gib * GIB * 0.985)
    return Budget(free_bytes=total, total_bytes=total, assumed=True)


def verdict(estimate: MemoryEstimate, budget: Budget) -> str | None:
    """yes, marginal or no; None when the free memory is not known.

    `yes` when the upper end (reserved plus context) fits, `no` when the lower end (allocated plus context) does not:
    before it fails, the allocator gives its cache back.
    """
    if budget.free_bytes is None:
        return None
    if estimate.high_bytes + estimate.context_bytes <= budget.free_bytes:
        return "yes"
    return "no" if estimate.low_bytes + estimate.context_bytes > budget.free_bytes else "marginal"


def judge(estimate: MemoryEstimate, budget: Budget, what: str = "This plan", fixes: tuple[str, ...] = ()) -> Finding:
    """The finding about the budget. `fixes`: what would fit, best first."""
    answer = verdict(estimate, budget)
    peak = (
        f"{_gib(estimate.allocated_bytes)} of tensors, {_gib(estimate.reserved_bytes)} with the allocator's cache, "
        f"plus about {_gib(estimate.context_bytes)} of CUDA context ({estimate.evidence}; peak at: {estimate.moment})"
    )
    bounds = f"Interval from this evidence's errors: {_gib(estimate.low_bytes)} to {_gib(estimate.high_bytes)}."
    if budget.cpu:
        peak = (
            f"{_gib(estimate.allocated_bytes)} of tensors, plus about {_gib(estimate.context_bytes)} for Python and "
            f"its libraries ({estimate.evidence}; peak at: {estimate.moment})"
        )
        bounds += " These errors were measured on GPUs; on a CPU other kernels run, so take it as a guide."
    source = "benchmarks/accuracy.py; facts/memory_errors.json"
    if answer is None or budget.free_bytes is None:
        return Finding(
            "memory-fit-unknown",
            Level.UNKNOWN,
            f"{what} takes {peak}; whether that fits could not be told, because no free GPU memory was seen.",
            why=f"{bounds} Without the memory of a card there is nothing to compare it with.",
            fix=(
                "name the card's memory with `--gpu-vram-gb N`",
                "run `python gpu_probe.py` where training runs",
            ),
            source=source,
        )
    free = f"{_gib(budget.free_bytes)} {'would be visible' if budget.assumed else 'is free'}"
    note = _surroundings(budget) + "".join(f" {told}" for told in estimate.notes)
    if answer == "yes":
        return Finding(
            "memory-fit-yes", Level.OK, f"{what} fits: {peak}; {free}.", why=f"{bounds}{note}", source=source
        )
    fix = fixes[:3] or (
        "shorten the sequences or lower the micro batch, then ask again",
        "use `--method qlora` with gradient checkpointing",
    )
    if answer == "marginal":
        return Finding(
            "memory-fit-marginal",
            Level.WARN,
            f"{what} may or may not fit: {peak}; {free}.",
            why=f"{bounds} The free memory lies inside it: the tensors may fit and the allocator's cache not.{note}",
            fix=fix,
            source=source,
        )
    return Finding(
        "memory-fit-no",
        Level.FAIL,
        f"{what} does not fit: {peak}; {free}.",
        why=f"{bounds} Even its lower end is above what is free; the run would end with CUDA out of memory.{note}",
        fix=fix,
        source=source,
    )


def _surroundings(budget: Budget) -> str:
    notes = []
    if budget.others_bytes:
        notes.append(f"{_gib(budget.others_bytes)} is held by other processes and was taken off.")
    if budget.mig:
        notes.append("The card is split (MIG): only the slice counts.")
    if budget.unified_memory:
        notes.append("CPU and GPU share this memory: what programs on the CPU take is missing for training.")
    if budget.windows:
        notes.append("On Windows (WDDM) the driver may move memory to the host instead of failing: slow, no error.")
    if budget.wsl:
        notes.append("Under WSL2 the Windows desktop holds a part of the card that no process list shows.")
    return "".join(" " + note for note in notes)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
