"""The report for looking at: one HTML file with its charts inside, read without network and without scripts."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from preflight import charts
from preflight.charts import GIB, number
from preflight.facts import shipped
from preflight.findings import quote
from preflight.report import STAGES, ReportTrouble, read_record, replace_text
from preflight.words import ENGLISH, HTML_NAMES, words_of

LIMIT_BYTES = 1 << 20
ORDER = {"fail": 0, "unknown": 1, "warn": 2, "ok": 3}
TIERS = (0.2, 0.5)
# The readings of the stress test that are drawn over time.
CURVES = ("tflops", "temperature_c", "sm_clock_mhz", "power_w", "utilization_pct", "memory_used_bytes")


@dataclass(frozen=True)
class Fullness:
    """How much of long lists and texts is shown; what is left out is in the JSON record."""

    rows: int
    characters: int


# A record with thousands of findings still has to give a page that opens: the first that stays under the limit is used.
FULLNESS = (Fullness(200, 4000), Fullness(60, 1000), Fullness(20, 300), Fullness(5, 120))


def render_html(
    record: Mapping[str, Any], name: str = "compatibility_report", strict: bool = False, language: str = ENGLISH
) -> str:
    """The page for a report's record, in a language.

    The same record gives the same text, under 1 MiB whatever the record holds.

    A part that cannot be shown (a section written by another version) is left out; its findings stay.
    With `strict` it raises instead.
    """
    text = ""
    for fullness in FULLNESS:
        encoded = _page(record, name, fullness, strict, language).encode(
            "utf-8", errors="replace"
        )  # a lone surrogate becomes "?"
        text = encoded.decode("utf-8")
        if len(encoded) < LIMIT_BYTES:
            break
    return text


def write_html(view_path: str | os.PathLike[str], language: str = ENGLISH) -> str:
    """Write the page beside a report from its JSON record. Returns "" or, in one line, why it could not be written.

    Whoever calls this while others may write the same report holds the report's lock.
    """
    page = Path(view_path).with_suffix(".html")
    try:
        record = read_record(page.with_suffix(".json"))
        replace_text(page, render_html(record, page.stem, language=language))
    except ReportTrouble as trouble:
        return str(trouble)
    except OSError as error:
        return f"{page}: cannot be written ({error.strerror or error})"
    except ImportError as error:
        return f"{page}: not written, because the Python package {error.name!r} is missing; `pip install {error.name}`"
    return ""


def _page(record: Mapping[str, Any], name: str, fullness: Fullness, strict: bool, language: str) -> str:
    from preflight.verdict import judge

    environment = _environment(fullness, language)
    sections = {stage: record["sections"][stage] for stage in STAGES if stage in record["sections"]}
    model = sections.get("model_analyzer")
    style = (shipped("templates", "html", "report.css")).read_text(encoding="utf-8").strip()
    script = (shipped("templates", "html", "report.js")).read_text(encoding="utf-8").strip()
    return str(
        environment.get_template("report.html.j2").render(
            name=name,
            language=HTML_NAMES[language],
            job=record.get("job") or {},
            verdict=judge(record),
            memory=_facts(environment, "memory", model["observed"], strict) if model else "",
            cards=[_card(environment, stage, section, fullness, strict) for stage, section in sections.items()],
            style=_markup(f"\n{style}\n"),
            script=_markup(f"\n{script}\n"),
            script_hash=_hash(f"\n{script}\n"),
            style_hash=_hash(f"\n{style}\n"),
        )
    )


def _hash(text: str) -> str:
    """What the page's own content policy allows to run: exactly this text and nothing else."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _card(environment: Any, stage: str, section: Mapping[str, Any], fullness: Fullness, strict: bool) -> dict[str, Any]:
    """One stage: its facts and its findings, worst first."""
    findings = sorted(section["findings"], key=lambda item: ORDER[item["level"]])
    passed = [finding for finding in findings if finding["level"] == "ok"]
    told = [finding for finding in findings if finding["level"] != "ok"]
    return {
        "stage": stage,
        "level": section["level"],
        "facts": _facts(environment, stage, section["observed"], strict),
        "told": told[: fullness.rows],
        "passed": passed[: fullness.rows],
        "left_out": max(0, len(told) - fullness.rows) + max(0, len(passed) - fullness.rows),
    }


def _facts(environment: Any, part: str, observed: Mapping[str, Any], strict: bool) -> Any:
    """One part of the page as HTML; "" when its template cannot show what this section observed."""
    import jinja2

    try:
        text = environment.get_template(f"html/{part}.html.j2").render(observed=observed, view=VIEWS[part](observed))
    except (jinja2.TemplateError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        if strict:
            raise
        text = ""
    return _markup(text.strip())


# --- what the charts show ------------------------------------------------------------------------------------------


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, (list, tuple)) else []


