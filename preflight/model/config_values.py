"""Values of config.json that transformers refuses when it builds the model, or that fail in the first forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from preflight import facts
from preflight.findings import Finding, Level, quote
from preflight.model_shape import Config, ModelShape, language_part

_SOURCE = "transformers 5.24: configuration_utils.py, modeling_rope_utils.py, activations.py"

# Rope types and what each needs, as modeling_rope_utils.py has them; the base length is filled in by transformers.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
# Types that translate an older word of their own: "su" in Phi-3, "mrope" in the Qwen vision models.
_ROPE_OWN_WORDS = {"su": "phi", "mrope": "vl", "axial": ""}
_ACTIVATIONS = {
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "swish"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
    *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "tanh", "xielu"),
}
# What the two families of types are laid out like; the others have words of their own for it.
_LLAMA_LIKE = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "granite", "smollm3", "phi3", "arcee", "cwm"),
}
# Configurations whose class checks that the width is a multiple of the heads, whatever head_dim says.
_WIDTH_IS_CHECKED = {"llama", "gemma2", "arcee", "cwm"}
_DTYPES = {"float16", "bfloat16", "float32", "float64", "float", "half", "double", "auto"}


def check_values(config: Mapping[str, Any], shape: ModelShape | None) -> list[Finding]:
    """What is refused, one finding for all of it. Only types that transformers itself lays out are judged."""
    raw = language_part(config)[1]
    model_type = str(raw.get("model_type") or config.get("model_type") or "")
    if config.get("auto_map") or not model_type or not facts.table("config_defaults")["model_types"].get(model_type):
        return []
    wrong = list(_wrong(raw, config, model_type, shape))
    if not wrong:
        return []
    return [
        Finding(
            "config-value-refused",
            Level.FAIL,
            f"config.json holds what transformers cannot build or run: {'; '.join(wrong)}.",
            "The file is valid JSON, so nothing complains before the model is built or the first batch runs.",
            ("compare config.json with the one in the model's own repository",),
            _SOURCE,
        )
    ]


def _wrong(
    raw: Mapping[str, Any], config: Mapping[str, Any], model_type: str, shape: ModelShape | None
) -> Iterator[str]:
    heads, kv_heads = (shape.heads, shape.kv_heads) if shape else (None, None)
    if model_type in _LLAMA_LIKE and heads and kv_heads and heads % kv_heads:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads} (attention fails)"
    width = shape.hidden_size if shape else None
    if heads and width and width % heads:
        if model_type in _WIDTH_IS_CHECKED:
            yield f"hidden_size {width} is not a multiple of num_attention_heads {heads} (refused by its configuration)"
        elif model_type in _LLAMA_LIKE and raw.get("head_dim") is None and (width // heads) % 2:
            yield f"hidden_size {width} over num_attention_heads {heads} is an odd head size (rotary needs an even one)"
    yield from _rope_wrong(raw, model_type)
    if model_type in _LLAMA_LIKE:
        word = Config(raw).common_word("activation")
        if word is not None and word not in _ACTIVATIONS:
            yield f"hidden_act {quote(word, 40)!r} is no activation of transformers (KeyError)"
        pad, rows = config.get("pad_token_id", raw.get("pad_token_id")), shape.vocab_size if shape else None
        if isinstance(pad, int) and not isinstance(pad, bool) and rows and pad >= rows:
            yield f"pad_token_id {pad} is beyond vocab_size {rows} (Padding_idx must be within num_embeddings)"
    kinds, layers = raw.get("layer_types"), shape.layers if shape else None
    if isinstance(kinds, list) and isinstance(raw.get("num_hidden_layers"), int) and layers and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for {layers} layers"
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if isinstance(value, str) and value and not _is_dtype(value):
            yield f"{key} {quote(value, 40)!r} is no type of torch"


def _rope_wrong(raw: Mapping[str, Any], model_type: str) -> Iterator[str]:
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if not isinstance(value, Mapping):
            continue
        parts = [value, *(part for part in value.values() if isinstance(part, Mapping))]
        for part in parts:
            kind = part.get("rope_type", part.get("type"))
            if not isinstance(kind, str):
                continue
            if kind in _ROPE_OWN_WORDS and _ROPE_OWN_WORDS[kind] in model_type:
                continue
            if kind not in _ROPE_NEEDS:
                yield f"{key} names the unknown type {quote(kind, 40)!r} (KeyError)"
                continue
            missing = [name for name in _ROPE_NEEDS[kind] if part.get(name) is None]
            # Phi-3 and others read the factor of longrope from the two lengths; yarn's may stand in an older key.
            if missing:
                yield f"{key} of type {kind} lacks {', '.join(missing)}"


def _is_dtype(word: str) -> bool:
    name = word.removeprefix("torch.")
    return name in _DTYPES or name.startswith(("float8_", "int", "uint", "float4"))
