"""The report: markers, kept text, damaged files, many writers, sudden ends, hostile text."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preflight.findings import Finding, Level, Section
from preflight.report import (
    STAGES,
    ReportTrouble,
    code,
    escape,
    prose,
    render,
    with_regions,
    write_section,
    write_sections,
)

ROOT = Path(__file__).resolve().parent.parent


def section(stage: str, text: str = "All is well.", level: Level = Level.OK, count: int = 1) -> Section:
    why = "" if level is Level.OK else "Because."
    fix = () if level is Level.OK else ("do `this`",)
    finding = Finding("a-code", level, text, why, fix, "a source")
    return Section(stage, {"count": count}, (finding,))


def test_a_new_report_has_the_summary_on_top_and_the_section_below(tmp_path: Path) -> None:
    view = tmp_path / "compatibility_report.md"
    assert write_section(view, section("model_analyzer", "Forty layers.")) == ""
    text = view.read_text(encoding="utf-8")
    assert text.startswith("# Fine-tuning compatibility report\n\n<!-- begin:summary -->")
    assert text.index("<!-- end:summary -->") < text.index("<!-- begin:model_analyzer -->")
    assert text.index("<!-- begin:model_analyzer -->") < text.rindex("Forty layers.")
    record = json.loads((tmp_path / "compatibility_report.json").read_text(encoding="utf-8"))
    assert record["schema"] == 1
    assert record["sections"]["model_analyzer"]["level"] == "ok"


def test_the_same_observations_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one.md", tmp_path / "two.md"
    for stage in STAGES:
        assert write_section(one, section(stage)) == ""
    for stage in reversed(STAGES):
        assert write_section(two, section(stage)) == ""
    assert one.read_bytes() == two.read_bytes()
    assert one.with_suffix(".json").read_bytes() == two.with_suffix(".json").read_bytes()
    before = one.read_bytes()
    assert write_section(one, section("gpu_probe")) == ""
    assert one.read_bytes() == before


def test_text_outside_the_markers_belongs_to_the_reader(tmp_path: Path) -> None:
    view = tmp_path / "r.md"
    assert write_section(view, section("gpu_probe", "First.")) == ""
    text = view.read_text(encoding="utf-8")
    text = "My ticket 4711\n" + text.replace("<!-- begin:gpu_probe -->", "Mine, before.\n\n<!-- begin:gpu_probe -->")
    view.write_text(text + "\nMine, at the end, without a newline", encoding="utf-8")
    assert write_section(view, section("gpu_probe", "Second.")) == ""
    assert write_section(view, section("env_sandbox", "Third.")) == ""
    after = view.read_text(encoding="utf-8")
    assert after.startswith("My ticket 4711\n")
    assert "Mine, before." in after
    assert after.endswith("\nMine, at the end, without a newline")
    assert "First." not in after
    assert after.index("Second.") < after.index("Third.")


def test_a_file_without_markers_keeps_its_text_and_gets_the_regions_after_it(tmp_path: Path) -> None:
    view = tmp_path / "notes.md"
    view.write_text("# Notes\n\nkeep me\n", encoding="utf-8")
    assert write_section(view, section("gpu_probe")) == ""
    assert view.read_text(encoding="utf-8").startswith("# Notes\n\nkeep me\n\n<!-- begin:summary -->")


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (("<!-- end:gpu_probe -->", ""), ["line "]),
        (("<!-- begin:gpu_probe -->", ""), ["line "]),
        (("<!-- begin:gpu_probe -->", "<!-- begin:gpu_probe -->\n<!-- begin:gpu_probe -->"), ["line ", ", line "]),
        (("<!-- end:summary -->", "<!-- begin:gpu_probe -->\n<!-- end:gpu_probe -->\n<!-- end:summary -->"), ["line "]),
    ],
)
def test_damaged_markers_are_an_error_that_names_the_lines_and_change_nothing(
    tmp_path: Path, damage: tuple[str, str], lines: list[str]
) -> None:
    view = tmp_path / "r.md"
    assert write_section(view, section("gpu_probe")) == ""
    view.write_text(view.read_text(encoding="utf-8").replace(*damage), encoding="utf-8")
    before = view.read_bytes(), view.with_suffix(".json").read_bytes()
    trouble = write_section(view, section("gpu_probe", "New."))
    assert "delete" in trouble
    assert "\n" not in trouble
    for words in lines:
        assert words in trouble
    assert (view.read_bytes(), view.with_suffix(".json").read_bytes()) == before


def test_the_named_lines_are_the_right_ones() -> None:
    old = "a\n<!-- begin:gpu_probe -->\nb\n"
    with pytest.raises(ReportTrouble, match=r"line 2 `<!-- begin:gpu_probe -->`"):
        with_regions(old, {"gpu_probe": "x"})


def test_regions_that_overlap_are_an_error() -> None:
    old = "<!-- begin:summary -->\n<!-- begin:gpu_probe -->\n<!-- end:summary -->\n<!-- end:gpu_probe -->\n"
    with pytest.raises(ReportTrouble, match="overlap"):
        with_regions(old, {"summary": "s", "gpu_probe": "x"})


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema": 99, "sections": {}}', '{"schema": 1, "sections": {"a": 1}}']
)
def test_a_foreign_or_damaged_record_is_never_overwritten(tmp_path: Path, content: str) -> None:
    view = tmp_path / "r.md"
    view.with_suffix(".json").write_text(content, encoding="utf-8")
    trouble = write_section(view, section("gpu_probe"))
    assert "r.json" in trouble
    assert view.with_suffix(".json").read_text(encoding="utf-8") == content
    assert not view.exists()


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    assert "does not exist" in write_section(tmp_path / "no" / "r.md", section("gpu_probe"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs a file system that refuses writes (Linux)")
def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    trouble = write_section("/proc/self/r.md", section("gpu_probe"))
    assert "/proc/self/r.md" in trouble
    assert "\n" not in trouble


HOSTILE = [
    "</details><script>alert(1)</script>",
    "| a | b |\n|---|---|",
    "# heading\n- item\n1. one",
    "![x](http://example.org/x.png) [l](javascript:alert(1))",
    "`code` ``` fence <!-- end:gpu_probe -->",
    "<!-- end:gpu_probe -->",
    "@everyone *bold* _em_ ~~gone~~ $math$",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_cannot_become_markup(tmp_path: Path, text: str) -> None:
    view = tmp_path / "r.md"
    assert write_section(view, section("gpu_probe", text, Level.FAIL)) == ""
    body = view.read_text(encoding="utf-8")
    assert "<script" not in body
    assert not re.search(r"(?<!\\)\]\(", body)
    assert "@everyone" not in body
    assert body.count("\n<!-- end:gpu_probe -->") == 1
    assert write_section(view, section("gpu_probe", "fine")) == ""


def test_escaping_leaves_ordinary_words_alone() -> None:
    assert escape("gpu_probe.py needs 525.60.13") == "gpu_probe.py needs 525.60.13"
    assert escape("a*b") == "a\\*b"
    assert prose("run `pip install a_b` now") == "run `pip install a_b` now"
    assert prose("an odd ` backtick") == "an odd \\` backtick"
    assert code("a`b") == "``a`b``"


def test_a_template_that_fails_falls_back_to_the_findings() -> None:
    record = {"schema": 1, "sections": {"gpu_probe": section("gpu_probe", "Still here.").as_json()}}
    record["sections"]["gpu_probe"]["observed"] = {"written": "by another version"}
    assert "Still here." in render(record)["gpu_probe"]


WRITER = """
import sys
sys.path.insert(0, {root!r})
from preflight.findings import Finding, Level, Section
from preflight.report import STAGES, write_section
path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(first, first + count):
    stage = STAGES[number % 4]
    finding = Finding("a-code", Level.OK, f"write {{number}} " + "x" * 2000)
    trouble = write_section(path, Section(stage, {{"count": number}}, (finding,)))
    if trouble:
        sys.exit(trouble)
