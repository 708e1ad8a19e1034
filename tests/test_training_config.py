"""training_config.yaml as template and as input, and the configurations of other programs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import model_analyzer
from preflight.console import UsageError, run_main
from preflight.facts import table
from preflight.foreign_configs import read_settings
from preflight.plan import Plan, read_plan
from preflight.training_config import configuration, recipe_plan, settings, template

ROOT = Path(__file__).resolve().parent.parent


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_at_the_root_is_the_default_plan():
    assert (ROOT / "training_config.yaml").read_text(encoding="utf-8") == template()
    expected = replace(recipe_plan(Plan()), gradient_accumulation=16, lora_alpha=32.0)
    assert read_plan(ROOT / "training_config.yaml") == replace(expected, attention="sdpa")


def test_every_value_of_the_template_has_its_reason():
    text = template()
    values = [line for line in text.splitlines() if line and line[0].isalpha()]
    assert len(values) > 30
    lines = text.splitlines()
    for value in values:
        assert lines[lines.index(value) - 1].startswith("# "), value
    assert "dataloader_num_workers: 0" in values
    assert "It has nothing to do with GPU timeouts." in " ".join(text.replace("# ", "").split())


@pytest.mark.parametrize(
    "plan",
    [
        Plan(method="full", weight_dtype="fp32", autocast="bf16", gradient_accumulation=4),
        Plan(method="full", weight_dtype="bf16", autocast=None, optimizer="adafactor", gradient_accumulation=2),
        Plan(method="lora", lora_rank=64, lora_alpha=16.0, micro_batch=4, gradient_checkpointing=False),
        Plan(method="lora", target_modules=("q_proj", "v_proj"), modules_to_save=("lm_head",), use_dora=True),
        Plan(method="qlora", quant_type="fp4", double_quant=False, optimizer="paged_adamw_8bit", sequence_tokens=8192),
        Plan(method="qlora", weight_dtype="fp16", autocast="fp16", attention="eager", packing=True),
        Plan(method="lora_int8", attention="flash_attention_2", grad_clip=None, lora_dropout=0.05),
    ],
)
def test_a_plan_survives_being_written_and_read(tmp_path, plan):
    wanted = recipe_plan(plan)
    path = write(tmp_path, configuration(settings(wanted, "model", conversations=1000)))
    got = read_plan(path)
    same = replace(wanted, gradient_accumulation=got.gradient_accumulation)
    same = replace(same, attention="sdpa") if wanted.attention == "auto" else same
    if not wanted.quantised or wanted.method == "lora_int8":  # these keys are only written where they decide something
        same = replace(same, quant_type=got.quant_type, double_quant=got.double_quant)
    if not wanted.adapters:
        same = replace(
            same, lora_rank=16, lora_alpha=32, lora_dropout=got.lora_dropout, adapter_dtype=got.adapter_dtype
        )
    if wanted.autocast == "fp16":  # plain trl would make them bfloat16; train.py does not
        same = replace(same, adapter_dtype=got.adapter_dtype)
    assert got == same


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("lora_rnk: 8", "lora_rnk: is no known key; the nearest right one is lora_rank"),
        ("max_lenght: 512", "the nearest right one is max_length"),
        ("per_device_batch_size: 1", "the nearest right one is per_device_"),
        ("gradient_chekpointing: true", "the nearest right one is gradient_checkpointing"),
        ("evaluation_strategy: steps", "use eval_strategy"),
        ("warmup_ratio: 0.1", "use warmup_steps"),
        ("no_cuda: true", "use use_cpu"),
        ("use_peft: true\nlora_r: many", "'many' is not allowed; a whole number from 1 to 1,000,000,000"),
        ("model_name_or_path: m\nload_in_4bit: true\nuse_peft: false", "use_peft: must be true"),
        ("model_name_or_path: m\nload_in_4bit: true\nload_in_8bit: true", "choose one"),
        ("- a list", "not a mapping"),
        ("a: [1, 2", "not a YAML file"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_names_the_right_one(tmp_path, text, named):
    with pytest.raises(UsageError) as error:
        read_plan(write(tmp_path, text))
    assert named in str(error.value) and "config.yaml" in str(error.value) and "\n" not in str(error.value)


def test_trl_with_its_own_defaults_is_what_trl_does(tmp_path):
    plan = read_plan(write(tmp_path, "model_name_or_path: m\nuse_peft: true\nload_in_4bit: true\n"))
    # trl 1.16 ModelConfig and SFTConfig: r 16, alpha 32, dropout 0.05, 1024 tokens, batch 8, bf16, no double quant
    assert (plan.method, plan.lora_rank, plan.lora_alpha, plan.lora_dropout) == ("qlora", 16, 32, 0.05)
    assert (plan.sequence_tokens, plan.micro_batch, plan.autocast, plan.double_quant) == (1024, 8, "bf16", False)
    assert (plan.weight_dtype, plan.adapter_dtype, plan.kbit_preparation) == ("fp32", "bf16", False)
    assert (plan.loss, plan.gradient_checkpointing) == ("chunked_lm_head_and_ce", True)


def test_trl_without_adapters_trains_everything(tmp_path):
    assert read_plan(write(tmp_path, "model_name_or_path: m\nmax_length: 512\n")).method == "full"


def test_a_dump_of_training_arguments_is_read(tmp_path):
    document = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "gradient_checkpointing": True,
        "bf16": True,
        "fp16": False,
        "optim": "paged_adamw_8bit",
        "max_grad_norm": 0.3,
        "fsdp": [],
        "fsdp_config": {"min_num_params": 0},
        "deepspeed": None,
        "lr_scheduler_kwargs": {},
        "_n_gpu": 1,
    }
    path = write(tmp_path, json.dumps(document), "training_args.json")
    plan = read_plan(path)
    assert (plan.method, plan.micro_batch, plan.gradient_accumulation) == ("full", 4, 8)
    assert (plan.autocast, plan.optimizer, plan.grad_clip, plan.parallel) == ("bf16", "paged_adamw_8bit", 0.3, "none")
    assert "add `--method lora`" in read_settings(document, "x").notes[0]
    del document["gradient_checkpointing"], document["bf16"]
    plan = read_plan(write(tmp_path, json.dumps(document)))
    assert plan.gradient_checkpointing is False and plan.autocast is None  # TrainingArguments' own defaults


def test_deepspeed_and_fsdp_name_the_sharding():
    base = {"output_dir": "o", "per_device_train_batch_size": 1}
    inline = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    for value, parallel, offload in (
        (inline, "zero3", True),
        ("configs/ds_z2_config.json", "zero2", False),
        ("deepspeed_configs/zero3_bf16_cpuoffload_all.json", "zero3", True),
    ):
        found = read_settings({**base, "deepspeed": value}, "x")
        assert (found.settings["parallel"], found.settings["offload"]) == (parallel, offload)
        assert any("--gpus" in note for note in found.notes)
    found = read_settings({**base, "deepspeed": "mine.json"}, "x")
    assert "parallel" not in found.settings and any("ZeRO stage" in note for note in found.notes)
    assert read_settings({**base, "fsdp": "full_shard auto_wrap"}, "x").settings["parallel"] == "fsdp_full"
    assert read_settings({**base, "fsdp": "hybrid_shard offload"}, "x").settings["parallel"] == "fsdp_hybrid"


AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
val_set_size: 0.05
adapter: qlora
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_32bit
bf16: auto
gradient_checkpointing: true
flash_attention: true
special_tokens:
  pad_token: <|end_of_text|>
"""