def hardware_view(observed: Mapping[str, Any]) -> dict[str, Any]:
    """Of the hardware stage: the telemetry of the stress test as curves and as ranges."""
    stress = _mapping(observed.get("stress"))
    telemetry, course = _mapping(stress.get("telemetry")), _mapping(stress.get("curve"))
    curves = []
    for name in CURVES:
        unit = float(GIB) if name == "memory_used_bytes" else 1.0
        read = [None if (size := number(value)) is None else size / unit for value in course.get(name) or ()]
        if (drawn := charts.curve(course.get("at_s"), read)) is not None:
            curves.append({"name": name, **drawn})
    readings = []
    for name, reading in telemetry.items():
        if isinstance(reading, Mapping) and {"min", "median", "max"} <= reading.keys():
            # a share has a scale of its own; every other reading is shown against its own highest value
            extent = 100.0 if name.endswith("_pct") else None
            span = charts.span(reading["min"], reading["median"], reading["max"], extent)
            readings.append({"name": name, **reading, "span": span})
    throttle = [
        {"name": str(name), "share": share, "at": charts.percent(share, 1.0)}
        for name, value in _mapping(telemetry.get("throttle_share")).items()
        if (share := number(value)) is not None
    ]
    return {"curves": curves, "readings": readings, "throttle": throttle}


def memory_view(observed: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model stage: the memory bar, the step's timeline or its moments, and what would fit.

    `enlarged` is the bar without the card, where it would be too small to read against the card.
    """
    memory = dict(_mapping(observed.get("memory")))
    places = (memory, _mapping(memory.get("rehearsal")), _mapping(memory.get("measured")))
    evidence = [found for place in places if (found := _mapping(place.get("estimate")))]
    # the bar shows the closest to reality that has parts and an interval; a measurement has the figures alone
    memory["estimate"] = next((item for item in reversed(evidence[:2]) if item.get("components")), {})
    estimate, budget = _mapping(memory["estimate"]), _mapping(memory.get("budget"))
    free, context = number(budget.get("free_bytes")), number(estimate.get("context_bytes")) or 0.0
    moments = {
        str(name): size
        for name, value in _mapping(estimate.get("moments_bytes")).items()
        if (size := number(value)) is not None
    }
    highest = max(moments.values(), default=0.0)
    bar = charts.memory_bar(memory)
    peak = bar["peak"]["bytes"] if bar else 0.0
    return {
        "memory": bar,
        "estimate": estimate,
        "evidence": evidence if len(evidence) > 1 else [],
        "enlarged": charts.memory_bar({**memory, "budget": None}) if bar and bar["high"]["at"] < 45 else None,
        "shares": {part["name"]: charts.percent(part["bytes"], peak) for part in bar["parts"]} if bar else {},
        # what torch can have: the context is not its own
        "timeline": charts.timeline(estimate.get("timeline"), None if free is None else free - context),
        "moments": [
            {"name": name, "bytes": size, "at": charts.percent(size, highest), "peak": size == highest}
            for name, size in moments.items()
        ],
        "plans": plans(memory),
        "best": _rows(_mapping(memory.get("would_fit")).get("best")),
        "changes": _rows(_mapping(memory.get("would_fit")).get("single")),
    }


def plans(memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of "what would fit": the same plan by each method, against what is free."""
    context = number(_mapping(memory.get("estimate")).get("context_bytes")) or 0.0
    free = number(_mapping(memory.get("budget")).get("free_bytes"))
    tried = [
        {"what": {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}.get(str(name), str(name)), **item}
        for name, item in _mapping(memory.get("by_method")).items()
        if isinstance(item, Mapping)
    ]
    found = []
    for row in tried:
        allocated, reserved = number(row.get("allocated_bytes")), number(row.get("reserved_bytes"))
        if allocated is None or reserved is None:
            continue
        found.append({**row, "allocated_bytes": allocated, "reserved_bytes": reserved, "needs": reserved + context})
    extent = charts.HEADROOM * max([row["needs"] for row in found] + ([free] if free else []), default=1.0)
    for row in found:
        row["width"] = charts.percent(row["needs"], extent)
        row["free_at"] = None if free is None else charts.percent(free, extent)
    return found


def task_view(observed: Mapping[str, Any]) -> dict[str, Any]:
    """Of the task stage: each task's share with its interval, and how long answers took."""
    tasks = []
    for task in _rows(observed.get("tasks")):
        span = charts.span(task.get("low"), task.get("share"), task.get("high"), 1.0)
        tasks.append({**task, "span": span})
    seconds = [
        value
        for sample in _rows(observed.get("samples"))
        if (value := number(sample.get("seconds"))) is not None and value >= 0
    ]
    latency = _mapping(observed.get("latency"))
    marks = {"P50": number(latency.get("p50_s")), "P95": number(latency.get("p95_s"))}
    tiers = _mapping(observed.get("settings")).get("tiers")
    bounds = [tier for value in tiers if (tier := number(value)) is not None] if isinstance(tiers, list) else TIERS
    return {
        "tasks": tasks,
        "tiers": [charts.percent(tier, 1.0) for tier in bounds],
        "latency": charts.histogram(seconds, marks),
        "answers": len(seconds),
    }


def software_view(observed: Mapping[str, Any]) -> dict[str, Any]:
    """Of the software stage: its steps, with the seconds of each as a part of the longest."""
    stages = _rows(observed.get("stages"))
    longest = max((number(stage.get("seconds")) or 0.0 for stage in stages), default=0.0)
    return {
        "stages": [{**stage, "width": charts.percent(number(stage.get("seconds")) or 0.0, longest)} for stage in stages]
    }


VIEWS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpu_probe": hardware_view,
    "env_sandbox": software_view,
    "model_analyzer": dict,
    "memory": memory_view,
    "task_evaluator": task_view,
}


