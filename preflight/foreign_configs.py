"""The configuration that people have: what does it say about the run, in the words of a Plan?

Read are this program's own keys, the keys of trl and transformers (training_config.yaml, a dump of TrainingArguments
as JSON or YAML), Axolotl and LLaMA-Factory. Only what decides memory is taken over.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from preflight.console import UsageError
from preflight.facts import table

SECTIONS = ("model", "lora", "peft", "adapter", "training", "train", "quantization", "quantisation", "data", "plan")
# trl's SFTTrainer from 1.16 on: the head and the loss run over pieces, the model is not prepared for k-bit training,
# and adapters over a quantised base are bfloat16. Source: trl 1.16.0, trainer/sft_trainer.py and trainer/utils.py.
SFT_TRAINER_LOSS = "chunked_lm_head_and_ce"

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_AXOLOTL_KEYS = {
    "adapter": "method",
    "sequence_len": "sequence_tokens",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_checkpointing": "gradient_checkpointing",
    "lora_r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_dora": "use_dora",
    "optimizer": "optimizer",
    "max_grad_norm": "grad_clip",
    "sample_packing": "packing",
    "attn_implementation": "attention",
    "bnb_4bit_quant_type": "quant_type",
}
_LLAMAFACTORY_KEYS = {
    "cutoff_len": "sequence_tokens",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "gradient_accumulation",
    "lora_rank": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target": "target_modules",
    "additional_target": "modules_to_save",
    "use_dora": "use_dora",
    "optim": "optimizer",
    "max_grad_norm": "grad_clip",
    "packing": "packing",
    "quantization_type": "quant_type",
    "double_quantization": "double_quant",
}
_AXOLOTL_MARKS = (
    "base_model",
    "sequence_len",
    "micro_batch_size",
    "sample_packing",
    "lora_target_linear",
    "val_set_size",
)
_LLAMAFACTORY_MARKS = ("finetuning_type", "cutoff_len", "lora_target", "quantization_bit", "dataset_dir", "stage")
_TRAINING_ARGUMENTS_MARKS = ("output_dir", "per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type")


@dataclass(frozen=True)
class ForeignConfig:
    """What a configuration says: `settings` in the names of Plan; `notes` in words, on what could not be taken over.

    `raw`: its keys and values as they are, sections opened.
    """

    format: str
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)


def read_settings(document: Mapping[str, Any], where: str) -> ForeignConfig:
    """The settings of a parsed configuration file of any of the formats.

    Raises UsageError, naming the nearest right key, for keys that nobody knows and for values of the wrong kind.
    """
    flat = _flat(document)
    return replace(_read(flat, where), raw=flat)


def _read(flat: dict[str, Any], where: str) -> ForeignConfig:
    if _count(flat, _AXOLOTL_MARKS) >= 2 or ("base_model" in flat and "adapter" in flat):
        return _axolotl(flat)
    if _count(flat, _LLAMAFACTORY_MARKS) >= 2:
        return _llamafactory(flat, where)
    _check_keys(flat, where)
    keys = table("training_keys")
    # `lora_alpha`, `packing` and the like are trl's and ours: they decide nothing.
    of_trl = set(keys["sft_config"]) | set(keys["model_config"])
    if "method" not in flat and _count(flat, of_trl - _plan_fields()):
        return _trl(flat, where)
    if _count(flat, _TRAINING_ARGUMENTS_MARKS) and not _count(flat, _plan_fields() - set(keys["training_arguments"])):
        return _training_arguments(flat)
    return ForeignConfig("plan", flat)


def known_keys() -> tuple[str, ...]:
    """All keys that a training configuration of our own or of trl may hold."""
    keys = table("training_keys")
    groups = ("training_arguments", "sft_config", "model_config", "script_arguments", "dataset_mixture", "recipe")
    from preflight.plan import settings_names

    return tuple(sorted({*(key for group in groups for key in keys[group]), *settings_names()}))


def _plan_fields() -> set[str]:
    from preflight.plan import Plan

    return set(Plan.__dataclass_fields__)


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Keys at the top or inside the sections that people group them in; a dict under another key is a value."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and str(key).lower() in SECTIONS:
            flat.update({str(inner): item for inner, item in value.items()})
        else:
            flat[str(key)] = value
    return flat


def _count(flat: Mapping[str, Any], names: Any) -> int:
    return sum(name in flat for name in names)


def _check_keys(flat: Mapping[str, Any], where: str) -> None:
    known, gone = known_keys(), table("training_keys")["gone"]
    for key in flat:
        if key in known or key.startswith("_"):
            continue
        if key in gone:
            raise UsageError(f"{where}: {key}: is no key of this version; use {gone[key]}")
        near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.6)
        nearest = f"the nearest right one is {near[0]}" if near else "see training_config.yaml for the keys there are"
        raise UsageError(f"{where}: {key}: is no known key; {nearest}")


def _precision(flat: Mapping[str, Any], settings: dict[str, Any]) -> None:
    for flag in ("bf16", "fp16"):
        if flat.get(flag) is True or str(flat.get(flag)).lower() in ("true", "auto", "full"):
            settings["autocast"] = flag
            return
    settings["autocast"] = "none"


def _parallel(flat: Mapping[str, Any], settings: dict[str, Any], notes: list[str]) -> None:
    """FSDP and DeepSpeed name the way of sharding, not the number of GPUs, which only the launcher knows."""
    if flat.get("fsdp"):
        settings["parallel"] = "fsdp_hybrid" if "hybrid" in str(flat["fsdp"]) else "fsdp_full"
        settings["offload"] = (
            "offload" in str(flat["fsdp"]) or "offload_params': true" in str(flat.get("fsdp_config")).lower()
        )
    deepspeed = flat.get("deepspeed")
    if deepspeed:
        stage: Any = None
        if isinstance(deepspeed, Mapping):
            zero = deepspeed.get("zero_optimization")
            stage = zero.get("stage") if isinstance(zero, Mapping) else None
        else:
            stage = next((n for n in (1, 2, 3) if f"zero{n}" in str(deepspeed).lower().replace("_", "")), None)
            stage = stage or next((n for n in (1, 2, 3) if f"z{n}" in str(deepspeed).lower()), None)
        if stage in (1, 2, 3):
            settings["parallel"] = f"zero{stage}"
            settings["offload"] = "offload" in str(deepspeed).lower()
        else:
            notes.append("deepspeed: the ZeRO stage could not be told from the name of its file; add `parallel: zero3`")
    if "parallel" in settings:
        notes.append("the number of GPUs is not in such a file; add `--gpus N`")


# Keys of Axolotl and LLaMA-Factory that change what a step takes and that a Plan has no word for.
_CHANGES_MEMORY = (
    "activation_offloading", "context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "use_galore",
    "use_apollo", "use_badam", "use_muon", "use_unsloth", "unsloth_lora_mlp", "unsloth_lora_qkv", "shift_attn",
    "mixture_of_depths", "relora", "reft_r", "pissa_init", "use_ref_model", "ref_model", "rl", "fp8", "torch_compile",
    "freeze_trainable_layers", "unfrozen_parameters", "lisa_n_layers", "expert_parallel_size", "use_rslora_plus",
)  # fmt: skip


def _left_over(flat: Mapping[str, Any], taken: Mapping[str, str], notes: list[str]) -> None:
    """Notes on keys that change the memory of a step and were not taken over, and on near misses of those that are."""
    for key, value in flat.items():
        if key in _CHANGES_MEMORY and value and (value is True or value != 1):  # a size of 1 divides nothing
            notes.append(f"{key} is not taken over, although it can change the memory of a step")
        elif key not in taken:
            near = difflib.get_close_matches(key, taken, n=1, cutoff=0.87)
            if near and near[0] not in flat:
                notes.append(f"{key} is no key that is known here and was not taken over; did you mean {near[0]}?")


def _dtype(value: Any) -> str | None:
    return _DTYPES.get(str(value).lower().removeprefix("torch."))


def _training_arguments(flat: Mapping[str, Any]) -> ForeignConfig:
    settings, notes = _trainer_settings(flat)
    settings["method"] = "full"
    notes.append(
        "TrainingArguments do not say whether adapters are used: judged as full fine-tuning; "
        "add `--method lora` or `--method qlora` where the script does that"
    )
    # TrainingArguments switch it off unless asked, other than Plan and trl.
    settings.setdefault("gradient_checkpointing", False)
    return ForeignConfig("TrainingArguments", settings, tuple(notes))


def _trainer_settings(flat: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What trl's and transformers' arguments have in common."""
    notes: list[str] = []
    names = {
        "per_device_train_batch_size": "micro_batch",
        "gradient_accumulation_steps": "gradient_accumulation",
        "gradient_checkpointing": "gradient_checkpointing",
        "max_grad_norm": "grad_clip",
        "optim": "optimizer",
        "max_length": "sequence_tokens",
        "packing": "packing",
        "attn_implementation": "attention",
    }
    settings = {name: flat[key] for key, name in names.items() if flat.get(key) is not None}
    if isinstance(settings.get("attention"), str) and settings["attention"].startswith("kernels-community/"):
        settings["attention"] = "flash_attention_2"
    _known_optimizer(settings, notes)
    _precision(flat, settings)
    if _dtype(flat.get("dtype")):
        settings["weight_dtype"] = _dtype(flat["dtype"])
    if flat.get("use_liger_kernel") is True and "max_length" not in flat:
        settings["loss"] = "fused_linear_ce"
    _parallel(flat, settings, notes)
    return settings, notes


