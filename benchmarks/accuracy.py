#!/usr/bin/env python3
"""How far off are the memory estimates? Every usable published measurement against each kind of evidence.

Rehearsals run in a sandbox with the row's own library versions where these install; --current-versions skips that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measured_rows import Row, read_rows
from preflight.console import UsageError, run_main
from preflight.findings import say
from preflight.machine import Machine, choose_python
from preflight.memory.budget import Budget, verdict
from preflight.memory.closed_form import MemoryEstimate, NoEstimate, estimate
from preflight.memory.rehearsal import Job, rehearse
from preflight.model_shape import ConfigTrouble, read_shape

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ("closed", "rehearsed")


@dataclass(frozen=True)
class Compared:
    """A row beside its estimate; `left_out` says why there is none."""

    row: Row
    estimate: MemoryEstimate | None
    left_out: str = ""
    versions: str = ""

    def error_pct(self, metric: str) -> float | None:
        """Signed error in per cent of the measured value; None when the row has no such reading."""
        measured = self.row.readings.get(metric)
        if not measured or self.estimate is None or self.row.kind != "peak":
            return None
        made = {
            "allocated": self.estimate.allocated_bytes,
            "reserved": self.estimate.reserved_bytes,
            "device": self.estimate.reserved_bytes + self.estimate.context_bytes,
        }[metric]
        return 100.0 * (made - measured) / measured


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "measured.jsonl", metavar="FILE.jsonl")
    parser.add_argument("--configs", type=Path, default=ROOT / "tests" / "configs", metavar="DIR")
    parser.add_argument("--evidence", default="closed", help="closed, rehearsed or both with a comma (default: closed)")
    parser.add_argument("--current-versions", action="store_true", help="rehearse all rows in one interpreter")
    parser.add_argument("--python", help="interpreter for rehearsals with current versions")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose id contains this")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write-facts", action="store_true", help="renew facts/memory_errors.json from this run")
    parser.add_argument("--each", action="store_true", help="print every row")
    args = parser.parse_args(argv)
    wanted = [name.strip() for name in args.evidence.split(",") if name.strip()]
    for name in wanted:
        if name not in EVIDENCE:
            raise UsageError(f"--evidence {name}: not known; allowed: closed, rehearsed")
    rows = [row for row in read_rows(args.rows) if args.only in row.id]
    results = {}
    for name in wanted:
        compared = closed(rows, args.configs) if name == "closed" else rehearsed(rows, args)
        results[name] = compared
    if args.write_facts:
        write_facts(results)
    if args.json:
        print(json.dumps({name: summary(items) for name, items in results.items()}, indent=1, allow_nan=False))
    else:
        for name, items in results.items():
            print_table(name, items, args.each)
    return 0


def config_of(row: Row, folder: Path) -> dict[str, Any] | None:
    """The model's config.json; None when it is not there."""
    name = str(row.raw.get("config") or "").removeprefix("configs/")
    try:
        loaded = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def closed(rows: Iterable[Row], folder: Path) -> list[Compared]:
    """Each row against the formulas."""
    found = []
    for row in rows:
        if row.left_out or row.plan is None:
            found.append(Compared(row, None, row.left_out))
            continue
        config = config_of(row, folder)
        if config is None:
            found.append(Compared(row, None, "no config.json for this model"))
            continue
        try:
            found.append(Compared(row, estimate(read_shape(config), row.plan)))
        except (NoEstimate, ConfigTrouble) as trouble:
            found.append(Compared(row, None, str(trouble)))
    return found


def versions_for(row: Row) -> dict[str, str]:
    """The row's versions; the current bitsandbytes where one is needed and none is stated."""
    versions = dict(row.versions)
    if row.plan is not None and row.plan.method in ("qlora", "lora_int8"):
        versions.setdefault("bitsandbytes", "0.50.2")
    return versions


