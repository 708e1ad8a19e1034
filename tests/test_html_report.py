"""The HTML page: its charts' numbers, hostile text, size, no network, and how it does in a real browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_invariants import everything, section_of

from preflight import charts
from preflight.findings import Finding, Level, Section
from preflight.html_report import FULLNESS, LIMIT_BYTES, memory_view, prose, render_html, sources, write_html
from preflight.memory import trace
from preflight.report import STAGES, render, write_section

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
GIB = 2**30


def record_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


class Page(HTMLParser):
    """The elements of a page, the text that is read, and whether its tags nest."""

    EMPTY = frozenset({"meta", "br", "rect", "line", "circle", "path", "polygon", "polyline"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.lines: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.EMPTY, tag
        self.elements.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] == ["style"]:
            self.styles.append(data)
        elif data.strip():
            self.lines.append(re.sub(r"\s+", " ", data).strip())


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</title></style></script><b>",
    "`</code><script>alert(1)</script>`",
    "javascript:alert(1) https://example.org/\"onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.exe\x00\x1b[31m",
    "-->]]>&lt;b&gt;",
    "\ud800",
)
TAGS = frozenset(
    [
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "a",
        "header",
        "h1",
        "h2",
        "h3",
        "div",
        "p",
        "strong",
        "ul",
        "li",
        "span",
        "nav",
        "main",
        "section",
        "details",
        "summary",
        "dl",
        "dt",
        "dd",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "svg",
        "rect",
        "line",
        "text",
        "circle",
        "path",
        "polygon",
        "polyline",
        "desc",
        "defs",
        "pattern",
        "code",
        "script",
        "footer",
    ]
)


def poisoned(value: Any, text: str) -> Any:
    """The same shape of data with every text replaced."""
    if isinstance(value, dict):
        return {key: poisoned(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, text) for item in value]
    return text if isinstance(value, str) else value


def hostile_record(text: str) -> dict[str, Any]:
    record = record_of("example")
    for section in record["sections"].values():
        section["observed"] = poisoned(section["observed"], text)
        for finding in section["findings"]:
            finding |= {"what": text, "why": text, "fix": [text], "source": text}
    return {**record, "job": {"model_name": text, "data_name": text, "data": text, "model": text}}


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_stays_text(text: str) -> None:
    html = render_html(hostile_record(text))
    page = Page(html)
    assert {tag for tag, _ in page.elements} <= TAGS
    assert len(page.scripts) == 1 and len(page.styles) == 1
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcset")], tag
        address = attributes.get("href")
        if address is not None:
            assert tag == "a"
            assert re.match(r"#[a-z_]+$|https?://", address), address
    assert not re.search(r"[\x00-\x08\x0e-\x1f\u202a-\u202e\u2066-\u2069]", html)
    assert "49" not in page.lines
    html.encode("utf-8")


@pytest.mark.parametrize("name", ["example", "too-old-torch"])
def test_the_page_needs_no_network_and_allows_no_other_script(name: str) -> None:
    html = render_html(record_of(name), strict=True)
    page = Page(html)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';")
    for kind, text in (("script", page.scripts[0]), ("style", page.styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert "@import" not in html
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= {"#hatch"}
    assert not [tag for tag, _ in page.elements if tag in ("link", "img", "iframe", "object", "embed", "base", "form")]
    assert len(html.encode()) < 128 * 1024


@pytest.mark.parametrize("name", ["example", "too-old-torch"])
def test_headings_landmarks_and_names_are_in_order(name: str) -> None:
    page = Page(render_html(record_of(name)))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        for wanted in (attributes.get("aria-labelledby") or "").split():
            assert wanted in ids
        address = attributes.get("href") or ""
        if address.startswith("#"):
            assert address[1:] in ids
        if tag == "svg" and "viewbox" not in attributes:
            assert attributes.get("role") == "img" or attributes.get("aria-hidden") == "true"
    assert [tag for tag, _ in page.elements].count("main") == 1
    assert ("html", {"lang": "en"}) in page.elements


def test_the_same_record_gives_the_same_page() -> None:
    assert render_html(record_of("example")) == render_html(record_of("example"))


@pytest.mark.parametrize("name", ["example", "too-old-torch"])
def test_what_a_reader_sees_is_as_recorded(name: str) -> None:
    """Golden texts. After a wanted change: `UPDATE_GOLDEN=1 pytest tests/test_html_report.py`, then read the diff."""
    record = record_of(name)
    whole = render(record, strict=True)
    made = {
        f"{name}.summary.md": whole["summary"].strip() + "\n",
        f"{name}.page.txt": "\n".join(Page(render_html(record, strict=True)).lines) + "\n",
    }
    for file, text in made.items():
        if os.environ.get("UPDATE_GOLDEN"):
            (GOLDEN / file).write_text(text, encoding="utf-8", newline="\n")
        assert text == (GOLDEN / file).read_text(encoding="utf-8"), f"{file} differs"


@pytest.mark.parametrize(("script", "arguments"), everything())
def test_every_recorded_section_is_shown_with_its_facts(script: str, arguments: tuple[str, ...]) -> None:
    document = json.loads(section_of(script, *arguments))
    html = render_html({"schema": 1, "sections": {script: document}}, strict=True)
    page = Page(html)
    text = " ".join(page.lines)
    for finding in document["findings"]:
        assert finding["code"] in text
    assert not re.search(r"(?<![\w.`'])(None(?! of)|nan|Undefined|\[object)(?![\w.`'])", text)
    assert len(html.encode()) < 256 * 1024


def test_a_huge_record_gives_a_page_under_a_mebibyte_that_keeps_the_worst() -> None:
    findings = tuple(
        Finding(f"code-{n}", Level.OK if n % 2 else Level.WARN, "<&'\"" * 200, "<" * 4000, ("&" * 4000,) * 3, "s" * 900)
        for n in range(1500)
    )
    worst = Finding("the-worst", Level.FAIL, "This decides.", "Why.", ("do `this now`",), "source")
    sections = {stage: Section(stage, {"samples": []}, (*findings, worst)).as_json() for stage in STAGES}
    html = render_html({"schema": 1, "sections": sections})
    assert len(html.encode()) < LIMIT_BYTES
    assert html.count("the-worst") >= 4
    assert "more findings are in compatibility_report.json" in html


@pytest.mark.parametrize(
    "observed", [{"memory": 7}, {"gpus": 1, "tasks": "x", "stages": {}}, {"stress": {"telemetry": []}}]
)
def test_a_section_of_another_version_keeps_its_findings(observed: dict[str, Any]) -> None:
    for stage in STAGES:
        section = Section(stage, observed, (Finding("a-code", Level.WARN, "Still here.", "w", ("f",), "s"),))
        assert "Still here." in render_html({"schema": 1, "sections": {stage: section.as_json()}})


def test_an_empty_report_says_what_to_run() -> None:
    text = " ".join(Page(render_html({"schema": 1, "sections": {}})).lines)
    assert "COULD NOT TELL" in text
    assert "python -m preflight MODEL" in text


# --- words ---------------------------------------------------------------------------------------------------------


def test_code_in_findings_becomes_code_and_commands_can_be_copied() -> None:
    assert str(prose("run `pip install a_b` now")) == 'run <code class="copy">pip install a_b</code> now'
    assert str(prose("see `config.json`")) == "see <code>config.json</code>"
    assert str(prose("an odd ` backtick")) == "an odd &#39; backtick"
    assert str(prose("<b>")) == "&lt;b&gt;"
    assert str(prose("a" * 50, 20)) == "a" * 17 + "..."


def test_only_web_addresses_in_sources_become_links() -> None:
    assert str(sources("see https://example.org/a?b=1&c=2.")) == (
        'see <a href="https://example.org/a?b=1&amp;c=2" rel="noreferrer">https://example.org/a?b=1&amp;c=2</a>.'
    )
    assert "href" not in str(sources("javascript:alert(1) file:///etc/passwd"))


# --- charts, with numbers worked out by hand -----------------------------------------------------------------------


def memory(free: int | None, total: int | None) -> dict[str, Any]:
    parts = {"static_model": 4 * GIB, "activations": 3 * GIB, "gradients": 0, "safety_margin": 1 * GIB}
    return {
        "estimate": {
            "components": {name: {"bytes": size, "what": "w"} for name, size in parts.items()},
            "low_bytes": 7 * GIB,
            "high_bytes": 9 * GIB,
            "context_bytes": GIB,
        },
        "budget": {"free_bytes": free, "total_bytes": total},
    }


def test_the_memory_bar_lies_against_the_card() -> None:
    bar = charts.memory_bar(memory(18 * GIB, 20 * GIB))
    assert bar is not None
    # 100 % is 1.06 x 20 GiB = 21.2 GiB, so 1 GiB is 4.717 %
    places = {part["name"]: (part["at"], part["width"]) for part in bar["parts"]}
    assert places["static_model"] == (0.0, pytest.approx(18.868, abs=0.001))
    assert places["activations"] == (pytest.approx(18.868, abs=0.001), pytest.approx(14.151, abs=0.001))
    assert places["gradients"][1] == 0.0
    assert places["context"] == (pytest.approx(37.736, abs=0.001), pytest.approx(4.717, abs=0.001))
    assert bar["peak"]["bytes"] == 9 * GIB
    assert (bar["low"]["bytes"], bar["high"]["bytes"]) == (8 * GIB, 10 * GIB)
    assert bar["high"]["at"] == pytest.approx(47.170, abs=0.001)
    assert bar["free"]["at"] == pytest.approx(84.906, abs=0.001)
    assert bar["total"]["at"] == pytest.approx(94.340, abs=0.001)
    assert [tick["value"] for tick in bar["ticks"]] == [0, 5, 10, 15, 20]


def test_the_memory_bar_without_a_card_fills_the_width() -> None:
    bar = charts.memory_bar(memory(None, None))
    assert bar is not None and bar["free"] is None and bar["total"] is None
    assert bar["high"]["at"] == pytest.approx(94.340, abs=0.001)  # 10 of 10.6 GiB


def test_a_small_estimate_on_a_large_card_is_also_shown_enlarged() -> None:
    assert memory_view({"memory": memory(75 * GIB, 80 * GIB)})["enlarged"] is not None
    assert memory_view({"memory": memory(11 * GIB, 12 * GIB)})["enlarged"] is None


def test_a_rehearsal_is_shown_before_the_formulas_and_beside_them() -> None:
    seen = memory(11 * GIB, 12 * GIB)
    seen["estimate"] |= {"evidence": "closed form"}
    rehearsed = {**seen["estimate"], "evidence": "rehearsed", "low_bytes": 6 * GIB, "timeline": [["fwd 0", 1, 2]] * 3}
    view = memory_view({"memory": {**seen, "rehearsal": {"trouble": None, "estimate": rehearsed}}})
    assert [item["evidence"] for item in view["evidence"]] == ["closed form", "rehearsed"]
    assert view["memory"]["low"]["bytes"] == 7 * GIB  # the rehearsed 6 GiB and the context
    assert view["timeline"] is not None
    failed = memory_view({"memory": {**seen, "rehearsal": {"trouble": "torch is missing", "estimate": None}}})
    assert failed["memory"]["low"]["bytes"] == 8 * GIB and failed["evidence"] == [] and failed["timeline"] is None


def test_no_estimate_gives_no_bar() -> None:
    assert charts.memory_bar({"estimate": None, "budget": {}}) is None
    assert memory_view({})["memory"] is None


def test_the_timeline_keeps_phases_peaks_and_the_limit() -> None:
    points = [["load 0", 0, 0], ["fwd 0", 2 * GIB, 2 * GIB], ["bwd 0", 4 * GIB, 5 * GIB], ["bwd 0", 1 * GIB, 5 * GIB]]
    line = charts.timeline(points, free_bytes=6.0 * GIB)
    assert line is not None
    # the limit is the highest thing: 100 % is 6.36 GiB
    assert line["free"]["at"] == pytest.approx(94.340, abs=0.001)
    assert line["allocated"][2] == [pytest.approx(66.667, abs=0.001), pytest.approx(62.893, abs=0.001)]
    assert [(p["word"], p["step"], p["peak_bytes"]) for p in line["phases"]] == [
        ("load", 1, 0),
        ("fwd", 1, 2 * GIB),
        ("bwd", 1, 4 * GIB),
    ]
    assert sum(p["width"] for p in line["phases"]) == pytest.approx(100.0, abs=0.01)
    assert line["peak"]["bytes"] == 4 * GIB and line["peak"]["word"] == "bwd"
    assert line["reserved_bytes"] == 5 * GIB
    far = charts.timeline(points, free_bytes=80.0 * GIB)
    assert far is not None and far["free"] is None


def test_a_replayed_timeline_holds_the_peak_of_every_phase() -> None:
    events: list[tuple[Any, ...]] = [("mark", "fwd", 0)]
    for number in range(1, 2001):  # 512 bytes stay each time, a big tensor comes and goes at an odd place
        events.append((number, 512, 0, number))
        if number in (777, 1333):
            events += [(10_000 + number, (number + 1) << 20, 0, 10_000 + number), (10_000 + number,)]
        if number == 1000:
            events.append(("mark", "bwd", 0))
    replayed = trace.replay(events, ["activation|x|[1]|float32"])
    line = charts.timeline(replayed.timeline)
    assert line is not None
    assert {f"{p['word']} {p['step'] - 1}": p["peak_bytes"] for p in line["phases"]} == replayed.phases
    assert replayed.phases["fwd 0"] == (778 << 20) + 777 * 512
    assert line["peak"]["bytes"] == replayed.allocated_bytes == (1334 << 20) + 1333 * 512


def test_a_long_timeline_is_thinned_without_losing_its_peak() -> None:
    points = [["fwd 0", 1000, 2000] for _ in range(5000)]
    points[1234] = ["fwd 0", 9999, 10000]
    line = charts.timeline(points)
    assert line is not None
    assert len(line["allocated"]) <= charts.MOST_POINTS
    assert max(y for _, y in line["allocated"]) == pytest.approx(100 * 9999 / 10600, abs=0.01)


@pytest.mark.parametrize(
    "points", [None, [], [["fwd 0", 1, 1]], "text", [["a"], ["b"]], [["a", None, 1], ["b", True, 2]]]
)
def test_a_timeline_that_is_none_is_left_out(points: object) -> None:
    assert charts.timeline(points) is None


def test_a_reading_over_time_keeps_its_gaps() -> None:
    drawn = charts.curve([1.0, 2.0, 3.0, 4.0, 5.0], [50.0, 100.0, None, 80.0, 60.0])
    assert drawn is not None
    # 100 % upwards is 1.06 x 100
    assert drawn["lines"] == [
        [[20.0, pytest.approx(47.170, abs=0.001)], [40.0, pytest.approx(94.340, abs=0.001)]],
        [[80.0, pytest.approx(75.472, abs=0.001)], [100.0, pytest.approx(56.604, abs=0.001)]],
    ]
    assert (drawn["first"], drawn["last"], drawn["low"], drawn["high"]) == (50.0, 60.0, 50.0, 100.0)
    alone = charts.curve([1.0, 2.0, 3.0, 4.0], [5.0, None, 5.0, 5.0])
    assert alone is not None and len(alone["lines"][0]) == 2


@pytest.mark.parametrize(
    ("seconds", "values"),
    [(None, None), ([1, 2], None), ([1, 2], [None, 3]), ([1], [1]), ("ab", "cd"), ([1, 2], [float("nan"), 1])],
)
def test_a_reading_that_is_none_is_not_drawn(seconds: object, values: object) -> None:
    assert charts.curve(seconds, values) is None


def stressed_record() -> dict[str, Any]:
    """The example after a stress test: a card that grows hot and slows down after 25 of 60 s."""
    record = record_of("example")
    at_s = [0.5 * (n + 1) for n in range(120)]
    record["sections"]["gpu_probe"]["observed"]["stress"] = {
        **{"device": "cuda:0", "name": "NVIDIA GeForce RTX 3090", "ended": "complete", "seconds": 60.0, "tflops": 61.2},
        **{"dtype": "bfloat16", "tflops_theoretical": 71.0, "copy_gb_per_s": 812.0, "copy_gb_per_s_theoretical": 936.1},
        **{"wrong_results": 0, "sag_pct": 12.5, "longest_kernel_s": 0.021},
        "telemetry": {
            **{"source": "NVML", "samples": 480, "hertz": 8.0, "throttle_share": {"sw thermal slowdown": 0.4}},
            "temperature_c": {"min": 41, "median": 80, "max": 84},
        },
        "curve": {
            "at_s": at_s,
            "tflops": [66.0 if at < 25 else 57.8 for at in at_s],
            "temperature_c": [min(84.0, 41 + 1.7 * at) for at in at_s],
            "sm_clock_mhz": [1860.0 if at < 25 else 1605.0 for at in at_s],
            "power_w": [None if 30 < at < 33 else 348.0 for at in at_s],
            "memory_used_bytes": [4.0 * GIB] * 120,
        },
    }
    return record


def test_the_stress_test_is_drawn_with_its_words() -> None:
    page = Page(render_html(stressed_record(), strict=True))
    text = " ".join(page.lines)
    assert "speed, TFLOP/s over 60 s of load" in text
    assert "66 at the start and 57.8 at the end; lowest 57.8, highest 66." in text
    assert "4 at the start and 4 at the end" in text  # GiB
    pictures = [attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("role") == "img"]
    named = [one for one in pictures if (one.get("aria-labelledby") or "").startswith("curve-")]
    assert len(named) == 5
    # the power was not read for a while: its curve has a gap
    assert [tag for tag, _ in page.elements].count("polyline") >= 6


def test_the_histogram_counts_every_value_once() -> None:
    # largest 2.0, at most 6 bars: steps of 0.5
    found = charts.histogram([0.1, 0.4, 0.5, 0.9, 1.2, 1.3, 2.0], {"P50": 0.9, "P95": None})
    assert found is not None
    assert [(bar["low"], bar["count"]) for bar in found["bars"]] == [(0.0, 2), (0.5, 2), (1.0, 2), (1.5, 0), (2.0, 1)]
    assert [bar["height"] for bar in found["bars"]] == [100.0, 100.0, 100.0, 0.0, 50.0]
    assert found["marks"] == [{"name": "P50", "value": 0.9, "at": 36.0}]  # 0.9 of 2.5
    assert charts.histogram([1.0] * 4, {}) is None


def test_values_that_are_all_zero_or_equal_do_not_break_a_chart() -> None:
    zero = charts.histogram([0.0] * 6, {"P50": 0.0})
    assert zero is not None and zero["bars"][0]["count"] == 6
    equal = charts.histogram([3.0] * 6, {})
    assert equal is not None and sum(bar["count"] for bar in equal["bars"]) == 6


@pytest.mark.parametrize(
    ("extent", "most", "step"), [(21.2, 6, 5), (10.0, 5, 2), (0.9, 6, 0.2), (6.0, 6, 1), (0.0, 6, 1), (65536, 4, 20000)]
)
def test_ticks_are_round_numbers(extent: float, most: int, step: float) -> None:
    assert charts.nice_step(extent, most) == pytest.approx(step)


def test_a_range_keeps_its_middle() -> None:
    assert charts.span(20, 50, 80, 100.0) == {"at": 20.0, "width": 60.0, "middle": 50.0}
    assert charts.span(None, 1, 2) is None
    assert charts.span(float("nan"), 1, 2) is None
    assert charts.span(3, 2, 1) is None


# --- files ---------------------------------------------------------------------------------------------------------


def one_section() -> Section:
    return Section("gpu_probe", {}, (Finding("a-code", Level.OK, "All is well."),))


def test_every_write_of_the_report_writes_the_page_beside_it(tmp_path: Path) -> None:
    view = tmp_path / "r.md"
    assert write_section(view, one_section()) == ""
    first = view.with_suffix(".html").read_bytes()
    assert b"All is well." in first
    assert write_section(view, one_section()) == ""
    assert view.with_suffix(".html").read_bytes() == first
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.skipif(os.name == "nt" or (os.geteuid() == 0 and not Path("/dev/full").exists()), reason="POSIX only")
def test_a_page_that_cannot_be_written_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    view = tmp_path / "r.md"
    view.with_suffix(".html").mkdir()
    trouble = write_section(view, one_section())
    assert trouble.startswith(str(view.with_suffix(".html"))) and "\n" not in trouble
    assert "All is well." in view.read_text(encoding="utf-8")
    assert json.loads(view.with_suffix(".json").read_text(encoding="utf-8"))["sections"]["gpu_probe"]["level"] == "ok"


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{", encoding="utf-8")
    assert "is not a record" in write_html(tmp_path / "r.md")
    assert not (tmp_path / "r.html").exists()


# --- a real browser ------------------------------------------------------------------------------------------------


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on PATH")
    return found


@pytest.mark.slow
def test_chromium_opens_the_page_as_a_file_at_both_widths(tmp_path: Path) -> None:
    browser = chromium()
    page = tmp_path / "page.html"
    page.write_text(render_html(record_of("example")), encoding="utf-8")
    for width in (1280, 500):  # a window of headless Chromium is at least 500 wide; narrower is tested with node
        shot = tmp_path / f"{width}.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1200", f"--screenshot={shot}"]
        done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
        assert shot.exists(), done.stderr[-2000:]
        header = shot.read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(header[16:20], "big") == width
        assert shot.stat().st_size > 20_000  # an empty page of this size is a few kilobytes


@pytest.mark.slow
def test_a_reader_finds_no_serious_fault_at_any_width_or_colour(tmp_path: Path) -> None:
    browser = chromium()
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on PATH")
    look = ROOT / "tests" / "browser" / "look.js"
    needs = "require.resolve('axe-core');require.resolve('playwright-core')"
    if subprocess.run([node, "-e", needs], cwd=look.parent, capture_output=True, check=False).returncode:
        pytest.skip("the npm packages axe-core and playwright-core are not where node looks (set NODE_PATH)")
    page = tmp_path / "page.html"
    record = stressed_record()  # with the model stage of the other: a card it does not fit on, and what would
    record["sections"]["model_analyzer"] = record_of("too-old-torch")["sections"]["model_analyzer"]
    page.write_text(render_html(record, strict=True), encoding="utf-8")
    done = subprocess.run(
        [node, str(look), browser, str(page), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    for one in seen["looks"]:
        where = f"{one['width']} {one['colorScheme']}"
        assert one["faults"] == [], where
        assert one["rulesPassed"] > 20, where
        assert one["requests"] == [], where
        assert one["complaints"] == [], where
        assert one["scrollWidth"] <= one["width"], where
    grounds = {one["colorScheme"]: one["ground"] for one in seen["looks"]}
    assert grounds["light"] != grounds["dark"]
    assert seen["copy"]["copied"] == seen["copy"]["text"]
    assert seen["copy"]["said"] == f"copied: {seen['copy']['text']}"
    assert seen["plain"]["buttons"] == 0
    assert "Can I fine-tune this model, here?" in seen["plain"]["text"]


# --- --open --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="the browser of this test is a shell script")
def test_open_shows_the_page_in_the_readers_browser(tmp_path: Path) -> None:
    seen = tmp_path / "seen.txt"
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\nprintf %s "$1" > {seen}\n', encoding="utf-8")
    program.chmod(0o755)
    machine = ROOT / "tests" / "wild" / "A-gpu" / "A12-sm120-wheel-too-old"
    skipped = [word for stage in STAGES[1:] for word in ("--skip", stage)]
    command = [sys.executable, "-m", "preflight", str(tmp_path), "--replay", str(machine), *skipped, "--open"]
    environment = {**os.environ, "BROWSER": f"{program} %s", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert seen.read_text(encoding="utf-8") == (tmp_path / "compatibility_report.html").as_uri()


def test_open_without_a_report_is_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "preflight", str(tmp_path), "--no-report", "--open"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --open") and done.stderr.count("\n") == 1


def test_the_page_shows_less_of_long_things_step_by_step() -> None:
    rows = [fullness.rows for fullness in FULLNESS]
    assert rows == sorted(rows, reverse=True)
