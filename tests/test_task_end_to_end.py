"""The exam of the embedded real model, on the CPU, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preflight.task.example_model import example_gguf, example_model
from preflight.task.statistics import wilson

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    """The example model in a cache inside this checkout, so that tests touch nothing outside it."""
    before = os.environ.get("FINETUNE_PREFLIGHT_CACHE")
    os.environ["FINETUNE_PREFLIGHT_CACHE"] = before or str(ROOT / "build" / "cache")
    try:
        yield example_model()
    finally:
        if before is None:
            del os.environ["FINETUNE_PREFLIGHT_CACHE"]


def exam(*arguments: str, code: int = 0) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "task_evaluator.py"), "--json", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def data(*names: str) -> list[str]:
    return [part for name in names for part in ("--data", str(EXAMPLES / f"{name}.jsonl"))]


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[str, Any]:
    """All 42 samples of three tasks, asked once."""
    return exam("--model", str(model), *data("questions", "judge", "arithmetic"))


def counts(document: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {task["task"]: (task["k"], task["n"]) for task in document["observed"]["tasks"]}


def test_the_example_answers_questions_and_fails_as_a_judge(whole: dict[str, Any]) -> None:
    """Measured 2026-11-30, float32 on a CPU: 18 of 22, 0 of 10 (no JSON at all), 5 or 6 of 10."""
    tasks = {task["task"]: task for task in whole["observed"]["tasks"]}
    assert sum(task["n"] for task in tasks.values()) == 42
    assert tasks["questions"]["k"] >= 16 and tasks["questions"]["tier"] == ">=50 %"
    assert tasks["judge"]["k"] == 0 and tasks["judge"]["wrong_form"] == 10 and tasks["judge"]["tier"] is None
    assert 3 <= tasks["arithmetic"]["k"] <= 8
    codes = {finding["code"]: finding for finding in whole["findings"]}
    assert whole["level"] == "warn" and codes["answers-complete"]["level"] == "ok"
    for task in tasks.values():
        low, high = wilson(task["k"], task["n"])
        assert (task["low"], task["high"]) == (round(low, 4), round(high, 4))


def test_known_answers_are_the_models_own_words(whole: dict[str, Any]) -> None:
    rows = {row["id"]: row for row in whole["observed"]["samples"]}
    assert rows["capital-of-france"]["output"] == "The capital of France is Paris."
    assert rows["capital-of-france"]["passed"] is True and rows["capital-of-france"]["finish"] == "stop"
    assert rows["capital-of-spain"]["passed"] is False
    assert rows["judge-capital"]["wrong_form"] is True


def test_times_add_up(whole: dict[str, Any]) -> None:
    latency = whole["observed"]["latency"]
    assert latency["n"] == 42 and latency["p95_upper_s"] is None  # an upper bound needs 59
    assert 0 < latency["first_token_p50_s"] < latency["p50_s"] <= latency["p95_s"] <= latency["maximum_s"]
    for row in whole["observed"]["samples"]:
        assert row["new_tokens"] <= 20 and row["first_token_s"] <= row["seconds"]
        if row["per_token_s"] is not None:
            told = row["first_token_s"] + row["per_token_s"] * (row["new_tokens"] - 1)
            assert told == pytest.approx(row["seconds"], rel=0.2, abs=0.05)


def test_a_second_run_gives_the_same_answers(model: Path, whole: dict[str, Any]) -> None:
    again = exam("--model", str(model), *data("judge"))
    first = [(row["id"], row["output"]) for row in whole["observed"]["samples"] if row["task"] == "judge"]
    assert [(row["id"], row["output"]) for row in again["observed"]["samples"]] == first


def test_a_server_of_the_same_model_gives_the_same_scores(model: Path, whole: dict[str, Any]) -> None:
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "exam_server.py"), str(model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        served = exam("--base-url", f"http://127.0.0.1:{port}/v1", "--model", "m", *data("questions"))
    finally:
        server.kill()
        server.wait()
    assert served["observed"]["generation"]["backend"] == "server"
    k, n = counts(served)["questions"]
    low, high = wilson(*counts(whole)["questions"])
    assert n == 22 and low <= k / n <= high


def test_debug_shows_prompt_ids_output_and_score(model: Path, tmp_path: Path) -> None:
    sample = tmp_path / "one.jsonl"
    sample.write_text((EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()[0] + "\n")
    ended = subprocess.run(
        [
            sys.executable, str(ROOT / "task_evaluator.py"), "--model", str(model), "--data", str(sample), "--debug",
            "--no-report", "--red-team", "1",
        ],
        capture_output=True, text=True, encoding="utf-8", check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>" in ended.stderr
    assert "raw output (stop): 'The capital of France is Paris.<|im_end|>'" in ended.stderr
    assert "right: holds 'Paris'" in ended.stderr
    # <|im_start|> is token 1 of this vocabulary, <|im_end|> token 2.
    assert "prompt ids: [1, " in ended.stderr and ", 2]" in ended.stderr
    assert "Red-team smoke test" in ended.stdout


def test_llama_cpp_gives_scores_within_the_interval(model: Path, whole: dict[str, Any]) -> None:
    """Runs where llama-cpp-python is (here, or in the interpreter that LLAMA_PYTHON names): building it takes minutes.

    Measured 2026-11-30, llama-cpp-python 0.3.36 on a CPU: 18 of 22, 0 of 10, 4 of 10, as transformers give.
    """
    python = os.environ.get("LLAMA_PYTHON")
    if python is None:
        pytest.importorskip("llama_cpp")
    flags = ["--python", python] if python else []
    served = exam("--model", str(example_gguf()), *flags, *data("questions", "judge", "arithmetic"))
    assert served["observed"]["generation"]["backend"] == "llama.cpp"
    for task, (k, n) in counts(served).items():
        low, high = wilson(*counts(whole)[task])
        assert low <= k / n <= high, task
    rows = {row["id"]: row for row in served["observed"]["samples"]}
    # The prompt is the same text as in transformers: 37 tokens.
    assert rows["capital-of-japan"]["prompt_tokens"] == rows["capital-of-france"]["prompt_tokens"] == 37