def _known_optimizer(settings: dict[str, Any], notes: list[str]) -> None:
    from preflight.plan import OPTIMIZERS, same_optimizer

    name = settings.get("optimizer")
    if name is None:
        return
    same = same_optimizer(str(name))
    if same is None:
        notes.append(
            f"optimizer {name}: its memory is not known here; judged as adamw_torch ({len(OPTIMIZERS)} are known)"
        )
        same = "adamw_torch"
    settings["optimizer"] = same


def _trl(flat: Mapping[str, Any], where: str) -> ForeignConfig:
    settings, notes = _trainer_settings(flat)
    # What is given in our own words beside trl's (loss, kbit_preparation, gpus, ...) counts as given.
    explicit = {key: value for key, value in flat.items() if key in _plan_fields() and value is not None}
    if flat.get("bf16") is None and not flat.get("fp16"):
        settings["autocast"] = "bf16"  # trl's default
    settings.setdefault("weight_dtype", "fp32")
    if str(flat.get("dtype")) == "auto":
        settings.pop("weight_dtype")
    settings.setdefault("sequence_tokens", 1024)
    settings.setdefault("gradient_checkpointing", True)
    quantised = flat.get("load_in_4bit") is True or flat.get("load_in_8bit") is True
    if flat.get("load_in_4bit") is True and flat.get("load_in_8bit") is True:
        raise UsageError(f"{where}: load_in_8bit: true cannot stand beside load_in_4bit: true; choose one")
    use_peft = flat.get("use_peft")
    if quantised and use_peft is False:
        raise UsageError(
            f"{where}: use_peft: must be true when the base model is quantised; it cannot be trained itself"
        )
    if use_peft is None and (quantised or _count(flat, ("lora_r", "lora_target_modules"))):
        use_peft = True
        notes.append("use_peft is not set: trl would leave the lora_ keys unused; judged as if it were true")
    if use_peft is True:
        settings["method"] = (
            "qlora" if flat.get("load_in_4bit") is True else "lora_int8" if flat.get("load_in_8bit") is True else "lora"
        )
        settings["lora_rank"] = flat.get("lora_r", 16)
        settings["lora_alpha"] = flat.get("lora_alpha", 32)
        settings["lora_dropout"] = flat.get("lora_dropout", 0.05)
        for key, name in (
            ("lora_target_modules", "target_modules"),
            ("lora_modules_to_save", "modules_to_save"),
            ("use_dora", "use_dora"),
            ("bnb_4bit_quant_type", "quant_type"),
        ):
            if flat.get(key) is not None:
                settings[name] = flat[key]
        settings["double_quant"] = flat.get("use_bnb_nested_quant") is True
        settings["adapter_dtype"] = "bf16" if quantised else "fp32"
        if "target_modules" not in settings:
            notes.append(
                "lora_target_modules is not given: peft's choice for this architecture, judged as all linear layers"
            )
    else:
        settings["method"] = "full"
    settings |= {"loss": SFT_TRAINER_LOSS, "kbit_preparation": False}
    # Samples of one batch differ in length: from two on they are padded, and the mask forbids flash attention.
    batch = settings.get("micro_batch", 8)
    settings.setdefault("micro_batch", 8)  # TrainingArguments' default
    settings["attention_mask"] = isinstance(batch, int) and batch > 1 and flat.get("packing") is not True
    return ForeignConfig("trl", {**settings, **explicit}, tuple(notes))


