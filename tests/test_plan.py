"""The plan that flags and YAML describe."""

import argparse
from pathlib import Path

import pytest

from preflight.console import UsageError
from preflight.plan import Plan, add_flags, plan_from, plan_from_flags, read_plan


def test_keys_of_training_scripts_mean_the_same_as_ours():
    plan = plan_from({"per_device_train_batch_size": 4, "max_seq_length": 1024, "lora_r": 8, "optim": "adamw_bnb_8bit"})
    assert (plan.micro_batch, plan.sequence_tokens, plan.lora_rank, plan.optimizer) == (4, 1024, 8, "adamw_8bit")


def test_all_linear_is_an_empty_list_of_targets():
    assert plan_from({"target_modules": "all-linear"}).target_modules == ()
    assert plan_from({"target_modules": "q_proj, v_proj"}).target_modules == ("q_proj", "v_proj")


def test_loading_in_four_bit_makes_lora_a_qlora():
    assert plan_from({"method": "lora", "load_in_4bit": True}).method == "qlora"
    assert plan_from({"method": "full", "load_in_4bit": True}).method == "full"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "magic"),
        ("micro_batch", 0),
        ("micro_batch", True),
        ("sequence_tokens", "many"),
        ("optimizer", "adam9000"),
        ("lora_dropout", -0.1),
        ("gradient_checkpointing", "yes"),
        ("target_modules", [1, 2]),
        ("autocast", "int8"),
    ],
)
def test_a_wrong_value_names_the_place_the_key_and_what_is_allowed(key, value):
    with pytest.raises(UsageError) as caught:
        plan_from({key: value}, "train.yaml")
    assert "train.yaml" in str(caught.value)
    assert key in str(caught.value)


def test_yaml_sections_are_read(tmp_path: Path):
    file = tmp_path / "training_config.yaml"
    file.write_text("lora:\n  r: 64\n  lora_alpha: 16\ntraining:\n  learning_rate: 2.0e-4\n  bf16: true\n")
    plan = read_plan(file)
    assert (plan.lora_rank, plan.lora_alpha, plan.autocast) == (64, 16.0, "bf16")


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00", "just words"])
def test_a_yaml_that_is_no_mapping_is_a_usage_error(tmp_path: Path, text: str):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError):
        read_plan(file)


def test_flags_win_over_the_configuration(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("method: lora\nmicro_batch: 8\n")
    parser = argparse.ArgumentParser()
    add_flags(parser)
    plan, choose = plan_from_flags(
        parser.parse_args(["--config", str(file), "--micro-batch", "2", "--autocast", "none"])
    )
    assert (plan.method, plan.micro_batch, plan.autocast, choose) == ("lora", 2, None, False)


def test_without_method_and_configuration_the_method_is_chosen():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert plan_from_flags(parser.parse_args([]))[1] is True
    assert plan_from_flags(parser.parse_args(["--method", "qlora"])) == (Plan(), False)


def test_a_global_batch_and_accumulation_steps_must_say_the_same():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = ["--method", "lora", "--global-batch", "12", "--micro-batch", "3"]
    assert plan_from_flags(parser.parse_args(given))[0].gradient_accumulation == 4
    assert plan_from_flags(parser.parse_args([*given, "--grad-accum", "4"]))[0].gradient_accumulation == 4
    with pytest.raises(UsageError, match="does not go with --grad-accum 2"):
        plan_from_flags(parser.parse_args([*given, "--grad-accum", "2"]))
