"""The plan as training_config.yaml: every value in the words of trl and transformers, with the reason for it."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from preflight.console import UsageError, one_line
from preflight.facts import shipped, table
from preflight.foreign_configs import SFT_TRAINER_LOSS
from preflight.plan import Plan

METHODS = {
    "full": "Full fine-tuning",
    "lora": "LoRA",
    "qlora": "QLoRA: LoRA over a base in 4 bits",
    "lora_int8": "LoRA over a base in 8 bits",
    "lora_gptq": "LoRA over a GPTQ base",
    "lora_awq": "LoRA over an AWQ base",
}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
OPTIMIZERS_OF_TRAINER = (
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor",
    "lion_32bit", "lion_8bit", "paged_lion_8bit", "sgd",
)  # fmt: skip
EFFECTIVE_BATCH = 16
TEMPLATE_MODEL = "path/to/your/model"


@dataclass(frozen=True)
class Setting:
    """One key of training_config.yaml, and why it has this value."""

    key: str
    value: Any
    reason: str

    @property
    def text(self) -> str:
        """The line (or block) of YAML. JSON's scalars and lists are YAML, too."""
        if isinstance(self.value, list) and self.value and isinstance(self.value[0], dict):
            rows = []
            for item in self.value:
                marks = ["- ", *["  "] * (len(item) - 1)]
                rows += [
                    f"  {mark}{key}: {_yaml(value)}" for mark, (key, value) in zip(marks, item.items(), strict=True)
                ]
            return f"{self.key}:\n" + "\n".join(rows)
        return f"{self.key}: {_yaml(self.value)}"