def _axolotl(flat: Mapping[str, Any]) -> ForeignConfig:
    notes: list[str] = []
    settings = {name: flat[key] for key, name in _AXOLOTL_KEYS.items() if flat.get(key) is not None}
    settings["method"] = str(flat.get("adapter") or "full").lower()
    if settings["method"] == "lora" and flat.get("load_in_8bit") is True:
        settings["method"] = "lora_int8"
    if settings["method"] == "lora" and flat.get("load_in_4bit") is True:
        settings["method"] = "qlora"
    if flat.get("lora_target_linear") is True:
        settings["target_modules"] = "all-linear"
    checkpointing = flat.get("gradient_checkpointing")
    if checkpointing == "offload":
        notes.append("gradient_checkpointing: offload moves activations to the host: judged as ordinary checkpointing")
    settings["gradient_checkpointing"] = bool(checkpointing)
    for key in ("flash_attention", "xformers_attention", "sdp_attention", "eager_attention"):
        if flat.get(key) is True:
            settings["attention"] = {
                "flash_attention": "flash_attention_2",
                "xformers_attention": "sdpa_mem_efficient",
                "sdp_attention": "sdpa",
                "eager_attention": "eager",
            }[key]
    _precision(flat, settings)
    settings["weight_dtype"] = "fp32" if settings["autocast"] == "none" and not flat.get("bfloat16") else "bf16"
    if flat.get("fp16") in (True, "true") or flat.get("float16") is True:
        settings["weight_dtype"] = "fp16"
    if flat.get("liger_fused_linear_cross_entropy") is True or flat.get("cut_cross_entropy") is True:
        settings["loss"] = "fused_linear_ce"
    _known_optimizer(settings, notes)
    _parallel(flat, settings, notes)
    _left_over(flat, _AXOLOTL_KEYS, notes)
    return ForeignConfig("Axolotl", settings, tuple(notes))


