"""Published measurements as plans: what was run, and why a row cannot be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import quote
from preflight.plan import ATTENTIONS, LOSSES, OPTIMIZERS, PARALLEL, Plan

HF_STACK = ("custom_loop_hf_peft", "hf_trainer", "ms_swift_hf_trainer", "axolotl_hf_trainer", "accelerate_loop_hf_peft")
_ROW_METHODS = ("full", "lora", "qlora", "lora_gptq", "lora_int8", "dora", "rslora")
_METHODS = {"dora": "lora", "rslora": "lora"}
_PARALLEL = {"none": "none", "fsdp_full_shard": "fsdp_full", "naive_model_parallel_device_map_auto": "pipeline",
             "deepspeed_zero3": "zero3", "deepspeed_zero2": "zero2", "ddp": "ddp"}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A measurement and the plan that it was taken under. `left_out` says why it cannot be compared, else "".

    Columns may be missing or of any type: what cannot be read is "" or None.
    """

    raw: Mapping[str, Any]
    plan: Plan | None
    left_out: str = ""
    measured_turn: int | None = None
    empty_before: bool = False
    readings: dict[str, int] = field(default_factory=dict)
    line: int = 0

    @property
    def id(self) -> str:
        """The row's key; the number of its line when it has none."""
        return text_of(self.raw, "id") or f"line {self.line}"

    @property
    def kind(self) -> str:
        """peak, oom or fits; "" when it says nothing of the kind."""
        return text_of(self.raw, "kind")

    @property
    def framework(self) -> str:
        """Which loop ran it."""
        return text_of(self.raw, "framework") or "framework not stated"

    @property
    def source(self) -> str:
        """Where it was published, in a word: rows of one source share their mistakes."""
        return text_of(self.raw, "source") or "source not stated"

    @property
    def quality(self) -> str:
        """A, B or C."""
        return text_of(self.raw, "quality")

    @property
    def certainty(self) -> str:
        """How sure the sequence length is."""
        return text_of(mapping_of(self.raw, "norm"), "seq_len_certainty")

    @property
    def gpu_total_bytes(self) -> int | None:
        """The memory that torch can see on the row's card."""
        return gib_of(self.raw.get("gpu_total_gib"))

    @property
    def hugging_face(self) -> bool:
        """Ran transformers' own modelling code."""
        return self.framework.startswith(HF_STACK)

    @property
    def certain(self) -> bool:
        """The sequence length was really reached."""
        return self.certainty in ("exact", "cap_reached")

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that the row states."""
        software = mapping_of(self.raw, "software")
        names = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
        return {name: version for name in names if _VERSION.fullmatch(version := str(software.get(name, "")))}


_VERSION = re.compile(r"\d[\w.+]{0,30}")


def text_of(mapping: Mapping[str, Any], key: str) -> str:
    """A text in a mapping; "" when it is none."""
    value = mapping.get(key)
    return value if isinstance(value, str) else ""


def mapping_of(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A mapping in a mapping; an empty one when it is none."""
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def gib_of(value: Any) -> int | None:
    """Bytes of a number of GiB that some card can have; None else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e5:
        return None
    return int(value * 2**30)


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSON-lines file. Raises UsageError when it cannot be read, or naming the line that is no JSON.

    A line that holds no object, or an object that is no row, becomes a row that is left out with the reason.
    """
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--rows {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--rows {path}: no text in UTF-8 (byte {error.start})") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--rows {path}, line {number}: no JSON object ({error})") from error
        found.append(row_of(raw, number))
    if not found:
        raise UsageError(f"--rows {path}: holds no rows; one JSON object a line is needed")
    return found


def row_of(raw: Any, line: int = 0) -> Row:
    """One row, with its plan or the reason why there is none. Never raises for what the row holds."""
    if not isinstance(raw, Mapping):
        return Row({}, None, f"a JSON {type(raw).__name__}, not an object", line=line)
    reason = ""
    try:
        reason = reason_left_out(raw)
        plan = plan_of(raw)
        turn, empty = (1, True) if text_of(raw, "source") == "fitcheck_llm" else (None, False)
        return Row(raw, plan, reason, turn, empty, readings_of(raw), line)
    except UsageError as trouble:
        return Row(raw, None, reason or str(trouble), line=line)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as trouble:
        return Row(raw, None, f"a column holds what is not expected there ({type(trouble).__name__})", line=line)


