"""The report: a JSON record and two views of it, written so that many writers and sudden ends damage nothing."""

from __future__ import annotations

import contextlib
import functools
import html
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.facts import shipped
from preflight.findings import SCHEMA, Section, section_from_json
from preflight.words import ENGLISH, LANGUAGES, Words, words_of

STAGES = ("gpu_probe", "env_sandbox", "model_analyzer", "task_evaluator")
REGIONS = ("summary", *STAGES)
TITLE = "Fine-tuning compatibility report"
LOCK_WAIT_S = 60.0


class ReportTrouble(Exception):
    """Why the report could not be written, in one line."""


def write_section(
    path: str | os.PathLike[str],
    section: Section,
    job: Mapping[str, Any] | None = None,
    language: str = ENGLISH,
) -> str:
    """Put one stage's section into the report. Returns "" or, in one line, why it could not be written."""
    return write_sections(path, [section], job, language)


def write_sections(
    path: str | os.PathLike[str],
    sections: Iterable[Section],
    job: Mapping[str, Any] | None = None,
    language: str = ENGLISH,
) -> str:
    """Put sections into the report at `path` (the Markdown view; the JSON record and the HTML page lie beside it).

    `job` (what was asked: model, data) is kept when given. Sections of other stages stay as they are, and so does all
    text outside the markers. Both views are written in `language`, all sections of them; the record has none.
    Returns "" or, in one line, why the report could not be written; then nothing changed.
    """
    view = _view_path(path)
    record_path = view.with_suffix(".json")
    try:
        from preflight.html_report import write_html

        with _locked(view):
            _sweep_temporaries(view)
            record = read_record(record_path)
            for section in sections:
                record["sections"][section.stage] = section.as_json()
            if job is not None:
                record["job"] = dict(job)
            # Known stages first and in their order, so that the same sections give the same bytes.
            order = {stage: index for index, stage in enumerate(STAGES)}
            record["sections"] = dict(
                sorted(record["sections"].items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
            )
            old = view.read_text(encoding="utf-8") if view.exists() else ""
            new = with_regions(old, render(record, language=language), view.name, title(language))
            replace_text(record_path, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            replace_text(view, new)
            return write_html(view, language)
    except ReportTrouble as trouble:
        return str(trouble)
    except UnicodeDecodeError:
        return f"{view}: is not UTF-8 text; move it away or use --report PATH"
    except OSError as error:
        return f"{view}: cannot be written ({error.strerror or error}); use --report PATH to write elsewhere"
    except ImportError as error:
        return f"{view}: not written, because the Python package {error.name!r} is missing; `pip install {error.name}`"


def write_views(record_path: Path, view: Path, language: str) -> list[Path]:
    """Both views of an existing record, in a language; text outside the markers of an older view is kept.

    Raises ReportTrouble, in one line, when the record is none or a view cannot be written.
    """
    view = _view_path(view)
    page = view.with_suffix(".html")
    try:
        from preflight.html_report import render_html

        with _locked(view):
            record = read_record(record_path)
            old = view.read_text(encoding="utf-8") if view.exists() else ""
            replace_text(view, with_regions(old, render(record, language=language), view.name, title(language)))
            replace_text(page, render_html(record, record_path.stem, language=language))
    except UnicodeDecodeError as error:
        raise ReportTrouble(f"{view}: is not UTF-8 text; move it away or use --output FILE") from error
    except OSError as error:
        raise ReportTrouble(f"{view}: cannot be written ({error.strerror or error}); use --output FILE") from error
    except ImportError as error:
        raise ReportTrouble(
            f"{view}: not written, because the Python package {error.name!r} is missing; `pip install {error.name}`"
        ) from error
    return [view, page]


def title(language: str) -> str:
    """The first line of a new report."""
    return f"# {words_of(language).template(TITLE)}\n"


def _view_path(path: str | os.PathLike[str]) -> Path:
    chosen = Path(path)
    if chosen.suffix.lower() in (".json", ".html"):
        return chosen.with_suffix(".md")
    return chosen if chosen.suffix else chosen.with_suffix(".md")


def read_record(path: Path) -> dict[str, Any]:
    """The record at `path`; a new one when the file does not exist. Raises ReportTrouble when it is not a record."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA:
            raise ReportTrouble(f"{path}: has schema {record['schema']!r}, this program writes {SCHEMA}; move it away")
        for document in record["sections"].values():
            section_from_json(document)
    except FileNotFoundError:
        return {"schema": SCHEMA, "sections": {}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportTrouble(
            f"{path}: is not a record of this program ({type(error).__name__}); move it away or use --report PATH"
        ) from error
    return dict(record)


@contextlib.contextmanager
def _locked(view: Path) -> Iterator[None]:
    """The operating system's lock on this report; it is freed even when the holder is killed."""
    from filelock import FileLock, Timeout

    if not view.parent.is_dir():
        raise ReportTrouble(f"{view}: the folder {view.parent} does not exist")
    lock = view.parent / f".{view.name}.lock"
    os.close(os.open(lock, os.O_RDWR | os.O_CREAT, 0o666))  # FileLock would retry what can never be opened
    try:
        with FileLock(lock, timeout=LOCK_WAIT_S):
            yield
    except Timeout as error:
        raise ReportTrouble(f"{view}: another program has held its lock for {LOCK_WAIT_S:.0f} s") from error


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}."


def _sweep_temporaries(view: Path) -> None:
    """Remove what a killed writer left. Only called under the lock, so nobody is using them."""
    for target in (view, view.with_suffix(".json"), view.with_suffix(".html")):
        for left in view.parent.glob(_temporary_prefix(target) + "*.part"):
            with contextlib.suppress(OSError):
                left.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write the whole text beside `path`, then rename it into place: readers see the old file or the new one."""
    handle, temporary = tempfile.mkstemp(prefix=_temporary_prefix(path), suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


# --- markers -----------------------------------------------------------------------------------------------------


def _begin(region: str) -> str:
    return f"<!-- begin:{region} -->"


def _end(region: str) -> str:
    return f"<!-- end:{region} -->"


def with_regions(old: str, rendered: Mapping[str, str], name: str = "the report", heading: str = f"# {TITLE}\n") -> str:
    """The text `old` with each region between its markers replaced by `rendered[region]`; all other text is kept.

    A region that has no markers yet is put in after the one before it in order (the summary: before all others).
    A first line that is our own in another language becomes `heading`.
    Raises ReportTrouble, naming the lines to delete, when markers are damaged.
    """
    lines = old.split("\n")
    if f"{lines[0]}\n" in {title(language) for language in LANGUAGES}:
        lines[0] = heading.rstrip("\n")
    spans = _spans(lines, name)
    if not spans:
        head = "\n".join(lines).rstrip("\n") + "\n\n" if old.strip() else heading + "\n"
        blocks = [_block(region, rendered[region]) for region in REGIONS if region in rendered]
        return head + "\n\n".join(blocks) + "\n"
    pieces: list[tuple[int, int, str]] = []  # first line, line after the last, new text
    for region, (first, last) in spans.items():
        if region in rendered:
            pieces.append((first, last + 1, _block(region, rendered[region])))
    for index, region in enumerate(REGIONS):
        if region in rendered and region not in spans:
            before = [spans[other][1] + 1 for other in REGIONS[:index] if other in spans]
            after = [spans[other][0] for other in REGIONS[index + 1 :] if other in spans]
            place = max(before) if before else min(after)
            text = "\n" + _block(region, rendered[region]) if before else _block(region, rendered[region]) + "\n"
            pieces.append((place, place, text))
    result: list[str] = []
    position = 0
    # An insertion at a line comes after a replacement that ends there, and insertions keep their order.
    for first, after_last, text in sorted(pieces, key=lambda piece: (piece[0], piece[1])):
        result.extend(lines[position:first])
        result.append(text)
        position = max(position, after_last)
    result.extend(lines[position:])
    return "\n".join(result)


def _block(region: str, text: str) -> str:
    return f"{_begin(region)}\n{text.strip()}\n{_end(region)}"


def _spans(lines: Sequence[str], name: str) -> dict[str, tuple[int, int]]:
    """For each region its marker lines (0-based). Raises ReportTrouble when they do not pair."""
    spans: dict[str, tuple[int, int]] = {}
    for region in REGIONS:
        begins = [index for index, line in enumerate(lines) if line.strip() == _begin(region)]
        ends = [index for index, line in enumerate(lines) if line.strip() == _end(region)]
        if not begins and not ends:
            continue
        if len(begins) == 1 and len(ends) == 1 and begins[0] < ends[0]:
            spans[region] = (begins[0], ends[0])
            continue
        found = ", ".join(f"line {index + 1} `{lines[index].strip()}`" for index in sorted(begins + ends))
        raise ReportTrouble(
            f"{name}: the markers of the region {region!r} do not pair ({found}); delete these lines "
            "(the region is then written anew) or restore one begin and one end"
        )
    taken = sorted(spans.items(), key=lambda item: item[1])
    for (one, (_, one_last)), (two, (two_first, _)) in itertools.pairwise(taken):
        if two_first < one_last:
            raise ReportTrouble(
                f"{name}: the regions {one!r} and {two!r} overlap (line {two_first + 1} lies before line "
                f"{one_last + 1}); delete the marker lines of both"
            )
    return spans


# --- Markdown ----------------------------------------------------------------------------------------------------


LIMIT_BYTES = 64 * 1024
MARKER_BYTES = 1024  # the title, the markers and empty lines around the regions


@dataclass(frozen=True)
class Fullness:
    """How many findings and rows of a table are shown, and how many characters of one text."""

    rows: int
    characters: int


# The first that keeps the report under its limit is used; trackers refuse or cut longer texts.
FULLNESS = (
    Fullness(200, 4000),
    Fullness(60, 1000),
    Fullness(30, 500),
    Fullness(15, 300),
    Fullness(8, 200),
    Fullness(5, 120),
)
PIPE = "\ue07c"  # stands for | in a code span until it is known whether the span lies in a table


class Markdown(str):
    """Text that is Markdown already and is not escaped again."""

    __slots__ = ()


# Characters of an address that no renderer takes for markup.
_ADDRESS = re.compile(r"(https?://[\w.~:/?#@!&;=%+,-]*[\w/#=])", re.ASCII)


def escape(text: str) -> str:
    """Text from outside as inert Markdown on one line: no markup, no HTML, no table cells, no emoji, no mention of
    people or tickets. Web addresses stay whole."""
    line = re.sub(r"\s*[\r\n]+\s*", " ", text.replace(PIPE, "|"))
    parts = _ADDRESS.split(line)
    for index in range(0, len(parts), 2):
        # a backslash after an address would become a part of it, unless the address has an end of its own
        if index and re.match(r"[\\`*\[\]|~$_<]", parts[index]):
            parts[index - 1] = f"<{parts[index - 1]}>"
        parts[index] = _inert(parts[index])
    line = "".join(parts)
    return re.sub(r"^(\s*)(\d+(?=[.)]\s)|[#+=-](?=[#+=-]|\s|$))", _escaped_start, line)


def _escaped_start(match: re.Match[str]) -> str:
    """What would begin a heading or a list, made plain: the mark, or the point after a number, gets a backslash."""
    space, mark = match.groups()
    return f"{space}{mark}\\" if mark.isdecimal() else f"{space}\\{mark}"


# Trackers look for these in the text that they show, after Markdown was read, so that no escaping helps: mentions of
# people, issues, merge requests, labels, milestones, snippets, epics, and the names of emoji.
_REFERENCE = re.compile(
    r"(?<![\w.])@(?=[A-Za-z0-9])|[#!](?=\d)|(?<!\w)~(?=\w)|(?<![\w%])%(?=[A-Za-z])|[$&](?=\d)|\bGH-(?=\d)|:(?=[\w+-]+:)"
)


def _unlinked(text: str) -> str:
    """The text with a character of no width in what a tracker would take for a reference."""
    return _REFERENCE.sub("\\g<0>\u200b", text)


def _inert(text: str) -> str:
    line = _unlinked(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*\[\]|~$])", r"\\\1", line)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)


def code(text: object) -> Markdown:
    """The text as a code span that it cannot break out of, also inside a table (once `settled`)."""
    line = re.sub(r"\s*[\r\n]+\s*", " ", str(text)).replace("|", PIPE)
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if line.startswith("`") or line.endswith("`") or not line.strip() else ""
    return Markdown(f"{fence}{pad}{line}{pad}{fence}")


def settled(text: str) -> str:
    """Rendered text with the pipes of its code spans: escaped in the rows of a table, where they would end the cell."""
    return "\n".join(line.replace(PIPE, "\\|" if line.startswith("|") else "|") for line in text.split("\n"))


def clipped(text: str, limit: int) -> str:
    """At most `limit` characters; a text that is cut has no code spans any more, for one may be cut in two."""
    return text if len(text) <= limit else text[: limit - 3].rstrip().replace("`", "'") + "..."


def prose(text: str) -> Markdown:
    """A finding's text: its `code spans` stay code, all the rest is escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an odd backtick: nothing in this text can be trusted to be a code span
        return Markdown(escape(text))
    return Markdown("".join(str(code(part)) if index % 2 else escape(part) for index, part in enumerate(parts) if part))


WORDS = {"ok": "ok", "warn": "warning", "unknown": "could not tell", "fail": "FAIL"}


def level_word(level: str, words: Words) -> Markdown:
    """A level for the reader; a failure stands out."""
    word = escape(words.template(WORDS.get(level, level)))
    return Markdown(f"**{word}**" if level == "fail" else word)


def render_findings(
    findings: Sequence[Mapping[str, Any]], language: str = ENGLISH, fullness: Fullness = FULLNESS[0]
) -> Markdown:
    """Findings as a list, worst first; what passed is folded away, and what is too much is counted."""
    words = words_of(language)

    def said(text: str) -> Markdown:
        return prose(clipped(words.text(text), fullness.characters))

    def more(count: int) -> list[str]:
        text = words.template("{count} more findings are in the JSON record beside this report.")
        return ["- " + text.format(count=count)] if count > 0 else []

    order = {"fail": 0, "unknown": 1, "warn": 2, "ok": 3}
    lines: list[str] = []
    told = [finding for finding in sorted(findings, key=lambda f: order[f["level"]]) if finding["level"] != "ok"]
    for finding in told[: fullness.rows]:
        lines.append(f"- {level_word(finding['level'], words)}: {said(finding['what'])} ({code(finding['code'])})")
        if finding["why"]:  # a list, because not every tracker knows <br>
            lines.append("  - " + words.template("why: {why}").format(why=said(finding["why"])))
        lines.extend("  - " + words.template("fix: {fix}").format(fix=said(fix)) for fix in finding["fix"])
    lines += more(len(told) - fullness.rows)
    passed = [finding for finding in findings if finding["level"] == "ok"]
    if passed:
        count = words.template("{count} checks passed").format(count=len(passed))
        lines.extend(["", f"<details><summary>{count}</summary>", ""])
        for finding in passed[: fullness.rows]:
            why = f" {said(finding['why'])}" if finding["why"] else ""
            lines.append(f"- {said(finding['what'])}{why} ({code(finding['code'])})")
            lines.extend(f"  - {said(fix)}" for fix in finding["fix"])
        lines += more(len(passed) - fullness.rows)
        lines.extend(["", "</details>"])
    return Markdown("\n".join(lines))


@functools.cache
def _environment(language: str = ENGLISH, fullness: Fullness = FULLNESS[0]) -> Any:
    import jinja2

    words = words_of(language)

    def finalize(value: Any) -> Any:
        if value is None:
            return words.template("could not tell")
        if isinstance(value, Markdown) or not isinstance(value, str):
            return value
        return escape(clipped(value, fullness.characters))

    def filled(text: str, **values: Any) -> Markdown:
        """Words of a template, trusted; what is put into them is not."""
        return Markdown(words.template(text).format(**{name: finalize(value) for name, value in values.items()}))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        autoescape=False,
    )
    environment.filters.update(
        gib=_of_number(words, lambda value: f"{value / 2**30:.2f} GiB"),
        mib=_of_number(words, lambda value: f"{value / 2**20:,.0f} MiB"),
        num=_of_number(words, lambda value, digits=0: f"{value:,.{digits}f}"),
        yesno=_of_number(words, lambda value: words.template("yes" if value else "no")),
        html=lambda value: Markdown(html.escape(_unlinked(str(value)))),  # between HTML tags there is no Markdown
        code=lambda value: code(clipped(str(value), fullness.characters)),
        prose=lambda text: prose(clipped(words.text(text), fullness.characters)),
        rows=lambda value, most=fullness.rows: list(value)[: min(most, fullness.rows)],
        said=words.said,
        t=filled,
    )
    environment.globals.update(
        render_findings=lambda findings: render_findings(findings, language, fullness),
        level_word=lambda level: level_word(level, words),
        t=filled,
    )
    return environment


