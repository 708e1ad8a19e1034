"""The terminal side of every script: shared flags, words and colours, exit codes, and one-line errors."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from preflight.findings import Finding, Level, Section, exit_code, say
from preflight.redact import redacted
from preflight.words import ENGLISH, LANGUAGES, words_of

if TYPE_CHECKING:
    from preflight.machine import Machine

DEFAULT_REPORT = "compatibility_report.md"

EXIT_CODES = """exit codes:
  0  ran; nothing stands in the way (warnings allowed)
  1  ran; at least one finding is a fail
  2  wrong usage or configuration
  3  ran, no fail, but something could not be determined (also: a bug in the tool)
  130  interrupted
  143  ended by SIGTERM; what an exam or stress test has by then is kept"""


class UsageError(Exception):
    """Bad input: one line with file, key, value and what is allowed. Ends the program with exit code 2."""


def parser(doc: str | None, example: str) -> argparse.ArgumentParser:
    """A parser whose help opens with the script's question, with the flags that all stages share."""
    made = argparse.ArgumentParser(
        description=(doc or "").strip(),
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    shared = made.add_argument_group("output and machine")
    shared.add_argument(
        "--report",
        metavar="PATH",
        help=f"report to write this section into (default: {DEFAULT_REPORT} here; none with --json)",
    )
    shared.add_argument("--no-report", action="store_true", help="write no report")
    shared.add_argument("--json", action="store_true", help="print the section as one JSON document on stdout")
    shared.add_argument("--replay", metavar="FOLDER", help="answer from a recorded machine instead of this one")
    shared.add_argument(
        "--record", metavar="FOLDER", help="keep every answer of this machine, redacted, in a new folder"
    )
    shared.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    add_language(shared)
    shared.add_argument("--verbose", action="store_true", help="also print sources and notes of what passed")
    return made


def add_language(flags: Any) -> None:
    """The flag for the language, on a parser or a group of one. The system's locale is never asked."""
    flags.add_argument(
        "--lang",
        choices=LANGUAGES,
        default=ENGLISH,
        help="language of findings and reports (default: en); JSON, codes and usage stay English",
    )


def run_stage(
    stage: str, args: argparse.Namespace, look_and_judge: Callable[[Machine, argparse.Namespace], Section]
) -> int:
    """Look, judge, say: print the section, write it into the report, return the exit code."""
    from preflight.machine import open_machine

    section = look_and_judge(open_machine(args.record, args.replay, stage), args)
    clean = Section(section.stage, redacted(section.observed), tuple(_clean(f) for f in section.findings))
    if args.json:
        print(json.dumps(clean.as_json(), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print_section(clean, args.color, args.verbose, args.lang)
    code = exit_code([clean])
    path = None if args.no_report else args.report or (None if args.json else DEFAULT_REPORT)
    if path:
        from preflight.report import write_section

        trouble = write_section(path, clean, language=args.lang)
        if trouble:
            say(f"error: {trouble}")
            return 2
        if not args.json:
            print("\n" + words_of(args.lang).template("Written: {path}").format(path=path))
    return code


def _clean(finding: Finding) -> Finding:
    return Finding(
        finding.code,
        finding.level,
        redacted(finding.what),
        redacted(finding.why),
        tuple(redacted(fix) for fix in finding.fix),
        finding.source,
    )


def print_section(section: Section, color: str = "auto", verbose: bool = False, language: str = ENGLISH) -> None:
    """The section for people, on stdout: worst findings first within their order, every fix under its finding."""
    paint, words = painter(color), words_of(language)
    print(f"{section.stage}: {paint(words.text(section.level.value), section.level)}")
    for finding in section.findings:
        print(f"{paint(f'[{words.text(finding.level.value)}]', finding.level)} {words.text(finding.what)}")
        if finding.why and (finding.level is not Level.OK or verbose or len(finding.why) < 240):
            print(f"       {words.text(finding.why)}")
        for fix in finding.fix:
            print(f"  {words.template('fix: {fix}').format(fix=words.text(fix))}")
        if verbose and finding.source:
            print(f"       {words.template('source: {source}').format(source=finding.source)}")


def painter(color: str = "auto") -> Callable[[str, Level], str]:
    """A function that colours a word by its level, or leaves it alone (NO_COLOR, no terminal, TERM=dumb)."""
    wanted = color == "always" or (
        color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    codes = {Level.OK: "32", Level.WARN: "33", Level.UNKNOWN: "33", Level.FAIL: "31"}

    def paint(text: str, level: Level) -> str:
        return f"\x1b[{codes[level]}m{text}\x1b[0m" if wanted else text

    return paint


def run_main(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Run a script's `main`: bad input is one line and 2, Ctrl-C is 130, a bug is a traceback on stderr and 3."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")
    _end_on_term()
    try:
        return main(argv)
    except UsageError as error:
        say(f"error: {one_line(str(error))}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception:
        traceback.print_exc()
        say(
            "\nThis is a bug in the tool. Run the same command with `--record FOLDER` and attach the folder "
            "(it is redacted) to a bug report."
        )
        return 3


def _end_on_term() -> None:
    """SIGTERM and SIGHUP unwind like an exit, so that children are ended and temporary folders removed."""
    import signal

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None:
            try:
                signal.signal(number, leave)
            except ValueError:  # not the main thread: somebody imported us
                return


def one_line(text: str) -> str:
    """The text on one line."""
    return re.sub(r"\s*\n\s*", " ", text).strip()


def gib(count: int | float | None) -> str:
    """Bytes as GiB with two digits, or "could not tell"."""
    return "could not tell" if count is None else f"{count / 2**30:.2f} GiB"