def rehearsed(rows: Sequence[Row], args: argparse.Namespace) -> list[Compared]:
    """Each row of the Hugging Face stack, rehearsed; with its own versions unless told otherwise."""
    from benchmarks.version_sandbox import python_with

    machine = Machine()
    found: list[Compared] = []
    by_python: dict[str, list[tuple[Row, Job]]] = {}
    notes: dict[str, str] = {}
    current = choose_python(machine, args.python, ("torch", "transformers", "peft")).path
    for row in rows:
        reason = row.left_out
        if not reason and not row.hugging_face:
            reason = f"{row.raw['framework']} has modules of its own, which are not rehearsed"
        if not reason and row.plan is not None and row.plan.gpus > 1:
            reason = "more than one GPU: closed form only"
        config = None if reason else config_of(row, args.configs)
        if not reason and config is None:
            reason = "no config.json for this model"
        if reason or config is None or row.plan is None:
            found.append(Compared(row, None, reason))
            continue
        python, note = (current, "current") if args.current_versions else python_with(versions_for(row), current)
        notes[python] = note
        job = Job(config, row.plan, measured_turn=row.measured_turn, empty_before=row.empty_before)
        by_python.setdefault(python, []).append((row, job))
    for python, pairs in by_python.items():
        for start in range(0, len(pairs), 20):
            part = pairs[start : start + 20]
            say(f"rehearsing {start + 1} to {start + len(part)} of {len(pairs)} ({notes[python]})")
            answers = rehearse(machine, python, [job for _, job in part], timeout_s=1200.0)
            for (row, _), answer in zip(part, answers, strict=True):
                found.append(Compared(row, answer.estimate, answer.trouble, notes[python]))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# figures


