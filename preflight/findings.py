"""What a check returns: a level, what was seen, why it matters, and what to do now."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

SCHEMA = 1


class Level(str, Enum):
    """How much a finding stands in the way, mildest first."""

    OK = "ok"
    WARN = "warn"
    UNKNOWN = "unknown"
    FAIL = "fail"

    @property
    def weight(self) -> int:
        """Position in the order ok < warn < unknown < fail."""
        return list(Level).index(self)


@dataclass(frozen=True)
class Finding:
    """One judged observation.

    `code` is kebab-case and never changes its meaning. `what` stands alone as a first line. `fix` holds at most three
    remedies, best first; commands stand in backticks. An OK finding with a `why` is an "ok with a note".
    Text that comes from outside (names, error messages) goes through `quote` before it is put into a finding.
    """

    code: str
    level: Level
    what: str
    why: str = ""
    fix: tuple[str, ...] = ()
    source: str = ""

    def as_json(self) -> dict[str, Any]:
        """The finding as plain JSON data."""
        return {**asdict(self), "level": self.level.value, "fix": list(self.fix)}


@dataclass(frozen=True)
class Section:
    """What one stage saw (`observed`, plain JSON data) and how it was judged."""

    stage: str
    observed: dict[str, Any]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def level(self) -> Level:
        """The worst level among the findings; UNKNOWN when nothing was checked."""
        return worst(finding.level for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The document that `--json` prints and that the report keeps."""
        return {
            "schema": SCHEMA,
            "stage": self.stage,
            "level": self.level.value,
            "observed": self.observed,
            "findings": [finding.as_json() for finding in self.findings],
        }


def section_from_json(document: dict[str, Any]) -> Section:
    """The Section that `Section.as_json` wrote. Raises KeyError, ValueError or TypeError when it is none."""
    findings = tuple(
        Finding(
            code=str(item["code"]),
            level=Level(item["level"]),
            what=str(item["what"]),
            why=str(item.get("why", "")),
            fix=tuple(str(fix) for fix in item.get("fix", ())),
            source=str(item.get("source", "")),
        )
        for item in document["findings"]
    )
    return Section(stage=str(document["stage"]), observed=dict(document["observed"]), findings=findings)


def worst(levels: Iterable[Level]) -> Level:
    """The worst of the levels; UNKNOWN for none, because nothing checked is not the same as nothing wrong."""
    return max(levels, key=lambda level: level.weight, default=Level.UNKNOWN)


def run_checks(checks: Iterable[Callable[..., Finding | Iterable[Finding]]], *seen: Any) -> tuple[Finding, ...]:
    """The findings of all checks, in order. A check that crashes becomes one UNKNOWN finding; the others still run."""
    findings: list[Finding] = []
    for check in checks:
        try:
            result = check(*seen)
            findings.extend([result] if isinstance(result, Finding) else list(result))
        except Exception as error:  # a broken check must not take the healthy ones with it
            findings.append(crashed(getattr(check, "__name__", "check"), error))
    return tuple(findings)


def crashed(name: str, error: BaseException) -> Finding:
    """The UNKNOWN finding for a check that raised `error`."""
    return Finding(
        code="check-crashed",
        level=Level.UNKNOWN,
        what=f"Could not tell: the check `{name}` failed with {type(error).__name__}: {quote(str(error))}",
        why="This is a fault of the program, not of this machine; the other checks were run.",
        fix=("run the same command with `--record FOLDER` and attach the folder to a bug report",),
        source="preflight/findings.py, run_checks",
    )


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]+")


def quote(text: object, limit: int = 300) -> str:
    """Text from outside, safe inside a finding: one line, no control or bidi characters, at most `limit` long."""
    line = _CONTROL.sub(" ", str(text)).replace("`", "'").strip()
    line = re.sub(r" {2,}", " ", line)
    return line if len(line) <= limit else line[: limit - 3].rstrip() + "..."


def exit_code(sections: Iterable[Section]) -> int:
    """0 nothing stands in the way, 1 at least one fail, 3 no fail but something could not be determined."""
    level = worst(section.level for section in sections)
    return {Level.OK: 0, Level.WARN: 0, Level.UNKNOWN: 3, Level.FAIL: 1}[level]


def say(message: str) -> None:
    """A line for people, on stderr, so that stdout stays clean for `--json`."""
    print(message, file=sys.stderr, flush=True)
