"""Words, colours, exit codes and one-line errors, the same for every script."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from preflight.console import UsageError, parser, print_section, run_main, run_stage
from preflight.findings import Finding, Level, Section, exit_code, quote, run_checks, section_from_json, worst

ROOT = Path(__file__).resolve().parent.parent


def finding(level: Level) -> Finding:
    return Finding(f"is-{level.value}", level, f"It is {level.value}.", "A reason.", ("do `it`",), "a source")


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([Level.OK], 0),
        ([Level.OK, Level.WARN], 0),
        ([Level.OK, Level.UNKNOWN], 3),
        ([Level.FAIL, Level.UNKNOWN], 1),
        ([], 3),
    ],
)
def test_the_exit_code_says_whether_something_stands_in_the_way(levels: list[Level], code: int) -> None:
    assert exit_code([Section("s", {}, tuple(finding(level) for level in levels))]) == code


def test_nothing_checked_is_not_nothing_wrong() -> None:
    assert worst([]) is Level.UNKNOWN


def test_a_crash_in_one_check_does_not_take_the_others_with_it() -> None:
    def broken(seen: int) -> Finding:
        raise ZeroDivisionError(f"at {seen}")

    def healthy(seen: int) -> list[Finding]:
        return [finding(Level.OK), finding(Level.WARN)]

    found = run_checks([broken, healthy], 7)
    assert [item.level for item in found] == [Level.UNKNOWN, Level.OK, Level.WARN]
    assert found[0].code == "check-crashed"
    assert "ZeroDivisionError: at 7" in found[0].what


def test_a_section_survives_the_way_through_json() -> None:
    section = Section("s", {"a": [1, None]}, (finding(Level.FAIL), finding(Level.OK)))
    document = json.loads(json.dumps(section.as_json()))
    assert document["level"] == "fail"
    assert section_from_json(document) == section


def test_text_from_outside_is_one_harmless_line() -> None:
    assert quote("a\n`b`\x1b[31m\u202ec\x00") == "a 'b' [31m c"
    assert quote("x" * 400) == "x" * 297 + "..."


def stage(args: list[str], tmp_path: Path, section: Section) -> int:
    parsed = parser("A question?", "x").parse_args([*args, "--report", str(tmp_path / "r.md")])
    return run_stage("s", parsed, lambda machine, _: section)


def test_json_is_one_document_on_stdout_and_redacted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = Section("gpu_probe", {"at": "/home/alice/x"}, (finding(Level.WARN),))
    assert stage(["--json"], tmp_path, section) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["observed"] == {"at": "/home/<user>/x"}


def test_words_stand_without_colour_and_colour_only_repeats_them(capsys: pytest.CaptureFixture[str]) -> None:
    section = Section("s", {}, (finding(Level.FAIL),))
    print_section(section)
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert plain.splitlines()[1:] == ["[fail] It is fail.", "       A reason.", "  fix: do `it`"]
    print_section(section, color="always")
    assert "\x1b[31m[fail]\x1b[0m" in capsys.readouterr().out


def test_no_report_is_written_with_json_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    section = Section("gpu_probe", {}, (finding(Level.OK),))
    run_stage("gpu_probe", parser("?", "x").parse_args(["--json"]), lambda machine, _: section)
    assert list(tmp_path.iterdir()) == []
    run_stage("gpu_probe", parser("?", "x").parse_args([]), lambda machine, _: section)
    assert (tmp_path / "compatibility_report.md").exists()
    assert "Written: compatibility_report.md" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_one_line_and_the_answer_is_still_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.json").write_text("not ours")
    assert stage([], tmp_path, Section("gpu_probe", {}, (finding(Level.OK),))) == 2
    out, err = capsys.readouterr()
    assert "[ok] It is ok." in out
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (UsageError("config.yaml: key 'r': 0 is not allowed; 1 or more"), 2, "error: config.yaml"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("oh"), 3, "This is a bug in the tool"),
    ],
)
def test_every_way_to_end_has_its_code(
    raised: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: object) -> int:
        raise raised

    assert run_main(main) == code
    assert words in capsys.readouterr().err


def test_wrong_flags_are_argparse_own_two() -> None:
    with pytest.raises(SystemExit) as ended:
        parser("?", "x").parse_args(["--no-such-flag"])
    assert ended.value.code == 2
    assert isinstance(parser("?", "x"), argparse.ArgumentParser)


SCRIPTS = [
    "gpu_probe.py",
    "env_sandbox.py",
    "model_analyzer.py",
    "task_evaluator.py",
    "validate_output_schema.py",
    "data_preprocessor.py",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_instant_and_opens_with_the_question(script: str) -> None:
    asked = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / script), "--help"], capture_output=True, text=True, check=True
    )
    assert re.search(r"^examples?:", asked.stdout, re.M)
    assert "exit codes:" in asked.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in asked.stderr.splitlines() if "|" in line}
    heavy = {
        "torch",
        "transformers",
        "numpy",
        "jinja2",
        "yaml",
        "jsonschema",
        "virtualenv",
        "huggingface_hub",
        "psutil",
    }
    assert not imported & heavy
