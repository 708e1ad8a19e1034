"""Is this checkpoint already quantised, can it be trained like that, and what would 4-bit loading really quantise?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preflight import facts
from preflight.findings import Finding, Level, quote
from preflight.model.model_directory import ModelDirectory, Reader, stored_bytes
from preflight.model.support import Versions, at_least
from preflight.model_shape import ModelShape, is_routed_expert, language_part

_SOURCE = "facts/quantised_bases.json (transformers 5.24, quantizers/quantizer_*.py)"
_UNQUANTISED_BYTES = 2
_OTHER_NAMES = {
    "gptq_marlin": "gptq",
    "awq_marlin": "awq",
    "finegrained_fp8": "fp8",
    "intel/auto-round": "auto-round",
}


@dataclass(frozen=True)
class Quantised:
    """What `quantization_config` says. `bits` is the width of a quantised weight, None when it does not say.

    `group_size` is the number of weights that share a scale (-1 in the file: a whole row, here None).
    """

    method: str
    bits: float | None
    group_size: int | None
    detail: str
    config: Mapping[str, Any]

    @property
    def rule(self) -> Mapping[str, Any] | None:
        """The row of the table for this method, None when it is not known."""
        row: Mapping[str, Any] | None = facts.table("quantised_bases")["methods"].get(self.method)
        return row


def read_quantised(config: Mapping[str, Any], directory: ModelDirectory | None = None) -> Quantised | None:
    """The quantisation of a checkpoint, None when it has none."""
    nested = language_part(config)[1]
    found = config.get("quantization_config") or nested.get("quantization_config") or config.get("compression_config")
    if (not isinstance(found, Mapping) or not found) and directory is not None:
        found = _beside(directory)
    if not isinstance(found, Mapping) or not found:
        if directory is not None and directory.weights.ggufs and not directory.weights.safetensors:
            return Quantised("gguf", None, None, "", {})
        return None
    method = str(found.get("quant_method") or "").lower()
    bits: float | None = None
    if not method:
        method = "bitsandbytes" if "load_in_4bit" in found or "load_in_8bit" in found else "unknown"
    if method in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"):
        four = found.get("load_in_4bit") or found.get("_load_in_4bit") or method.endswith("4bit")
        bits, method = (4.0 if four else 8.0), "bitsandbytes"
    given = found.get("bits", found.get("w_bit", found.get("nbits")))
    if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given <= 32:
        bits = float(given)
    detail = ""
    if method == "compressed-tensors":
        bits, detail = _compressed(found)
    if method == "torchao":
        detail = _torchao_type(found)
        bits = 4.0 if "4" in detail else 8.0 if "8" in detail else None
    method = {
        "gptq_marlin": "gptq",
        "awq_marlin": "awq",
        "finegrained_fp8": "fp8",
        "intel/auto-round": "auto-round",
    }.get(method, method)
    size = found.get("group_size", found.get("q_group_size"))
    group = size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 20 else None
    rule = facts.table("quantised_bases")["methods"].get(method)
    if bits is None and rule is not None:
        bits = rule["bits"] if rule["bits"] is not None else None
    return Quantised(method, bits, group, detail, found)


def _beside(directory: ModelDirectory) -> Mapping[str, Any]:
    """Quantisation that config.json does not mention: files of older tools, or packed tensors in the headers."""
    reader = Reader(directory.path, False)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if directory.has(name):
            return {"quant_method": method, **reader.json(name).object}
    names = directory.weights.tensors
    if any(name.endswith(".qweight") for name in names):
        return {"quant_method": "gptq" if any(name.endswith(".g_idx") for name in names) else "awq"}
    return {}


def _compressed(found: Mapping[str, Any]) -> tuple[float | None, str]:
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) and groups else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    weights = weights if isinstance(weights, Mapping) else {}
    bits, kind = weights.get("num_bits"), str(weights.get("type", ""))
    number = float(bits) if isinstance(bits, int) and not isinstance(bits, bool) and 0 < bits <= 32 else None
    return number, f"{kind}{bits}" if number else str(found.get("format", ""))


def _torchao_type(found: Mapping[str, Any]) -> str:
    kind = found.get("quant_type")
    if isinstance(kind, Mapping):
        default = kind.get("default")
        kind = default.get("_type") if isinstance(default, Mapping) else default
    return str(kind or "")[:80]


def quantised_linear_weights(shape: ModelShape) -> int:
    """Weights that a quantised checkpoint packs: linear modules and experts of the language model, not the head."""
    return sum(
        module.weights * module.per_layer * times
        for module, times, stack in shape.occurrences()
        if stack not in ("vision", "audio", "")
        and (module.kind in ("linear", "conv1d", "experts"))
        and not shape.is_head(module)
    )


def packed_bytes(shape: ModelShape, quantised: Quantised) -> int | None:
    """Bytes of the checkpoint as it lies on disk and on a card that keeps it packed. None when the width is unknown.

    Scales and zero points of GPTQ and AWQ: one fp16 scale and one packed zero a group. FP8: one fp32 scale a block.
    """
    if shape.parameters is None or quantised.bits is None:
        return None
    linear = quantised_linear_weights(shape)
    if quantised.method == "mxfp4":  # only the experts of gpt-oss are packed
        linear = sum(m.weights * times for m, times, _ in shape.occurrences() if is_routed_expert(m))
    overhead = 0.0
    if quantised.method in ("gptq", "awq", "auto-round"):
        overhead = (16 + quantised.bits) / (quantised.group_size or 4096)
    elif quantised.method == "fp8":
        overhead = 32 / (128 * 128)
    elif quantised.method == "bitsandbytes" and quantised.bits == 4:
        double = bool(quantised.config.get("bnb_4bit_use_double_quant"))
        overhead = 0.127 if double else 0.5
    return round(linear * (quantised.bits + overhead) / 8) + (shape.parameters - linear) * _UNQUANTISED_BYTES


def method_on(quantised: Quantised) -> str | None:
    """The plan's method for training on this base: LoRA on it as it lies in memory. None: as for any model.

    FP8, MXFP4 and others are estimated as bf16: what they become without the right card, and the safe side with it.
    """
    if quantised.method == "bitsandbytes":
        return "lora_int8" if quantised.bits == 8 else "qlora"
    return {"gptq": "lora_gptq", "awq": "lora_awq"}.get(quantised.method, "lora")


def dequantises(quantised: Quantised, compute_capability: str | None, gpu: bool | None) -> bool | None:
    """Whether loading turns it into bf16 on this card; None when that could not be told (no card named)."""
    floor = (quantised.rule or {}).get("dequantises_below")
    if floor is None:
        return False
    if gpu is False:
        return True
    if compute_capability is None:
        return None
    return not at_least(compute_capability, str(floor))


def quantised_facts(
    quantised: Quantised | None, shape: ModelShape | None, directory: ModelDirectory, versions: Versions,
    compute_capability: str | None, gpu: bool | None,
) -> dict[str, Any]:  # fmt: skip
    """The facts as plain data; {} for a checkpoint that is not quantised."""
    if quantised is None:
        return {}
    made: dict[str, Any] = {
        "quant_method": quantised.method,
        "bits": quantised.bits,
        "group_size": quantised.group_size,
        "allowed": {
            "full_fine_tuning": False,
            "lora_on_top": lora_allowed(quantised, versions)[0],
            "bitsandbytes_on_top": False,
        },
        "dequantizes_to_bf16_here": dequantises(quantised, compute_capability, gpu),
    }
    floor = (quantised.rule or {}).get("dequantises_below")
    if floor:
        made["dequantizes_to_bf16_when"] = f"no GPU, or compute capability below {floor}"
    if quantised.bits is not None:
        made["linear_bytes_per_param"] = quantised.bits / 8 if quantised.bits % 8 else int(quantised.bits // 8)
    if shape is not None and shape.parameters is not None:
        made["packed_weight_bytes"] = stored_bytes(directory.weights) or packed_bytes(shape, quantised)
        made["bf16_weight_bytes_if_dequantized"] = shape.parameters * 2
        made["unquantized_params_embeddings_and_head"] = shape.embedding_parameters + shape.head_parameters
    return made


def lora_allowed(quantised: Quantised, versions: Versions) -> tuple[bool | None, str]:
    """Whether LoRA on this frozen base is allowed with these versions, and why; None when it could not be told."""
    rule = quantised.rule
    if rule is None:
        return None, f"the method {quote(quantised.method, 40)} is not known here"
    version = versions.of("transformers")
    if quantised.method == "fp8":
        if version is None:
            return None, "up to transformers 5.9.0 it is refused, with 5.24.0 it is allowed"
        if not at_least(version, rule["unclear_from"]):
            return False, f"transformers {version} refuses it: {rule['refusal']}"
        if not at_least(version, rule["known_trainable"]):
            return None, f"refused up to 5.9.0, allowed in 5.24.0; {version} lies between"
        return True, f"transformers {version} allows it (its fp8 quantizer reports is_trainable)"
    if quantised.method == "torchao":
        return ("8" in quantised.detail) if quantised.detail else None, "only 8-bit types are trainable"
    if quantised.method == "compressed-tensors":
        float8 = quantised.detail.startswith("float8")
        return (None, "FP8 kernels are for inference only: load with dequantize=True") if float8 else (True, "")
    if quantised.method == "mxfp4":
        return None, "packed it cannot be trained; load with Mxfp4Config(dequantize=True), the experts become bf16"
    if quantised.method == "awq":
        installed = versions.of("gptqmodel")
        return (at_least(installed, "5.0") if installed else None), "AWQ training needs gptqmodel 5.0 or newer"
    return rule["lora"] == "yes" or str(rule["lora"]).startswith("needs"), str(rule["lora"])


def check_quantised(
    quantised: Quantised | None, shape: ModelShape | None, directory: ModelDirectory, versions: Versions,
    compute_capability: str | None, gpu: bool | None,
) -> list[Finding]:  # fmt: skip
    """What a quantised base means for training."""
    if quantised is None:
        return []
    rule = quantised.rule
    if rule is None:
        return [
            Finding(
                "pre-quantized-unknown",
                Level.UNKNOWN,
                f"The checkpoint is quantised with a method that is not known here: {quote(quantised.method, 60)}.",
                "Whether it can be loaded, trained, or given an adapter could not be told.",
                ("start from the unquantised checkpoint",),
                _SOURCE,
            )
        ]
    allowed, reason = lora_allowed(quantised, versions)
    width = f" {quantised.bits:g}-bit" if quantised.bits else ""
    group = f", groups of {quantised.group_size}" if quantised.group_size else ""
    size = packed_bytes(shape, quantised) if shape is not None else None
    size = stored_bytes(directory.weights) or size
    weighs = f" It weighs about {size / 2**30:.2f} GiB." if size else ""
    why = [f"Full fine-tuning is not possible on it, and a second quantisation (load_in_4bit) is refused.{weighs}"]
    becomes = dequantises(quantised, compute_capability, gpu)
    full_bytes = shape.parameters * 2 if shape is not None and shape.parameters is not None else None
    floor = rule.get("dequantises_below")
    if floor and full_bytes:
        heavy = f"{full_bytes / 2**30:.2f} GiB"
        if becomes:
            here = f"this card ({compute_capability})" if compute_capability else "a machine without GPU"
            why.append(f"On {here} it is turned into bf16 when it is loaded: {heavy}.")
        elif becomes is None:
            why.append(f"Without GPU, or below compute capability {floor}, it becomes bf16 when it is loaded: {heavy}.")
    words = {True: "LoRA on top is possible", False: "LoRA on top is refused", None: "LoRA on top depends"}[allowed]
    why.append(f"{words}{': ' + reason if reason and reason != 'yes' else ''}. {rule['merge']}".strip())
    package = rule.get("package")
    fixes = [str(rule["alternative"])]
    if allowed is not False and package and not versions.of(str(package)):
        fixes.insert(0 if quantised.method in ("gptq", "awq") else 1, f"`pip install {package}` to train LoRA on it")
    if quantised.method == "fp8" and allowed is not True:
        fixes.append('`pip install "transformers>=5.24"` and a GPU of compute capability 8.9 or newer')
    code = {"compressed-tensors": "compressed-tensors", "auto-round": "auto-round"}.get(
        quantised.method, quantised.method.replace("_", "-")
    )
    blocked = allowed is False and quantised.method not in ("fp8",)
    return [
        Finding(
            f"pre-quantized-{code}",
            Level.FAIL if blocked and not floor else Level.WARN,
            f"The checkpoint is already quantised: {rule['name']}{width}{group}.",
            " ".join(why),
            tuple(fixes[:3]),
            _SOURCE,
        )
    ]


# ---------------------------------------------------------------------------------------------------------------------
# what 4-bit loading would quantise


def four_bit_coverage(shape: ModelShape) -> dict[str, int] | None:
    """Elements that bitsandbytes would quantise and those that stay in 16 bit, by reason. None: structure unknown."""
    total = shape.parameters
    if total is None:
        return None
    experts = sum(m.weights * m.per_layer * t for m, t, _ in shape.occurrences() if m.kind == "experts")
    return {
        "total": total,
        "quantised": shape.bitsandbytes_weights,
        "embeddings": shape.embedding_parameters,
        "head": shape.head_parameters,
        "stacked_experts": experts,
        "other": total
        - shape.bitsandbytes_weights
        - shape.embedding_parameters
        - shape.head_parameters
        - experts,
    }  # fmt: skip


def four_bit_bytes(shape: ModelShape, double_quant: bool = True) -> int | None:
    """Bytes of the weights loaded in 4 bit with bitsandbytes nf4: 0.5 bytes and 0.127 (or 0.5) bits of scales each.

    Source: QLoRA paper, section 3 (double quantisation 0.127 bit a parameter); FACTS section 6.
    """
    coverage = four_bit_coverage(shape)
    if coverage is None:
        return None
    scales = 0.127 if double_quant else 0.5
    return round(coverage["quantised"] * (4 + scales) / 8) + (coverage["total"] - coverage["quantised"]) * 2


def check_four_bit(shape: ModelShape | None, quantised: Quantised | None) -> list[Finding]:
    """How much of the model 4-bit loading would really quantise."""
    if shape is None or quantised is not None:
        return []
    coverage = four_bit_coverage(shape)
    size = four_bit_bytes(shape)
    if coverage is None or size is None or not coverage["total"]:
        return []
    share = coverage["quantised"] / coverage["total"]
    what = f"4-bit loading would quantise {share:.0%} of the parameters: {size / 2**30:.2f} GiB of weights."
    source = "transformers 5.24, integrations/bitsandbytes.py and quantizers/base.py (get_keys_to_not_convert)"
    if coverage["stacked_experts"] > 0.05 * coverage["total"]:
        return [
            Finding(
                "moe-experts-not-quantised",
                Level.WARN,
                what,
                f"The experts ({coverage['stacked_experts'] / coverage['total']:.0%} of the parameters) are stacked "
                "3-D parameters since transformers 5; bitsandbytes replaces only linear modules, so they stay in "
                "16 bit, and prepare_model_for_kbit_training then turns them into fp32 (twice that).",
                (
                    "plan with this size, not with half a byte a parameter",
                    "see with `--gpu-vram-gb N` which card is large enough",
                ),
                source,
            )
        ]
    derived = sum(m.weights * t for m, t, _ in shape.occurrences() if m.subclass)
    if derived > 0.5 * coverage["total"]:
        return [
            Finding(
                "four-bit-passes-over",
                Level.WARN,
                what,
                "The linear layers of this architecture are of a class derived from nn.Linear; since transformers 5 "
                "bitsandbytes replaces nn.Linear itself only, so they stay in 16 bit.",
                ("plan with this size: LoRA on the 16-bit weights, not QLoRA",),
                source,
            )
        ]
    kept = coverage["embeddings"] + coverage["head"]
    return [
        Finding(
            "four-bit-coverage",
            Level.OK,
            what,
            f"Embeddings and output head ({kept / coverage['total']:.0%}) stay in 16 bit"
            + (", and so does what is neither linear nor Conv1D." if coverage["other"] else "."),
            source=source,
        )
    ]
