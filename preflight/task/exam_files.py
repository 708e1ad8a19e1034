"""Two finished exams, before and after: the same questions, paired."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import Finding, Level, quote
from preflight.task.exam import compare
from preflight.task.exam_checks import comparison_finding


@dataclass(frozen=True)
class Exam:
    """A finished exam: for each question (task, fingerprint of question and rule) whether it was answered right."""

    name: str
    model: str
    right: Mapping[tuple[str, str], bool]
    names: Mapping[tuple[str, str], str]
    settings: Mapping[str, Any]


def read_exam(path: str, flag: str) -> Exam:
    """An exam from what `task_evaluator.py --json` printed, or from a report's JSON record. Raises UsageError."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {path}: is not JSON ({quote(error, 80)}); give what --json printed") from error
    if isinstance(document, dict) and isinstance(document.get("sections"), dict):
        document = document["sections"].get("task_evaluator")
    try:
        if document["stage"] != "task_evaluator":
            raise KeyError("stage")
        observed = document["observed"]
        rows = [row for row in observed["samples"] if row["passed"] is not None]
        keys = [(str(row["task"]), str(row["fingerprint"])) for row in rows]
        return Exam(
            name=Path(path).name,
            model=str(observed.get("model_name") or ""),
            right={key: row["passed"] is True for key, row in zip(keys, rows, strict=True)},
            names={key: str(row["id"]) for key, row in zip(keys, rows, strict=True)},
            settings=dict(observed.get("settings") or {}),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{flag} {path}: holds no finished exam; give what `python task_evaluator.py … --json` printed, "
            "or a compatibility_report.json"
        ) from error


def compare_exams(before: Exam, after: Exam) -> dict[str, Any]:
    """Both exams, in all and per task, with the questions gained and lost; plain JSON data."""
    tasks = [task for task in dict.fromkeys(key[0] for key in before.right) if any(k[0] == task for k in after.right)]
    rows = [
        {
            "task": task,
            **compare(
                {str(key): value for key, value in before.right.items() if key[0] == task},
                {str(key): value for key, value in after.right.items() if key[0] == task},
            ),
        }
        for task in tasks
    ]
    both = [key for key in before.right if key in after.right]
    differing = sorted(
        name
        for name in ("max_new_tokens", "temperature", "seed", "shots", "no_thinking")
        if before.settings.get(name) != after.settings.get(name)
    )
    return {
        "before": {"file": before.name, "model_name": before.model},
        "after": {"file": after.name, "model_name": after.model},
        "tasks": rows,
        "gained": [after.names[key] for key in both if after.right[key] and not before.right[key]][:100],
        "lost": [before.names[key] for key in both if before.right[key] and not after.right[key]][:100],
        "settings_that_differ": differing,
    }


def check_comparison(observed: Mapping[str, Any]) -> list[Finding]:
    """Did the training help?  Per task, and what keeps the two exams from being comparable."""
    seen = observed["comparison"]
    findings = []
    if seen["settings_that_differ"]:
        findings.append(
            Finding(
                "exams-differ",
                Level.WARN,
                f"The two exams were run with different settings: {', '.join(seen['settings_that_differ'])}.",
                "A difference may come from the settings instead of the training.",
                ("run both with the same settings",),
                "preflight/task/exam_files.py",
            )
        )
    for row in seen["tasks"]:
        unpaired = f" {row['unpaired']} questions are in one exam only and left out." if row["unpaired"] else ""
        gain = "The same questions, paired, so chance in the choice of questions plays no part." + unpaired
        about = f"Task '{quote(row['task'], 60)}', before against after"
        findings.append(comparison_finding("comparison", about, row, gain))
    if not seen["tasks"]:
        findings.append(
            Finding(
                "comparison-not-comparable",
                Level.UNKNOWN,
                "Could not tell: the two exams have no task in common.",
                "Only the same questions can be compared.",
                ("run both exams with the same `--data`",),
                "preflight/task/exam_files.py",
            )
        )
    return findings