def _of_number(words: Words, write: Callable[..., str]) -> Callable[..., str]:
    def text(value: Any, *arguments: Any) -> str:
        return words.template("could not tell") if value is None else write(value, *arguments)

    return text


def render(record: Mapping[str, Any], strict: bool = False, language: str = ENGLISH) -> dict[str, str]:
    """Region → Markdown in a language, for the summary and for every stage in the record; together under 64 KiB.

    A template that fails on a section (say, one written by another version) falls back to the plain list of findings;
    with `strict` it raises.
    """
    rendered: dict[str, str] = {}
    for fullness in FULLNESS:
        rendered = _render(record, strict, language, fullness)
        if sum(len(text.encode("utf-8", "replace")) for text in rendered.values()) < LIMIT_BYTES - MARKER_BYTES:
            break
    else:  # tables of unknown make: the findings alone
        for stage in rendered.keys() & record["sections"].keys():
            rendered[stage] = _findings_alone(stage, record["sections"][stage], language, FULLNESS[-1])
    if fullness != FULLNESS[0]:
        note = _environment(language).globals["t"](
            "Shortened to stay below 64 KiB: at most {rows} entries of each list and {characters} characters of each "
            "text are shown. Everything is in the JSON record beside this report.",
            rows=fullness.rows,
            characters=fullness.characters,
        )
        rendered["summary"] += f"\n\n> {note}"
    return rendered


def _findings_alone(stage: str, section: Mapping[str, Any], language: str, fullness: Fullness) -> str:
    return settled(f"## {stage}\n\n{render_findings(section['findings'], language, fullness)}")


def _render(record: Mapping[str, Any], strict: bool, language: str, fullness: Fullness) -> dict[str, str]:
    import jinja2

    from preflight.verdict import judge

    environment = _environment(language, fullness)
    sections = {stage: record["sections"][stage] for stage in STAGES if stage in record["sections"]}
    summary = environment.get_template("summary.md.j2")
    rendered = {"summary": settled(summary.render(verdict=judge(record), sections=sections, job=record.get("job")))}
    for stage, section in sections.items():
        try:
            text = environment.get_template(f"{stage}.md.j2").render(
                section=section, observed=section["observed"], findings=section["findings"]
            )
        except (jinja2.TemplateError, KeyError, TypeError, ValueError, AttributeError):
            if strict:
                raise
            text = _findings_alone(stage, section, language, fullness)
        rendered[stage] = settled(text)
    words = words_of(language)
    return {region: words.tidy(text) for region, text in rendered.items()}
