"""The exam through its command line: data that cannot be judged, replayed runs, comparisons, wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WILD = ROOT / "tests" / "wild" / "E-data"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "task_evaluator.py"), "--no-report", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd or ROOT,
        check=False,
    )


def section(*arguments: str, code: int = 0) -> dict[str, Any]:
    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    ended = run("--json", *arguments)
    assert ended.returncode == code, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout, parse_constant=no_constants)
    return document


def finding(document: dict[str, Any], code: str) -> dict[str, Any]:
    found = [item for item in document["findings"] if item["code"] == code]
    assert len(found) == 1, [item["code"] for item in document["findings"]]
    return dict(found[0])


def test_e06_nan_duplicates_empty() -> None:
    """E06-nan-duplicates-empty: nothing is judged that cannot be, and the report stays valid JSON."""
    document = section("--data", str(WILD / "E06-nan-duplicates-empty" / "eval.jsonl"))
    data = document["observed"]["data"][0]
    assert document["level"] == "warn"
    assert finding(document, "needs-review")["level"] == "warn"
    assert data["rows"] == 6
    assert data["duplicates"] == [[1, 2]]
    assert data["empty_reference"] == [3, 4]
    assert data["non_string_content"] == [5]
    assert data["no_messages"] == [6]
    assert data["scorable"] == [1, 2]
    assert "nan" not in json.dumps(document["observed"]["data"][0]["problems"]).replace("NaN", "").lower()


def recording(folder: Path, *lines: dict[str, Any], child: str = "child generate", **entry: Any) -> str:
    """A recorded machine that answers one child."""
    folder.mkdir(exist_ok=True)
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    inputs = [{"file": "answers.jsonl", "kind": child, "exit_code": 0, **entry}]
    (folder / "case.json").write_text(json.dumps({"schema": 1, "inputs": inputs}), encoding="utf-8")
    return str(folder)


def answers(path: Path, task: str, outputs: list[str], arm: str = "plain", **more: Any) -> list[dict[str, Any]]:
    """The child's lines for these outputs, in the order of the data file."""
    ids = [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "step": "sample", "key": f"{arm}/{task}/{name}", "output": output, "finish": "stop", "seconds": 0.5,
            "first_token_s": 0.1, "per_token_s": 0.05, "new_tokens": 9, "prompt_tokens": 30,
            "rendered": "chat template", **more,
        }
        for name, output in zip(ids, outputs, strict=False)
    ]  # fmt: skip


LOAD = {"step": "load", "device": "cpu", "dtype": "float32", "seconds": 1.0, "weights_bytes": 1000}
DONE = {"step": "done", "seconds": 9.0}