# --- words ---------------------------------------------------------------------------------------------------------


def prose(text: object, limit: int = 4000) -> Any:
    """A finding's text as HTML: its `code spans` become code (those with a blank in them can be copied)."""
    from markupsafe import Markup, escape

    parts = _clipped(str(text), limit).split("`")
    if len(parts) % 2 == 0:  # an odd backtick: nothing in this text can be trusted to be a code span
        return escape(quote(text, limit))
    html = Markup("")
    for index, part in enumerate(parts):
        shown = quote(part, limit)
        if index % 2:
            kind = Markup(' class="copy"') if " " in shown else Markup("")
            html += Markup("<code{}>{}</code>").format(kind, shown)
        elif part:
            before, after = " " * part[:1].isspace(), " " * (part[-1:].isspace() and len(part) > 1)
            html += Markup("{}{}{}").format(before, shown, after)
    return html


def _clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3].replace("`", "'") + "..."


def sources(text: object) -> Any:
    """A finding's source; addresses in it can be followed."""
    from markupsafe import Markup, escape

    html = Markup("")
    for index, part in enumerate(re.split(r"(https?://[^\s<>\"'`]+)", quote(text, 600))):
        address = part.rstrip(".,;)")
        rest = part[len(address) :]
        html += Markup('<a href="{0}" rel="noreferrer">{0}</a>{1}').format(address, rest) if index % 2 else escape(part)
    return html


@cache
def _environment(fullness: Fullness, language: str) -> Any:
    import jinja2
    from markupsafe import Markup

    words = words_of(language)

    def finalize(value: Any) -> Any:
        if value is None or isinstance(value, jinja2.Undefined):
            return words.template("could not tell")
        if isinstance(value, bool):
            return words.template("yes" if value else "no")
        if isinstance(value, Markup) or not isinstance(value, str):
            return value
        return quote(value, fullness.characters)

    def of_number(write: Any) -> Any:
        def text(value: object, *arguments: Any) -> str:
            found = number(value)
            return words.template("could not tell") if found is None else str(write(found, *arguments))

        return text

    def filled(text: str, **values: Any) -> Any:
        """Words of a template, trusted, with their markup; what is put into them is escaped."""
        return Markup(words.template(text)).format(**{name: finalize(value) for name, value in values.items()})

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.ChainableUndefined,
        finalize=finalize,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        gib=of_number(lambda value: f"{value / 2**30:.2f} GiB"),
        mib=of_number(lambda value: f"{value / 2**20:,.0f} MiB"),
        num=of_number(lambda value, digits=0: f"{value:,.{digits}f}"),
        pct=of_number(lambda value, digits=0: f"{100 * value:.{digits}f} %"),
        prose=lambda text: prose(words.text(str(text)), fullness.characters),
        said=words.said,
        t=filled,
        sources=sources,
        rows=lambda value, most=fullness.rows: _rows(value)[: min(most, fullness.rows)],
        points=_points,
        area=_area,
    )
    environment.globals.update(t=filled)
    return environment


def _points(pairs: Sequence[Sequence[float]]) -> Any:
    """[x, y upwards] in per cent as the points of an SVG polyline in a box of 1000 x 1000. Numbers only: markup."""
    return _markup(" ".join(f"{10 * x:.1f},{1000 - 10 * y:.1f}" for x, y in pairs))


def _area(pairs: Sequence[Sequence[float]]) -> Any:
    """The same, closed along the ground."""
    first, last = pairs[0][0], pairs[-1][0]
    return _markup(f"{10 * first:.1f},1000 {_points(pairs)} {10 * last:.1f},1000")
