"""Why this much? Every product that the breakdown shows is worked out again and gives the bytes beside it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from test_invariants import section_of

from preflight.memory.closed_form import estimate
from preflight.model_shape import read_shape
from preflight.plan import Plan
from preflight.report import render

ROOT = Path(__file__).resolve().parent.parent
_WORDS = re.compile(r"\b(?!(?:blocks|sqrt)\()[A-Za-z]+\b")


def worked_out(product: str) -> float:
    """What a reader gets: units and words dropped, x is times, blocks(n) is n in whole blocks of 512 bytes."""
    text = _WORDS.sub("", product.replace(" x ", " * ").replace(",", ""))
    assert re.fullmatch(r"[\d.\s()+*/]*(?:(?:blocks|sqrt)\([\d.\s()+*/]*\)[\d.\s()+*/]*)*", text), product
    names: dict[str, Any] = {"__builtins__": {}, "blocks": lambda size: -(-size // 512) * 512, "sqrt": math.sqrt}
    return float(eval(text, names))


def test_the_reader_of_products_reads_them_as_people_do() -> None:
    assert worked_out("28 layers x 2,048 x 3,584 x 2 B") == 411_041_792
    assert worked_out("2 x blocks(100 x 3 B) + 7 B of blocks not filled") == 1031
    assert worked_out("1,000 / 64 x 1 B + 3 x sqrt(16) x 4 B") == 15.625 + 48
    with pytest.raises(AssertionError):
        worked_out("__import__('os')")


MODELS = {
    "dense": "Qwen__Qwen2.5-7B",
    "dense, fused, biases": "openai-community__gpt2",
    "parallel blocks": "EleutherAI__pythia-1.4b",
    "soft caps, window": "google__gemma-2-2b",
    "mixture of experts": "Qwen__Qwen3-30B-A3B",
    "latent attention": "deepseek-ai__DeepSeek-V2-Lite",
    "encoder-decoder": "bigscience__T0_3B",
    "hybrid": "ibm-granite__granite-4.0-tiny-preview",
    "gated linear attention": "Qwen__Qwen3-Next-80B-A3B-Instruct",
    "with a tower": "google__gemma-3-4b-it",
    "odd sizes": "sshleifer__tiny-gpt2",
}
PLANS = {
    "qlora": Plan(),
    "qlora without checkpointing": Plan(gradient_checkpointing=False, sequence_tokens=512, double_quant=False),
    "lora": Plan(method="lora", optimizer="adamw_8bit", lora_dropout=0.1, kbit_preparation=False),
    "lora, odd tokens": Plan(method="lora", sequence_tokens=777, micro_batch=3, gradient_accumulation=4),
    "full": Plan(method="full", optimizer="adamw_torch", autocast=None),
    "full, float32": Plan(method="full", weight_dtype="fp32", loss="fused_linear_ce", micro_batch=2),
    "full, adafactor": Plan(method="full", optimizer="adafactor", sequence_tokens=4096),
    "full, paged": Plan(method="full", optimizer="paged_adamw_8bit", attention="eager"),
    "full, math": Plan(method="full", optimizer="sgd", attention="sdpa_math", gradient_checkpointing=False),
    "int8": Plan(method="lora_int8", loss="chunked_lm_head_and_ce"),
    "gptq": Plan(method="lora_gptq", compute_capability="7.5", autocast="fp16", weight_dtype="fp16"),
    "dora and saved modules": Plan(method="lora", use_dora=True, modules_to_save=("embed_tokens",), holds_outputs=True),
    "divided": Plan(method="full", gpus=4, parallel="fsdp_full", optimizer="adamw_torch"),
    "zero 2 with offload": Plan(method="full", gpus=8, parallel="zero2", offload=True),
    "ddp": Plan(method="lora", gpus=2, parallel="ddp"),
}  # fmt: skip


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_every_product_gives_its_bytes_and_everything_adds_up(model: str, plan: Plan) -> None:
    shape = read_shape(json.loads((ROOT / "tests/configs" / model / "config.json").read_text()))
    shown = json.loads(json.dumps(estimate(shape, plan).as_json()))
    for name, component in shown["components"].items():
        for item in component["items"]:
            assert item["formula"], item
            assert abs(worked_out(item["formula"]) - item["bytes"]) <= 1, (name, item)
            filled = re.search(r"\+ ([\d,]+) B of blocks not filled", item["formula"])
            if filled and item["bytes"] > 2**20:  # what blocks add is little where a tensor is no crumb
                assert int(filled[1].replace(",", "")) < 0.02 * item["bytes"] + 2**18, item
        assert sum(item["bytes"] for item in component["items"]) == component["bytes"], name
    parts = {name: component["bytes"] for name, component in shown["components"].items()}
    assert sum(parts.values()) == shown["reserved_bytes"]
    assert sum(parts.values()) - parts["safety_margin"] == shown["allocated_bytes"]
    assert shown["moments_bytes"][shown["moment"]] == shown["allocated_bytes"]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_report_shows_every_product_with_its_result(model: str) -> None:
    flags = ("--method", "qlora", "--no-gradient-checkpointing", "--seq-len", "512")  # the plan with the most lines
    document = json.loads(section_of("model_analyzer", str(ROOT / "tests/configs" / model), *flags))
    text = render({"schema": 1, "sections": {"model_analyzer": document}}, strict=True)["model_analyzer"]
    found = re.findall(r"^\| [^|]+ \| [^|]+ \| (.+?) = ([\d,]+) B \|$", text, re.MULTILINE)
    result = [(worked_out(product), int(size.replace(",", ""))) for product, size in found]
    assert len(result) > 20 and all(abs(product - size) <= 1 for product, size in result)
    assert sum(size for _, size in result) == document["observed"]["memory"]["estimate"]["reserved_bytes"]
    assert len(text.encode()) < 24 * 1024
