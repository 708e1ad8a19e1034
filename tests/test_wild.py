"""Every odd input from a real bug report is there and is really tried by a test."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CASES = sorted(path.parent.name for path in HERE.glob("wild/*/*/case.json"))
# Which tests try which group; the letter is the first of the case's name.
TESTED_IN = {
    "A": "test_wild_a.py",
    "B": "test_wild_b.py",
    "C": "test_wild_c.py",
    "D": "test_wild_d.py",
    "E": "test_wild_e.py",
    "F": "test_wild_f.py",
}


def test_no_case_got_lost() -> None:
    assert len(CASES) >= 62
    assert len(set(CASES)) == len(CASES)


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_named_in_a_test(case: str) -> None:
    number = re.match(r"[A-F]\d+", case)
    assert number is not None
    places = [HERE / TESTED_IN[case[0]], HERE / "test_task_evaluator.py"]
    text = "".join(place.read_text(encoding="utf-8") for place in places if place.exists())
    assert case in text, f"no test in {TESTED_IN[case[0]]} names {case}"


@pytest.mark.parametrize("case", CASES)
def test_every_input_of_a_case_is_there(case: str) -> None:
    folder = next(HERE.glob(f"wild/*/{case}"))
    described = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    for item in described["inputs"]:
        assert (folder / item["file"]).is_file()
    assert described["expected"]
