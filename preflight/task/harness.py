"""Existing tasks of lm-evaluation-harness, run through lm-eval where it is installed, with our intervals."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import Finding, Level, quote
from preflight.machine import Machine
from preflight.task.backends import from_anywhere

# Metrics of lm-eval that are 0 or 1 per sample, so that k of n and its interval mean something; best first.
YES_NO_METRICS = ("exact_match", "acc", "acc_norm", "em", "pass@1")
LIMIT_S = 4 * 3600
SOURCE = "https://github.com/EleutherAI/lm-evaluation-harness"


def task_names(given: Sequence[str]) -> tuple[list[str], str | None]:
    """(names of tasks, folder of their YAML files or None). A YAML file is named by its `task` key.

    Raises UsageError for a file that names no task.
    """
    names, folder = [], None
    for item in given:
        path = Path(item)
        if path.suffix.lower() not in (".yaml", ".yml"):
            names.append(item)
            continue
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise UsageError(f"--harness-task {item}: cannot be read ({error.strerror})") from error
        # The file may hold lm-eval's own tags (!function), which only lm-eval may resolve: the name is read as text.
        found = next((line.partition(":")[2] for line in text.splitlines() if line.startswith("task:")), "")
        name = found.split("#")[0].strip().strip("'\"")
        if not name:
            raise UsageError(f"--harness-task {item}: has no line `task: NAME`")
        if folder is not None and folder != str(path.parent.resolve()):
            raise UsageError(f"--harness-task {item}: all YAML files must lie in one folder")
        names.append(name)
        folder = str(path.parent.resolve())
    return names, folder


def run_harness(machine: Machine, python: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """The result per task; plain JSON data. `trouble` and `failure` say why there is none."""
    with tempfile.TemporaryDirectory(prefix="preflight-harness-") as folder:
        path = os.path.join(folder, "job.json")
        Path(path).write_text(json.dumps(dict(job)), encoding="ascii")
        answer = machine.ask("run_harness", from_anywhere(python), [path], timeout_s=LIMIT_S, cwd=folder)
    lines = answer.lines_of_json()
    failure = next((line for line in lines if line.get("step") == "failed"), None)
    done = next((line for line in lines if line.get("step") == "done"), None)
    version = next((str(line.get("version")) for line in lines if line.get("step") == "import lm_eval"), None)
    last = quote((answer.errors.strip().splitlines() or [""])[-1], 200)
    return {
        "version": version,
        "tasks": harness_results([line for line in lines if line.get("step") == "harness sample"]),
        "failure": {key: failure.get(key) for key in ("during", "error", "message")} if failure else None,
        "trouble": answer.trouble or ("" if done or failure else "died"),
        "last_words": "" if done else last,
    }


def no_result(trouble: str) -> dict[str, Any]:
    """What `run_harness` returns, when it was ended from outside."""
    return {"version": None, "tasks": [], "failure": None, "trouble": trouble, "last_words": ""}


def harness_results(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """k of n with its Wilson interval per task and yes-no metric; the mean for other metrics."""
    from preflight.task import statistics

    rows = []
    for task in dict.fromkeys(str(sample.get("task")) for sample in samples):
        group = [sample.get("metrics") or {} for sample in samples if str(sample.get("task")) == task]
        names = dict.fromkeys(name for metrics in group for name in metrics)
        for name in names:
            values = [metrics[name] for metrics in group if _is_number(metrics.get(name))]
            if not values:
                continue
            row: dict[str, Any] = {"task": task, "metric": name, "n": len(values)}
            row["mean"] = round(sum(values) / len(values), 4)
            if name in YES_NO_METRICS and all(value in (0, 1) for value in values):
                k = int(sum(values))
                low, high = statistics.wilson(k, len(values))
                row.update(k=k, low=round(low, 4), high=round(high, 4))
            rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not (isinstance(value, float) and value != value)


def check_harness(observed: Mapping[str, Any]) -> list[Finding]:
    """What the harness's tasks say."""
    seen = observed.get("harness")
    if not seen:
        return []
    failure = seen["failure"]
    if failure and failure["during"] == "import":
        return [
            Finding(
                "harness-missing",
                Level.UNKNOWN,
                f"Could not tell: lm-eval does not load in that interpreter: {quote(failure['message'], 200)}",
                "Tasks of the harness are run through lm-eval itself.",
                ("`pip install lm-eval` there, or name another interpreter with `--python`",),
                SOURCE,
            )
        ]
    if failure or seen["trouble"]:
        said = quote(f"{failure['error']}: {failure['message']}", 300) if failure else seen["last_words"]
        return [
            Finding(
                "harness-failed",
                Level.UNKNOWN,
                f"Could not tell: lm-eval ended without a result: {said or seen['trouble']}",
                "Nothing of these tasks was measured.",
                ("run the task with `lm_eval` itself to see more", "check that its data set can be reached from here"),
                SOURCE,
            )
        ]
    findings = []
    for row in seen["tasks"]:
        name = f"Harness task '{quote(row['task'], 60)}', {quote(row['metric'], 30)}"
        if "k" in row:
            share = f"{100 * row['mean']:.0f} %, 95 % interval {100 * row['low']:.0f} to {100 * row['high']:.0f} %"
            what = f"{name}: {row['k']} of {row['n']} ({share})."
        else:
            what = f"{name}: mean {row['mean']:g} over {row['n']} samples."
        note = "What counts as good depends on the task: multiple choice with four options gives 25 % for guessing."
        findings.append(Finding("harness-result", Level.OK, what, note, source=SOURCE))
    return findings or [
        Finding(
            "harness-failed",
            Level.UNKNOWN,
            "Could not tell: lm-eval reported no samples.",
            "Nothing of these tasks was measured.",
            ("check the task's data set and `--limit`",),
            SOURCE,
        )
    ]
