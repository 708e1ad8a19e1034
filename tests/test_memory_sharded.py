"""FSDP rehearsed on one rank of a group of GPUs that exists in name only."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import model_analyzer
from preflight.console import run_main
from preflight.machine import Machine
from preflight.memory.rehearsal import Job, rehearse
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package)

SMALL: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4096,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# attention 4 x 512 x 512, MLP 3 x 512 x 1024, two norms; embedding and head; final norm
LAYER = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
WHOLE = 6 * LAYER + 2 * 4096 * 512 + 512
PLAN = Plan(method="full", sequence_tokens=64, gpus=4, parallel="fsdp_full", optimizer="adamw_torch", grad_clip=None)


def size(made: Any, component: str) -> int:
    return next(part.bytes for part in made.estimate.components if part.name == component)


def test_each_gpu_holds_its_part_of_weights_gradients_and_states() -> None:
    (made,) = rehearse(Machine(), sys.executable, [Job(SMALL, PLAN)])
    assert made.trouble == "" and made.estimate.moment.startswith("optimizer")
    # float32 under mixed precision; 0.1 %: blocks of 512 bytes, buffers of positions
    assert size(made, "static_model") == pytest.approx(WHOLE * 4 / 4, rel=2e-3)
    assert size(made, "gradients") == pytest.approx(WHOLE * 4 / 4, rel=2e-3)
    assert size(made, "optimizer") >= WHOLE * 8 / 4


def test_more_gpus_hold_less_each_and_more_tokens_more() -> None:
    jobs = [
        Job(SMALL, replace(PLAN, gpus=2)),
        Job(SMALL, replace(PLAN, gpus=8)),
        Job(SMALL, replace(PLAN, gpus=8, sequence_tokens=256, micro_batch=4)),
    ]
    two, eight, longer = (made.estimate.allocated_bytes for made in rehearse(Machine(), sys.executable, jobs))
    # weights, gradients and states: 16 bytes a parameter; up to 4 more for the temporary of AdamW's foreach step
    assert WHOLE * 16 * 3 / 8 < two - eight < WHOLE * 20 * 3 / 8
    assert longer > eight


@pytest.mark.slow
def test_published_peak_of_two_gpus_is_met() -> None:
    """fms_acceleration: Mistral-7B, all weights in bf16, 2 x A100, micro batch 2 of 4096 packed tokens: 33.738 GiB."""
    config = json.loads((ROOT / "tests/configs/mistralai__Mistral-7B-v0.1/config.json").read_text(encoding="utf-8"))
    plan = Plan(
        method="full", sequence_tokens=4096, micro_batch=2, gpus=2, parallel="fsdp_full", autocast=None,
        optimizer="adamw_torch", attention="flash_attention_2",
    )  # fmt: skip
    (made,) = rehearse(Machine(), sys.executable, [Job(config, plan)])
    assert made.estimate.allocated_bytes / 2**30 == pytest.approx(33.738, rel=0.01)


def test_what_has_no_rehearsal_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(ROOT / "tests/configs/Qwen__Qwen2.5-0.5B"), "--method", "qlora", "--gpus", "2"]
    arguments += ["--parallel", "fsdp_full", "--gpu-vram-gb", "24", "--rehearse", "--json"]
    assert run_main(model_analyzer.main, arguments) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    (said,) = [one for one in findings if one["code"] == "rehearsal-failed"]
    assert "4-bit weights divided by FSDP" in said["what"]
