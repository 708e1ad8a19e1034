"""What would fit, what does each change buy, and what does it cost? By the closed form; the search is in search.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from preflight.memory.budget import Budget, named_card, verdict
from preflight.memory.search import Search, flags_of, largest
from preflight.memory.speed import Card, cards, pace, seconds, work
from preflight.model_shape import ModelShape
from preflight.plan import Plan


@dataclass(frozen=True)
class Change:
    """One change of a plan: what it is called, what it does, and what it costs."""

    name: str
    apply: Callable[[Plan], Plan]
    cost: str
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
            f"QLoRA (4-bit base, r={min(plan.lora_rank, 16)})",
            lambda p: replace(p, method="qlora", lora_rank=min(p.lora_rank, 16), kbit_preparation=True),
            "weights dequantised at every use: slower steps; a small loss of quality",
            f"--method qlora --lora-rank {min(plan.lora_rank, 16)}",
        )
    if plan.method == "full" and plan.gpus == 1 and not plan.offload:
        yield Change(
            "optimizer states in host memory (DeepSpeed ZeRO-2 with offload)",
            lambda p: replace(p, parallel="zero2", offload=True),
            "the update runs on the CPU and crosses the bus: much slower with few accumulation steps; needs host RAM",
            "--parallel zero2 --offload",
        )
    if plan.sequence_tokens > 512:
        yield Change(
            f"sequences of {plan.sequence_tokens // 2} tokens",
            lambda p: replace(p, sequence_tokens=p.sequence_tokens // 2),
            "longer samples are cut off",
            f"--seq-len {plan.sequence_tokens // 2}",
        )


def would_fit(
    shape: ModelShape, plan: Plan, budget: Budget, card: Card | None = None, longest: int | None = None
) -> dict[str, Any]:
    """Plain JSON data: what fits on this card, and which other cards hold the plan.

    `best`: the few plans that fit and that no other beats in quality and speed (search.py); `single`: one change at a
    time, what each buys and costs; `combination`: the changes of the best, None when nothing fits;
    `longest_sequence_tokens` and `largest_micro_batch` of this plan; `gpus_needed`, `gpus`: how many such cards when
    FSDP divides it, and with which changes; `cards`: published cards that hold the plan as it is, smallest first.
    `longest`: tokens of the longest conversation, when it is known.
    Raises NoEstimate as the closed form does.
    """
    search = Search(shape, plan, budget, card, longest)
    base = search.made(plan)
    before = pace(shape, plan, card)
    single = []
    for change in changes(plan):
        changed = change.apply(plan)
        made = search.made(changed)
        taken = seconds(work(shape, changed), changed, card)
        single.append(
            {
                "change": change.name,
                "flags": change.flag,
                "allocated_bytes": made.allocated_bytes,
                "saves_bytes": base.allocated_bytes - made.allocated_bytes,
                "verdict": verdict(made, budget),
                "cost": change.cost,
                "time_factor": round(pace(shape, changed, card) / before, 2),
                "seconds_per_update": None if taken is None else [round(each, 3) for each in taken],
            }
        )
    best = [search.as_json(found) for found in search.run()]
    return {
        "best": best,
        "single": single,
        "combination": best[0] if best else None,
        "longest_sequence_tokens": longest_sequence(search),
        "largest_micro_batch": largest_micro_batch(search),
        "gpus_needed": (several := gpus_needed(search)) and several["count"],
        "gpus": several,
        "cards": [one.name for one in cards() if _holds(search, one)],
        "speed": {"card": card.name, "bandwidth": card.bandwidth, "tensor_16bit": card.tensor_16bit} if card else None,
    }


def _holds(search: Search, card: Card) -> bool:
    made = search.made(search.plan)  # it does not depend on the card, but for what its generation can do
    return verdict(made, named_card(card.memory_gib)) == "yes"


def longest_sequence(search: Search) -> int | None:
    """The longest sequence in steps of 128 tokens that still fits with certainty; None when 128 do not."""
    top = max(1, min(search.shape.max_position or 131072, 1 << 20) // 128)
    found = largest(lambda n: search.fits(replace(search.plan, sequence_tokens=n * 128)), top)
    return found and found * 128


def largest_micro_batch(search: Search) -> int | None:
    """The largest micro batch that still fits with certainty; None when 1 does not."""
    return largest(lambda n: search.fits(replace(search.plan, micro_batch=n)), 256)


def gpus_needed(search: Search) -> dict[str, Any] | None:
    """How many such cards hold the training when FSDP divides it, with the fewest changes that this needs.

    Dividing leaves each card its own activations and logits: where these alone are too large, what shrinks them is
    changed as well. None when 256 are not enough even then.
    """
    plan = search.plan
    smaller = search.smallest(search.resources(plan))[:1]
    ways = [plan, *(replace(way, parallel=plan.parallel, offload=plan.offload) for way in smaller)]
    for way in ways:
        for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            steps = way.gradient_accumulation
            if steps % count == 0:  # the global batch stays
                steps //= count
            parallel = "none" if count == 1 else "fsdp_full"
            divided = replace(way, gpus=count, parallel=parallel, offload=False, gradient_accumulation=steps)
            if search.fits(divided):
                if count == 1 and way is not plan:
                    continue  # that is what the search for one card says
                return {"count": count, "flags": flags_of(divided, plan), "changes": way is not plan}
    return None


def fixes(found: dict[str, Any], needs_bytes: int) -> tuple[str, ...]:
    """The search's result as remedies, best first. `needs_bytes`: what a single card would have to offer."""
    made = []
    for best in found["best"][:1]:
        if not best["changes"]:
            break
        given_up = "; ".join(best["gives_up"]) or "nothing in quality"
        made.append(
            f"change: {', '.join(best['changes'])} (`{best['flags']}`): {_gib(best['allocated_bytes'])} of tensors, "
            f"{_gib(best['saves_bytes'])} less; it gives up: {given_up}"
        )
    if found["longest_sequence_tokens"]:
        made.append(f"keep the plan with sequences of at most {found['longest_sequence_tokens']} tokens")
    several = found["gpus"]
    if several and several["count"] > 1:
        made.append(f"divide it over {several['count']} such GPUs (`{several['flags']}`)")
    which = f" ({found['cards'][0]})" if found["cards"] else ""
    made.append(f"use a card with at least {_gib(needs_bytes)} of free memory for the plan as it is{which}")
    return tuple(made[:3])


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
