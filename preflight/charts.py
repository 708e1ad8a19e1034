"""Where the parts of the report's charts lie, in per cent of their width or height. Numbers only, nothing is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
HEADROOM = 1.06  # so that the last line of a chart does not stick to its edge
MOST_POINTS = 400


def number(value: object) -> float | None:
    """The value as a finite float; None for everything else (also for bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def nice_step(extent: float, most: int = 6) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `extent` into at most `most` parts."""
    if extent <= 0:
        return 1.0
    exact = extent / most
    power = 10.0 ** math.floor(math.log10(exact))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= exact * (1 - 1e-9))


def ticks(extent: float, unit: float = 1.0, most: int = 6) -> list[dict[str, Any]]:
    """Round positions on an axis from 0 to `extent`: where (`at`, per cent) and which `value` (in `unit`s)."""
    step = nice_step(extent / unit, most)
    count = int(extent / unit / step + 1e-9)
    return [{"at": percent(index * step * unit, extent), "value": round(index * step, 9)} for index in range(count + 1)]


def percent(value: float, extent: float) -> float:
    """The place of `value` between 0 and `extent`, held inside 0 to 100."""
    return round(min(100.0, max(0.0, 100.0 * value / extent)), 3) if extent > 0 else 0.0


def memory_bar(memory: Mapping[str, Any]) -> dict[str, Any] | None:
    """The estimate's components end to end, the CUDA context after them, against the card. None without an estimate.

    `parts` ({name, bytes, at, width}); `low`, `high`, `peak` include the context, as what is compared with the free
    memory does; `free` and `total` are None when the card is not known.
    """
    estimate, budget = _mapping(memory.get("estimate")), _mapping(memory.get("budget"))
    components = {
        str(name): number(_mapping(part).get("bytes")) or 0.0
        for name, part in _mapping(estimate.get("components")).items()
    }
    context = number(estimate.get("context_bytes")) or 0.0
    low, high = number(estimate.get("low_bytes")), number(estimate.get("high_bytes"))
    if not components or low is None or high is None:
        return None
    stacked = {**components, "context": context}
    peak = sum(stacked.values())
    free, total = number(budget.get("free_bytes")), number(budget.get("total_bytes"))
    extent = HEADROOM * max(peak, high + context, free or 0.0, total or 0.0)
    parts, position = [], 0.0
    for name, size in stacked.items():
        parts.append({"name": name, "bytes": size, "at": percent(position, extent), "width": percent(size, extent)})
        position += size

    def place(value: float | None) -> dict[str, float] | None:
        return None if value is None else {"bytes": value, "at": percent(value, extent)}

    return {
        "parts": parts,
        "peak": place(peak),
        "low": place(low + context),
        "high": place(high + context),
        "free": place(free),
        "total": place(total),
        "ticks": ticks(extent, GIB),
        "extent_bytes": extent,
    }


def timeline(points: object, free_bytes: float | None = None) -> dict[str, Any] | None:
    """A rehearsal's memory over the step. None when there are fewer than two usable points.

    `points`: [phase, allocated bytes, reserved bytes] in order; a phase is "fwd 0", the number counting steps from 0.
    `allocated` and `reserved` are [x, y] in per cent, y upwards; `phases` are the stretches of one phase ({word, step
    counted from 1, at, width, peak_bytes}). At most 400 points are kept: of
    each run of neighbours the highest. `free` is a line that is only there when the curve comes near it.
    """
    usable = []
    for point in points if isinstance(points, (list, tuple)) else ():
        if isinstance(point, (list, tuple)) and len(point) == 3:
            allocated, reserved = number(point[1]), number(point[2])
            if allocated is not None and reserved is not None:
                usable.append((str(point[0]), allocated, reserved))
    if len(usable) < 2:
        return None
    size = math.ceil(len(usable) / MOST_POINTS)
    kept = [
        max(enumerate(usable[start : start + size], start), key=lambda pair: pair[1][1])
        for start in range(0, len(usable), size)
    ]
    highest = max(max(allocated, reserved) for _, allocated, reserved in usable)
    near = free_bytes is not None and free_bytes <= 2 * highest
    extent = HEADROOM * (max(highest, free_bytes) if near and free_bytes is not None else highest)
    last = len(usable) - 1
    phases: list[dict[str, Any]] = []
    for index, (name, allocated, _) in enumerate(usable):
        if not phases or phases[-1]["name"] != name:
            phases.append({"name": name, **_word_and_step(name), "first": index, "peak_bytes": allocated})
        phases[-1]["peak_bytes"] = max(phases[-1]["peak_bytes"], allocated)
    for phase, after in zip(phases, [*phases[1:], None], strict=True):
        end = last if after is None else after["first"]
        phase["at"] = percent(phase["first"], last)
        phase["width"] = round(percent(end, last) - phase["at"], 3)
    peak = max(usable, key=lambda point: point[1])
    return {
        "allocated": [[percent(index, last), percent(point[1], extent)] for index, point in kept],
        "reserved": [[percent(index, last), percent(point[2], extent)] for index, point in kept],
        "phases": phases,
        "peak": {**_word_and_step(peak[0]), "bytes": peak[1], "at": percent(usable.index(peak), last)},
        "reserved_bytes": max(point[2] for point in usable),
        "free": {"bytes": free_bytes, "at": percent(free_bytes, extent)} if near and free_bytes is not None else None,
        "ticks": ticks(extent, GIB, 4),
    }


def _word_and_step(phase: str) -> dict[str, Any]:
    word, _, step = phase.partition(" ")
    return {"word": word, "step": int(step) + 1 if step.isdecimal() else None}


def histogram(values: Sequence[float], marks: Mapping[str, float | None]) -> dict[str, Any] | None:
    """How often which value came, in bars of equal round width from 0. None for fewer than five values.

    `bars`: {at, width, height, low, high, count}; `marks` (say, P50) keep their names and get their place.
    """
    if len(values) < 5:
        return None
    step = nice_step(max(values), max(5, min(20, math.ceil(math.sqrt(len(values)) * 2))))
    counts: dict[int, int] = {}
    for value in values:
        counts[int(value / step + 1e-9)] = counts.get(int(value / step + 1e-9), 0) + 1
    extent = step * (max(counts) + 1)
    most = max(counts.values())
    bars = [
        {
            "at": percent(index * step, extent),
            "width": percent(step, extent),
            "height": percent(counts.get(index, 0), most),
            "low": round(index * step, 9),
            "high": round((index + 1) * step, 9),
            "count": counts.get(index, 0),
        }
        for index in range(max(counts) + 1)
    ]
    placed = [{"name": name, "value": value, "at": percent(value, extent)} for name, value in marks.items() if value]
    return {"bars": bars, "marks": placed, "ticks": ticks(extent), "most": most}


def curve(seconds: object, values: object) -> dict[str, Any] | None:
    """One reading over time. None when there are fewer than two usable points.

    `lines` are runs of neighbours that were all read, each [x, y] in per cent, y upwards from 0; `ticks` lie on the
    value's axis and `seconds` on the other; `low`, `high`, `first`, `last` are the values to say in words.
    """
    if not isinstance(seconds, (list, tuple)) or not isinstance(values, (list, tuple)):
        return None
    points = [(number(at), number(value)) for at, value in zip(seconds, values, strict=False)]
    found = [(at, value) for at, value in points if at is not None and value is not None and at >= 0 and value >= 0]
    if len(found) < 2:
        return None
    last_s = max(at for at, _ in found)
    extent = HEADROOM * max(value for _, value in found)
    lines: list[list[list[float]]] = [[]]
    for at, value in points:
        if at is None or value is None or at < 0 or value < 0:
            lines.append([])
        else:
            lines[-1].append([percent(at, last_s), percent(value, extent)])
    # a point alone would draw nothing: it becomes a short line
    drawn = [line if len(line) > 1 else [[line[0][0] - 0.4, line[0][1]], line[0]] for line in lines if line]
    return {
        "lines": drawn,
        "ticks": ticks(extent, most=3),
        "seconds": ticks(last_s, most=4),
        "low": min(value for _, value in found),
        "high": max(value for _, value in found),
        "first": found[0][1],
        "last": found[-1][1],
        "last_s": last_s,
    }


def span(low: object, middle: object, high: object, extent: float | None = None) -> dict[str, float] | None:
    """A range with its middle, on an axis from 0 to `extent` (default: a little more than `high`)."""
    first, centre, last = number(low), number(middle), number(high)
    if first is None or centre is None or last is None or last < first:
        return None
    scale = extent if extent is not None else HEADROOM * last
    start, end = percent(first, scale), percent(last, scale)
    return {"at": start, "width": round(end - start, 3), "middle": percent(centre, scale)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
