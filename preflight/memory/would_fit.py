"""What would fit, what does each change buy, and what does it cost? A search over plans with the closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from preflight.memory.budget import Budget, verdict
from preflight.memory.closed_form import MemoryEstimate, NoEstimate, estimate
from preflight.model_shape import ModelShape
from preflight.plan import Plan


@dataclass(frozen=True)
class Change:
    """One change of a plan: what it is called, what it does, and what it costs.

    `compute` is the factor on the arithmetic of a step (forward 1, backward 2, a second forward 1).
    """

    name: str
    apply: Callable[[Plan], Plan]
    cost: str
    compute: float = 1.0
    flag: str = ""


def changes(plan: Plan) -> Iterator[Change]:
    """The changes that are open to this plan, the least costly first."""
    if plan.loss == "full_logits_fp32_upcast":
        yield Change(
            "fused linear cross-entropy (Liger, cut cross-entropy)",
            lambda p: replace(p, loss="fused_linear_ce", holds_outputs=False),
            "none in quality; needs the package",
            flag="--loss fused_linear_ce",
        )
    if plan.attention in ("eager", "sdpa_math"):
        yield Change(
            "scaled_dot_product_attention instead of eager",
            lambda p: replace(p, attention="auto"),
            "none; faster",
            flag="--attention auto",
        )
    if not plan.gradient_checkpointing:
        yield Change(
            "gradient checkpointing",
            lambda p: replace(p, gradient_checkpointing=True),
            "a second forward pass: about a third more time per step",
            4 / 3,
            "--gradient-checkpointing",
        )
    if plan.micro_batch > 1:
        yield Change(
            f"micro batch 1 with {plan.micro_batch * plan.gradient_accumulation} accumulation steps",
            lambda p: replace(p, micro_batch=1, gradient_accumulation=p.micro_batch * p.gradient_accumulation),
            "the same global batch; smaller matrix products run less efficiently",
            flag=f"--micro-batch 1 --grad-accum {plan.micro_batch * plan.gradient_accumulation}",
        )
    if "8bit" not in plan.optimizer_name() and plan.optimizer_name() not in ("sgd", "adafactor"):
        yield Change(
            "8-bit paged AdamW",
            lambda p: replace(p, optimizer="paged_adamw_8bit"),
            "states in 8 bit, moved to host memory under pressure; needs bitsandbytes",
            flag="--optimizer paged_adamw_8bit",
        )
    if plan.method == "full":
        yield Change(
            "LoRA r=64 on all linear layers",
            lambda p: replace(p, method="lora", lora_rank=64, target_modules=()),
            "fewer trained parameters; close to full fine-tuning for small data sets",
            2 / 3,
            "--method lora --lora-rank 64",
        )
    if plan.adapters and plan.lora_rank > 8:
        yield Change(
            "LoRA rank 8",
            lambda p: replace(p, lora_rank=8),
            "less capacity in the adapter",
            flag="--lora-rank 8",
        )
    if plan.method in ("full", "lora"):
        yield Change(
            "QLoRA (4-bit base, r=16)",
            lambda p: replace(p, method="qlora", lora_rank=min(p.lora_rank, 16), kbit_preparation=True),
            "weights dequantised at every use: slower steps; a small loss of quality",
            1.0,
            "--method qlora --lora-rank 16",
        )
    if plan.sequence_tokens > 512:
        yield Change(
            f"sequences of {plan.sequence_tokens // 2} tokens",
            lambda p: replace(p, sequence_tokens=p.sequence_tokens // 2),
            "longer samples are cut off",
            0.5,
            f"--seq-len {plan.sequence_tokens // 2}",
        )


def would_fit(shape: ModelShape, plan: Plan, budget: Budget) -> dict[str, Any]:
    """Plain JSON data: `single` changes with what each buys, `combination` that fits, `longest_sequence_tokens`,
    `largest_micro_batch` for this plan (None when nothing fits), and `gpus_needed` under FSDP.

    Raises NoEstimate as the closed form does.
    """
    base = estimate(shape, plan)
    single = []
    for change in changes(plan):
        made = estimate(shape, change.apply(plan))
        single.append(
            {
                "change": change.name,
                "flags": change.flag,
                "allocated_bytes": made.allocated_bytes,
                "saves_bytes": base.allocated_bytes - made.allocated_bytes,
                "verdict": verdict(made, budget),
                "cost": change.cost,
                "compute_factor": round(change.compute, 2),
            }
        )
    return {
        "single": single,
        "combination": combination(shape, plan, budget),
        "longest_sequence_tokens": longest_sequence(shape, plan, budget),
        "largest_micro_batch": largest_micro_batch(shape, plan, budget),
        "gpus_needed": gpus_needed(shape, plan, budget),
    }


def combination(shape: ModelShape, plan: Plan, budget: Budget) -> dict[str, Any] | None:
    """The fewest changes, least costly first, after which the plan fits; None when even all of them do not do."""
    applied: list[Change] = []
    current = plan
    before = estimate(shape, plan)
    while True:
        made = estimate(shape, current)
        if verdict(made, budget) == "yes":
            needed = _needed(shape, plan, applied, budget)
            final = plan
            for change in needed:
                final = change.apply(final)
            last = estimate(shape, final)
            return {
                "changes": [change.name for change in needed],
                "flags": " ".join(change.flag for change in needed if change.flag),
                "plan": final.as_json(),
                "allocated_bytes": last.allocated_bytes,
                "reserved_bytes": last.reserved_bytes,
                "saves_bytes": before.allocated_bytes - last.allocated_bytes,
            }
        done = {change.name for change in applied}
        open_changes = [change for change in changes(current) if change.name not in done]
        if not open_changes:
            return None
        applied.append(open_changes[0])
        current = open_changes[0].apply(current)


def _needed(shape: ModelShape, plan: Plan, applied: list[Change], budget: Budget) -> list[Change]:
    """The applied changes without those that are not needed: the costly ones are dropped first where they can be."""
    kept = list(applied)
    for change in applied:
        fewer = [other for other in kept if other is not change]
        current = plan
        for other in fewer:
            current = other.apply(current)
        if verdict(estimate(shape, current), budget) == "yes":
            kept = fewer
    return kept


def longest_sequence(shape: ModelShape, plan: Plan, budget: Budget) -> int | None:
    """The longest sequence in steps of 128 tokens that still fits with certainty; None when 128 do not."""
    top = min(shape.max_position or 131072, 1 << 20)
    return _largest(lambda n: replace(plan, sequence_tokens=n * 128), shape, budget, max(1, top // 128), 128)


def largest_micro_batch(shape: ModelShape, plan: Plan, budget: Budget) -> int | None:
    """The largest micro batch that still fits with certainty; None when 1 does not."""
    return _largest(lambda n: replace(plan, micro_batch=n), shape, budget, 256, 1)


def _largest(make: Callable[[int], Plan], shape: ModelShape, budget: Budget, top: int, unit: int) -> int | None:
    def fits(number: int) -> bool:
        return verdict(estimate(shape, make(number)), budget) == "yes"

    if not fits(1):
        return None
    low = 1
    while low < top and fits(min(top, low * 2)):
        low = min(top, low * 2)
    high = min(top, low * 2)
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low * unit


def gpus_needed(shape: ModelShape, plan: Plan, budget: Budget) -> int | None:
    """How many such cards the plan takes when FSDP divides it; None when 64 are not enough."""
    for count in (1, 2, 4, 8, 16, 32, 64):
        divided = replace(plan, gpus=count, parallel="none" if count == 1 else "fsdp_full")
        if verdict(estimate(shape, divided), budget) == "yes":
            return count
    return None


def fixes(found: dict[str, Any], needs_bytes: int) -> tuple[str, ...]:
    """The search's result as remedies, best first. `needs_bytes`: what a single card would have to offer."""
    made = []
    best = found["combination"]
    if best is not None and best["changes"]:
        made.append(
            f"change: {', '.join(best['changes'])} (`{best['flags']}`): {_gib(best['allocated_bytes'])} of tensors, "
            f"{_gib(best['saves_bytes'])} less"
        )
    if found["longest_sequence_tokens"]:
        made.append(f"keep the plan with sequences of at most {found['longest_sequence_tokens']} tokens")
    count = found["gpus_needed"]
    if count and count > 1:
        made.append(f"divide it over {count} such GPUs (`--gpus {count} --parallel fsdp_full`)")
    made.append(f"use a card with at least {_gib(needs_bytes)} of free memory for the plan as it is")
    return tuple(made[:3])


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


__all__ = ["Change", "MemoryEstimate", "NoEstimate", "changes", "fixes", "would_fit"]
