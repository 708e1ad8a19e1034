"""LoRA counts. Expected values were counted by get_peft_model on the meta device (PEFT 0.21.2), or by hand."""

import json
from pathlib import Path

import pytest

from preflight.model.adapter_choice import choices, language_pattern, linear_names, recommend_rank, recommended
from preflight.model.lora import default_targets, reach, trainable_parameters
from preflight.model_shape import read_shape

HERE = Path(__file__).parent
MEASURED = [
    row
    for line in (HERE / "measured" / "meta_counts.jsonl").read_text(encoding="utf-8").splitlines()
    if "name" in (row := json.loads(line))
]


def shape_of(name):
    return read_shape(json.loads((HERE / "configs" / name / "config.json").read_text(encoding="utf-8")))


def test_enough_models_were_counted_by_peft():
    assert sum(isinstance(row["lora_all"], int) for row in MEASURED) >= 80
    assert sum(isinstance(row["lora_two"], int) for row in MEASURED) >= 80


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["name"])
def test_trainable_parameters_are_those_of_get_peft_model(row):
    shape = shape_of(row["name"])
    for targets, expected in (("all-linear", row["lora_all"]), (row["two"], row["lora_two"])):
        assert trainable_parameters(shape, targets, 8) == (expected if isinstance(expected, int) else None)


def test_counts_grow_in_proportion_to_the_rank():
    shape = shape_of("Qwen__Qwen2-7B")
    assert trainable_parameters(shape, "all-linear", 8) == 20_185_088  # FACTS, section 7
    assert trainable_parameters(shape, "all-linear", 64) == 8 * 20_185_088
    assert trainable_parameters(shape, ["q_proj", "k_proj", "v_proj", "o_proj"], 8) == 5_046_272


def test_names_that_do_not_exist_are_told_apart():
    found = reach(shape_of("microsoft__Phi-3-mini-4k-instruct"), ["q_proj", "o_proj", "down_proj"], 8)
    assert found.ignored == ("q_proj",)
    assert found.matched == {"q_proj": 0, "o_proj": 32, "down_proj": 32}
    assert found.layers == 32


def test_a_choice_that_matches_nothing_is_refused():
    found = reach(shape_of("openai-community__gpt2"), ["q_proj"], 8)
    assert found.trainable is None and "not found in the base model" in found.refused


@pytest.mark.parametrize("name", sorted(path.parent.name for path in HERE.glob("configs/*/config.json")))
def test_every_published_model_gets_targets_that_exist(name):
    shape = shape_of(name)
    best = recommended(choices(shape))
    assert best is not None and best.reached.trainable
    assert not best.reached.ignored
    assert best.reached.layers == sum(g.count for g in shape.groups if g.stack in ("decoder", "encoder"))


def test_a_vision_tower_with_the_same_names_is_left_out():
    shape = shape_of("google__gemma-3-4b-it")
    pattern = language_pattern(shape, linear_names(shape))
    assert isinstance(pattern, str)
    found = reach(shape, pattern, 8)
    # 34 layers; q 2560->2048, k and v 2560->1024, o 2048->2560, gate and up 2560->10240, down 10240->2560
    layer = 8 * ((2560 + 2048) + 2 * (2560 + 1024) + (2048 + 2560) + 3 * (2560 + 10240))
    assert found.trainable == 34 * layer


def test_peft_has_no_default_for_some_types():
    assert default_targets("llama") == ["q_proj", "v_proj"]
    assert default_targets("phi3") is None
    assert default_targets(None) is None


@pytest.mark.parametrize(
    ("tokens", "low", "high"),
    [(None, 16, 16), (1_000, 8, 8), (200_000, 16, 16), (20_000_000, 32, 64), (10**12, 256, 256)],
)
def test_the_rank_follows_the_tokens_and_not_the_width(tokens, low, high):
    shape = shape_of("Qwen__Qwen2-7B")
    rank = recommend_rank(shape, recommended(choices(shape)), tokens)
    assert low <= rank.r <= high
    assert rank.rule["would_give"] == [56, 224] and rank.rule["used"] is False
