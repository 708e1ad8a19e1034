"""The intervals of facts/memory_errors.json: what is fitted on which rows, and how well it holds on others.

The final table is fitted on all named rows. How far it may be trusted on rows that nobody fitted is found by leaving
out one source (a repository that published) at a time: fitted on the others, tested on that one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.accuracy import Compared, quantile
from preflight.memory.errors import interval

FACTS = Path(__file__).resolve().parent.parent / "facts" / "memory_errors.json"
METHODS = ("full", "lora", "qlora", "lora_gptq")
LEAST_ROWS, LEAST_SOURCES = 8, 2  # fewer do not cover a method
FEW_ROWS = 3


def fitted(item: Compared) -> bool:
    """Whether a row is one that intervals are fitted on: transformers' code, quality A or B, a fixed length.

    Batches of many lengths ("cap_reached") are not: their cache says nothing about batches of one length.
    """
    row = item.row
    return (
        item.estimate is not None and row.kind == "peak" and row.hugging_face and row.quality in ("A", "B")
        and row.certainty == "exact" and bool(set(row.readings) & {"allocated", "reserved"})
    )  # fmt: skip


def groups_of(evidence: str, items: Sequence[Compared], static_of: Mapping[str, int]) -> dict[str, Any]:
    """The table of one kind of evidence, fitted on these rows. Ratios are measured over estimated.

    `static_of`: by row id, the bytes that lie there all the time.
    """
    table: dict[str, Any] = {}
    if evidence == "closed":
        table["cache"] = cache_shares(items, static_of)
    for group in ("all", "several GPUs", *METHODS):
        part = [item for item in items if group in _groups(item)]
        made: dict[str, Any] = {}
        for metric in ("allocated", "reserved", "moving"):
            ratios = {
                item.row.id: ratio for item in part if (ratio := _ratio(evidence, item, metric, table, static_of))
            }
            sources = {item.row.source for item in part if item.row.id in ratios}
            enough = len(ratios) >= LEAST_ROWS and len(sources) >= LEAST_SOURCES
            if len(ratios) >= 4 and (enough or metric == "allocated"):
                made[metric] = _bounds(list(ratios.values()))
                made[f"{metric}_rows"] = len(ratios)
                made[f"{metric}_sources"] = sorted(sources)
        if made:
            table[group] = made
    return table


def cache_shares(items: Sequence[Compared], static_of: Mapping[str, int]) -> dict[str, float]:
    """Median share of the reserved peak in what is not static, by what decides it most."""
    shares: dict[str, list[float]] = {"eager": [], "quantised": [], "plain": []}
    for item in items:
        share, plan = cache_share(item, static_of), item.row.plan
        if share is not None and plan is not None:
            shares["eager" if plan.attention == "eager" else "quantised" if plan.quantised else "plain"].append(share)
    return {name: round(quantile(sorted(values), 0.5), 4) if values else 1.3 for name, values in shares.items()}


def cache_share(item: Compared, static_of: Mapping[str, int]) -> float | None:
    """(reserved - static) / (allocated - static), both as measured; None for a row that lacks one of them."""
    readings, static = item.row.readings, static_of.get(item.row.id)
    if static is None or not {"allocated", "reserved"} <= set(readings) or readings["allocated"] <= static:
        return None
    return (readings["reserved"] - static) / (readings["allocated"] - static)


def document_from(results: Mapping[str, Sequence[Compared]], old: Mapping[str, Any]) -> dict[str, Any]:
    """facts/memory_errors.json anew; the parts set by hand and the evidence that was not run stay as they are."""
    made = dict(old)
    made["as_of"] = date.today().isoformat() if made.get("as_of") is None else made["as_of"]
    made["evidence"] = dict(old["evidence"])
    made["rows"], made["held_out"] = dict(old.get("rows", {})), dict(old.get("held_out", {}))
    for evidence, every in results.items():
        items = [item for item in every if fitted(item)]
        static_of = {item.row.id: item.estimate.static_bytes for item in items if item.estimate}
        if evidence == "closed":
            shares = [share for item in items if (share := cache_share(item, static_of))]
            made["largest_cache"] = round(max(shares), 4)
        made["rows"][evidence] = sorted(item.row.id for item in items)
        made["evidence"][evidence] = groups_of(evidence, items, static_of)
    for evidence, every in results.items():
        made["held_out"][evidence] = held_out(evidence, [item for item in every if fitted(item)], made)
    return made


def held_out(evidence: str, items: Sequence[Compared], document: Mapping[str, Any]) -> dict[str, Any]:
    """How many rows of each source lie inside the interval that the rows of all other sources give.

    Inside: the measured allocated peak is not below the lower end, the measured peaks are not above the upper one.
    """
    static_of = {item.row.id: item.estimate.static_bytes for item in items if item.estimate}
    found: dict[str, Any] = {}
    for source in sorted({item.row.source for item in items}):
        others = [item for item in items if item.row.source != source]
        shares = [share for item in others if (share := cache_share(item, static_of))]
        table = {
            **document,
            "evidence": {evidence: groups_of(evidence, others, static_of)},
            "largest_cache": max(shares, default=document["largest_cache"]),
        }
        mine = [item for item in items if item.row.source == source]
        found[source] = {"rows": len(mine), "inside": sum(inside(evidence, item, table) for item in mine)}
    total, within = (sum(row[key] for row in found.values()) for key in ("rows", "inside"))
    return {"by_source": found, "rows": total, "inside": within}


def inside(evidence: str, item: Compared, table: Mapping[str, Any]) -> bool:
    """Whether what was measured lies in the interval that the table gives."""
    made, plan = item.estimate, item.row.plan
    assert made is not None
    assert plan is not None
    own = made.reserved_bytes if evidence == "rehearsed" else None
    low, high, _ = interval(evidence, plan, made.allocated_bytes, made.static_bytes, own, table)
    readings = item.row.readings
    return readings.get("allocated", low) >= low and max(readings.values()) <= high


def write_facts(results: Mapping[str, Sequence[Compared]]) -> None:
    """Renew facts/memory_errors.json from these results."""
    old = json.loads(FACTS.read_text(encoding="utf-8"))
    old["as_of"] = date.today().isoformat()
    FACTS.write_text(json.dumps(document_from(results, old), indent=1) + "\n", encoding="utf-8")


def _groups(item: Compared) -> tuple[str, ...]:
    plan = item.row.plan
    if plan is None:
        return ()
    return ("several GPUs",) if plan.gpus > 1 else (plan.method, "all")


def _ratio(
    evidence: str, item: Compared, metric: str, table: Mapping[str, Any], static_of: Mapping[str, int]
) -> float | None:
    """Measured over estimated; the closed form's reserved peak is made with the table's own share of cache.

    "moving": the same of the reserved peaks, each less what is static.
    """
    made, plan, measured = item.estimate, item.row.plan, item.row.readings.get(_READING[metric])
    if made is None or plan is None or measured is None:
        return None
    if metric == "allocated":
        return measured / made.allocated_bytes
    static = static_of[item.row.id]
    expected: float = made.reserved_bytes
    if evidence == "closed":
        name = "eager" if plan.attention == "eager" else "quantised" if plan.quantised else "plain"
        expected = static + (made.allocated_bytes - static) * table["cache"][name]
    less = static if metric == "moving" else 0
    return (measured - less) / (expected - less)


_READING = {"allocated": "allocated", "reserved": "reserved", "moving": "reserved"}


def _bounds(ratios: Iterable[float]) -> list[float]:
    ordered = sorted(ratios)
    return [round(quantile(ordered, 0.025), 4), round(quantile(ordered, 0.975), 4)]
