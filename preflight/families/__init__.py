"""Which modules does each architecture have? The numbers come from config.json, the layout from its family."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from preflight.families import dense
from preflight.families.parts import architecture
from preflight.model_shape import Config, ModelShape, language_part, read_dtype

# Families whose layers are those of another, sometimes under another name of the type.
SAME_AS = {
    "code_llama": "llama", "llama_moe": "llama", "yayi": "llama", "deepseek": "llama", "solar": "llama",
    "RefinedWeb": "falcon", "RefinedWebModel": "falcon", "gpt-sw3": "gpt2", "InternLM": "internlm",
    "InternLM2ForCausalLM": "internlm2", "Yi": "yi", "gemma3n": "gemma3n_text", "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "llava_qwen": "qwen2", "llava_llama": "llama",
    "phi3_v": "phi3", "hyperclovax": "granite", "mellum": "mellum",
}  # fmt: skip

MODULES = ("moe", "state", "towers", "encoders")


def builder_of(model_type: str) -> Callable[[Config], ModelShape] | None:
    """The function that lays out this type, None for dense decoders and unknown types.

    Modules are imported only as far as they are needed: a Llama needs none of them.
    """
    for name in MODULES:
        found: Callable[[Config], ModelShape] | None
        found = importlib.import_module(f"preflight.families.{name}").BUILDERS.get(model_type)
        if found is not None:
            return found
    return None


def read(raw: Mapping[str, Any]) -> ModelShape:
    """The shape of any config. Raises ConfigTrouble."""
    key, language = language_part(raw)
    model_type = raw.get("model_type")
    if isinstance(model_type, str):
        name = SAME_AS.get(model_type, model_type)
        if name == "qwen" and isinstance(raw.get("visual"), Mapping):
            from preflight.families import towers

            return towers.qwen1_visual(Config(raw), dense.dense_decoder(Config(raw), dense.STYLES["qwen"]))
        if key is None and name in dense.STYLES:
            return dense.dense_decoder(Config(raw, name if name == "falcon" else None), dense.STYLES[name])
        builder = builder_of(model_type)
        if builder is not None:
            return builder(Config(raw))
    return _unknown(Config(language if key else raw), raw, key)


def _unknown(c: Config, raw: Mapping[str, Any], key: str | None) -> ModelShape:
    """A type whose layout is not known here: the numbers it states, and no modules."""
    numbers = {name: c.common(name) for name in ("hidden_size", "layers", "heads", "head_dim", "intermediate_size")}
    heads, hidden = numbers["heads"], numbers["hidden_size"]
    return ModelShape(
        model_type=raw.get("model_type") if isinstance(raw.get("model_type"), str) else None,
        architecture=architecture(raw),
        structure="unknown",
        hidden_size=hidden,
        layers=numbers["layers"],
        heads=heads,
        kv_heads=c.common("kv_heads") or heads,
        head_dim=numbers["head_dim"] or (hidden // heads if hidden and heads else None),
        intermediate_size=numbers["intermediate_size"],
        vocab_size=c.common("vocab_size"),
        max_position=c.common("max_position"),
        dtype=read_dtype(raw),
        language_key=key,
    )
