"""The one answer on top: which findings decide it, and what to do next."""

from __future__ import annotations

from typing import Any

import pytest

from preflight.verdict import judge


def finding(code: str, level: str, what: str = "Something.", fix: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"code": code, "level": level, "what": what, "why": "", "fix": list(fix), "source": ""}


def record(**stages: list[dict[str, Any]]) -> dict[str, Any]:
    order = ["ok", "warn", "unknown", "fail"]
    return {
        "schema": 1,
        "sections": {
            stage: {
                "stage": stage,
                "level": max((f["level"] for f in findings), key=order.index, default="unknown"),
                "observed": {},
                "findings": findings,
            }
            for stage, findings in stages.items()
        },
    }


GOOD = {
    "gpu_probe": [finding("gpu-found", "ok")],
    "env_sandbox": [finding("stack-loads", "ok")],
    "model_analyzer": [finding("memory-fit-yes", "ok", "LoRA needs 2 GiB of 8 GiB.")],
    "task_evaluator": [finding("task-score", "warn", "3 of 10.")],
}


def test_all_well_is_yes_with_the_deciding_numbers() -> None:
    verdict = judge(record(**GOOD))
    assert verdict["answer"] == "yes"
    assert [fact["what"] for fact in verdict["facts"]] == ["LoRA needs 2 GiB of 8 GiB.", "3 of 10."]
    assert verdict["next_command"] == "`python -m preflight MODEL --data YOUR_TRAINING_DATA.jsonl --recipe ./recipe`"


@pytest.mark.parametrize("stage", ["gpu_probe", "env_sandbox", "model_analyzer"])
def test_a_fail_that_stands_in_the_way_is_no_and_its_first_fix_comes_next(stage: str) -> None:
    bad = finding("broken", "fail", "It is broken.", ("run `mend`",))
    verdict = judge(record(**{**GOOD, stage: [*GOOD[stage], bad]}))
    assert verdict["answer"] == "no"
    assert verdict["facts"][0]["what"] == "It is broken."
    assert verdict["next_command"] == "run `mend`"


def test_a_weak_task_result_is_a_reason_not_an_obstacle() -> None:
    verdict = judge(record(**{**GOOD, "task_evaluator": [finding("task-score", "fail", "0 of 10.")]}))
    assert verdict["answer"] == "yes"


def test_a_straddling_estimate_is_marginal() -> None:
    fit = finding("memory-fit-marginal", "warn", "Needs 7 to 9 of 8 GiB.", ("use `--method qlora`",))
    verdict = judge(record(**{**GOOD, "model_analyzer": [fit]}))
    assert verdict["answer"] == "marginal"
    assert verdict["next_command"] == "use `--method qlora`"


@pytest.mark.parametrize(
    "change",
    [
        {"model_analyzer": [finding("shape", "ok")]},
        {"gpu_probe": [finding("gpu-silent", "unknown")]},
        {"env_sandbox": []},
        {"env_sandbox": [finding("requirements-read", "ok")]},
    ],
)
def test_what_decides_but_is_not_known_is_could_not_tell(change: dict[str, Any]) -> None:
    assert judge(record(**{**GOOD, **change}))["answer"] == "could not tell"


def test_a_stage_that_was_not_run_never_counts_as_passed() -> None:
    stages = {stage: findings for stage, findings in GOOD.items() if stage != "env_sandbox"}
    verdict = judge(record(**stages))
    assert verdict["answer"] == "could not tell"
    assert "python env_sandbox.py" in verdict["facts"][0]["what"]
    assert [row["level"] for row in verdict["stages"]] == ["ok", "not run", "ok", "warn"]


def test_sections_about_different_models_are_pointed_out() -> None:
    both = record(**GOOD)
    both["sections"]["model_analyzer"]["observed"]["model_name"] = "one"
    both["sections"]["task_evaluator"]["observed"]["model_name"] = "two"
    assert "different models" in judge(both)["notes"][0]


def test_a_stage_that_was_not_run_names_the_command_that_would() -> None:
    record = {"sections": {}, "job": {"model": "./my-model", "data": "eval.jsonl"}}
    told = {row["stage"]: row["what"] for row in judge(record)["stages"]}
    assert told["gpu_probe"] == "Not run: `python gpu_probe.py` answers it."
    assert told["model_analyzer"] == "Not run: `python model_analyzer.py ./my-model` answers it."
    asked = "`python task_evaluator.py --model ./my-model --data eval.jsonl`"
    assert told["task_evaluator"] == f"Not run: {asked} answers it."
