"""The main job: four stages in order, one verdict; a stage that cannot run stops nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import preflight.__main__ as main_job
from preflight.console import UsageError
from preflight.findings import Finding, Level, Section

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.abort()", "ended by signal 6"),
        ("import sys; sys.exit(2)", "refused its input"),
        ("print('no json')", "printed no result"),
        ("print('{}')", "printed no result"),
        ("import time; time.sleep(60)", "given up after its limit"),
    ],
)
def test_a_stage_without_a_result_is_unknown_with_its_reason(
    code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(main_job.LIMITS_S, "gpu_probe", 3)
    section = main_job.run_stage("gpu_probe", [sys.executable, "-c", code])
    assert section.level is Level.UNKNOWN
    assert reason in section.findings[0].what
    assert section.findings[0].why
    assert section.findings[0].fix


def test_a_stage_that_cannot_be_started_is_unknown() -> None:
    assert "could not be started" in main_job.run_stage("gpu_probe", ["/no/such/program"]).findings[0].what


def sections(*levels: Level) -> list[Section]:
    names = ("gpu_probe", "env_sandbox", "model_analyzer")
    return [
        Section(name, {}, (Finding("memory-fit-yes" if name == "model_analyzer" else "x", level, "w"),))
        for name, level in zip(names, levels, strict=True)
    ]


@pytest.mark.parametrize(
    ("answer", "levels", "code"),
    [
        ("yes", (Level.OK, Level.OK, Level.OK), 0),
        ("marginal", (Level.OK, Level.OK, Level.WARN), 0),
        ("no", (Level.OK, Level.FAIL, Level.OK), 1),
        ("could not tell", (Level.OK, Level.OK, Level.OK), 3),
        ("could not tell", (Level.UNKNOWN, Level.OK, Level.OK), 3),
    ],
)
def test_the_exit_code_follows_the_verdict(answer: str, levels: tuple[Level, ...], code: int) -> None:
    assert main_job.verdict_code({"answer": answer}, sections(*levels)) == code


def job(*arguments: str) -> tuple[str, list[str], dict[str, object]]:
    return main_job.resolve_job(main_job.make_parser().parse_args(list(arguments)))


def test_paths_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        job(str(tmp_path / "no-model"))
    with pytest.raises(UsageError, match="no such file"):
        job("some/model", "--data", str(tmp_path / "no.jsonl"))


def test_a_hub_id_is_passed_on_and_named_without_its_owner() -> None:
    model, data, described = job("Qwen/Qwen2.5-7B")
    assert (model, data, described["model_name"]) == ("Qwen/Qwen2.5-7B", [], "Qwen2.5-7B")


def test_flags_reach_their_stage(tmp_path: Path) -> None:
    args = main_job.make_parser().parse_args(
        ["m", "--gpu-vram-gb", "16", "--method", "qlora", "--mode", "quick", "--requirements", "r.txt", "--schema", "s"]
    )
    analyzer = main_job.stage_command("model_analyzer", args, "m", ["d.jsonl"])
    assert analyzer[-7:] == ["m", "--method", "qlora", "--gpu-vram-gb", "16.0", "--evidence", "auto"]
    sandbox = main_job.stage_command("env_sandbox", args, "m", [])
    assert sandbox[-4:] == ["--mode", "quick", "--requirements", "r.txt"]
    task = main_job.stage_command("task_evaluator", args, "m", ["d.jsonl", "e.jsonl"])
    assert task[-8:] == ["--model", "m", "--data", "d.jsonl", "--data", "e.jsonl", "--schema", "s"]


@pytest.mark.slow
@pytest.mark.network
def test_the_embedded_example_ends_with_a_verdict_and_four_measured_sections(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "preflight", "--report", str(tmp_path / "r.md")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert ran.returncode in (0, 3), ran.stderr
    assert "verdict: " in ran.stdout
    record = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert list(record["sections"]) == ["gpu_probe", "env_sandbox", "model_analyzer", "task_evaluator"]
    codes = {finding["code"] for section in record["sections"].values() for finding in section["findings"]}
    assert "stage-not-run" not in codes
    assert "check-crashed" not in codes
    # SmolLM2-135M, counted by its makers: 134,515,008 parameters.
    assert "134515008" in json.dumps(record["sections"]["model_analyzer"]["observed"])
    view = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert len(view.encode()) < 64 * 1024
    assert str(Path.home()) not in view
    for line in view.splitlines()[:15]:
        if line.startswith("## Can I fine-tune this, here?"):
            break
    else:
        pytest.fail("the verdict is not in the first 15 lines")
