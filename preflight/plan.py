"""The fine-tuning run that is planned: method, batch, adapters, optimizer, precision. From YAML, flags or a dict."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from preflight.console import UsageError

if TYPE_CHECKING:
    from preflight.foreign_configs import ForeignConfig

METHODS = ("full", "lora", "qlora", "lora_gptq", "lora_awq", "lora_int8", "ia3", "prefix_tuning", "freeze")
OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adafactor",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_8bit",
    "sgd",
    "galore_adamw",
    "galore_adamw_8bit",
    "muon",
)
LOSSES = (
    "full_logits_fp32_upcast",  # transformers: logits.float() before cross-entropy
    "full_logits",  # cross-entropy on the logits as they are
    "full_logits_chunked_ce",  # logits exist once, cross-entropy runs over pieces
    "fused_ce_on_full_logits",  # a kernel that overwrites the logits with their gradient
    "fused_linear_ce",  # Liger or cut cross-entropy: logits never exist as a whole
    "chunked_lm_head_and_ce",  # head and loss run over pieces of the sequence
    "classification",
)
ATTENTIONS = ("auto", "flash_attention_2", "sdpa", "sdpa_math", "sdpa_mem_efficient", "sdpa_flash", "eager")
PARALLEL = ("none", "ddp", "fsdp_full", "fsdp_hybrid", "zero1", "zero2", "zero3", "pipeline")
FLOATS = ("fp32", "bf16", "fp16")
MODELLING = ("transformers", "litgpt")

_OTHER_NAMES = {
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "adamw_torch_8bit": "adamw_8bit",
    "lion": "lion_32bit",
    "flash_attention": "flash_attention_2",
    "fsdp": "fsdp_full",
    "fsdp_full_shard": "fsdp_full",
    "deepspeed_zero3": "zero3",
    "deepspeed_zero2": "zero2",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "liger": "fused_linear_ce",
    "cut_cross_entropy": "fused_linear_ce",
    "sft": "full",
    "gptq": "lora_gptq",
    "awq": "lora_awq",
}


@dataclass(frozen=True)
class Plan:
    """One planned run, per device. All names are lower case; sizes are counts of tokens, samples or bytes.

    `optimizer` None: the Trainer's default of the torch version (fused from 2.8). `target_modules` empty: all linear
    layers. `compute_capability` None: a card of the Ampere kind (8.0) is assumed, which the estimate says.
    `trl_casting`: norms in float32, embeddings and head in bfloat16, as TRL casts 4-bit models under bf16.
    `transformers`, `bitsandbytes`: the versions whose loss and layers are meant; None the current ones. `modelling`:
    whose code the layers are, transformers' or that of a framework with layers of its own.
    """

    method: str = "qlora"
    sequence_tokens: int = 2048
    micro_batch: int = 1
    gradient_accumulation: int = 1
    gradient_checkpointing: bool = True
    # adapters
    lora_rank: int = 16
    lora_alpha: float = 32
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    adapter_dtype: str = "fp32"
    virtual_tokens: int = 20
    # precision: dtype of what is not quantised; autocast is what bf16=True or fp16=True of the Trainer switches on
    weight_dtype: str = "bf16"
    autocast: str | None = "bf16"
    quant_type: str = "nf4"
    double_quant: bool = True
    kbit_preparation: bool = True
    quantise_head: bool = False
    trl_casting: bool = False
    # the step
    optimizer: str | None = None
    optimizer_in_backward: bool = False
    grad_clip: float | None = 1.0
    attention: str = "auto"
    compute_capability: str | None = None
    loss: str = "full_logits_fp32_upcast"
    attention_mask: bool = False
    holds_outputs: bool = False
    holds_across_steps: bool = False
    packing: bool = False
    use_cache: bool = False
    transformers: str | None = None
    bitsandbytes: str | None = None
    modelling: str = "transformers"
    # more than one GPU
    gpus: int = 1
    parallel: str = "none"
    offload: bool = False

    @property
    def adapters(self) -> bool:
        """Only small added tensors are trained."""
        return self.method not in ("full", "freeze")

    @property
    def quantised(self) -> bool:
        """The frozen linear layers are stored in 4 or 8 bits."""
        return self.method in ("qlora", "lora_gptq", "lora_awq", "lora_int8")

    @property
    def upcast(self) -> bool:
        """prepare_model_for_kbit_training turns what is not quantised into float32 (not for GPTQ and AWQ bases)."""
        return self.kbit_preparation and self.method in ("qlora", "lora_int8")

    @property
    def tokens(self) -> int:
        """Tokens per device and step of the forward pass."""
        return self.micro_batch * self.sequence_tokens

    def optimizer_name(self) -> str:
        """The optimizer that runs; the Trainer of current versions takes the fused AdamW when none is named."""
        return self.optimizer or "adamw_torch_fused"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


_ALLOWED: dict[str, tuple[str, ...]] = {
    "method": METHODS,
    "optimizer": OPTIMIZERS,
    "loss": LOSSES,
    "attention": ATTENTIONS,
    "parallel": PARALLEL,
    "weight_dtype": FLOATS,
    "adapter_dtype": FLOATS,
    "autocast": ("bf16", "fp16"),
    "quant_type": ("nf4", "fp4"),
    "modelling": MODELLING,
}
_WHOLE = {
    "sequence_tokens": 1,
    "micro_batch": 1,
    "gradient_accumulation": 1,
    "lora_rank": 1,
    "virtual_tokens": 1,
    "gpus": 1,
}
_YES_NO = {field.name for field in fields(Plan) if field.type == "bool"}
_NUMBERS = ("lora_alpha", "lora_dropout", "grad_clip")
# Samples of one update on all GPUs: it sets the accumulation steps.
_GLOBAL = ("global_batch", "global_batch_size", "effective_batch_size")
# Keys that training scripts use for the same thing.
_KEYS = {
    "max_seq_length": "sequence_tokens",
    "max_length": "sequence_tokens",
    "seq_len": "sequence_tokens",
    "sequence_length": "sequence_tokens",
    "sequence_len": "sequence_tokens",
    "cutoff_len": "sequence_tokens",
    "per_device_train_batch_size": "micro_batch",
    "micro_batch_size": "micro_batch",
    "batch_size": "micro_batch",
    "gradient_accumulation_steps": "gradient_accumulation",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target": "target_modules",
    "optim": "optimizer",
    "attn_implementation": "attention",
    "max_grad_norm": "grad_clip",
    "dtype": "weight_dtype",
    "torch_dtype": "weight_dtype",
    "finetuning_type": "method",
    "bnb_4bit_quant_type": "quant_type",
    "bnb_4bit_use_double_quant": "double_quant",
    "mixed_precision": "autocast",
    "num_virtual_tokens": "virtual_tokens",
    "num_gpus": "gpus",
}


def settings_names() -> tuple[str, ...]:
    """Every key that describes a Plan: its own names and those that training scripts use for the same thing."""
    return (*(field.name for field in fields(Plan)), *_KEYS, *_GLOBAL, "bf16", "fp16", "load_in_4bit", "load_in_8bit")


def same_optimizer(name: str) -> str | None:
    """The name in OPTIMIZERS for what a training script calls `name`; None when its memory is not known here."""
    text = _OTHER_NAMES.get(name.lower(), name.lower())
    return text if text in OPTIMIZERS else None


def plan_from(settings: Mapping[str, Any], where: str = "plan", base: Plan | None = None) -> Plan:
    """The Plan that a mapping of settings describes, on top of `base`. None values are left out.

    Unknown keys are left to others (a training configuration holds paths and schedules too).
    Raises UsageError naming the place, the key, the value and what is allowed.
    """
    known = {field.name for field in fields(Plan)}
    wanted: dict[str, Any] = {}
    for key, value in settings.items():
        name = _KEYS.get(key, key)
        if name in known and value is not None:
            wanted[name] = _checked(where, key, name, value)
    for flag in ("bf16", "fp16"):
        if settings.get(flag) is True and "autocast" not in wanted:
            wanted["autocast"] = flag
    if settings.get("load_in_4bit") is True and wanted.get("method", "lora") == "lora":
        wanted["method"] = "qlora"
    if settings.get("load_in_8bit") is True and wanted.get("method", "lora") == "lora":
        wanted["method"] = "lora_int8"
    made = replace(base or Plan(), **wanted)
    for key in _GLOBAL:
        if settings.get(key) is not None:
            return _with_global_batch(made, settings[key], f"{where}: {key}")
    return made


def _with_global_batch(plan: Plan, value: Any, where: str) -> Plan:
    """The plan whose updates have so many samples. Raises UsageError when micro batches do not add up to them."""
    once = plan.micro_batch * plan.gpus
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise UsageError(f"{where}: {value!r} is not allowed; a whole number of at least 1")
    if value % once:
        allowed = f"a multiple of {once}, the micro batch of {plan.micro_batch} on {plan.gpus} GPU(s)"
        raise UsageError(f"{where}: {value} is not allowed; {allowed}")
    return replace(plan, gradient_accumulation=value // once)


def _checked(where: str, key: str, name: str, value: Any) -> Any:
    def wrong(allowed: str) -> UsageError:
        return UsageError(f"{where}: {key}: {value!r} is not allowed; {allowed}")

    if name in ("target_modules", "modules_to_save"):
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(item, str) for item in names):
            raise wrong("a list of module names, or all-linear")
        names = [part.strip() for item in names for part in item.split(",") if part.strip()]
        return () if names in (["all-linear"], ["all"]) else tuple(names)
    if name in _ALLOWED:
        if value is False or (isinstance(value, str) and value.lower() in ("no", "none", "")):
            return None
        text = _OTHER_NAMES.get(str(value).lower(), str(value).lower())
        if text not in _ALLOWED[name]:
            raise wrong("one of " + ", ".join(_ALLOWED[name]))
        return text
    if name in _WHOLE:
        if isinstance(value, bool) or not isinstance(value, int) or not _WHOLE[name] <= value <= 10**9:
            raise wrong(f"a whole number from {_WHOLE[name]} to 1,000,000,000")
        return value
    if name in _YES_NO:
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if name in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise wrong("a number of at least 0")
        return float(value) if name != "grad_clip" or value else None
    if not isinstance(value, str):
        raise wrong("a text")
    return value


def plan_of(settings: Mapping[str, Any]) -> Plan:
    """The Plan that `Plan.as_json` wrote."""
    made: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return Plan(**made)


def read_plan(path: str | Path, base: Plan | None = None) -> Plan:
    """The Plan in a YAML or JSON file: our own keys, trl's, TrainingArguments, Axolotl's or LLaMA-Factory's.

    Raises UsageError when the file cannot be read, is no mapping, or holds a key or value that is not allowed.
    """
    return plan_from(read_configuration(path).settings, str(path), base)


def read_configuration(path: str | Path) -> ForeignConfig:
    """What such a file says: its format, its settings in the names of Plan, and notes on what was not taken over.

    Raises UsageError as `read_plan` does.
    """
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"{path}: reading YAML needs the package PyYAML: `pip install PyYAML`") from error
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a YAML file ({str(error).splitlines()[0]})") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise UsageError(f"{path}: holds {type(document).__name__}, not a mapping of settings")
    from preflight.foreign_configs import read_settings

    return read_settings(document, str(path))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a plan; unset ones leave the configuration's value."""
    group = parser.add_argument_group("plan")
    group.add_argument("--config", metavar="YAML", help="training configuration to judge (default: none)")
    group.add_argument("--method", choices=("auto", *METHODS), help="default: auto, the strongest method that fits")
    group.add_argument("--seq-len", type=int, dest="sequence_tokens", metavar="N", help="tokens per sequence")
    group.add_argument("--micro-batch", type=int, dest="micro_batch", metavar="N", help="samples per step and GPU")
    group.add_argument("--grad-accum", type=int, dest="gradient_accumulation", metavar="N")
    group.add_argument(
        "--global-batch", type=int, metavar="N", help="samples per update on all GPUs: sets the accumulation steps"
    )
    group.add_argument("--gradient-checkpointing", action=argparse.BooleanOptionalAction, dest="gradient_checkpointing")
    group.add_argument("--lora-rank", type=int, dest="lora_rank", metavar="R")
    group.add_argument("--target-modules", dest="target_modules", metavar="A,B", help="default: all linear layers")
    group.add_argument("--modules-to-save", dest="modules_to_save", metavar="A,B")
    group.add_argument("--dora", action="store_const", const=True, dest="use_dora")
    group.add_argument("--optimizer", metavar="NAME", help=", ".join(OPTIMIZERS))
    group.add_argument("--autocast", choices=("bf16", "fp16", "none"), help="mixed precision of the loop")
    group.add_argument("--weight-dtype", choices=FLOATS, dest="weight_dtype")
    group.add_argument("--attention", choices=ATTENTIONS)
    group.add_argument("--loss", choices=LOSSES)
    group.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default 1)")
    group.add_argument("--parallel", choices=PARALLEL)
    group.add_argument("--offload", action="store_const", const=True, help="states (and parameters) to host memory")


def plan_from_flags(args: argparse.Namespace) -> tuple[Plan, bool]:
    """The Plan of the flags on top of `--config`, and whether the method is to be chosen (`auto`)."""
    given = {key: value for key, value in vars(args).items() if value is not None}
    base = read_plan(given["config"]) if given.get("config") else None
    method = given.pop("method", None)
    choose = method == "auto" or (method is None and base is None)
    autocast = given.pop("autocast", None)
    settings = {key: given[key] for key in given if key in {field.name for field in fields(Plan)}}
    if method not in (None, "auto"):
        settings["method"] = method
    if given.get("global_batch") is not None:
        steps = settings.pop("gradient_accumulation", None)
        settings["global_batch"] = given["global_batch"]
        plan = plan_from(settings, "flags", base)
        if steps not in (None, plan.gradient_accumulation):
            raise UsageError(f"--global-batch {given['global_batch']}: does not go with --grad-accum {steps}")
    plan = plan_from(settings, "flags", base)
    if autocast is not None:
        plan = replace(plan, autocast=None if autocast == "none" else autocast)
    return plan, choose