def _llamafactory(flat: Mapping[str, Any], where: str) -> ForeignConfig:
    notes: list[str] = []
    settings = {name: flat[key] for key, name in _LLAMAFACTORY_KEYS.items() if flat.get(key) is not None}
    method = str(flat.get("finetuning_type") or "lora").lower()
    bits = flat.get("quantization_bit")
    if bits not in (None, 4, 8):
        raise UsageError(f"{where}: quantization_bit: {bits!r} is not allowed; 4 or 8")
    if bits and method == "lora":
        method = "qlora" if bits == 4 else "lora_int8"
    settings["method"] = method
    settings.setdefault("sequence_tokens", 2048)  # cutoff_len's default
    settings.setdefault("lora_rank", 8)
    settings.setdefault("lora_alpha", 2 * settings["lora_rank"] if isinstance(settings["lora_rank"], int) else 16)
    settings["gradient_checkpointing"] = flat.get("disable_gradient_checkpointing") is not True
    settings["kbit_preparation"] = False  # its prepare_model_for_training keeps the frozen parts as they are
    attention = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "eager": "eager", "auto": "auto"}
    if flat.get("flash_attn") is not None:
        settings["attention"] = attention.get(str(flat["flash_attn"]).lower(), "auto")
    _precision(flat, settings)
    settings["weight_dtype"] = "fp32" if settings["autocast"] == "none" else settings["autocast"]
    if flat.get("pure_bf16") is True:
        settings |= {"weight_dtype": "bf16", "adapter_dtype": "bf16", "autocast": "none"}
    if flat.get("enable_liger_kernel") is True:
        settings["loss"] = "fused_linear_ce"
    if str(flat.get("stage", "sft")) not in ("sft", "pt"):
        notes.append(
            f"stage {flat['stage']}: judged as sft; preference training also holds a reference model or two answers"
        )
    _known_optimizer(settings, notes)
    _parallel(flat, settings, notes)
    _left_over(flat, _LLAMAFACTORY_KEYS, notes)
    return ForeignConfig("LLaMA-Factory", settings, tuple(notes))
