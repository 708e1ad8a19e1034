"""Published measurements as plans: what was run, and why a row cannot be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.plan import Plan

HF_STACK = ("custom_loop_hf_peft", "hf_trainer", "ms_swift_hf_trainer", "axolotl_hf_trainer", "accelerate_loop_hf_peft")
_METHODS = {"dora": "lora", "rslora": "lora", "lora_fa": "lora"}
_PARALLEL = {"none": "none", "fsdp_full_shard": "fsdp_full", "naive_model_parallel_device_map_auto": "pipeline",
             "deepspeed_zero3": "zero3", "deepspeed_zero2": "zero2", "ddp": "ddp"}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A measurement and the plan that it was taken under. `left_out` says why it cannot be compared, else ""."""

    raw: Mapping[str, Any]
    plan: Plan | None
    left_out: str = ""
    measured_turn: int | None = None
    empty_before: bool = False
    readings: dict[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The row's key."""
        return str(self.raw["id"])

    @property
    def kind(self) -> str:
        """peak, oom or fits."""
        return str(self.raw["kind"])

    @property
    def hugging_face(self) -> bool:
        """Ran transformers' own modelling code."""
        return str(self.raw["framework"]).startswith(HF_STACK)

    @property
    def certain(self) -> bool:
        """The sequence length was really reached."""
        return self.raw["norm"]["seq_len_certainty"] in ("exact", "cap_reached")

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that the row states."""
        software = self.raw.get("software") or {}
        names = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
        return {name: str(software[name]) for name in names if re.fullmatch(r"\d[\w.+]*", str(software.get(name, "")))}


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSON-lines file. Raises UsageError naming the line that is none."""
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--rows {path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                raw = json.loads(line)
                found.append(row_of(raw))
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"--rows {path}, line {number}: {type(error).__name__}: {error}") from error
    return found


def row_of(raw: Mapping[str, Any]) -> Row:
    """One row, with its plan or the reason why there is none."""
    try:
        plan = plan_of(raw)
    except UsageError as trouble:
        return Row(raw, None, str(trouble))
    turn, empty = (1, True) if raw["source"] == "fitcheck_llm" else (None, False)
    return Row(raw, plan, reason_left_out(raw), turn, empty, readings_of(raw))


def readings_of(raw: Mapping[str, Any]) -> dict[str, int]:
    """The measured peaks in bytes: allocated, reserved, device."""
    found: dict[str, int] = {}
    metric, value = raw["norm"]["metric"], raw["value_gib"]
    if value is not None and metric:
        found["allocated" if metric == "active" else metric] = int(value * 2**30)
    other = raw.get("other_metrics_gib") or {}
    for key, name in (("torch_max_memory_allocated", "allocated"), ("torch_max_memory_reserved", "reserved")):
        if isinstance(other.get(key), (int, float)):
            found.setdefault(name, int(other[key] * 2**30))
    return found


def reason_left_out(raw: Mapping[str, Any]) -> str:
    """Why a row is not compared; "" when it is."""
    if raw["quality"] == "C":
        return "quality C: an important input is missing"
    if raw["method"] not in ("full", "lora", "qlora", "lora_gptq", "lora_int8", "dora", "rslora"):
        return f"method {raw['method']} has no formula here"
    if raw["kind"] != "peak":
        return "" if raw.get("gpu_total_gib") else "the card's memory is not known"
    if raw["norm"]["seq_len_certainty"] in ("cap_not_reached", "cap_unknown"):
        return "the length of the longest batch is not known"
    if not readings_of(raw):
        return "the tool that measured is not stated"
    return ""


def plan_of(raw: Mapping[str, Any]) -> Plan:
    """The plan of a row. Raises UsageError when a column has no counterpart."""
    norm, peft = raw["norm"], raw.get("peft") or {}
    method = _METHODS.get(raw["method"], raw["method"])
    if method not in ("full", "lora", "qlora", "lora_gptq", "lora_int8"):
        raise UsageError(f"method {raw['method']} has no formula here")
    for key in ("seq_len", "micro_batch"):
        if not isinstance(raw.get(key), int):
            raise UsageError(f"{key} is not stated")
    targets = peft.get("target_modules")
    if isinstance(targets, str):
        targets = [targets]
    names = [] if not targets or targets in (["all-linear"], ["all linear"]) else [_module_name(t) for t in targets]
    unquantised = str(raw.get("unquantized_weight_dtype") or "")
    base = str(raw.get("base_weight_dtype") or "bf16")
    weight = _dtype(base if base[:4] in ("bf16", "fp16", "fp32") else unquantised)
    if weight is None or (method in ("qlora", "lora_int8") and unquantised.startswith("fp32")):
        weight = _dtype(str((raw.get("quant") or {}).get("compute_dtype") or "bf16")) or "bf16"
    quant = raw.get("quant") or {}
    framework = str(raw["framework"])
    optimizer = norm["optimizer"]
    if optimizer in ("adamw_hf", None, "lora_fa_adamw"):
        optimizer = "adamw_torch"
    loss = norm["loss"] or "full_logits_fp32_upcast"
    litgpt = framework == "litgpt"
    quant_head = litgpt and method == "qlora"
    software = raw.get("software") or {}
    version = str(software.get("transformers") or "")
    bnb = str(software.get("bitsandbytes") or "").rstrip("?")
    return Plan(
        method=method,
        sequence_tokens=raw["seq_len"],
        micro_batch=raw["micro_batch"],
        gradient_accumulation=raw.get("grad_accum") or 1,
        gradient_checkpointing=raw.get("gradient_checkpointing") is not False,
        lora_rank=peft.get("r") or 8,
        lora_alpha=float(peft.get("lora_alpha") or 16),
        lora_dropout=float(peft.get("lora_dropout") or 0.0),
        target_modules=tuple(name for name in names if name),
        modules_to_save=tuple(peft.get("modules_to_save") or ()),
        use_dora=raw["method"] == "dora" or bool(peft.get("use_dora")),
        adapter_dtype=norm["trainable_dtype"] if norm["trainable_dtype"] in ("fp32", "bf16", "fp16") else "fp32",
        weight_dtype=weight,
        autocast=norm["autocast"] if norm["autocast"] in ("bf16", "fp16") else None,
        quant_type="fp4" if quant.get("type") == "fp4" else "nf4",
        double_quant=bool(quant.get("double_quant", False)),
        kbit_preparation=unquantised.startswith("fp32"),
        quantise_head=quant_head,
        trl_casting="trl" in framework
        and method == "qlora"
        and norm["autocast"] == "bf16"
        and unquantised.startswith("fp32"),
        optimizer=optimizer,
        optimizer_in_backward="backward" in str(raw.get("optimizer") or ""),
        grad_clip=raw.get("grad_clip"),
        attention=norm["attention"] or "auto",
        compute_capability=capability(str(raw.get("gpu") or "")),
        loss=loss,
        holds_outputs=raw["source"] in ("can_i_finetune_this", "peft_method_comparison", "fitcheck_llm"),
        # litgpt's variable `logits` holds the graph of a step until the next forward returns; where only the first
        # batch has the stated length, no later one meets it
        holds_across_steps=raw["source"] == "can_i_finetune_this"
        or (litgpt and "longest_sample" not in str(raw.get("seq_len_kind"))),
        packing=bool(raw.get("packing")),
        use_cache=raw["source"] == "peft_method_comparison",
        gpus=raw.get("n_gpus") or 1,
        parallel=_PARALLEL.get(raw.get("parallelism") or "none", "none"),
        # rows that state no version are from 2023 to spring 2025
        transformers=version if re.fullmatch(r"\d+(\.\d+)+.*", version) else "4.48",
        # litgpt asked for 0.42 of bitsandbytes; other rows that state none are as above
        bitsandbytes=bnb if re.fullmatch(r"\d+(\.\d+)+.*", bnb) else "0.42" if litgpt else "0.43",
        modelling="litgpt" if litgpt else "transformers",
    )


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
