"""Which plans fit this card? A search over method, rank, length, batch, checkpointing, optimizer, loss and offload."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from preflight.memory.blocks import Builder
from preflight.memory.budget import Budget, verdict
from preflight.memory.closed_form import MemoryEstimate, estimate
from preflight.memory.speed import Card, pace, seconds, work
from preflight.model_shape import ModelShape
from preflight.plan import Plan

SHORTEST = 512
FEW = 5
_FLAGS = {
    "method": "--method",
    "lora_rank": "--lora-rank",
    "sequence_tokens": "--seq-len",
    "micro_batch": "--micro-batch",
    "gradient_accumulation": "--grad-accum",
    "optimizer": "--optimizer",
    "loss": "--loss",
    "attention": "--attention",
    "gpus": "--gpus",
    "parallel": "--parallel",
}


def flags_of(plan: Plan, base: Plan) -> str:
    """The flags that turn `base` into `plan`; the method is always among them."""
    words = []
    for name, flag in _FLAGS.items():
        if getattr(plan, name) != getattr(base, name) or name == "method":
            words.append(f"{flag} {getattr(plan, name)}")
    if plan.gradient_checkpointing != base.gradient_checkpointing:
        words.append("--gradient-checkpointing" if plan.gradient_checkpointing else "--no-gradient-checkpointing")
    if plan.offload and not base.offload:
        words.append("--offload")
    return " ".join(words)


@dataclass(frozen=True)
class Loss:
    """What a plan gives up in quality against the one that was asked for: a rank (0: nothing), and in words."""

    weight: float
    words: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """A plan that fits."""

    plan: Plan
    made: MemoryEstimate
    loss: Loss
    pace: float


class Search:
    """One search; estimates that were made are kept."""

    def __init__(self, shape: ModelShape, plan: Plan, budget: Budget, card: Card | None, longest: int | None) -> None:
        self.shape, self.plan, self.budget, self.card = shape, plan, budget, card
        # the longest conversation of the data: sequences that still hold it cut nothing
        self.longest = longest
        self.known: dict[Plan, MemoryEstimate] = {}

    def made(self, plan: Plan) -> MemoryEstimate:
        if plan not in self.known:
            self.known[plan] = estimate(self.shape, plan)
        return self.known[plan]

    def fits(self, plan: Plan) -> bool:
        return verdict(self.made(plan), self.budget) == "yes"

    # -- what may be given up

    def qualities(self) -> list[tuple[Plan, Loss]]:
        """Plans that differ in what they can learn, the best first: method, rank and length of the sequences."""
        found = []
        for (method, first), (length, second) in itertools.product(self.methods(), self.lengths()):
            words = (*first.words, *second.words)
            found.append((replace(method, sequence_tokens=length), Loss(first.weight + second.weight, words)))
        return sorted(found, key=lambda pair: pair[1].weight)

    def methods(self) -> list[tuple[Plan, Loss]]:
        plan = self.plan
        found = [(plan, Loss(0.0, ()))]
        if plan.method == "full":
            for rank, weight in ((64, 1.0), (16, 1.3), (8, 1.6)):
                lora = replace(plan, method="lora", lora_rank=rank, target_modules=())
                words = f"LoRA r={rank} on all linear layers instead of all weights"
                found.append((lora, Loss(weight, (words,))))
        if plan.adapters and plan.lora_rank > 8:
            found.append((replace(plan, lora_rank=8), Loss(0.5, ("LoRA rank 8",))))
        if plan.method in ("full", "lora"):
            first = 16 if plan.method == "full" else plan.lora_rank
            for rank in dict.fromkeys((first, min(first, 8))):
                small = replace(plan, method="qlora", lora_rank=rank, kbit_preparation=True)
                weight = (2.0 if plan.method == "full" else 1.0) + (0.5 if rank < first else 0.0)
                found.append((small, Loss(weight, (f"base in 4 bits (QLoRA, r={rank})",))))
        return found

    def lengths(self) -> list[tuple[int, Loss]]:
        tokens = self.plan.sequence_tokens
        found = [(tokens, Loss(0.0, ()))]
        if self.longest and self.longest < tokens:
            enough = -(-self.longest // 64) * 64
            if enough < tokens:
                words = f"sequences of {enough} tokens, which hold the longest conversation of the data"
                found.append((enough, Loss(0.0, (words,))))
        shorter = tokens // 2
        while shorter >= SHORTEST and (not self.longest or shorter < self.longest):
            halvings = len(found)
            found.append((shorter, Loss(3.0 * halvings, (f"sequences of {shorter} tokens: longer samples are cut",))))
            shorter //= 2
        return found

    # -- what costs speed only

    def resources(self, plan: Plan) -> list[Plan]:
        """The same training in other ways, the fastest first."""
        checkpointing = [plan.gradient_checkpointing] if plan.gradient_checkpointing else [False, True]
        losses = [plan.loss]
        if plan.loss in ("full_logits_fp32_upcast", "full_logits", "fused_ce_on_full_logits"):
            losses.append("fused_linear_ce")
        optimizers = [plan.optimizer]
        if plan.optimizer_name() in ("adamw_torch", "adamw_torch_fused"):
            optimizers += ["adamw_8bit", "paged_adamw_8bit"]
        elif plan.optimizer_name() == "adamw_8bit":
            optimizers.append("paged_adamw_8bit")
        attentions = [plan.attention]
        if plan.attention in ("eager", "sdpa_math"):
            attentions.append("auto")
        if self.package_helps(plan):
            attentions.append("flash_attention_2")
        offloads = [(plan.parallel, plan.offload)]
        if plan.method == "full" and plan.gpus == 1 and not plan.offload:
            offloads.append(("zero2", True))
        made = []
        for batch, accumulation in self.batches():
            for ckpt, loss, optimizer, attention, (parallel, offload) in itertools.product(
                checkpointing, losses, optimizers, attentions, offloads
            ):
                if offload and optimizer != plan.optimizer:
                    continue  # DeepSpeed's own Adam runs on the CPU
                made.append(
                    replace(
                        plan,
                        micro_batch=batch,
                        gradient_accumulation=accumulation,
                        gradient_checkpointing=ckpt,
                        loss=loss,
                        optimizer=optimizer,
                        attention=attention,
                        parallel=parallel,
                        offload=offload,
                    )
                )
        return sorted(made, key=lambda one: (pace(self.shape, one, self.card), self.changed(one)))

    def changed(self, plan: Plan) -> int:
        """How many settings differ from the plan that was asked for."""
        names = (*_FLAGS, "gradient_checkpointing", "offload")
        return sum(getattr(plan, name) != getattr(self.plan, name) for name in names)

    def batches(self) -> list[tuple[int, int]]:
        """(micro batch, accumulation) with the same global batch, the largest micro batch first."""
        whole = self.plan.micro_batch * self.plan.gradient_accumulation
        sizes = [self.plan.micro_batch]
        while sizes[-1] > 1:
            sizes.append(next(size for size in range(max(1, sizes[-1] // 2), 0, -1) if whole % size == 0))
        return [(size, whole // size) for size in sizes]

    def package_helps(self, plan: Plan) -> bool:
        """Whether flash-attn would take the place of attention that keeps the square of the sequence."""
        build = Builder(self.shape, plan)
        if build.capability < 8.0 or plan.attention.startswith("flash") or self.shape.encoder_decoder:
            return False
        heads, kv_heads = self.shape.heads or 1, self.shape.kv_heads or self.shape.heads or 1
        head_dim = self.shape.head_dim or 0
        if not head_dim or head_dim > 256 or self.shape.softcap or plan.weight_dtype == "fp32":
            return False
        width = build.cast or build.stream
        kind = build.attention_kind(width, head_dim, self.shape.v_head_dim or head_dim, heads != kv_heads, None).kind
        return kind in ("eager", "math") and plan.attention in ("auto", "sdpa")

    # -- the search

    def run(self) -> list[Found]:
        """The few plans that fit and that no other one beats in both quality and speed, the best quality first."""
        front: list[Found] = []
        for plan, loss in self.qualities():
            if front and plan.sequence_tokens < front[0].plan.sequence_tokens:
                continue  # nothing needs to be cut
            found = self.fastest(plan, loss)
            if found is None:
                continue
            if all(found.pace < 0.97 * other.pace or found.loss.weight < other.loss.weight for other in front):
                front.append(found)
            if len(front) == FEW:
                break
        return front

    def fastest(self, plan: Plan, loss: Loss) -> Found | None:
        """The fastest way to train this plan here; None when even the one with the least memory does not fit."""
        ways = self.resources(plan)
        if not any(self.fits(way) for way in self.smallest(ways)):
            return None
        best = next((way for way in ways if self.fits(way)), None)
        if best is None:
            return None
        best = self.plainest(best)
        return Found(best, self.made(best), loss, pace(self.shape, best, self.card))

    def smallest(self, ways: list[Plan]) -> list[Plan]:
        """Those with everything that saves memory; more than one because offload and an 8-bit optimizer exclude."""
        least = min(way.micro_batch for way in ways)
        loss = "fused_linear_ce" if any(way.loss == "fused_linear_ce" for way in ways) else ways[0].loss
        saving = any(way.gradient_checkpointing for way in ways)
        return [
            way
            for way in ways
            if way.micro_batch == least and way.loss == loss and way.gradient_checkpointing == saving
        ]

    def plainest(self, best: Plan) -> Plan:
        """The plan with every change taken back that costs no speed worth naming and is not needed to fit."""
        for names in (("optimizer",), ("loss",), ("attention",)):
            back = replace(best, **{name: getattr(self.plan, name) for name in names})
            if (
                back != best
                and self.fits(back)
                and pace(self.shape, back, self.card) <= 1.03 * pace(self.shape, best, self.card)
            ):
                best = back
        return best

    def as_json(self, found: Found) -> dict[str, Any]:
        """One row for the report."""
        asked = self.made(self.plan)
        taken = seconds(work(self.shape, found.plan), found.plan, self.card)
        return {
            "flags": flags_of(found.plan, self.plan),
            "gives_up": list(found.loss.words),
            "changes": list(changes_in(found.plan, self.plan)),
            "allocated_bytes": found.made.allocated_bytes,
            "reserved_bytes": found.made.reserved_bytes,
            "saves_bytes": asked.allocated_bytes - found.made.allocated_bytes,
            "verdict": "yes",
            "time_factor": round(found.pace / pace(self.shape, self.plan, self.card), 2),
            "seconds_per_update": None if taken is None else [round(each, 3) for each in taken],
            "plan": found.plan.as_json(),
        }


def changes_in(plan: Plan, base: Plan) -> Iterator[str]:
    """What differs, in words of one or two each."""
    if plan.method != base.method:
        yield {"lora": f"LoRA r={plan.lora_rank}", "qlora": f"QLoRA r={plan.lora_rank}"}.get(plan.method, plan.method)
    elif plan.lora_rank != base.lora_rank:
        yield f"LoRA rank {plan.lora_rank}"
    if plan.sequence_tokens != base.sequence_tokens:
        yield f"sequences of {plan.sequence_tokens} tokens"
    if plan.micro_batch != base.micro_batch:
        yield f"micro batch {plan.micro_batch} with {plan.gradient_accumulation} accumulation steps"
    if plan.gradient_checkpointing != base.gradient_checkpointing:
        yield "gradient checkpointing" if plan.gradient_checkpointing else "no gradient checkpointing"
    if plan.loss != base.loss:
        yield "fused linear cross-entropy (Liger, cut cross-entropy)"
    if plan.optimizer != base.optimizer:
        yield {"adamw_8bit": "8-bit AdamW", "paged_adamw_8bit": "8-bit paged AdamW"}.get(
            plan.optimizer_name(), plan.optimizer_name()
        )
    if plan.attention != base.attention:
        yield "the package flash-attn" if plan.attention == "flash_attention_2" else "attention chosen by torch"
    if plan.offload and not base.offload:
        yield "optimizer states in host memory (DeepSpeed ZeRO-2 with offload)"
    if plan.gpus != base.gpus:
        yield f"{plan.gpus} GPUs ({plan.parallel})"


def largest(fits: Callable[[int], bool], top: int) -> int | None:
    """The largest number from 1 to `top` that fits, within a sixteenth; None when 1 does not."""
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
    return low
