"""The Markdown report as somebody gets it in a ticket: the top suffices, tables are tables, and everything folds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rendered import RENDERERS, check_rendered
from test_html_report import hostile_record
from test_invariants import everything, section_of

from preflight.findings import Finding, Level, Section, section_from_json
from preflight.report import (
    LIMIT_BYTES,
    REGIONS,
    STAGES,
    code,
    escape,
    prose,
    render,
    settled,
    with_regions,
    write_sections,
)

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
        for renderer in RENDERERS:
            check_rendered(text, renderer)


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


# --- as trackers show it -------------------------------------------------------------------------------------------

# Every kind of reference and markup that GitHub, GitLab or Jira knows, and an end that must not get lost.
NASTY = (
    "@alice #123 !12 :tada: ~label ~5 %mile $1 &5 GH-12 user/repo#4 www.example.org a@b.com std::vector::size END",
    "[[wiki|x]] [x] $x^2$ ^[foot] [^1] ~~s~~ <b>x</b> | pipe *s* __b__ _i_ <!-- end:summary --> </details> END",
    "{color:red}r{color} !img.png! [link|http://x.y] h1. head ---- {code} https://example.org/a_b?c=1&d=2#5 <i> END",
)
NASTY_CODE = ("`a|b @bob #7`", "`grep 'a\\|b'`", "`|`", "`` ` ``", "odd ` tick | END", "`x`|`y`")


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("name", ["example", "too-old-torch"])
def test_a_tracker_shows_the_whole_report_as_it_was_meant(name: str, renderer: str) -> None:
    text = with_regions("", render(record_of(name), strict=True))
    seen = check_rendered(text, renderer)
    assert len(seen.tables) >= 3 and len(seen.folded) >= 3
    assert seen.paragraphs and not [line for line in seen.paragraphs if line.startswith("|")]


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("text", [*NASTY, *NASTY_CODE])
def test_text_from_outside_reaches_a_tracker_as_the_same_text_and_does_nothing(text: str, renderer: str) -> None:
    rendered = render(hostile_record(text))
    assert "Shortened" not in rendered["summary"]
    seen = check_rendered(with_regions("", rendered), renderer)
    assert seen.text.count("END") >= 20 or "END" not in text
    shown = check_rendered(f"- {escape(text)}", renderer)
    assert shown.text.strip().replace("\u200b", "") == text
    assert not shown.code


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("text", ["a|b", "|", "``", "`x`", "a\\", " ", "@bob", "<b>", "*x*", "&amp;", "a `|` b"])
def test_code_stays_code_in_a_list_and_in_a_table(text: str, renderer: str) -> None:
    for form in ("- x {}", "| a | b |\n|---|---|\n| {} | END |"):
        seen = check_rendered(settled(form.format(code(text))), renderer)
        assert [span.strip() for span in seen.code] == [text.strip()]
        assert not seen.tables or seen.tables[0][1][1] == "END"


@pytest.mark.parametrize("renderer", RENDERERS)
def test_a_web_address_in_a_finding_leads_where_it_says(renderer: str) -> None:
    addresses = ["https://example.org/a_b~c?d=1&e=2#f", "https://github.com/o/r/issues/4", "http://x.org/*"]
    for address in addresses:
        seen = check_rendered(f"- {prose(f'see {address}, then go on')}", renderer)
        assert seen.links[0][0] in (address, "http://x.org/")


def test_text_that_looks_like_the_start_of_a_block_begins_none() -> None:
    for text in ("# head", "+ item", "- item", "1. item", "23) item", "= x", "---"):
        for renderer in RENDERERS:
            seen = check_rendered(escape(text), renderer)
            assert seen.tags <= {"p"} and seen.text.strip() == text, text


def large_record() -> dict[str, Any]:
    record = record_of("example")
    task = record["sections"]["task_evaluator"]["observed"]
    task["samples"] = [{**task["samples"][0], "id": f"sample-{n}", "output": "word | " * 40} for n in range(500)]
    for stage in STAGES:
        findings = [
            Finding(
                f"code-{n}",
                Level.OK if n % 2 else Level.WARN,
                f"Finding {n} was seen. " * 4,
                "Why. " * 20,
                ("do `x y`",),
                "s",
            )
            for n in range(300)
        ]
        worst = Finding("the-worst", Level.FAIL, "This decides.", "Why.", ("do `this now`",), "source")
        record["sections"][stage] |= Section(stage, {}, (*findings, worst)).as_json() | {
            "observed": record["sections"][stage]["observed"]
        }
    return record


@pytest.mark.parametrize("record", [large_record(), hostile_record("<&|*" * 5000)], ids=["long lists", "long texts"])
def test_a_large_record_is_shortened_below_the_limit_and_says_so(record: dict[str, Any]) -> None:
    rendered = render(record)
    text = with_regions("", rendered)
    assert len(text.encode("utf-8")) < LIMIT_BYTES
    assert "Shortened to stay below 64 KiB" in rendered["summary"]
    assert "Everything is in the JSON record beside this report." in rendered["summary"]
    for renderer in RENDERERS:
        check_rendered(text, renderer)


def test_what_is_left_out_of_long_lists_is_counted_and_the_worst_stays() -> None:
    rendered = render(large_record())
    for stage in STAGES:
        assert "This decides." in rendered[stage]
        # 150 warnings and the failure; 150 passed
        shown = len(re.findall(r"^- warning: ", rendered[stage], re.MULTILINE))
        assert f"- {150 - shown} more findings are in the JSON record beside this report." in rendered[stage]
    shown = len(re.findall(r"^\| sample-", rendered["task_evaluator"], re.MULTILINE))
    assert f"{500 - shown} more are in the JSON record beside this report." in rendered["task_evaluator"]


def test_an_ordinary_record_is_not_shortened() -> None:
    assert "Shortened" not in render(record_of("example"))["summary"]


def test_tables_that_stay_too_large_leave_the_findings() -> None:
    record = record_of("example")
    record["sections"]["gpu_probe"]["observed"]["host"]["environments"] = ["x" * 100] * 2000
    rendered = render(record)
    assert sum(len(text.encode()) for text in rendered.values()) < LIMIT_BYTES
    assert "`no-gpu`" in rendered["gpu_probe"]


def adf_nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *[found for child in node.get("content", []) for found in adf_nodes(child)]]


def adf_text(node: dict[str, Any]) -> str:
    return "".join(found.get("text", "") for found in adf_nodes(node))


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [False, True])
def test_jira_reads_the_same_tables_lists_and_code(hostile: bool, tmp_path: Path) -> None:
    """Jira has no <details>: its tags stay as text on lines of their own, and what they fold is open."""
    node, script = shutil.which("node"), Path(__file__).parent / "browser" / "jira.js"
    needs = ("@atlaskit/editor-markdown-transformer", "@atlaskit/adf-schema")
    asked = "".join(f"require.resolve('{name}');" for name in needs)
    if (
        node is None
        or subprocess.run([node, "-e", asked], cwd=script.parent, capture_output=True, check=False).returncode
    ):
        pytest.skip(f"node or the npm packages {', '.join(needs)} are not where node looks (set NODE_PATH)")
    text = with_regions("", render(hostile_record(" ".join(NASTY)) if hostile else record_of("example")))
    file = tmp_path / "r.md"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run([node, str(script), str(file)], capture_output=True, text=True, env=os.environ, check=True)
    nodes = adf_nodes(json.loads(done.stdout))
    kinds = {node["type"] for node in nodes}
    assert kinds <= {
        *("doc", "heading", "paragraph", "text", "table", "tableRow", "tableHeader", "tableCell", "blockquote"),
        *("bulletList", "listItem"),
    }  # no mention, emoji, media or panel
    rulers = re.findall(r"^\|(?:\s*:?-+:?\s*\|)+$", text, re.MULTILINE)
    tables = [node for node in nodes if node["type"] == "table"]
    assert len(tables) == len(rulers)
    for table, ruler in zip(tables, rulers, strict=True):
        assert {len(row["content"]) for row in table["content"]} == {ruler.count("|") - 1}
    paragraphs = "\n".join(adf_text(node) for node in nodes if node["type"] == "paragraph")
    tags = re.findall(r"^.*(?:<!|details).*$", paragraphs, re.MULTILINE)
    own = r"<details><summary>[^<]+</summary>|</details>|<!-- (begin|end):\w+ -->"
    assert hostile or all(re.fullmatch(own, line) for line in tags), tags
    codes = [node["text"] for node in nodes if any(mark["type"] == "code" for mark in node.get("marks", []))]
    assert "no-gpu" in codes or hostile