def readings_of(raw: Mapping[str, Any]) -> dict[str, int]:
    """The measured peaks in bytes: allocated, reserved, device."""
    found: dict[str, int] = {}
    metric, value = text_of(mapping_of(raw, "norm"), "metric"), gib_of(raw.get("value_gib"))
    if value is not None and metric in ("allocated", "active", "reserved", "device"):
        found["allocated" if metric == "active" else metric] = value
    other = mapping_of(raw, "other_metrics_gib")
    for key, name in (("torch_max_memory_allocated", "allocated"), ("torch_max_memory_reserved", "reserved")):
        size = gib_of(other.get(key))
        if size is not None:
            found.setdefault(name, size)
    return found


def reason_left_out(raw: Mapping[str, Any]) -> str:
    """Why a row is not compared; "" when it is."""
    kind, quality, method = (text_of(raw, key) for key in ("kind", "quality", "method"))
    if kind not in ("peak", "oom", "fits"):
        return "kind is none of peak, oom, fits"
    if quality not in ("A", "B"):
        return "quality C: an important input is missing" if quality == "C" else "quality is not stated"
    if method not in _ROW_METHODS:
        return f"method {quote(method[:40]) or 'not stated'} has no formula here"
    if method != "full" and mapping_of(raw, "peft").get("r") is None:
        return "the adapter's rank is not stated"
    if kind != "peak":
        return "" if gib_of(raw.get("gpu_total_gib")) else "the card's memory is not known"
    if text_of(mapping_of(raw, "norm"), "seq_len_certainty") in ("cap_not_reached", "cap_unknown"):
        return "the length of the longest batch is not known"
    if not readings_of(raw):
        return "the tool that measured is not stated"
    return ""


