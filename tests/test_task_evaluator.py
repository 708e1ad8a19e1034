"""The exam through its command line: data that cannot be judged, replayed runs, comparisons, wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WILD = ROOT / "tests" / "wild" / "E-data"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "task_evaluator.py"), "--no-report", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd or ROOT,
        check=False,
    )


def section(*arguments: str, code: int = 0) -> dict[str, Any]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    ended = run("--json", *arguments)
    assert ended.returncode == code, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout, parse_constant=no_constants)
    return document


def finding(document: dict[str, Any], code: str) -> dict[str, Any]:
    found = [item for item in document["findings"] if item["code"] == code]
    assert len(found) == 1, [item["code"] for item in document["findings"]]
    return dict(found[0])


def test_e06_nan_duplicates_empty() -> None:
    """E06-nan-duplicates-empty: nothing is judged that cannot be, and the report stays valid JSON."""
    document = section("--data", str(WILD / "E06-nan-duplicates-empty" / "eval.jsonl"))
    data = document["observed"]["data"][0]
    assert document["level"] == "warn"
    assert finding(document, "needs-review")["level"] == "warn"
    assert data["rows"] == 6
    assert data["duplicates"] == [[1, 2]]
    assert data["empty_reference"] == [3, 4]
    assert data["non_string_content"] == [5]
    assert data["no_messages"] == [6]
    assert data["scorable"] == [1, 2]
    assert "nan" not in json.dumps(document["observed"]["data"][0]["problems"]).replace("NaN", "").lower()
