"""The real stack on fake tensors: against published measurements, against real tensors, and when things go wrong."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from preflight.machine import Machine
from preflight.memory.rehearsal import Job, measure_on_cpu, rehearse
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


def config(name: str) -> dict:
    return json.loads((ROOT / "tests" / "configs" / name / "config.json").read_text())


TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny(model_type: str, architecture: str, **more) -> dict:
    return {**TINY, "model_type": model_type, "architectures": [architecture], **more}


GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 4, "n_head": 4,
    "vocab_size": 256, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL = [
    tiny("llama", "LlamaForCausalLM"),
    tiny("qwen2", "Qwen2ForCausalLM"),
    tiny("qwen3", "Qwen3ForCausalLM"),
    tiny("mistral", "MistralForCausalLM"),
    tiny("gemma", "GemmaForCausalLM"),
    tiny("gemma2", "Gemma2ForCausalLM"),
    tiny("phi3", "Phi3ForCausalLM"),
    tiny("granite", "GraniteForCausalLM"),
    tiny("olmo2", "Olmo2ForCausalLM"),
    tiny("gpt_neox", "GPTNeoXForCausalLM"),
    tiny("starcoder2", "Starcoder2ForCausalLM"),
    GPT2,
]
METHODS = [
    {"method": "full", "autocast": None},
    {"method": "lora", "autocast": "bf16"},
    {"method": "qlora", "autocast": None, "gradient_checkpointing": False},
]


@pytest.mark.slow
def test_published_peaks_are_met_within_one_per_cent():
    """can_i_finetune_this (RTX 4080) and fms_acceleration (A100): allocated and reserved GiB as published."""
    qwen = Plan(
        method="qlora", sequence_tokens=1024, target_modules=ATTENTION, optimizer="paged_adamw_8bit", autocast=None,
        grad_clip=None, holds_outputs=True, holds_across_steps=True, compute_capability="8.9", attention="sdpa",
    )  # fmt: skip
    mistral = Plan(
        method="full", sequence_tokens=4096, micro_batch=4, autocast=None, optimizer="adamw_torch",
        attention="flash_attention_2",
    )  # fmt: skip
    jobs = [
        Job(config("Qwen__Qwen2.5-1.5B-Instruct"), qwen),
        Job(config("Qwen__Qwen2.5-1.5B-Instruct"), replace(qwen, sequence_tokens=4096)),
        Job(config("mistralai__Mistral-7B-v0.1"), mistral),
    ]
    published = [(4.0413, 4.3574), (11.5068, 13.5566), (67.4602, None)]
    for made, (allocated, reserved) in zip(rehearse(Machine(), sys.executable, jobs), published, strict=True):
        assert made.trouble == ""
        assert made.estimate.allocated_bytes / 2**30 == pytest.approx(allocated, rel=0.01)
        if reserved:
            assert made.estimate.reserved_bytes / 2**30 == pytest.approx(reserved, rel=0.05)


@pytest.mark.slow
def test_few_layers_say_the_same_as_all_layers_to_the_byte():
    plans = [
        Plan(method="lora", sequence_tokens=256, gradient_accumulation=4, lora_dropout=0.1),
        Plan(method="qlora", sequence_tokens=256, gradient_checkpointing=False, autocast=None),
        Plan(method="full", sequence_tokens=256, optimizer="adamw_torch"),
    ]
    some = [Job(config("openai-community__gpt2"), plan) for plan in plans]
    every = [replace(job, layers=99) for job in some]
    answers = rehearse(Machine(), sys.executable, [*some, *every])
    for few, full in zip(answers[:3], answers[3:], strict=True):
        assert few.trouble == full.trouble == ""
        assert few.estimate.allocated_bytes == full.estimate.allocated_bytes
        assert few.estimate.reserved_bytes == full.estimate.reserved_bytes
        assert few.estimate.trainable_parameters == full.estimate.trainable_parameters


@pytest.mark.slow
def test_real_tensors_on_the_cpu_take_what_was_rehearsed_for_twelve_architectures():
    base = Plan(sequence_tokens=32, micro_batch=2, optimizer="adamw_torch", lora_rank=4)
    jobs = []
    for number, made in enumerate(SMALL):
        settings = METHODS[number % 3]
        plan = replace(base, **settings)
        jobs.append(Job(made, plan, on_cpu=True))
    rehearsed = rehearse(Machine(), sys.executable, jobs, 600.0)
    measured = measure_on_cpu(Machine(), sys.executable, jobs, 600.0)
    for job, one, other in zip(jobs, rehearsed, measured, strict=True):
        name = f"{job.config['model_type']} {job.plan.method}"
        assert one.trouble == other.trouble == "", name
        assert one.estimate.allocated_bytes == pytest.approx(other.estimate.allocated_bytes, rel=0.02), name


@pytest.mark.slow
def test_what_cannot_be_rehearsed_says_why():
    unknown = {"model_type": "not_a_model", "architectures": ["NotAModel"]}
    torn = {"model_type": "llama", "hidden_size": -5}
    answers = rehearse(Machine(), sys.executable, [Job(unknown, Plan()), Job(torn, Plan()), Job({}, Plan())])
    assert "does not know the model type not_a_model" in answers[0].trouble
    assert all(answer.estimate is None and answer.trouble for answer in answers)


def test_an_interpreter_without_torch_is_no_crash(tmp_path):
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    empty.chmod(0o755)
    made = rehearse(Machine(), str(empty), [Job(TINY, Plan())])[0]
    assert made.estimate is None
    assert "torch" in made.trouble


def test_an_interpreter_that_is_not_there_is_no_crash():
    assert rehearse(Machine(), "/nowhere/python", [Job(TINY, Plan())])[0].estimate is None


def test_a_job_that_takes_the_child_with_it_costs_the_others_nothing(monkeypatch):
    """The child is killed (as when memory runs out) in the second of three jobs: the third runs in its own."""
    import preflight.memory.rehearsal as module

    asked = []
    real = module._rehearse

    def killed(machine, python, jobs, timeout_s):
        asked.append(len(jobs))
        if len(jobs) < 3:
            return real(machine, python, jobs, timeout_s)
        first = real(machine, python, jobs[:1], timeout_s)
        return [*first, *(module.Rehearsal(None, "exit code -9", "starting", lost=True) for _ in jobs[1:])]

    monkeypatch.setattr(module, "_rehearse", killed)
    small = config("HuggingFaceTB__SmolLM2-135M")
    jobs = [Job(small, Plan(method="lora", sequence_tokens=64)) for _ in range(3)]
    made = module.rehearse(Machine(), sys.executable, jobs)
    assert asked == [3, 1]
    assert made[1].trouble == "exit code -9"
    assert made[2].estimate.allocated_bytes == made[0].estimate.allocated_bytes


def test_data_parallel_adds_one_copy_of_the_gradients():
    """DDP's buckets: of full fine-tuning in 16 bit, 2 bytes a parameter; each tensor in whole blocks of 512 bytes."""
    shape = tiny("llama", "LlamaForCausalLM", num_hidden_layers=12)
    plan = Plan(method="full", sequence_tokens=64, autocast=None, optimizer="adamw_torch", gradient_checkpointing=False)
    alone, two = rehearse(
        Machine(), sys.executable, [Job(shape, plan), Job(shape, replace(plan, gpus=2, parallel="ddp"))]
    )
    # a layer: q, o of 64 x 64, k, v of 64 x 32, three of 64 x 128, two norms of 64 (one block of 512 bytes each)
    layer = (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 2 + 2 * 512
    whole = 12 * layer + 2 * 256 * 64 * 2 + 512
    assert two.estimate.allocated_bytes - alone.estimate.allocated_bytes == whole
