"""How far off is each kind of evidence, on published measurements? Read from facts/memory_errors.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from preflight import facts
from preflight.plan import Plan


def interval(
    evidence: str,
    plan: Plan,
    allocated: int,
    static: int,
    reserved: int | None = None,
    table: Mapping[str, Any] | None = None,
) -> tuple[int, int, int]:
    """(low, high, reserved): bounds of the allocated and of the reserved peak, and the expected reserved peak.

    All in bytes. `static` is the part of the peak that lies there all the time (weights, optimizer states): the
    allocator's cache grows with the rest. `low` bounds the allocated peak from below, `high` the reserved one from
    above. Without a reserved figure of its own the evidence takes the share of published rows that give both. Where
    published rows do not cover a method, the largest share that was ever seen with fixed lengths bounds it.
    `table` stands for facts/memory_errors.json.
    """
    document = table if table is not None else facts.table("memory_errors")
    least = document["least"][evidence]
    moving = max(0, allocated - static)
    groups: Mapping[str, Any] = document["evidence"][evidence]
    bounds = spread(groups, plan)
    expected = reserved
    if expected is None:
        cache = groups.get("cache", document["unmeasured"])
        share = cache["eager"] if plan.attention == "eager" else cache["quantised" if plan.quantised else "plain"]
        expected = int(static + moving * share)
    widest = document["unmeasured"]
    low, most = bounds["allocated"] if "allocated" in bounds else widest["allocated"]
    if "moving" in bounds:
        above = static + (max(expected, allocated) - static) * bounds["moving"][1]
        high = max(above, max(expected, allocated) * (1.0 + least))
    else:
        high = max(expected, (static + moving * document["largest_cache"]) * max(1.0, most)) * (1.0 + least)
    return int(allocated * min(1.0 - least, low)), int(high), expected


def spread(groups: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Measured over estimated for this plan, as far as published rows cover it: [low, high] of the allocated peak, of
    the reserved one, and of what of it is not static ("moving")."""
    if plan.gpus > 1:
        return dict(groups.get("several GPUs", {}))
    return dict(groups.get("full" if plan.method == "freeze" else plan.method, {}))