def _yaml(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def recipe_plan(plan: Plan, on_cpu: bool = False) -> Plan:
    """The plan as train.py runs it: trl's loss path and adapters; on a CPU in float32 and without quantisation.

    Raises UsageError for what the recipe does not cover.
    """
    if plan.method not in METHODS:
        raise UsageError(f"--recipe: method {plan.method} is not covered; one of {', '.join(METHODS)}")
    if plan.parallel not in ("none", "ddp") or plan.offload:
        raise UsageError(
            f"--recipe: {plan.parallel}{' with offload' if plan.offload else ''} is not covered; the recipe runs on "
            "one GPU, or with ddp on several"
        )
    if on_cpu:
        method = "lora" if plan.method in ("qlora", "lora_int8") else plan.method
        plan = replace(plan, method=method, weight_dtype="fp32", autocast=None, optimizer="adamw_torch")
    autocast = plan.autocast
    if autocast is None and plan.adapters and plan.weight_dtype != "fp32":
        # Without it every adapter would compute in float32 beside its two-byte base.
        autocast = plan.weight_dtype
    optimizer = plan.optimizer_name() if plan.optimizer_name() in OPTIMIZERS_OF_TRAINER else "adamw_torch"
    return replace(
        plan,
        loss=SFT_TRAINER_LOSS,
        kbit_preparation=False,
        autocast=autocast,
        optimizer=optimizer,
        optimizer_in_backward=False,
        adapter_dtype="bf16" if plan.method in ("qlora", "lora_int8") and autocast != "fp16" else "fp32",
        attention_mask=plan.micro_batch > 1 and not plan.packing,
    )


def settings(
    plan: Plan, model: str, conversations: int | None = None, parameters: int | None = None, on_cpu: bool = False
) -> list[tuple[str, list[Setting]]]:
    """The groups of training_config.yaml. `conversations` (to train on) and `parameters` are None when not known."""
    return [
        ("the model", _of_model(plan, model)),
        ("what is trained", _of_method(plan)),
        ("the data", _of_data(plan)),
        ("the memory of a step", _of_step(plan, conversations)),
        ("the course of the training", _of_course(plan, conversations, parameters, on_cpu)),
    ]


def _of_model(plan: Plan, model: str) -> list[Setting]:
    dtype_reasons = {
        "bf16": "Two bytes per weight, with float32's range: no loss scaling. Native from compute capability 8.0 on.",
        "fp16": "Two bytes per weight, for GPUs before compute capability 8.0, where bfloat16 is only emulated.",
        "fp32": "Four bytes per weight: for CPUs, and for full fine-tuning with mixed precision.",
    }
    attention = {
        "flash_attention_2": "Needs the package flash-attn and compute capability 8.0; asked for by the plan.",
        "eager": "Keeps the whole [batch, heads, s, s] matrix; asked for by the plan.",
    }
    name = plan.attention if plan.attention in attention else "sdpa"
    reason = attention.get(
        name, "torch's own; it picks the best kernel for the GPU. transformers' default for nearly all models."
    )
    return [
        Setting("model_name_or_path", model, "A local directory or a hub id."),
        Setting("dtype", DTYPES[plan.weight_dtype], dtype_reasons[plan.weight_dtype]),
        Setting("attn_implementation", name, reason),
    ]


def _of_method(plan: Plan) -> list[Setting]:
    if not plan.adapters:
        return [Setting("use_peft", False, "Every weight is trained: no adapter.")]
    found = [Setting("use_peft", True, "Only small added matrices are trained; the base stays as it is.")]
    if plan.method == "qlora":
        found += [
            Setting("load_in_4bit", True, "The frozen linear layers in 4 bits: a quarter of bfloat16's memory."),
            Setting(
                "bnb_4bit_quant_type",
                plan.quant_type,
                "NF4 is made for normally distributed weights (QLoRA paper)."
                if plan.quant_type == "nf4"
                else "Asked for by the plan; nf4 is the usual choice.",
            ),
            Setting(
                "use_bnb_nested_quant",
                plan.double_quant,
                "Quantises the scales too: 0.127 instead of 0.5 bits per weight on top of the 4."
                if plan.double_quant
                else "Off: the scales stay in float32, 0.5 bits per weight on top of the 4.",
            ),
        ]
    if plan.method == "lora_int8":
        found.append(Setting("load_in_8bit", True, "The frozen linear layers in 8 bits; needs compute capability 7.5."))
    targets: Any = list(plan.target_modules) or "all-linear"
    found += [
        Setting(
            "lora_r",
            plan.lora_rank,
            "Start at 16; raise it to 32 or 64 from some ten million trained tokens on. The number of adapted layers "
            "matters more than the rank.",
        ),
        Setting("lora_alpha", _whole(plan.lora_alpha), "The update is scaled by alpha / r; twice the rank is usual."),
        Setting("lora_dropout", plan.lora_dropout, "0 is peft's default; 0.05 can help with very little data."),
        Setting(
            "lora_target_modules",
            targets,
            "Every linear layer but the head: better than attention alone at equal size (QLoRA paper, trl's guide)."
            if targets == "all-linear"
            else "Asked for by the plan; all-linear is better at equal size (QLoRA paper, trl's LoRA guide).",
        ),
    ]
    if plan.modules_to_save:
        found.append(
            Setting(
                "lora_modules_to_save",
                list(plan.modules_to_save),
                "Trained as a whole and kept in full: weights, gradients and optimizer states of their own.",
            )
        )
    if plan.use_dora:
        found.append(Setting("use_dora", True, "Direction and size apart: better at low rank, slower, more memory."))
    return found


def _of_data(plan: Plan) -> list[Setting]:
    return [
        Setting(
            "datasets",
            [{"path": "json", "data_files": "data/train.jsonl", "split": "train"}],
            "Chat samples, one JSON object with `messages` per line. The validation loss of train.py comes from "
            "valid.jsonl beside it.",
        ),
        Setting("test_split_size", 0.1, "For `trl sft` only, which makes its own split for the validation loss."),
        Setting(
            "assistant_only_loss",
            True,
            "Only the answers carry the loss. train.py finds them for every chat template and shows what it trains on; "
            "`trl sft` does so for the templates it knows and refuses others.",
        ),
        Setting(
            "max_length",
            plan.sequence_tokens,
            "Longer samples are cut; train.py says how many. Activations and logits grow with it.",
        ),
        Setting(
            "packing",
            plan.packing,
            "Several samples share one sequence: no padding, but needs flash attention to keep them apart."
            if plan.packing
            else "Off: packed samples are kept apart only by flash attention.",
        ),
        Setting(
            "dataloader_num_workers",
            0,
            "Everything is tokenized before the first step, so workers would have nothing to do. Each would import "
            "torch anew on Windows and macOS, take RAM, and in containers /dev/shm. Raise it for data that is decoded "
            "on the fly. It has nothing to do with GPU timeouts.",
        ),
    ]


def _of_step(plan: Plan, conversations: int | None) -> list[Setting]:
    accumulation = accumulation_for(plan, conversations)
    whole = plan.micro_batch * accumulation * plan.gpus
    autocast, optimizer = plan.autocast, plan.optimizer_name()
    return [
        Setting(
            "per_device_train_batch_size",
            plan.micro_batch,
            "Samples in memory at once: with max_length the strongest lever on memory.",
        ),
        Setting(
            "gradient_accumulation_steps",
            accumulation,
            f"{plan.micro_batch} x {accumulation}{f' x {plan.gpus} GPUs' if plan.gpus > 1 else ''} = {whole} samples "
            "per update. LoRA likes fewer than 32 (trl's LoRA guide). It costs time, not memory.",
        ),
        Setting(
            "gradient_checkpointing",
            plan.gradient_checkpointing,
            "Computes activations twice instead of keeping them: about a fifth slower, far less memory."
            if plan.gradient_checkpointing
            else "Off: all activations are kept; it fits, and a step is about a fifth faster.",
        ),
        Setting(
            "bf16",
            autocast == "bf16",
            "Mixed precision: matrix products in bfloat16." if autocast == "bf16" else _no_autocast(plan, "bfloat16"),
        ),
        Setting(
            "fp16",
            autocast == "fp16",
            "Mixed precision with loss scaling, for GPUs without bfloat16."
            if autocast == "fp16"
            else "Only for GPUs without bfloat16.",
        ),
        Setting("optim", optimizer, _OPTIMIZER_REASONS.get(optimizer, "Asked for by the plan.")),
        Setting("max_grad_norm", plan.grad_clip or 0.0, "Cuts rare huge gradients; 0 switches it off."),
    ]


_OPTIMIZER_REASONS = {
    "adamw_torch": "Two float32 states per trained weight.",
    "adamw_torch_fused": "Two float32 states per trained weight, one kernel per update; the Trainer's default.",
    "adamw_8bit": "The two states in 8 bits (bitsandbytes): a quarter of AdamW's memory.",
    "paged_adamw_8bit": "States in 8 bits that move to host memory when the GPU is full (bitsandbytes).",
    "paged_adamw_32bit": "States that move to host memory when the GPU is full (bitsandbytes).",
    "adafactor": "Keeps rows and columns instead of whole second moments: little memory.",
    "sgd": "No states. Needs another learning rate.",
}


def _no_autocast(plan: Plan, name: str) -> str:
    if plan.weight_dtype == "fp32":
        return f"Off: everything in float32. true halves the activations where {name} is native."
    return "Off: the weights have two bytes already."


def accumulation_for(plan: Plan, conversations: int | None) -> int:
    """Steps per update: the plan's own when it names some, else for about 16 samples, fewer for very little data."""
    if plan.gradient_accumulation > 1:
        return plan.gradient_accumulation
    wanted = EFFECTIVE_BATCH if conversations is None else max(1, min(EFFECTIVE_BATCH, conversations // 10))
    return max(1, round(wanted / (plan.micro_batch * plan.gpus)))


def _of_course(plan: Plan, conversations: int | None, parameters: int | None, on_cpu: bool) -> list[Setting]:
    if plan.adapters:
        large = parameters is not None and parameters > 30_000_000_000
        rate = 0.0001 if large else 0.0002
        rate_reason = (
            "Half of the usual 0.0002, for more than 30 billion parameters (QLoRA paper)."
            if large
            else "About ten times that of full fine-tuning (QLoRA paper; trl's LoRA guide)."
        )
    else:
        rate, rate_reason = 0.00002, "trl's default for full fine-tuning."
    epochs = 3 if conversations is None or conversations < 5000 else 1
    updates = None
    if conversations is not None:
        updates = max(1, -(-conversations // (plan.micro_batch * accumulation_for(plan, conversations) * plan.gpus)))
        updates *= epochs
    every = 50 if updates is None else max(1, min(500, updates // 5))
    known = "" if updates is None else f"; about {updates} updates in all"
    found = [
        Setting("output_dir", "outputs", "Checkpoints, adapter and merged model. train.py resumes from what is here."),
        Setting(
            "num_train_epochs",
            epochs,
            f"Times each sample is seen{known}. Watch the validation loss: when it rises, fewer is better.",
        ),
        Setting("learning_rate", rate, rate_reason),
        Setting("lr_scheduler_type", "cosine", "Falls smoothly to zero."),
        Setting("warmup_steps", 0.03, "A number below 1 is a share of all steps: the first 3 % rise from zero."),
        Setting("weight_decay", 0.0, "Adapters are small already." if plan.adapters else "The usual start."),
        Setting("logging_steps", 1 if updates is None or updates <= 100 else 10, "How often the loss is shown."),
        Setting("eval_strategy", "steps", "The validation loss shows overfitting while there is time to stop."),
        Setting("eval_steps", every, "Some five times per run."),
        Setting("per_device_eval_batch_size", plan.micro_batch, "As in training, so that it fits as well."),
        Setting("save_strategy", "steps", "A checkpoint is what a killed run resumes from."),
        Setting("save_steps", every, "At most this many updates are lost when the machine goes down."),
        Setting("save_total_limit", 2, "Older checkpoints are removed: the last and the one before it stay."),
        Setting("seed", 42, "Order of the data, dropout and first adapter weights: the same run gives the same model."),
        Setting("data_seed", 42, "The order of the data, also after a resume."),
        Setting("report_to", "none", "Nothing is sent anywhere. tensorboard, wandb, trackio, ... can be named here."),
    ]
    if on_cpu:
        found.append(Setting("use_cpu", True, "No accelerator was found on the machine that this was written on."))
    return found


def _whole(number: float) -> int | float:
    return int(number) if float(number).is_integer() else number


HEAD = (
    "The plan of a fine-tuning run: what is judged before it, and what runs afterwards.",
    "",
    "  python -m preflight MODEL --config training_config.yaml    does it fit here?",
    "  python train.py                                           train (in a folder made by --recipe)",
    "  trl sft --config training_config.yaml                     or with trl's own command",
    "",
    "The keys are those of trl {trl} and transformers {transformers}; a wrong one is refused and the nearest named.",
    "`python -m preflight` also reads a dump of TrainingArguments, and Axolotl's and LLaMA-Factory's files.",
)


def configuration(groups: Sequence[tuple[str, Sequence[Setting]]], judged: Sequence[str] = ()) -> str:
    """The text of training_config.yaml. `judged`: what is known of the plan's memory, in sentences."""
    versions = table("training_keys")["versions"]
    head = [line.format(**versions) for line in HEAD]
    if judged:
        head += ["", *(line for sentence in judged for line in textwrap.wrap(one_line(sentence), 116))]
    return render("training_config.yaml.j2", head=head, groups=groups)


def render(name: str, **values: Any) -> str:
    """A file of the recipe: `templates/recipe/NAME` with the values put in. Raises UsageError without Jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise UsageError("--recipe: needs the package Jinja2: `pip install Jinja2`") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped("templates", "recipe")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["lines"] = lambda text: textwrap.wrap(text, 116)
    return str(environment.get_template(name).render(**values))


def template() -> str:
    """The text of training_config.yaml at the root: the default plan, with no data or machine known."""
    return configuration(settings(recipe_plan(Plan()), TEMPLATE_MODEL))


if __name__ == "__main__":
    sys.stdout.write(template())
