"""What can be said of a requirements file before anything is installed."""

from __future__ import annotations

import os

from preflight.findings import Finding, Level, quote
from preflight.software.requirements import (
    Requirements,
    foreign_kind,
    hash_mode_offenders,
    misnamed,
    unusable_here,
)


def check_lines(found: Requirements) -> list[Finding]:
    """Whether every line of the requirements could be understood."""
    name = os.path.basename(found.path)
    foreign = foreign_kind(found.path) if found.problems or not found.items else None
    if foreign is not None:
        what, how = foreign
        return [
            Finding(
                "requirement-line-refused",
                Level.FAIL,
                f"{name} is {what}, not a requirements file of pip.",
                "pip would stop at its first line, before anything is installed.",
                (how, "then give that file to `--requirements`"),
                "pip documentation, requirements file format",
            )
        ]
    if found.problems:
        said = "; ".join(
            f"{os.path.basename(problem.file)} line {problem.number} ({quote(problem.text, 60)}): {problem.reason}"
            for problem in found.problems[:5]
        )
        more = f" (and {len(found.problems) - 5} more)" if len(found.problems) > 5 else ""
        return [
            Finding(
                "requirement-line-refused",
                Level.FAIL,
                f"{len(found.problems)} line(s) of {name} cannot be used: {said}{more}.",
                "pip would stop at the first of them, before anything is installed.",
                ("correct or remove the line, then run again",),
                "pip documentation, requirements file format",
            )
        ]
    skipped = f", {len(found.skipped)} skipped by their marker" if found.skipped else ""
    return [
        Finding(
            "requirements-read",
            Level.OK,
            f"{len(found.active)} requirements of {name} apply here{skipped}.",
            source="pip documentation, requirements file format",
        )
    ]


def check_names(found: Requirements) -> list[Finding]:
    """Names that another tool or an import has for a package."""
    wrong = misnamed(found)
    if not wrong:
        return []
    said = "; ".join(f"{item.name} (line {item.number}): {why}" for item, why in wrong[:5])
    return [
        Finding(
            "other-package-name",
            Level.FAIL,
            f"{len(wrong)} line(s) name what pip's index has under another name, or not at all: {said}.",
            "Under these names the index has nothing, or a placeholder that refuses to install.",
            ("correct these lines, then run again",),
            "PyPI: the placeholders pytorch and sklearn say so themselves",
        )
    ]


def check_hashes(found: Requirements) -> list[Finding]:
    """pip's all-or-nothing rule for hashes."""
    offending = hash_mode_offenders(found)
    if not offending:
        return []
    said = "; ".join(f"{item.shown()} (line {item.number}) {reason}" for item, reason in offending[:5])
    return [
        Finding(
            "hash-mode",
            Level.FAIL,
            f"pip will refuse the file: some lines have hashes, but {quote(said, 240)}.",
            "In --require-hashes mode, all requirements must have their versions pinned with == and have a hash, "
            "dependencies included. One line with --hash turns the mode on for all.",
            (
                "pin and hash every line: `pip-compile --generate-hashes` or `uv pip compile --generate-hashes`",
                "or remove the hashes",
            ),
            "pip documentation, secure installs: hash-checking mode",
        )
    ]


def check_local(found: Requirements, tags: frozenset[str] | None, python: str) -> list[Finding]:
    """Local files and folders that cannot be installed by this interpreter, and lines that need more than an index."""
    bad = unusable_here(found, tags, python)
    if not bad:
        return []
    said = "; ".join(
        f"{quote(os.path.basename(item.target.rstrip('/')) or item.text, 90)} {reason}" for item, reason in bad[:5]
    )
    remote = [item for item in found.active if item.kind in ("vcs", "url")]
    if remote:
        said += "; " + ", ".join(f"{quote(item.text, 60)} needs network access" for item in remote[:2])
        said += " and git" if any(item.kind == "vcs" for item in remote) else ""
    return [
        Finding(
            "needs-attention",
            Level.WARN,
            f"The file cannot be installed here as it stands: {said}.",
            "Nothing was installed. On the machine the file was written for this may be right; here it is not.",
            (
                f"take wheels built for this interpreter ({python}), and put local files where the lines say",
                "or run this on the machine the file is for",
            ),
            "PEP 425 wheel tags; the file system",
        )
    ]