def write_data(folder: Path, count: int, name: str = "yes.jsonl") -> Path:
    path = folder / name
    records = [{"id": f"s{n}", "question": f"Is {n} a number?", "keywords": ["yes"]} for n in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def replayed(folder: Path, data: Path, *lines: dict[str, Any], flags: tuple[str, ...] = (), code: int = 0) -> Any:
    machine = recording(folder / "machine", *lines)
    return section("--replay", machine, "--model", "recorded-model", "--data", str(data), *flags, code=code)


def test_a_recorded_exam_is_judged_again(tmp_path: Path) -> None:
    data = write_data(tmp_path, 12)
    outputs = ["Yes."] * 9 + ["No."] * 2 + [""]
    document = replayed(tmp_path, data, LOAD, *answers(data, "yes", outputs), DONE)
    task = document["observed"]["tasks"][0]
    # Wilson for 9 of 12: 46.77 to 91.11 %.
    assert (task["k"], task["n"], task["wrong_form"], task["low"], task["high"]) == (9, 12, 1, 0.4677, 0.9111)
    assert task["tier"] is None and finding(document, "task-result")["level"] == "warn"
    assert document["observed"]["model_name"] == "recorded-model"
    assert [row["passed"] for row in document["observed"]["samples"]] == [True] * 9 + [False] * 3


def test_the_same_recording_gives_the_same_bytes(tmp_path: Path) -> None:
    data = write_data(tmp_path, 5)
    lines = [LOAD, *answers(data, "yes", ["yes"] * 5), DONE]
    assert json.dumps(replayed(tmp_path, data, *lines)) == json.dumps(replayed(tmp_path, data, *lines))


def test_thresholds_can_be_moved(tmp_path: Path) -> None:
    data = write_data(tmp_path, 10)
    lines = [LOAD, *answers(data, "yes", ["yes"] * 3 + ["no"] * 7), DONE]
    assert replayed(tmp_path, data, *lines)["observed"]["tasks"][0]["tier"] is None
    moved = replayed(tmp_path, data, *lines, flags=("--tiers", "90"))
    assert moved["observed"]["tasks"][0]["tier"] == "<90 %"


def test_a_target_is_met_only_with_enough_answers(tmp_path: Path) -> None:
    data = write_data(tmp_path, 60)
    lines = [LOAD, *answers(data, "yes", ["yes"] * 60), DONE]
    met = replayed(tmp_path, data, *lines, flags=("--target-p95-ms", "600"))
    assert finding(met, "latency-target-met")["level"] == "ok"
    missed = replayed(tmp_path, data, *lines, flags=("--target-p95-ms", "400"))
    # 0.1 s to the first token and 0.05 s per further token: 7 tokens take 0.1 + 6 * 0.05 = 0.4 s.
    assert "at most 7 new tokens" in finding(missed, "latency-target-not-met")["fix"][0]
    few = replayed(tmp_path, data, *lines, flags=("--target-p95-ms", "600", "--limit", "20"), code=3)
    assert finding(few, "latency-target-unknown")["level"] == "unknown"


def test_few_shot_is_paired_with_zero_shot(tmp_path: Path) -> None:
    data = write_data(tmp_path, 14)
    plain = answers(data, "yes", ["no"] * 14)
    shots = answers(data, "yes", ["yes"] * 14, arm="shots")
    document = replayed(tmp_path, data, LOAD, *plain, *shots, DONE, flags=("--shots", "2"))
    row = document["observed"]["few_shot"][0]
    assert (row["n"], row["first_right"], row["second_right"], row["p_value"]) == (12, 0, 12, 0.000488)
    assert finding(document, "few-shot-better")["level"] == "ok"


@pytest.mark.parametrize(
    ("lines", "entry", "code", "expected"),
    [
        ([LOAD], {"exit_code": -9}, 1, "generation-died"),
        ([{"step": "import torch", "version": "2"}], {"exit_code": -11}, 3, "generation-died"),
        (
            [{"step": "failed", "during": "import", "error": "ImportError", "message": "m"}],
            {},
            3,
            "generation-packages",
        ),
        ([{"step": "failed", "during": "load", "error": "OSError", "message": "m"}], {}, 1, "model-not-loaded"),
        ([], {"exit_code": None, "trouble": "timeout"}, 3, "generation-died"),
    ],
)
def test_runs_that_end_badly(tmp_path: Path, lines: Any, entry: Any, code: int, expected: str) -> None:
    machine = recording(tmp_path / "machine", *lines, **entry)
    document = section("--replay", machine, "--model", "m", "--data", str(write_data(tmp_path, 3)), code=code)
    found = finding(document, expected)
    assert found["why"] and found["fix"] and found["source"]
    assert document["observed"]["tasks"][0]["n"] == 0 and document["observed"]["tasks"][0]["not_run"] == 3


def test_a_recording_without_answers_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    (tmp_path / "machine" / "case.json").write_text('{"inputs": []}')
    data = write_data(tmp_path, 3)
    document = section("--replay", str(tmp_path / "machine"), "--model", "m", "--data", str(data), code=3)
    assert finding(document, "generation-not-recorded")["level"] == "unknown"


def test_what_was_answered_before_a_death_counts(tmp_path: Path) -> None:
    data = write_data(tmp_path, 5)
    machine = recording(tmp_path / "machine", LOAD, *answers(data, "yes", ["yes", "no"]), exit_code=-9)
    document = section("--replay", machine, "--model", "m", "--data", str(data), code=1)
    task = document["observed"]["tasks"][0]
    assert (task["k"], task["n"], task["not_run"]) == (1, 2, 3)


def test_repeated_records_are_asked_once(tmp_path: Path) -> None:
    data = tmp_path / "twice.jsonl"
    line = json.dumps({"question": "Is 1 a number?", "keywords": ["yes"]})
    data.write_text(f"{line}\n{line}\n{line}\n")
    answer = {"step": "sample", "key": "plain/twice/twice:1", "output": "yes", "seconds": 0.5}
    machine = recording(tmp_path / "machine", LOAD, answer, DONE)
    document = section("--replay", machine, "--model", "m", "--data", str(data))
    assert (document["observed"]["tasks"][0]["k"], document["observed"]["tasks"][0]["n"]) == (1, 1)


def test_two_files_of_the_same_name_are_both_asked(tmp_path: Path) -> None:
    paths = []
    for name, count in (("a", 3), ("b", 2)):
        (tmp_path / name).mkdir()
        paths.append(write_data(tmp_path / name, count))
    lines = answers(paths[0], "yes", ["yes"] * 3)
    lines += [{**line, "key": line["key"] + "'"} for line in answers(paths[1], "yes", ["no"] * 2)]
    machine = recording(tmp_path / "machine", LOAD, *lines, DONE)
    document = section("--replay", machine, "--model", "m", "--data", str(paths[0]), "--data", str(paths[1]))
    assert [(task["task"], task["k"], task["n"]) for task in document["observed"]["tasks"]] == [("yes", 3, 5)]


def exam_file(path: Path, rows: dict[str, bool | None], **settings: Any) -> str:
    samples = [{"id": name, "task": "t", "fingerprint": name, "passed": passed} for name, passed in rows.items()]
    observed = {"model_name": path.stem, "samples": samples, "settings": {"seed": 0, **settings}}
    path.write_text(json.dumps({"schema": 1, "stage": "task_evaluator", "observed": observed, "findings": []}))
    return str(path)


def test_before_and_after_are_paired(tmp_path: Path) -> None:
    before = exam_file(tmp_path / "base.json", {str(n): n < 4 for n in range(20)} | {"x": None, "old": True})
    after = exam_file(tmp_path / "tuned.json", {str(n): n != 0 for n in range(20)} | {"new": False})
    document = section("--before", before, "--after", after)
    row = document["observed"]["comparison"]["tasks"][0]
    assert (row["n"], row["first_right"], row["second_right"]) == (20, 4, 19)
    assert (row["only_second_right"], row["only_first_right"], row["unpaired"]) == (16, 1, 2)
    assert document["observed"]["comparison"]["lost"] == ["0"]
    # Exact binomial: 2 * (1 + 17) / 2**17 = 0.000275.
    assert row["p_value"] == 0.000275 and finding(document, "comparison-better")["level"] == "ok"
    other = exam_file(tmp_path / "other.json", {str(n): True for n in range(20)}, seed=3)
    assert finding(section("--before", before, "--after", other), "exams-differ")["level"] == "warn"
    worse = section("--before", after, "--after", before)
    assert finding(worse, "comparison-worse")["level"] == "warn"


def test_an_exam_can_be_compared_with_itself_through_a_report(tmp_path: Path) -> None:
    data = write_data(tmp_path, 4)
    machine = recording(tmp_path / "machine", LOAD, *answers(data, "yes", ["yes"] * 4), DONE)
    ended = subprocess.run(
        [sys.executable, str(ROOT / "task_evaluator.py"), "--replay", machine, "--model", "m", "--data", str(data)],
        capture_output=True, text=True, encoding="utf-8", cwd=tmp_path, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    report = str(tmp_path / "compatibility_report.json")
    document = section("--before", report, "--after", report, code=0)
    assert document["observed"]["comparison"]["tasks"][0]["n"] == 4
    assert "4 of 4" in (tmp_path / "compatibility_report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "passed", "failed"),
    [
        ("def score(output, record): return record['id'] in output", 1, 0),
        ("def score(output, record): return 0.7, 'close'", 2, 0),
        ("def score(output, record): raise KeyError('x')", 0, 2),
        ("def score(output, record): return 7", 0, 2),
        ("score = 5", 0, 2),
        ("raise SystemExit(3)", 0, 0),
        ("def score(output, record):\n    import os\n    os.abort()", 0, 0),
    ],
)
def test_an_own_function_judges_in_a_child(tmp_path: Path, code: str, passed: int, failed: int) -> None:
    from preflight.machine import Machine
    from preflight.task import exam, exam_run
    from preflight.task.backends import Reply
    from preflight.task.samples import ReadingRules, read_samples

    file = tmp_path / "own.py"
    file.write_text(code)
    samples = read_samples(str(write_data(tmp_path, 2)), ReadingRules(scorer="function")).samples
    judged = {s.id: exam.judge(s, Reply(s.id, "s1 it is", seconds=1.0)) for s in samples}
    assert all(item.scored is None for item in judged.values())
    trouble = exam_run.judge_by_function(Machine(), sys.executable, str(file), judged)
    assert sum(item.passed for item in judged.values()) == passed
    assert trouble["failed"] == failed
    assert trouble["complete"] == ("raise SystemExit" not in code and "abort" not in code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--data: is missing"),
        (("--data", "absent.jsonl"), "does not exist"),
        (("--data", "yes.jsonl", "--model", "./absent"), "no such directory"),
        (("--data", "yes.jsonl", "--model", "absent.gguf"), "no such directory"),
        (("--data", "yes.jsonl", "--base-url", "ftp://x"), "must begin with http"),
        (("--data", "yes.jsonl", "--schema", "absent.json"), "cannot be read"),
        (("--data", "yes.jsonl", "--schema", "bad-schema.json"), "not a valid JSON Schema"),
        (("--data", "yes.jsonl", "--model", "m", "--scorer-file", "absent.py"), "no such file"),
        (("--data", "yes.jsonl", "--model", ".", "--python", "/no/such/python"), "no such program"),
        (("--before", "yes.jsonl"), "both are needed"),
        (("--before", "yes.jsonl", "--after", "yes.jsonl"), "is not JSON"),
        (("--before", "bad-schema.json", "--after", "bad-schema.json"), "holds no finished exam"),
        (("--harness-task", "absent.yaml", "--model", "m"), "cannot be read"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    write_data(tmp_path, 2)
    (tmp_path / "bad-schema.json").write_text('{"type": "objekt"}')
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.strip().splitlines()[-1]) < 400
    assert [line for line in ended.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    "flags",
    [
        ("--tiers", "50,20"), ("--tiers", "x"), ("--tiers", "0,100"), ("--limit", "0"), ("--temperature", "-1"),
        ("--target-p95-ms", "0"), ("--shots", "0"), ("--red-team", "9"), ("--sample-timeout", "0"),
    ],
)  # fmt: skip
def test_a_flag_outside_its_range_is_refused(flags: tuple[str, str]) -> None:
    ended = run("--data", "x", *flags)
    assert ended.returncode == 2 and flags[0] in ended.stderr


def test_help_is_quick_and_opens_with_the_question() -> None:
    began = time.monotonic()
    ended = run("--help")
    assert ended.returncode == 0 and "How well does the untouched model" in ended.stdout
    assert time.monotonic() - began < 1.5