"""


def writer(tmp_path: Path, view: Path, first: int, count: int) -> subprocess.Popen[bytes]:
    script = tmp_path / "writer.py"
    if not script.exists():
        script.write_text(WRITER.format(root=str(ROOT)), encoding="utf-8")
    return subprocess.Popen([sys.executable, str(script), str(view), str(first), str(count)])


def whole(view: Path) -> dict[str, object]:
    """The report parses, its markers pair, and it says what the record says."""
    record = json.loads(view.with_suffix(".json").read_text(encoding="utf-8"))
    rendered = render(record)
    text = view.read_text(encoding="utf-8")
    assert with_regions(text, rendered) is not None
    return dict(record["sections"])


@pytest.mark.slow
def test_two_hundred_concurrent_writes_lose_nothing(tmp_path: Path) -> None:
    view = tmp_path / "r.md"
    writers = [writer(tmp_path, view, first=25 * number, count=25) for number in range(8)]
    assert [process.wait(300) for process in writers] == [0] * 8
    sections = whole(view)
    assert set(sections) == set(STAGES)
    assert not list(tmp_path.glob(".*.part"))
    text = view.read_text(encoding="utf-8")
    for stage in STAGES:
        count = sections[stage]["observed"]["count"]  # type: ignore[index]
        assert f"write {count} " in text


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_forty_kills_at_random_moments_damage_nothing(tmp_path: Path) -> None:
    view = tmp_path / "r.md"
    assert write_sections(view, [section(stage, f"first {stage}") for stage in STAGES]) == ""
    text = view.read_text(encoding="utf-8")
    view.write_text("Mine.\n" + text, encoding="utf-8")
    random.seed(4)
    for number in range(40):
        before = view.with_suffix(".json").stat().st_mtime_ns
        process = writer(tmp_path, view, first=1001 * number, count=1000)  # each begins with another stage
        while view.with_suffix(".json").stat().st_mtime_ns == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.random() * 0.25)  # the first write takes most of this, later ones a tenth of it
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        sections = whole(view)
        assert set(sections) == set(STAGES)
        assert view.read_text(encoding="utf-8").startswith("Mine.\n")
    assert write_section(view, section("gpu_probe", "After all of it.")) == ""
    assert not list(tmp_path.glob(".*.part"))
    assert "After all of it." in view.read_text(encoding="utf-8")
    assert sum("write " in str(value) for value in whole(view).values()) >= 1
