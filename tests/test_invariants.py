"""What must hold for every finding, on every recorded machine and every odd model directory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from preflight.console import run_main
from preflight.facts import shipped
from preflight.findings import section_from_json
from preflight.report import render, write_section

HERE = Path(__file__).resolve().parent
MACHINES = sorted(path.parent for path in HERE.glob("wild/A-gpu/*/case.json"))
MODELS = sorted(path.parent for path in HERE.glob("wild/[BC]-*/*/case.json"))
LEVELS = ("ok", "warn", "unknown", "fail")


@functools.cache
def section_of(script: str, *arguments: str) -> str:
    """The JSON that a stage prints for these arguments, run in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = run_main(importlib.import_module(script).main, [*arguments, "--json", "--no-report"])
    assert code in (0, 1, 3), (script, arguments, code)
    return out.getvalue()


def everything() -> list[Any]:
    machines = [pytest.param("gpu_probe", ("--replay", str(folder)), id=folder.name) for folder in MACHINES]
    models = [pytest.param("model_analyzer", (str(folder),), id=folder.name) for folder in MODELS]
    return machines + models


@pytest.mark.parametrize(("script", "arguments"), everything())
def test_every_finding_says_what_why_what_to_do_and_from_where(script: str, arguments: tuple[str, ...]) -> None:
    document = json.loads(section_of(script, *arguments))
    assert document["schema"] == 1
    assert document["stage"] == script
    assert document["findings"]
    for finding in document["findings"]:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", finding["code"]), finding
        assert finding["level"] in LEVELS
        assert finding["code"] != "check-crashed", finding
        assert finding["what"], finding
        assert "\n" not in finding["what"], finding
        assert len(finding["fix"]) <= 3, finding
        assert finding["what"].count("`") % 2 == 0, finding
        for text in (finding["what"], finding["why"], *finding["fix"]):
            assert not re.search(r"(?<![.\w])None(?!\w)|\bnan\b", text), finding
        if finding["level"] in ("warn", "fail"):
            assert finding["why"], finding
            assert finding["fix"], finding
            assert finding["source"], finding
        if finding["level"] == "unknown":
            assert finding["why"], finding
    worst = max((finding["level"] for finding in document["findings"]), key=LEVELS.index)
    assert document["level"] == worst


@pytest.mark.parametrize(("script", "arguments"), everything())
def test_every_section_has_a_template_that_works_and_a_report_that_repeats(
    script: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    document = json.loads(section_of(script, *arguments))
    rendered = render({"schema": 1, "sections": {script: document}}, strict=True)[script]
    assert 0 < len(rendered.encode()) < 24 * 1024
    assert not re.search(r"(?<![\w.])None(?![\w.])", re.sub(r"`[^`]*`", "", rendered)), rendered
    section = section_from_json(document)
    view = tmp_path / "r.md"
    assert write_section(view, section) == ""
    first = view.read_bytes(), view.with_suffix(".json").read_bytes()
    assert write_section(view, section) == ""
    assert (view.read_bytes(), view.with_suffix(".json").read_bytes()) == first


@pytest.mark.parametrize("script", ["gpu_probe"])
def test_the_same_machine_gives_the_same_answer_twice(script: str) -> None:
    for folder in MACHINES:
        first = section_of(script, "--replay", str(folder))
        section_of.cache_clear()
        assert section_of(script, "--replay", str(folder)) == first


@pytest.mark.parametrize("path", sorted(shipped("facts").glob("*.json")), ids=lambda path: path.stem)
def test_every_table_of_facts_says_from_when_and_from_where(path: Path) -> None:
    table = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(table["schema"], int)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", table["as_of"])
    if path.stem in ("error_signatures", "schema_lint"):  # these name their source row by row
        rows = table.get("signatures") or table["rules"]
        assert all(row["source"] for row in rows)
    else:
        assert table.get("sources") or table.get("source")
