"""How far off is each kind of evidence, on published measurements? Read from facts/memory_errors.json."""

from __future__ import annotations

from typing import Any

from preflight import facts
from preflight.plan import Plan

_MEASURED = ("full", "lora", "qlora", "lora_gptq")


def interval(evidence: str, plan: Plan, allocated: int, reserved: int | None = None) -> tuple[int, int, int]:
    """(low, high, reserved): bounds of the allocated and of the reserved peak, and the expected reserved peak.

    All in bytes. `low` bounds the allocated peak from below, `high` the reserved one from above: 95 % of the published
    measurements lie within. Without a reserved figure of its own the evidence takes the ratio of published rows that
    give both. Methods that no published row covers get a wide interval.
    """
    row = spread(evidence, plan)
    expected = reserved if reserved is not None else int(allocated * row["reserved_over_allocated"])
    least = facts.table("memory_errors")["least"][evidence]
    low = int(allocated * min(1.0 - least, row["allocated"][0]))
    high = int(max(expected, allocated) * max(1.0 + least, row["reserved"][1]))
    return low, high, expected


def spread(evidence: str, plan: Plan) -> dict[str, Any]:
    """The row of the table for this plan: allocated and reserved [low, high] as factors, reserved_over_allocated."""
    document = facts.table("memory_errors")
    table: dict[str, Any] = document["evidence"][evidence]
    fallback: dict[str, Any] = document["unmeasured"]
    if plan.method not in _MEASURED:
        return fallback
    found = {**fallback, **table.get("all", {})}
    if plan.gpus > 1:
        low, high = table.get("several GPUs", fallback)["allocated"]
        found["allocated"] = [low, high]
        found["reserved"] = [found["reserved"][0] * min(1.0, low), found["reserved"][1] * max(1.0, high)]
    elif plan.method in table:
        found |= table[plan.method]
    if plan.attention == "eager" and evidence == "closed":
        found |= table.get("eager", {})
    return found