def figures(errors: Sequence[float]) -> dict[str, Any]:
    """n, median and 95th percentile of the absolute error, and the bias (mean signed error), in per cent."""
    if not errors:
        return {"n": 0, "median_abs_pct": None, "p95_abs_pct": None, "bias_pct": None}
    sizes = sorted(abs(error) for error in errors)
    return {
        "n": len(sizes),
        "median_abs_pct": round(quantile(sizes, 0.5), 3),
        "p95_abs_pct": round(quantile(sizes, 0.95), 3),
        "bias_pct": round(sum(errors) / len(errors), 3),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of an ordered list, between neighbours by proportion."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


GROUPS = ("full", "lora", "qlora", "several GPUs", "varying lengths", "eager", "all")


def group_of(item: Compared) -> tuple[str, ...]:
    """The groups of the error table that a row belongs to."""
    plan = item.row.plan
    if plan is None:
        return ()
    if plan.gpus > 1:
        return ("several GPUs",)
    if item.row.raw["norm"]["seq_len_certainty"] == "cap_reached":  # batches of many lengths fragment the cache
        return ("varying lengths",)
    return (("eager",) if plan.attention == "eager" else ()) + (plan.method, "all")


def write_facts(results: dict[str, list[Compared]]) -> None:
    """facts/memory_errors.json: how measured peaks spread around the estimates, by evidence and group.

    Rows of transformers with a certain length, quality A or B. Quantiles of measured / estimated: 2.5 and 97.5 %.
    """
    path = ROOT / "facts" / "memory_errors.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    for evidence, items in results.items():
        table: dict[str, Any] = {}
        for group in GROUPS:
            ratios: dict[str, list[float]] = {"allocated": [], "reserved": []}
            over: list[float] = []
            for item in items:
                if group not in group_of(item) or not item.row.certain or not item.row.hugging_face:
                    continue
                for metric in ratios:
                    error = item.error_pct(metric)
                    if error is not None and (evidence == "closed" or metric in item.row.readings):
                        ratios[metric].append(1 / (1 + error / 100))
                readings = item.row.readings
                if item.estimate is not None and {"allocated", "reserved"} <= set(readings):
                    over.append(readings["reserved"] / readings["allocated"])
            row: dict[str, Any] = {}
            for metric, values in ratios.items():
                values.sort()
                if len(values) >= 4:
                    row[metric] = [round(quantile(values, 0.025), 4), round(quantile(values, 0.975), 4)]
                    row[f"{metric}_rows"] = len(values)
            if over:
                row["reserved_over_allocated"] = round(quantile(sorted(over), 0.5), 4)
            if row:
                table[group] = row
        document["evidence"][evidence] = table
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def errors_of(items: Iterable[Compared], metric: str) -> list[float]:
    """The signed errors of all items with this reading."""
    return [error for item in items if (error := item.error_pct(metric)) is not None]


def answer_of(item: Compared) -> str | None:
    """yes, marginal or no on the row's own card; None without an estimate."""
    total = item.row.raw.get("gpu_total_gib")
    if item.estimate is None or not total:
        return None
    return verdict(item.estimate, Budget(free_bytes=int(total * 2**30)))


def summary(items: Sequence[Compared]) -> dict[str, Any]:
    """The figures of one kind of evidence: all rows, then parts of them, then what was left out and why."""
    parts: dict[str, list[Compared]] = {"hugging face, A, certain length": [], "all frameworks, A and B": []}
    for item in items:
        raw = item.row.raw
        if item.row.hugging_face and raw["quality"] == "A" and item.row.certain:
            parts["hugging face, A, certain length"].append(item)
        parts["all frameworks, A and B"].append(item)
        parts.setdefault(f"{raw['framework']} / {raw['method']}", []).append(item)
    left: dict[str, list[str]] = {}
    for item in items:
        if item.estimate is None:
            left.setdefault(item.left_out or "no estimate", []).append(item.row.id)
    return {
        "allocated": figures(errors_of(items, "allocated")),
        "reserved": figures(errors_of(items, "reserved")),
        "device": figures(errors_of(items, "device")),
        "oom_called_yes": sum(1 for i in items if i.row.kind == "oom" and answer_of(i) == "yes"),
        "fits_called_no": sum(1 for i in items if i.row.kind == "fits" and answer_of(i) == "no"),
        "peaks_called_no": sum(1 for i in items if i.row.kind == "peak" and answer_of(i) == "no"),
        "oom": sum(1 for i in items if i.row.kind == "oom" and i.estimate is not None),
        "fits": sum(1 for i in items if i.row.kind == "fits" and i.estimate is not None),
        "parts": {
            name: {metric: figures(errors_of(part, metric)) for metric in ("allocated", "reserved")}
            for name, part in parts.items()
            if errors_of(part, "allocated") or errors_of(part, "reserved")
        },
        "left_out": {reason: sorted(ids) for reason, ids in sorted(left.items())},
    }


def print_table(name: str, items: Sequence[Compared], each: bool) -> None:
    """The figures for people."""
    made = summary(items)
    print(f"{name}: {sum(1 for i in items if i.estimate)} of {len(items)} rows")
    lines = [("all", made), *made["parts"].items()]
    for label, part in lines:
        texts = []
        for metric in ("allocated", "reserved"):
            f = part[metric]
            if f["n"]:
                texts.append(
                    f"{metric} n={f['n']:3d} median {f['median_abs_pct']:6.2f} p95 {f['p95_abs_pct']:6.2f} "
                    f"bias {f['bias_pct']:+6.2f}"
                )
        print(f"  {label:48s} {' | '.join(texts)}")
    print(
        f"  oom answered yes: {made['oom_called_yes']} of {made['oom']}; fits answered no: {made['fits_called_no']} of "
        f"{made['fits']}; peaks answered no: {made['peaks_called_no']}"
    )
    for reason, ids in made["left_out"].items():
        print(f"  left out, {reason}: {len(ids)}")
    if each:
        for item in items:
            errors = {m: item.error_pct(m) for m in ("allocated", "reserved", "device")}
            text = " ".join(f"{m} {e:+.2f} %" for m, e in errors.items() if e is not None)
            if item.row.kind != "peak":
                text = f"{item.row.kind} answered {answer_of(item)}"
            if item.estimate is not None:
                print(f"    {item.row.id}: {text} ({item.estimate.moment})")


if __name__ == "__main__":
    sys.exit(run_main(main))