def test_axolotl_is_read(tmp_path):
    plan = read_plan(write(tmp_path, AXOLOTL))
    assert (plan.method, plan.sequence_tokens, plan.micro_batch, plan.gradient_accumulation) == ("qlora", 4096, 2, 4)
    assert (plan.lora_rank, plan.lora_alpha, plan.lora_dropout, plan.target_modules) == (32, 16, 0.05, ())
    assert (plan.optimizer, plan.autocast, plan.weight_dtype) == ("paged_adamw_32bit", "bf16", "bf16")
    assert plan.packing and plan.gradient_checkpointing and plan.attention == "flash_attention_2"
    plain = AXOLOTL.replace("adapter: qlora\n", "").replace("load_in_4bit: true", "load_in_4bit: false")
    plain += "liger_fused_linear_cross_entropy: true\nfsdp:\n  - full_shard\n  - auto_wrap\n"
    plan = read_plan(write(tmp_path, plain))
    assert (plan.method, plan.loss, plan.parallel) == ("full", "fused_linear_ce", "fsdp_full")


LLAMAFACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
"""


def test_llamafactory_is_read(tmp_path):
    plan = read_plan(write(tmp_path, LLAMAFACTORY))
    assert (plan.method, plan.lora_rank, plan.lora_alpha, plan.target_modules) == ("lora", 8, 16, ())
    assert (plan.sequence_tokens, plan.micro_batch, plan.gradient_accumulation) == (2048, 1, 8)
    assert plan.autocast == "bf16" and plan.gradient_checkpointing
    plan = read_plan(write(tmp_path, LLAMAFACTORY + "quantization_bit: 4\nquantization_method: bitsandbytes\n"))
    assert plan.method == "qlora" and plan.kbit_preparation is False
    with pytest.raises(UsageError, match="quantization_bit: 3"):
        read_plan(write(tmp_path, LLAMAFACTORY + "quantization_bit: 3\n"))
    full = LLAMAFACTORY.replace("finetuning_type: lora", "finetuning_type: full") + "deepspeed: x/ds_z3_config.json\n"
    plan = read_plan(write(tmp_path, full))
    assert (plan.method, plan.parallel) == ("full", "zero3")


def test_an_optimizer_that_is_not_known_is_said():
    found = read_settings(yaml.safe_load(AXOLOTL.replace("paged_adamw_32bit", "came_pytorch")), "x")
    assert found.settings["optimizer"] == "adamw_torch"
    assert any("came_pytorch" in note for note in found.notes)


def test_what_the_recipe_does_not_cover_is_refused():
    for plan in (Plan(method="ia3"), Plan(method="full", parallel="zero3", gpus=4), Plan(offload=True)):
        with pytest.raises(UsageError, match="not covered"):
            recipe_plan(plan)


CHILD = """
import dataclasses, json, sys
import trl
from transformers import TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
names = lambda kind: sorted(f.name for f in dataclasses.fields(kind) if f.init)
parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
parsed = parser.parse_args_and_config(["--config", sys.argv[1], "--use_cpu"], return_remaining_strings=True)
print(json.dumps({
    "versions": [trl.__version__, __import__("transformers").__version__],
    "training_arguments": names(TrainingArguments),
    "sft_config": sorted(set(names(SFTConfig)) - set(names(TrainingArguments))),
    "model_config": names(ModelConfig), "script_arguments": names(ScriptArguments),
    "dataset_mixture": names(DatasetMixtureConfig), "unknown": parsed[-1],
    "read": [parsed[1].warmup_steps, parsed[1].learning_rate, parsed[2].lora_target_modules, parsed[2].dtype],
}))
"""


@pytest.mark.slow
def test_the_known_keys_are_those_of_the_installed_trl_and_its_parser_reads_the_template():
    pytest.importorskip("trl", reason="trl is not installed")
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT / "training_config.yaml")],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    keys = table("training_keys")
    if found.pop("versions") != [keys["versions"]["trl"], keys["versions"]["transformers"]]:
        pytest.skip("other versions of trl and transformers are installed")
    assert found.pop("unknown") == []  # `trl sft` hands unknown keys on to accelerate, which stops at them
    assert found.pop("read") == [0.03, 0.0002, "all-linear", "bfloat16"]
    assert found == {name: keys[name] for name in found}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            AXOLOTL.replace("sequence_len: 4096", "sequence_len: 4096\nactivation_offloading: true"),
            "activation_offloading",
        ),
        (AXOLOTL.replace("lora_dropout: 0.05", "lora_dropuot: 0.05"), "did you mean lora_dropout"),
        (LLAMAFACTORY + "use_galore: true\n", "use_galore"),
        ("output_dir: x\nnum_train_epochs: 2\nper_device_train_batch_size: 2\n", "judged as full fine-tuning"),
    ],
)
def test_what_of_a_foreign_file_is_not_taken_over_is_a_finding(tmp_path, capsys, text, words):
    path = write(tmp_path, text)
    model = str(ROOT / "tests" / "configs" / "Qwen__Qwen2.5-0.5B")
    run_main(model_analyzer.main, [model, "--config", str(path), "--json", "--no-report"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    told = [finding for finding in findings if finding["code"] == "config-not-taken-over"]
    assert any(words in finding["what"] for finding in told)
    assert all(finding["level"] == "warn" and finding["why"] and finding["fix"] for finding in told)


def test_a_configuration_of_our_own_leaves_nothing_out(tmp_path, capsys):
    model = str(ROOT / "tests" / "configs" / "Qwen__Qwen2.5-0.5B")
    run_main(model_analyzer.main, [model, "--config", str(ROOT / "training_config.yaml"), "--json", "--no-report"])
    assert "config-not-taken-over" not in capsys.readouterr().out


def test_a_global_batch_sets_the_accumulation_steps(tmp_path):
    plan = read_plan(write(tmp_path, "method: lora\nmicro_batch: 4\nglobal_batch: 32\ngpus: 2\nparallel: ddp\n"))
    assert plan.gradient_accumulation == 4
    with pytest.raises(UsageError, match="a multiple of 8, the micro batch of 4 on 2"):
        read_plan(write(tmp_path, "method: lora\nmicro_batch: 4\nglobal_batch: 12\ngpus: 2\n"))
