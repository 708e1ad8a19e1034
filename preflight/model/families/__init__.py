"""Which modules does each architecture have? The numbers come from config.json, the layout from its family."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from preflight.model.families import dense
from preflight.model.families.parts import architecture, linear
from preflight.model_shape import Config, ConfigTrouble, LayoutUnknown, ModelShape, language_part, read_dtype

# Families whose layers are those of another, sometimes under another name of the type.
SAME_AS = {
    "code_llama": "llama", "RefinedWeb": "falcon", "RefinedWebModel": "falcon", "gpt-sw3": "gpt2",
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
}  # fmt: skip

MODULES = ("moe", "state", "towers", "encoders")


def builder_of(model_type: str) -> Callable[[Config], ModelShape] | None:
    """The function that lays out this type, None for dense decoders and unknown types.

    Modules are imported only as far as they are needed: a Llama needs none of them.
    """
    for name in MODULES:
        found: Callable[[Config], ModelShape] | None
        found = importlib.import_module(f"preflight.model.families.{name}").BUILDERS.get(model_type)
        if found is not None:
            return found
    return None


def read(raw: Mapping[str, Any]) -> ModelShape:
    """The shape of any config, with the head that its architecture names. Raises ConfigTrouble."""
    shape = _read(raw)
    name = shape.architecture or ""
    decoder = shape.structure == "known" and not shape.encoder_only and not shape.encoder_decoder
    if not decoder or shape.language_key or shape.hidden_size is None:
        return shape
    if name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        named = raw.get("id2label")
        labels = (
            len(named) if isinstance(named, Mapping) and named else Config(raw).number("num_labels", default=2) or 2
        )
        head = linear("score", shape.hidden_size, labels or 2, name.endswith("ForTokenClassification"))
        rest = (*(module for module in shape.rest if not shape.is_head(module)), head)
        return replace(shape, rest=rest, head_path="score")
    if name.endswith("Model") and not name.endswith(("LMHeadModel", "ChatGLMModel")):
        return replace(shape, rest=tuple(module for module in shape.rest if not shape.is_head(module)))
    return shape


def _read(raw: Mapping[str, Any]) -> ModelShape:
    key, language = language_part(raw)
    model_type = raw.get("model_type")
    if isinstance(model_type, str):
        name = SAME_AS.get(model_type, model_type)
        if name == "qwen" and isinstance(raw.get("visual"), Mapping):
            from preflight.model.families import towers

            return towers.qwen1_visual(Config(raw), dense.dense_decoder(Config(raw), dense.STYLES["qwen"]))
        if key is None and name in dense.STYLES:
            return dense.dense_decoder(Config(raw, name if name == "falcon" else None), dense.STYLES[name])
        builder = builder_of(model_type)
        if builder is not None:
            try:
                return builder(Config(raw))
            except LayoutUnknown:
                pass
    if key is not None:
        inside = _read(language)
        if inside.structure == "known":
            return replace(
                inside,
                structure="language part",
                model_type=model_type if isinstance(model_type, str) else None,
                architecture=architecture(raw),
                dtype=read_dtype(raw),
                language_key=key,
            )
    return _unknown(Config(language if key else raw), raw, key)


# Where each layer has key and value heads of its own (OpenELM, DeciLM, Nemotron-NAS), one number would be wrong.
_HEADS_PER_LAYER = ("num_key_value_heads_per_layer", "num_kv_heads", "block_configs", "_block_configs")


def _unknown(c: Config, raw: Mapping[str, Any], key: str | None) -> ModelShape:
    """A type whose layout is not known here: the numbers it states, and no modules.

    What is no plain number there (some types list one value a layer) counts as not stated.
    """

    def stated(name: str) -> int | None:
        try:
            return c.common(name)
        except ConfigTrouble:
            return None

    hidden, heads = stated("hidden_size"), stated("heads")
    kv_heads = stated("kv_heads")
    if kv_heads is None and not any(c.raw.get(name) for name in _HEADS_PER_LAYER):
        kv_heads = heads
    return ModelShape(
        model_type=raw.get("model_type") if isinstance(raw.get("model_type"), str) else None,
        architecture=architecture(raw),
        structure="unknown",
        hidden_size=hidden,
        layers=stated("layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=stated("head_dim") or (hidden // heads if hidden and heads else None),
        intermediate_size=stated("intermediate_size"),
        vocab_size=stated("vocab_size"),
        max_position=stated("max_position"),
        dtype=read_dtype(raw),
        language_key=key,
    )
