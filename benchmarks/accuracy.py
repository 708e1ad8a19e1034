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

from benchmarks.measured_rows import Row, read_rows, text_of
from preflight.console import UsageError, run_main
from preflight.findings import quote, say
from preflight.machine import Machine, choose_python
from preflight.memory.budget import Budget, verdict
from preflight.memory.closed_form import MemoryEstimate, NoEstimate, context_bytes, estimate
from preflight.memory.errors import interval
from preflight.memory.rehearsal import Job, rehearse
from preflight.model_shape import ConfigTrouble, ModelShape, read_shape

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
    parser.add_argument("--resume", type=Path, metavar="FILE.jsonl", help="keep rehearsed peaks there, and take them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write-facts", action="store_true", help="renew facts/memory_errors.json from this run")
    parser.add_argument("--each", action="store_true", help="print every row")
    args = parser.parse_args(argv)
    wanted = [name.strip() for name in args.evidence.split(",") if name.strip()]
    for name in wanted:
        if name not in EVIDENCE:
            raise UsageError(f"--evidence {name}: not known; allowed: closed, rehearsed")
    if not args.configs.is_dir():
        raise UsageError(f"--configs {args.configs}: no folder")
    rows = [row for row in read_rows(args.rows) if args.only in row.id]
    results: dict[str, list[Compared]] = {}
    stopped = False
    try:
        for name in wanted:
            results[name] = []
            if name == "closed":
                results[name] += closed(rows, args.configs)
            else:
                rehearsed(rows, args, results[name])
    except KeyboardInterrupt:
        stopped = True
        say("interrupted: the figures are those of what was done until then")
    if args.write_facts and not stopped:
        from benchmarks.calibration import write_facts

        write_facts(results)
    if args.json:
        print(json.dumps({name: summary(items) for name, items in results.items()}, indent=1, allow_nan=False))
    else:
        for name, items in results.items():
            print_table(name, items, args.each)
    return 130 if stopped else 0


def config_of(row: Row, folder: Path) -> dict[str, Any] | None:
    """The model's config.json below the folder; None when it is not there."""
    name = text_of(row.raw, "config")
    for inside in (name.removeprefix("configs/"), name):
        try:
            path = (folder / inside).resolve()
            if not name or not path.is_relative_to(folder.resolve()):
                return None
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        return loaded if isinstance(loaded, dict) else None
    return None


def closed(rows: Iterable[Row], folder: Path) -> list[Compared]:
    """Each row against the formulas."""
    found = []
    for row in rows:
        if row.left_out or row.plan is None:
            found.append(Compared(row, None, row.left_out or "no plan"))
            continue
        config = config_of(row, folder)
        if config is None:
            found.append(Compared(row, None, "no config.json for this model"))
            continue
        try:
            shape = read_shape(config)
            unknown = experts_unknown(row, shape)
            found.append(Compared(row, None, unknown) if unknown else Compared(row, estimate(shape, row.plan)))
        except (NoEstimate, ConfigTrouble) as trouble:
            found.append(Compared(row, None, str(trouble)))
        except Exception as trouble:  # a fault of ours in one row must not cost the others
            found.append(Compared(row, None, f"could not be counted: {type(trouble).__name__}: {trouble}"[:200]))
    return found


def experts_unknown(row: Row, shape: ModelShape) -> str:
    """Why a 4-bit run of a mixture cannot be compared: an option of axolotl's quantises stacked experts too."""
    stacked = any(module.kind == "experts" for module, _, _ in shape.occurrences())
    if stacked and row.plan is not None and row.plan.quantised and row.framework.startswith("axolotl"):
        return "whether the stacked experts were quantised is not stated in a column"
    return ""


def versions_for(row: Row) -> dict[str, str]:
    """The row's versions; the current bitsandbytes where one is needed and none is stated."""
    versions = dict(row.versions)
    if row.plan is not None and row.plan.method in ("qlora", "lora_int8"):
        versions.setdefault("bitsandbytes", "0.50.2")
    return versions


def trouble_of(row: Row, config: dict[str, Any]) -> str:
    """Why a rehearsal with this config.json would not stand for the row; "" when it does."""
    try:
        return experts_unknown(row, read_shape(config))
    except ConfigTrouble as trouble:
        return str(trouble)


def why_not_rehearsed(row: Row) -> str:
    """Why there is no rehearsal of this row; "" when there is one."""
    if row.left_out or row.plan is None:
        return row.left_out or "no plan"
    if not row.hugging_face:
        return f"{quote(row.framework[:40])} has modules of its own, which are not rehearsed"
    divided = row.plan.gpus > 1 and row.plan.parallel != "ddp"
    return "divided over several GPUs when FSDP 1 was in use; FSDP 2 is rehearsed" if divided else ""