def plan_of(raw: Mapping[str, Any]) -> Plan:
    """The plan of a row. Raises UsageError when a column has no counterpart."""
    norm, peft, quant = mapping_of(raw, "norm"), mapping_of(raw, "peft"), mapping_of(raw, "quant")
    method = _METHODS.get(text_of(raw, "method"), text_of(raw, "method"))
    if text_of(raw, "method") not in _ROW_METHODS:
        raise UsageError(f"method {quote(method[:40]) or 'not stated'} has no formula here")
    targets = peft.get("target_modules")
    if isinstance(targets, str):
        targets = [targets]
    if targets is not None and not (isinstance(targets, list) and all(isinstance(t, str) for t in targets)):
        raise UsageError("target_modules are no list of names")
    names = [] if not targets or targets in (["all-linear"], ["all linear"]) else [_module_name(t) for t in targets]
    unquantised = text_of(raw, "unquantized_weight_dtype")
    base = text_of(raw, "base_weight_dtype") or "bf16"
    weight = _dtype(base if base[:4] in ("bf16", "fp16", "fp32") else unquantised)
    if weight is None or (method in ("qlora", "lora_int8") and unquantised.startswith("fp32")):
        weight = _dtype(text_of(quant, "compute_dtype") or "bf16") or "bf16"
    framework = text_of(raw, "framework")
    source = text_of(raw, "source")
    optimizer = text_of(norm, "optimizer") or "adamw_torch"
    if optimizer in ("adamw_hf", "lora_fa_adamw"):
        optimizer = "adamw_torch"
    elif optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {quote(optimizer[:40])} has no formula here")
    loss = text_of(norm, "loss") or "full_logits_fp32_upcast"
    attention = text_of(norm, "attention") or "auto"
    named = text_of(raw, "parallelism") or "none"
    parallel = named if named in PARALLEL else _PARALLEL.get(named)
    if loss not in LOSSES or attention not in ATTENTIONS or parallel is None:
        raise UsageError("loss, attention or parallelism has no formula here")
    litgpt = framework == "litgpt"
    software = mapping_of(raw, "software")
    version = str(software.get("transformers") or "")
    bnb = str(software.get("bitsandbytes") or "").rstrip("?")
    modules_to_save = peft.get("modules_to_save") or ()
    if not isinstance(modules_to_save, (list, tuple)) or not all(isinstance(name, str) for name in modules_to_save):
        raise UsageError("modules_to_save is no list of names")
    trained = text_of(norm, "trainable_dtype")
    autocast = text_of(norm, "autocast")
    return Plan(
        method=method,
        sequence_tokens=_whole(raw, "seq_len"),
        micro_batch=_whole(raw, "micro_batch"),
        gradient_accumulation=_whole(raw, "grad_accum", 1),
        gradient_checkpointing=raw.get("gradient_checkpointing") is not False,
        lora_rank=_whole(peft, "r", 8),
        lora_alpha=_number(peft, "lora_alpha", 16.0),
        lora_dropout=_number(peft, "lora_dropout", 0.0),
        target_modules=tuple(name for name in names if name),
        modules_to_save=tuple(modules_to_save),
        use_dora=text_of(raw, "method") == "dora" or bool(peft.get("use_dora")),
        adapter_dtype=trained if trained in ("fp32", "bf16", "fp16") else "fp32",
        weight_dtype=weight,
        autocast=autocast if autocast in ("bf16", "fp16") else None,
        quant_type="fp4" if quant.get("type") == "fp4" else "nf4",
        double_quant=bool(quant.get("double_quant", False)),
        kbit_preparation=unquantised.startswith("fp32"),
        quantise_head=litgpt and method == "qlora",
        trl_casting="trl" in framework and method == "qlora" and autocast == "bf16" and unquantised.startswith("fp32"),
        optimizer=optimizer,
        optimizer_in_backward="backward" in text_of(raw, "optimizer"),
        grad_clip=_number(raw, "grad_clip", 0.0) or None,
        attention=attention,
        compute_capability=capability(text_of(raw, "gpu")),
        loss=loss,
        holds_outputs=source in ("can_i_finetune_this", "peft_method_comparison", "fitcheck_llm"),
        # litgpt's variable `logits` holds the graph of a step until the next forward returns; where only the first
        # batch has the stated length, no later one meets it
        holds_across_steps=source == "can_i_finetune_this"
        or (litgpt and "longest_sample" not in text_of(raw, "seq_len_kind")),
        packing=bool(raw.get("packing")),
        use_cache=source == "peft_method_comparison",
        gpus=_whole(raw, "n_gpus", 1),
        parallel=parallel,
        # rows that state no version are from 2023 to spring 2025
        transformers=version if re.fullmatch(r"\d+(\.\d+)+.*", version) else "4.48",
        # litgpt asked for 0.42 of bitsandbytes
        bitsandbytes=bnb if re.fullmatch(r"\d+(\.\d+)+.*", bnb) else "0.42" if litgpt else None,
        modelling="litgpt" if litgpt else "transformers",
    )


def _whole(mapping: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count of at least 1. Raises UsageError when it is none, or missing without a default."""
    value = mapping.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**8:
        raise UsageError(f"{key} is not stated" if value is None else f"{key} is no count")
    return value


def _number(mapping: Mapping[str, Any], key: str, default: float) -> float:
    """A number of at least 0. Raises UsageError when it is none."""
    value = mapping.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise UsageError(f"{key} is no number of at least 0")
    return float(value)


def _module_name(text: str) -> str:
    return re.sub(r"\s*\(.*", "", text).strip()


def _dtype(text: str) -> str | None:
    for name in ("fp32", "bf16", "fp16"):
        if text.startswith(name):
            return name
    return None


_CARDS = (
    ("T4", "7.5"), ("V100", "7.0"), ("A100", "8.0"), ("A800", "8.0"), ("A10", "8.6"), ("3090", "8.6"), ("4090", "8.9"),
    ("4080", "8.9"), ("L40", "8.9"), ("L4", "8.9"), ("H100", "9.0"), ("H200", "9.0"), ("H800", "9.0"),
)  # fmt: skip


def capability(card: str) -> str:
    """Compute capability of a named card; the data-centre Ampere when the name says nothing."""
    return next((value for name, value in _CARDS if name in card), "8.0")
