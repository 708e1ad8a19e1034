"""What was seen of a model, as plain JSON data with flat names."""

from __future__ import annotations

from typing import Any

from preflight.findings import quote
from preflight.model.adapter_choice import (
    adapter_facts,
    asked_facts,
)
from preflight.model.attention import attention_facts
from preflight.model.chat_template import (
    template_facts,
)
from preflight.model.directory_checks import (
    adapter_facts as saved_adapter_facts,
)
from preflight.model.model_directory import ModelDirectory, stored_bytes
from preflight.model.model_look import Seen
from preflight.model.module_tree import tree_facts
from preflight.model.quantised import (
    Quantised,
    four_bit_bytes,
    four_bit_coverage,
    packed_bytes,
    quantised_facts,
)
from preflight.model.support import (
    support_facts,
    versions_facts,
)
from preflight.model_shape import ModelShape, read_dtype

# What a comparison shows of every model, also of one whose shape could not be read.
SHOWN = (
    "params", "params_active", "params_towers", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "dtype", "kv_bytes_per_token_bf16", "weight_bytes",
)  # fmt: skip


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


def facts_of(seen: Seen) -> dict[str, Any]:
    """What was observed, as plain JSON data with flat names."""
    shape, directory = seen.shape, seen.directory
    dtype = read_dtype(directory.config.object)
    made: dict[str, Any] = {"model_name": quote(seen.name, 120)}
    made |= shape_facts(shape, dtype, directory, seen.quantised)
    made |= support_facts(seen.support, seen.versions, directory)
    made["config_bom"] = directory.config.bom
    made["weights"] = {
        "complete": directory.weights.complete if directory.weights.present else None,
        "missing": list(directory.weights.missing),
        "lfs_pointers": list(directory.weights.pointers),
        "damaged": [list(item) for item in directory.weights.damaged],
        "index_total_size": directory.weights.index_total_bytes,
        "elements": directory.weights.elements,
        "bytes_by_dtype": dict(directory.weights.bytes_by_dtype),
    }
    made["adapter"] = saved_adapter_facts(directory) or None
    made["quantization"] = (
        quantised_facts(seen.quantised, shape, directory, seen.versions, seen.card.capability, seen.card.gpu) or None
    )
    made |= {"four_bit": None, "lora": None, "tokenizer": None, "memory": seen.memory or None}
    if shape is not None and shape.parameters is not None and seen.quantised is None:
        made["four_bit"] = {"coverage": four_bit_coverage(shape), "weight_bytes": four_bit_bytes(shape)}
    if shape is not None and seen.rank is not None:
        made["lora"] = adapter_facts(shape, seen.made, seen.rank)
        made["lora"]["asked"] = asked_facts(shape, seen.plan.target_modules, seen.plan.lora_rank)
    made["attention"] = attention_facts(seen.supported, seen.taken, seen.plan)
    if seen.tokenizer.present:
        made["tokenizer"] = {
            **template_facts(seen.tokenizer, seen.rendered),
            "special_tokens": dict(seen.tokenizer.tokens),
            "max_token_id": seen.tokenizer.max_token_id,
            "embedding_rows": shape.vocab_size if shape else None,
        }
    made["phone"] = seen.phone
    made["module_tree"] = tree_facts(seen.tree)
    made["card"] = {"name": seen.card.name, "compute_capability": seen.card.capability}
    made["versions"] = versions_facts(seen.versions)
    return made


def shape_facts(
    shape: ModelShape | None, dtype: str | None, directory: ModelDirectory, quantised: Quantised | None
) -> dict[str, Any]:
    """The numbers of the model."""
    if shape is None:
        return dict.fromkeys(SHOWN) | {"dtype_in_config": dtype}
    width = BYTES.get(dtype or "bfloat16", 2)
    as_loaded = shape.parameters * width if shape.parameters else None
    if quantised is not None:
        as_loaded = packed_bytes(shape, quantised)
    values = shape.kv_values_per_token
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    counted = shape.parameters
    stored = stored_bytes(directory.weights)
    mixers: dict[str, int] = {}
    for group in shape.groups:
        if group.stack in ("decoder", "encoder"):
            key = group.mixer if group.mixer != "none" else group.mlp if group.mlp != "dense" else "mlp"
            mixers[key] = mixers.get(key, 0) + group.count
    decoder = [group for group in shape.groups if group.stack in ("decoder", "encoder")]
    made = {
        "params": counted,
        "params_active": shape.active_parameters,
        "params_language_model": shape.counted_parameters - shape.other_tower_parameters
        if shape.structure != "unknown"
        else None,
        "params_embedding": shape.embedding_parameters,
        "params_head": shape.head_parameters,
        "params_towers": shape.other_tower_parameters,
        "structure": shape.structure,
        "dtype_in_config": dtype,
        "dtype": dtype,
        "weight_bytes": stored if stored is not None else as_loaded,
        "weight_bytes_bf16": counted * 2 if counted else None,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": shape.v_head_dim,
        "q_proj_out": heads * head_dim if heads and head_dim else None,
        "kv_proj_out": kv_heads * head_dim if kv_heads and head_dim else None,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position": shape.max_position,
        "mlp_is_gated": shape.gated_mlp,
        "activation": shape.activation,
        "tie_word_embeddings": shape.tied_embeddings,
        "kv_bytes_per_token_bf16": values * 2 if values is not None else None,
        "kv_bytes_per_token_fp16": values * 2 if values is not None else None,
        "layers": mixers,
        "moe_layers": sum(group.count for group in decoder if "moe" in group.mlp),
        "dense_layers": sum(group.count for group in decoder if group.mlp == "dense"),
        "multimodal": shape.other_tower_parameters > 0 or shape.language_key is not None,
        "language_config_key": shape.language_key,
        "encoder_decoder": shape.encoder_decoder,
    }
    if shape.moe is not None:
        made |= {"experts": shape.moe.experts, "experts_per_token": shape.moe.per_token}
    if shape.mla is not None:
        made |= {
            "attention_kind": "mla",
            "q_lora_rank": shape.mla.q_rank,
            "latent_cache_values_per_token_per_layer": shape.mla.kv_rank + shape.mla.rope_dim,
        }
    return made
