#!/usr/bin/env python3
"""Fills what can be generated in the pages of docs/: the accuracy table and the list of modules."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GROUPS = {
    "Scripts": "*.py",
    "preflight/": "preflight/*.py",
    "preflight/hardware/ (gpu_probe.py)": "preflight/hardware/*.py",
    "preflight/software/ (env_sandbox.py)": "preflight/software/*.py",
    "preflight/model/ (model_analyzer.py)": "preflight/model/*.py",
    "preflight/model/families/": "preflight/model/families/*.py",
    "preflight/memory/": "preflight/memory/*.py",
    "preflight/task/ (task_evaluator.py)": "preflight/task/*.py",
    "preflight/data/ (data_preprocessor.py; the task stage reads with it)": "preflight/data/*.py",
    "preflight/outputs/ (validate_output_schema.py)": "preflight/outputs/*.py",
    "preflight/children/ (each runs alone in another interpreter)": "preflight/children/*.py",
    "preflight/children/rehearsal/ (the parts of rehearse.py)": "preflight/children/rehearsal/*.py",
    "benchmarks/": "benchmarks/*.py",
}


def modules() -> str:
    """Every module with its first sentence, grouped by folder."""
    lines: list[str] = []
    for title, pattern in GROUPS.items():
        rows = [(path, sentence) for path in sorted(ROOT.glob(pattern)) if (sentence := first_sentence(path))]
        lines += [f"### {title}", "", "| file | what |", "|---|---|"]
        lines += [f"| `{path.relative_to(ROOT).as_posix()}` | {sentence} |" for path, sentence in rows]
        lines.append("")
    return "\n".join(lines).strip()


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring; "" without one."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    found = re.match(r".+?[.?!](?=\s|$)", paragraph)
    return (found.group(0) if found else paragraph).replace("|", "\\|")


def accuracy() -> str:
    """Both kinds of evidence against every usable row, the intervals that answers carry, and the peers.

    The closed form is computed now; rehearsals are those kept in benchmarks/rehearsed.jsonl.
    """
    from benchmarks.accuracy import closed, kept_rehearsals, summary
    from benchmarks.measured_rows import read_rows

    rows = read_rows(ROOT / "benchmarks" / "measured.jsonl")
    made = {
        "closed form": summary(closed(rows, ROOT / "tests" / "configs")),
        "rehearsed": summary(kept_rehearsals(rows, ROOT / "benchmarks" / "rehearsed.jsonl")),
    }
    left_out = sum(len(ids) for ids in made["closed form"]["left_out"].values())
    lines = [
        "| evidence | against | peak | rows | median error | 95 % of errors below | bias |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, figures in made.items():
        for part in ("hugging face, A, certain length", "all frameworks, A and B"):
            for metric in ("allocated", "reserved"):
                row = error_row(part, metric, figures["parts"].get(part, {}).get(metric, {"n": 0}))
                lines.append(f"| {kind} {row}")
    lines += [
        "",
        f"{len(rows)} rows are known; {left_out} of them cannot be compared (an input that decides is not stated, or",
        'the method has no formula here). "A" rows state everything that decides; "certain length" means that the',
        "longest batch really had the stated length. Rows of ms-swift have batches of many lengths, whose cache no",
        "figure of one length can tell: they make the errors of reserved peaks over all frameworks.",
        "",
    ]
    for kind, figures in made.items():
        lines.append(
            f"{kind.capitalize()}: of {figures['oom']} runs that ended out of memory {figures['oom_called_yes']} "
            f"were answered with yes; of {figures['fits']} that fitted {figures['fits_called_no']} with no."
        )
    facts = json.loads((ROOT / "facts" / "memory_errors.json").read_text(encoding="utf-8"))
    return "\n".join([*lines, "", *intervals(facts), "", *held_out(facts), "", *peers()])


def error_row(part: str, metric: str, figures: Mapping[str, Any]) -> str:
    """One row of the first table."""
    if not figures["n"]:
        return f"| {part} | {metric} | 0 | could not tell | could not tell | could not tell |"
    return (
        f"| {part} | {metric} | {figures['n']} | {figures['median_abs_pct']:.1f} % | {figures['p95_abs_pct']:.1f} % | "
        f"{figures['bias_pct']:+.1f} % |"
    )


def intervals(facts: Mapping[str, Any]) -> list[str]:
    """The second table: measured over estimated, which makes the interval of an answer."""
    lines = [
        f"Measured over estimated, 2.5 and 97.5 % quantiles (as of {facts['as_of']}): what makes an answer's interval.",
        "",
        "| evidence | of | tensors (allocated) | rows | with cache (reserved) | rows |",
        "|---|---|---|---|---|---|",
    ]
    for kind, parts in facts["evidence"].items():
        for part, figures in parts.items():
            if part == "cache":
                continue
            cells = []
            for metric in ("allocated", "reserved"):
                bounds, count = figures.get(metric), figures.get(f"{metric}_rows")
                cells += [f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "too few rows"]
                cells.append(str(count) if count else "-")
            lines.append(f"| {kind} | {part} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "A method whose cache too few rows show gets the widest bound: everything that is not static times "
        f"{facts['largest_cache']:.2f}, the largest share seen with one length.",
    ]


def held_out(facts: Mapping[str, Any]) -> list[str]:
    """The third table: how the intervals hold on rows that did not make them."""
    lines = [
        "Do these intervals hold on rows that nobody fitted? Each source (a repository that published) was tested with",
        "the table that the other sources give:",
        "",
        "| evidence | source left out | rows | inside the interval |",
        "|---|---|---|---|",
    ]
    for kind, found in facts["held_out"].items():
        for source, row in found["by_source"].items():
            lines.append(f"| {kind} | {source} | {row['rows']} | {row['inside']} |")
        share = 100.0 * found["inside"] / max(1, found["rows"])
        lines.append(f"| {kind} | all | {found['rows']} | {found['inside']} ({share:.0f} %) |")
    return lines


def peers() -> list[str]:
    """The last table: other offline estimators on the same rows."""
    kept = json.loads((ROOT / "benchmarks" / "peers.json").read_text(encoding="utf-8"))
    lines = [
        "Other estimators that run offline, each on the rows it can answer, and this program's closed form on just",
        "these (`python benchmarks/peers.py --write`; median error, 95 % of errors below):",
        "",
        "| estimator | allocated, rows | theirs | ours | reserved, rows | theirs | ours | about |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, both in kept["accuracy"].items():
        cells = [name]
        for metric in ("allocated", "reserved"):
            cells.append(str(both[name][metric]["n"]))
            for who in (name, "this program, closed form"):
                figures = both[who][metric]
                known = figures["n"] > 0
                text = f"{figures['median_abs_pct']:.1f} %, {figures['p95_abs_pct']:.1f} %" if known else "no row"
                cells.append(text)
        lines.append(f"| {' | '.join(cells)} | {both['about']} |")
    seconds = kept["seconds"]
    ratio = seconds["this program, closed form"] / seconds["canifinetune estimate"]
    return [
        *lines,
        "",
        f"One cold answer: this program's closed form {seconds['this program, closed form']:.2f} s, "
        f"`canifinetune estimate` {seconds['canifinetune estimate']:.2f} s ({ratio:.2f} times as long as that).",
    ]


def filled(page: str, region: str, text: str) -> str:
    """The page with the text between the region's markers."""
    begin, end = f"<!-- begin:{region} -->", f"<!-- end:{region} -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def pages() -> dict[Path, str]:
    """Each generated page as it should be."""
    wanted = {"memory-prediction.md": ("accuracy", accuracy), "where-is-what.md": ("modules", modules)}
    return {
        (path := ROOT / "docs" / name): filled(path.read_text(encoding="utf-8"), region, make())
        for name, (region, make) in wanted.items()
    }


def main() -> int:
    """Write the pages; 1 when `--check` finds one that is old."""
    old = [path for path, text in pages().items() if path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in old:
            print(f"{path.relative_to(ROOT).as_posix()} is old: run `python docs/generate.py`")
        return 1 if old else 0
    for path in old:
        path.write_text(pages()[path], encoding="utf-8", newline="\n")
        print(f"Written: {path.relative_to(ROOT).as_posix()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
