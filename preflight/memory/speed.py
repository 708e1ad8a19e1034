"""How long does a training step take? Its arithmetic and its memory traffic against the published figures of a card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from preflight import facts
from preflight.memory.closed_form import state_bytes
from preflight.model_shape import ModelShape, is_routed_expert
from preflight.plan import Plan

# Share of the published tensor throughput that training reaches: 20 to 60 %. Published model FLOPs utilisation of
# large runs lies at 38 to 57 % (PaLM 2022, table 3; Llama 3 2024, table 4); small batches and adapters stay below.
UTILISATION = (0.2, 0.6)
BANDWIDTH_SHARE = (0.5, 1.0)  # of the published memory bandwidth
_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Card:
    """Published figures of a card: bytes a second, and floating point operations a second of 16-bit products."""

    name: str
    memory_gib: float
    compute_capability: str | None
    bandwidth: float
    tensor_16bit: float

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dict(vars(self))


def cards() -> list[Card]:
    """The published cards, smallest memory first. Source: facts/cards.json."""
    return [_card(row) for row in facts.table("cards")["cards"]]


def _card(row: dict[str, Any]) -> Card:
    return Card(
        str(row["name"]),
        float(row["memory_gib"]),
        row["compute_capability"],
        float(row["bandwidth"]) * 1e9,
        float(row["tensor_16bit"]) * 1e12,
    )


def card_named(name: str | None) -> Card | None:
    """The published card that this name means, as nvidia-smi or people write it; None when it is not in the table."""
    for row in facts.table("cards")["cards"]:
        if name and re.search(row["match"], name, re.IGNORECASE):
            return _card(row)
    return None


@dataclass(frozen=True)
class Work:
    """What one forward and backward pass of a micro batch does, and one update.

    `flops` of the passes, `bytes` of weights that they read, `update_bytes` that the optimizer reads and writes.
    """

    flops: float
    bytes: float
    update_bytes: float


def work(shape: ModelShape, plan: Plan) -> Work:
    """The work of one micro batch under a plan, by counting.

    A product of [tokens, in] and [in, out] takes 2 x tokens x in x out operations; the backward pass as much for its
    input, and again for the weight where it is trained; with checkpointing the forward pass runs twice. Attention:
    half of the square, because it is causal. Traffic of activations is left out.
    """
    share = shape.moe.per_token / max(1, shape.moe.experts) if shape.moe else 1.0
    matrices = weights = head = trained = 0.0
    for module, times, stack in shape.occurrences():
        if module.kind not in ("linear", "conv1d", "experts", "router") or stack in ("vision", "audio"):
            continue
        count = module.weights * module.per_layer * times
        if shape.is_head(module):
            head += count
            continue
        matrices += count * (share if is_routed_expert(module) else 1.0)
        weights += count
        if plan.adapters:
            trained += plan.lora_rank * (module.in_features + module.out_features) * module.per_layer * times
    head = head or float((shape.vocab_size or 0) * (shape.hidden_size or 0))
    if not plan.adapters:
        trained = float(shape.parameters or weights + head)
    layers = sum(group.count for group in shape.groups if group.mixer in ("attention", "mla"))
    square = plan.tokens * plan.sequence_tokens * (shape.heads or 1) * (shape.head_dim or 0) * layers * 2.0
    passes = 2.0 + plan.gradient_checkpointing  # forward (twice with checkpointing), backward for the inputs
    flops = 2.0 * plan.tokens * (matrices * passes + head * 2.0) + square * (passes + 1.0)
    flops += 2.0 * plan.tokens * (trained * 3.0 if plan.adapters else matrices + head)
    each = _WIDTH[plan.weight_dtype]
    if plan.method == "qlora":
        each_read = 0.5 + 2 * each  # read packed, written wide, read for the product
    elif plan.quantised:
        each_read = 1 + 2 * each
    else:
        each_read = each
    wide = _WIDTH[plan.adapter_dtype] if plan.adapters else each
    states = state_bytes(plan.optimizer_name().removeprefix("paged_"), max(1, int(trained)), wide)
    return Work(flops, (weights * each_read + head * each) * passes, trained * 3 * wide + 2 * states)


def seconds(made: Work, plan: Plan, card: Card | None) -> tuple[float, float] | None:
    """(low, high) seconds of one update: all its micro batches and the optimizer. None: could not tell.

    It could not be told without the card's figures, for float32 products, and for bfloat16 where the card has none.
    """
    if card is None or plan.offload or plan.gpus > 1:
        return None
    precision = plan.autocast or plan.weight_dtype
    if precision == "fp32":
        return None
    if precision == "bf16" and card.compute_capability is not None and float(card.compute_capability) < 8.0:
        return None
    times = plan.gradient_accumulation
    low = max(made.flops / (card.tensor_16bit * UTILISATION[1]), made.bytes / (card.bandwidth * BANDWIDTH_SHARE[1]))
    high = made.flops / (card.tensor_16bit * UTILISATION[0]) + made.bytes / (card.bandwidth * BANDWIDTH_SHARE[0])
    update = made.update_bytes / card.bandwidth
    return low * times + update / BANDWIDTH_SHARE[1], high * times + update / BANDWIDTH_SHARE[0]


def pace(shape: ModelShape, plan: Plan, card: Card | None) -> float:
    """A figure that grows with the time per token, to compare plans of one model: lower is faster.

    Without a card the balance of an A100 stands for it (156 operations for a byte).
    """
    made = work(shape, plan)
    balance = card.tensor_16bit / card.bandwidth if card else 156.0
    once = made.flops / UTILISATION[1] + made.bytes * balance
    update = made.update_bytes * balance * (20.0 if plan.offload else 1.3 if "paged" in plan.optimizer_name() else 1.0)
    eager = 1.3 if plan.attention in ("eager", "sdpa_math") else 1.0
    return (once * eager + update / plan.gradient_accumulation) / plan.tokens