def rehearsed(rows: Sequence[Row], args: argparse.Namespace, found: list[Compared]) -> None:
    """Each row of the Hugging Face stack, rehearsed; with its own versions unless told otherwise.

    Results go into `found` and, with --resume, into that file as they come, so that Ctrl-C loses one batch at most.
    """
    from benchmarks.version_sandbox import python_with

    machine = Machine()
    by_python: dict[str, list[tuple[Row, Job, str]]] = {}
    current = choose_python(machine, args.python, ("torch", "transformers", "peft")).path
    kept = read_kept(args.resume)
    for row in rows:
        reason = why_not_rehearsed(row)
        config = None if reason else config_of(row, args.configs)
        if not reason and config is None:
            reason = "no config.json for this model"
        if not reason and config is not None:
            reason = trouble_of(row, config)
        if reason or config is None or row.plan is None:
            found.append(Compared(row, None, reason))
            continue
        python, note = (current, "current") if args.current_versions else python_with(versions_for(row), current)
        if (row.id, note) in kept:
            found.append(kept[row.id, note].compared(row))
            continue
        job = Job(config, row.plan, measured_turn=row.measured_turn, empty_before=row.empty_before)
        by_python.setdefault(python, []).append((row, job, note))
    for python, pairs in by_python.items():
        for start in range(0, len(pairs), 10):
            part = pairs[start : start + 10]
            say(f"rehearsing {start + 1} to {start + len(part)} of {len(pairs)} ({part[0][2]})")
            answers = rehearse(machine, python, [job for _, job, _ in part], timeout_s=900.0)
            for (row, _, note), answer in zip(part, answers, strict=True):
                found.append(Compared(row, answer.estimate, answer.trouble, note))
                keep(args.resume, found[-1])


@dataclass(frozen=True)
class Kept:
    """A rehearsal that was kept: its two peaks before any correction, or the trouble."""

    allocated: int | None
    reserved: int | None
    static: int
    moment: str
    trouble: str
    versions: str

    def compared(self, row: Row) -> Compared:
        """The row beside what was kept; the interval is made again."""
        if self.allocated is None or self.reserved is None or row.plan is None:
            return Compared(row, None, self.trouble or "no estimate", self.versions)
        low, high, reserved = interval("rehearsed", row.plan, self.allocated, self.static, self.reserved)
        made = MemoryEstimate(
            evidence="rehearsed", allocated_bytes=self.allocated, reserved_bytes=reserved, low_bytes=low,
            high_bytes=high, context_bytes=context_bytes(row.plan), moment=self.moment, moments={}, components=(),
            trainable_parameters=0, static_bytes=self.static,
        )  # fmt: skip
        return Compared(row, made, "", self.versions)


def read_kept(path: Path | None) -> dict[tuple[str, str], Kept]:
    """What an earlier run kept, by row and versions; damaged lines (a killed run) are passed over."""
    if path is None or not path.exists():
        return {}
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            one = json.loads(line)
            name = one.pop("id")
            found[name, one["versions"]] = Kept(**one)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def kept_rehearsals(rows: Iterable[Row], path: Path) -> list[Compared]:
    """Each row beside the last rehearsal that was kept of it."""
    last = {name: one for (name, _), one in read_kept(path).items()}
    return [
        last[row.id].compared(row) if row.id in last else Compared(row, None, why_not_rehearsed(row) or "not kept")
        for row in rows
    ]


def keep(path: Path | None, item: Compared) -> None:
    """Append one rehearsal to the file of kept ones."""
    if path is None:
        return
    made = item.estimate
    one = {
        "id": item.row.id,
        "allocated": made.allocated_bytes if made else None,
        "reserved": made.reserved_bytes if made else None,
        "static": made.static_bytes if made else 0,
        "moment": made.moment if made else "",
        "trouble": item.left_out,
        "versions": item.versions,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(one) + "\n")


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


def errors_of(items: Iterable[Compared], metric: str) -> list[float]:
    """The signed errors of all items with this reading."""
    return [error for item in items if (error := item.error_pct(metric)) is not None]


def answer_of(item: Compared) -> str | None:
    """yes, marginal or no on the row's own card; None without an estimate."""
    total = item.row.gpu_total_bytes
    if item.estimate is None or not total:
        return None
    return verdict(item.estimate, Budget(free_bytes=total))


def summary(items: Sequence[Compared]) -> dict[str, Any]:
    """The figures of one kind of evidence: all rows, then parts of them, then what was left out and why."""
    parts: dict[str, list[Compared]] = {"hugging face, A, certain length": [], "all frameworks, A and B": []}
    for item in items:
        if item.row.hugging_face and item.row.quality == "A" and item.row.certain:
            parts["hugging face, A, certain length"].append(item)
        parts["all frameworks, A and B"].append(item)
        parts.setdefault(f"{item.row.framework} / {text_of(item.row.raw, 'method')}", []).append(item)
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
        "versions": {note: sum(1 for i in items if i.versions == note) for note in sorted({i.versions for i in items})},
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
