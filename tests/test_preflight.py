"""The main job: four stages in order, one verdict; a stage that cannot run stops nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("content", ["file", "folder"])
def test_a_recipe_folder_that_cannot_be_used_is_refused_before_anything_runs(tmp_path: Path, content: str) -> None:
    target = tmp_path / "mine"
    if content == "file":
        target.write_text("kept", encoding="utf-8")
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("kept", encoding="utf-8")
    with pytest.raises(UsageError, match="exists and is not empty"):
        main_job.check_folder(str(target))
    with pytest.raises(UsageError, match="cannot be written"):
        main_job.check_folder(str(tmp_path / "mine" / "thesis.txt" / "below"))
    main_job.check_folder(str(tmp_path / "new" / "deep"))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_recipe_is_written_for_what_fits_when_memory_is_all_that_stands_in_the_way() -> None:
    def record(*codes: str) -> dict[str, Any]:
        findings = [{"code": code, "level": "fail"} for code in codes]
        return {"sections": {"model_analyzer": {"stage": "model_analyzer", "findings": findings}}}

    assert main_job.only_memory_fails(record("memory-fit-no"))
    assert not main_job.only_memory_fails(record("memory-fit-no", "architecture-too-new"))
    assert not main_job.only_memory_fails(record())


@pytest.mark.slow
def test_seven_billion_by_qlora_on_16_gib_get_a_recipe_whose_own_rehearsal_says_yes(tmp_path: Path) -> None:
    """From config.json alone: no weights, no GPU."""
    for needed in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(needed)
    model, recipe = str(ROOT / "tests/configs/Qwen__Qwen2.5-7B"), tmp_path / "recipe"
    flags = ["--gpu-vram-gb", "16", "--method", "qlora", "--data", str(ROOT / "examples/judge-train.jsonl")]
    flags += ["--python", sys.executable, "--evidence", "closed", "--skip", "env_sandbox", "--skip", "task_evaluator"]
    command = [sys.executable, "-m", "preflight", model, *flags, "--recipe", str(recipe), "--no-report"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode in (0, 1, 3), ended.stderr
    text = (recipe / "training_config.yaml").read_text(encoding="utf-8")
    assert "\nload_in_4bit: true\n" in text and "use_cpu" not in text
    assert "There are no weight files in" in (recipe / "README.md").read_text(encoding="utf-8")
    command = [sys.executable, str(ROOT / "model_analyzer.py"), model, "--config", str(recipe / "training_config.yaml")]
    command += ["--gpu-vram-gb", "16", "--rehearse", "--python", sys.executable, "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    memory = json.loads(ended.stdout)["observed"]["memory"]
    assert memory["rehearsal"]["estimate"]["evidence"] == "rehearsed"
    assert memory["verdict"] == "yes"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_while_a_stage_runs_leaves_no_recipe_and_no_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "preflight", str(ROOT / "tests/configs/Qwen__Qwen2.5-0.5B"), "--recipe", "r"]
    command += ["--data", str(ROOT / "examples/judge-train.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    running.stderr.readline()  # the first stage has begun
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
