"""The Markdown report as somebody gets it in a ticket: the top suffices, tables are tables, and everything folds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_invariants import everything, section_of

from preflight.findings import section_from_json
from preflight.report import REGIONS, render, with_regions, write_sections

GOLDEN = Path(__file__).resolve().parent / "golden"


def cells(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line)) - 1


def check_layout(text: str) -> None:
    """What GitHub, GitLab and Jira agree on."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        if line.startswith("|"):
            if before.startswith("|"):
                assert cells(line) == cells(before), (before, line)
            else:
                assert not before.strip(), f"a table needs an empty line before it: {before!r} {line!r}"
                assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", lines[number + 1]), lines[number + 1]
        if line.startswith("#"):
            assert not before.strip(), (before, line)
        if line.startswith("<details>"):
            assert not before.strip() or before == "</details>", (before, line)
            assert re.fullmatch(r"<details><summary>[^<>]+</summary>", line), line
            assert not lines[number + 1].strip(), lines[number + 1]
        if line.startswith("- ") and before.startswith("|"):
            raise AssertionError(("a list needs an empty line after a table", before, line))
    assert text.count("<details>") == text.count("</details>")
    assert not re.search(r"\n[ \t]*\n[ \t]*\n[ \t]*\n", text), "three empty lines"
    without_code = re.sub(r"(`+).*?\1", "", text)
    tags = set(re.findall(r"</?([a-zA-Z][\w-]*)", without_code))
    assert tags <= {"details", "summary"}, tags


@pytest.mark.parametrize(("script", "arguments"), everything())
def test_every_region_is_laid_out_for_every_renderer(script: str, arguments: tuple[str, ...]) -> None:
    document = json.loads(section_of(script, *arguments))
    for text in render({"schema": 1, "sections": {script: document}}, strict=True).values():
        assert text.lstrip().startswith("## ")
        check_layout(text)


def record_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("name", ["example", "too-old-torch"])
def test_the_whole_report_fits_a_ticket(name: str) -> None:
    rendered = render(record_of(name), strict=True)
    text = with_regions("", rendered)
    assert len(text.encode("utf-8")) < 64 * 1024
    regions = re.findall(r"^<!-- begin:(\w+) -->$", text, re.MULTILINE)
    assert regions == [region for region in REGIONS if region in rendered]
    for region in rendered.values():
        check_layout(region)


@pytest.mark.parametrize(
    ("name", "answer", "model", "command"),
    [
        ("example", "**YES**", "SmolLM2-135M-Instruct", "python -m preflight --recipe"),
        ("too-old-torch", "**NO**", "Qwen2.5-7B-Instruct", "pip install torch==2.11.0"),
    ],
)
def test_the_top_fifteen_lines_suffice(name: str, answer: str, model: str, command: str, tmp_path: Path) -> None:
    record = record_of(name)
    view = tmp_path / "r.md"
    sections = [section_from_json(section) for section in record["sections"].values()]
    assert write_sections(view, sections, record["job"]) == ""
    top = "\n".join(view.read_text(encoding="utf-8").split("\n")[:15])
    assert answer in top
    assert model in top
    assert "**Next:**" in top and command in top
    worst = next((f for s in sections for f in s.findings if f.level.value == "fail"), None)
    assert worst is None or worst.what[:60] in top


def test_detail_is_folded_and_what_stands_in_the_way_is_not() -> None:
    text = render(record_of("too-old-torch"), strict=True)["gpu_probe"]
    open_text = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert "**FAIL**" in open_text and "fix: `python -m pip install torch==2.11.0" in open_text
    assert len(open_text.split("\n")) < 40
