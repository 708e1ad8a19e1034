"""Models of several parts: vision or audio towers joined to a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from preflight.model.families.parts import architecture, embedding, linear, norm, parameter
from preflight.model_shape import (
    Config,
    ConfigTrouble,
    Layers,
    LayoutUnknown,
    ModelShape,
    Module,
    language_part,
    read_dtype,
)


@dataclass(frozen=True)
class Tower:
    """A vision or audio tower and the width of what it hands on."""

    layers: Layers
    rest: tuple[Module, ...]
    width: int


def _block(at: str, names: tuple[str, ...], hidden: int, biased: bool = True) -> list[Module]:
    return [linear(f"{at}.{name}", hidden, hidden, biased) for name in names]


def clip_vision(v: Config, base: str, siglip: bool = True) -> Tower:
    """A CLIP or SigLIP tower (also Idefics3's and SmolVLM's): a plain ViT with learned positions."""
    hidden = v.number("hidden_size", least=1) or 768
    inner = v.number("intermediate_size", least=1) or 3072
    patch = v.number("patch_size", default=16, least=1) or 16
    patches = ((v.number("image_size", default=224, least=1) or 224) // patch) ** 2
    channels = v.number("num_channels", default=3, least=1) or 3
    at = f"{base}.encoder.layers.*"
    modules = [
        *_block(f"{at}.self_attn", ("k_proj", "v_proj", "q_proj", "out_proj"), hidden),
        norm(f"{at}.layer_norm1", hidden, True),
        norm(f"{at}.layer_norm2", hidden, True),
        linear(f"{at}.mlp.fc1", hidden, inner, True),
        linear(f"{at}.mlp.fc2", inner, hidden, True),
    ]
    rest = [
        parameter(f"{base}.embeddings.patch_embedding", hidden, channels, patch, patch, kind="conv",
                  bias=hidden if siglip else 0),
        embedding(f"{base}.embeddings.position_embedding", patches + (0 if siglip else 1), hidden),
        norm(f"{base}.post_layernorm", hidden, True),
    ]  # fmt: skip
    if not siglip:
        rest += [parameter(f"{base}.embeddings.class_embedding", hidden), norm(f"{base}.pre_layrnorm", hidden, True)]
    if siglip and "siglip" in (v.model_type or "") and v.flag("vision_use_head", default=True):
        at = f"{base}.head"  # SigLIP's attention pooling; Gemma's files switch it off
        rest += [
            parameter(f"{at}.probe", 1, 1, hidden),
            parameter(f"{at}.attention.in_proj_weight", 3 * hidden, hidden, bias=3 * hidden),
            linear(f"{at}.attention.out_proj", hidden, hidden, True),
            norm(f"{at}.layernorm", hidden, True),
            linear(f"{at}.mlp.fc1", hidden, inner, True),
            linear(f"{at}.mlp.fc2", inner, hidden, True),
        ]
    layers = v.number("num_hidden_layers", default=12, least=1) or 12
    return Tower(Layers(layers, "attention", tuple(modules), stack="vision"), tuple(rest), hidden)


def qwen_vision(v: Config, base: str, generation: int, text_width: int) -> Tower:
    """The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, with the merger that joins them to the text."""
    hidden = v.number("hidden_size", least=1) if generation > 20 else v.number("embed_dim", least=1)
    hidden = hidden or 1280
    patch = v.number("patch_size", default=14, least=1) or 14
    times = v.number("temporal_patch_size", default=2, least=1) or 2
    channels = v.number("in_channels", "in_chans", default=3, least=1) or 3
    merged = hidden * (v.number("spatial_merge_size", default=2, least=1) or 2) ** 2
    at = f"{base}.blocks.*"
    layer_norm = generation != 25
    if generation == 25:
        inner = v.number("intermediate_size", least=1) or 3420
        mlp = [
            linear(f"{at}.mlp.gate_proj", hidden, inner, True),
            linear(f"{at}.mlp.up_proj", hidden, inner, True),
            linear(f"{at}.mlp.down_proj", inner, hidden, True),
        ]
    else:
        ratio = v.fraction("mlp_ratio", 4)
        inner = int(hidden * ratio) if generation == 20 else v.number("intermediate_size", least=1) or 4304
        names = ("fc1", "fc2") if generation == 20 else ("linear_fc1", "linear_fc2")
        mlp = [
            linear(f"{at}.mlp.{names[0]}", hidden, inner, True),
            linear(f"{at}.mlp.{names[1]}", inner, hidden, True),
        ]
    modules = [
        norm(f"{at}.norm1", hidden, layer_norm),
        norm(f"{at}.norm2", hidden, layer_norm),
        linear(f"{at}.attn.qkv", hidden, 3 * hidden, True),
        linear(f"{at}.attn.proj", hidden, hidden, True),
        *mlp,
    ]
    out = v.number("out_hidden_size", least=1) if generation >= 25 else v.number("hidden_size", least=1)
    out = out or text_width
    rest = [
        parameter(f"{base}.patch_embed.proj", hidden, channels, times, patch, patch, kind="conv",
                  bias=hidden if generation == 30 else 0)
    ]  # fmt: skip
    if generation == 30:
        rows = v.number("num_position_embeddings", default=2304, least=1) or 2304
        rest.append(embedding(f"{base}.pos_embed", rows, hidden))
        stacks = len(v.list_of("deepstack_visual_indexes") or [8, 16, 24])
        for name, width, each in (("merger", hidden, 1), ("deepstack_merger_list.*", merged, stacks)):
            rest += [
                norm(f"{base}.{name}.norm", width, True, each),
                linear(f"{base}.{name}.linear_fc1", merged, merged, True, each),
                linear(f"{base}.{name}.linear_fc2", merged, out, True, each),
            ]
    else:
        rest += [
            norm(f"{base}.merger.ln_q", hidden, layer_norm),
            linear(f"{base}.merger.mlp.0", merged, merged, True),
            linear(f"{base}.merger.mlp.2", merged, out, True),
        ]
    layers = v.number("depth", default=32, least=1) or 32
    return Tower(Layers(layers, "attention", tuple(modules), stack="vision"), tuple(rest), out)


def pixtral_vision(v: Config, base: str) -> Tower:
    """Pixtral's tower: Llama-like blocks, rotary positions."""
    hidden = v.number("hidden_size", default=1024, least=1) or 1024
    inner = v.number("intermediate_size", default=4096, least=1) or 4096
    heads = v.number("num_attention_heads", default=16, least=1) or 16
    wide = heads * (v.number("head_dim") or hidden // heads)
    patch = v.number("patch_size", default=16, least=1) or 16
    at = f"{base}.transformer.layers.*"
    modules = [
        norm(f"{at}.attention_norm", hidden),
        norm(f"{at}.ffn_norm", hidden),
        linear(f"{at}.feed_forward.gate_proj", hidden, inner),
        linear(f"{at}.feed_forward.up_proj", hidden, inner),
        linear(f"{at}.feed_forward.down_proj", inner, hidden),
        *(linear(f"{at}.attention.{name}", hidden, wide) for name in ("k_proj", "v_proj", "q_proj")),
        linear(f"{at}.attention.o_proj", wide, hidden),
    ]
    channels = v.number("num_channels", default=3, least=1) or 3
    rest = (
        parameter(f"{base}.patch_conv", hidden, channels, patch, patch, kind="conv"),
        norm(f"{base}.ln_pre", hidden),
    )
    layers = v.number("num_hidden_layers", default=24, least=1) or 24
    return Tower(Layers(layers, "attention", tuple(modules), stack="vision"), rest, hidden)


def internvl_vision(v: Config, base: str, remote: bool) -> Tower:
    """InternViT: in transformers' layout (q, k, v apart) or in that of the published remote code (fused qkv)."""
    hidden = v.number("hidden_size", default=1024, least=1) or 1024
    inner = v.number("intermediate_size", default=4096, least=1) or 4096
    size, patch = v.value("image_size", default=448), v.value("patch_size", default=14)
    size = size[0] if isinstance(size, list) and size else size
    patch = patch[0] if isinstance(patch, list) and patch else patch
    if not isinstance(size, int) or not isinstance(patch, int) or patch < 1:
        raise ConfigTrouble(f"vision_config: image_size {size!r} and patch_size {patch!r} must be integers")
    patches = (size // patch) ** 2
    layer_norm = v.word("norm_type", default="layer_norm") == "layer_norm"
    if remote:
        at, biased, qk = f"{base}.encoder.layers.*", v.flag("qkv_bias", default=True), v.flag("qk_normalization")
        modules = [
            linear(f"{at}.attn.qkv", hidden, 3 * hidden, biased),
            linear(f"{at}.attn.proj", hidden, hidden, True),
            parameter(f"{at}.ls1", hidden),
            parameter(f"{at}.ls2", hidden),
            norm(f"{at}.norm1", hidden, layer_norm),
            norm(f"{at}.norm2", hidden, layer_norm),
        ]
        if qk:
            modules += [norm(f"{at}.attn.q_norm", hidden), norm(f"{at}.attn.k_norm", hidden)]
        names = ("class_embedding", "position_embedding", "patch_embedding")
    else:
        at, biased, qk = f"{base}.encoder.layer.*", v.flag("attention_bias"), v.flag("use_qk_norm")
        modules = [
            *(linear(f"{at}.attention.{name}", hidden, hidden, biased) for name in ("q_proj", "k_proj", "v_proj")),
            linear(f"{at}.attention.projection_layer", hidden, hidden, True),
            parameter(f"{at}.lambda_1", hidden),
            parameter(f"{at}.lambda_2", hidden),
            norm(f"{at}.layernorm_before", hidden, layer_norm),
            norm(f"{at}.layernorm_after", hidden, layer_norm),
        ]
        if qk:
            modules += [norm(f"{at}.attention.q_norm", hidden), norm(f"{at}.attention.k_norm", hidden)]
        names = ("cls_token", "position_embeddings", "patch_embeddings.projection")
    modules += [linear(f"{at}.mlp.fc1", hidden, inner, True), linear(f"{at}.mlp.fc2", inner, hidden, True)]
    channels = v.number("num_channels", default=3, least=1) or 3
    rest = [
        parameter(f"{base}.embeddings.{names[0]}", 1, 1, hidden),
        parameter(f"{base}.embeddings.{names[2]}", hidden, channels, patch, patch, kind="conv", bias=hidden),
    ]
    if remote or v.flag("use_absolute_position_embeddings", default=True):
        rest.append(parameter(f"{base}.embeddings.{names[1]}", 1, patches + 1, hidden))
    layers = v.number("num_hidden_layers", default=24, least=1) or 24
    return Tower(Layers(layers, "attention", tuple(modules), stack="vision"), tuple(rest), hidden)


def whisper_audio(v: Config, base: str) -> Tower:
    """Whisper's encoder, as Qwen2-Audio and Voxtral use it."""
    hidden = v.number("d_model", "hidden_size", default=1280, least=1) or 1280
    inner = v.number("encoder_ffn_dim", "intermediate_size", default=4 * hidden, least=1) or 4 * hidden
    mels = v.number("num_mel_bins", default=128, least=1) or 128
    rows = v.number("max_source_positions", default=1500, least=1) or 1500
    at = f"{base}.layers.*"
    modules = [
        linear(f"{at}.self_attn.k_proj", hidden, hidden),
        *_block(f"{at}.self_attn", ("v_proj", "q_proj", "out_proj"), hidden),
        norm(f"{at}.self_attn_layer_norm", hidden, True),
        linear(f"{at}.fc1", hidden, inner, True),
        linear(f"{at}.fc2", inner, hidden, True),
        norm(f"{at}.final_layer_norm", hidden, True),
    ]
    rest = (
        parameter(f"{base}.conv1", hidden, mels, 3, kind="conv", bias=hidden),
        parameter(f"{base}.conv2", hidden, hidden, 3, kind="conv", bias=hidden),
        embedding(f"{base}.embed_positions", rows, hidden),
        norm(f"{base}.layer_norm", hidden, True),
    )
    layers = v.number("encoder_layers", "num_hidden_layers", default=32, least=1) or 32
    return Tower(Layers(layers, "attention", tuple(modules), stack="audio"), rest, hidden)


# ---------------------------------------------------------------------------------------------------------------------


def _text(c: Config, key: str | None, fallback: str, base: str) -> ModelShape:
    """The shape of the language model inside, its modules under `base`."""
    from preflight.model import families

    nested: Mapping[str, Any] = c.raw.get(key, {}) if key else c.raw
    nested = dict(nested) if isinstance(nested, Mapping) else {}
    if not isinstance(nested.get("model_type"), str) or key is None:
        nested["model_type"] = fallback
    tied = c.value("tie_word_embeddings")  # the whole model's word counts, then the class default, then the text's
    if tied is not None:
        nested["tie_word_embeddings"] = tied
    text = families.read(nested)
    if text.structure == "unknown":
        raise LayoutUnknown(f"{key}.model_type is {str(nested['model_type'])[:60]!r}: its layers are not known here")

    def moved(module: Module) -> Module:
        if text.is_head(module) or not module.path.startswith("model."):
            return module
        return replace(module, path=base + module.path.removeprefix("model"))

    groups = tuple(replace(g, modules=tuple(moved(m) for m in g.modules)) for g in text.groups)
    return replace(text, groups=groups, rest=tuple(moved(m) for m in text.rest))


def _joined(c: Config, text: ModelShape, towers: list[Tower], joint: list[Module], key: str | None) -> ModelShape:
    return replace(
        text,
        model_type=c.model_type,
        architecture=architecture(c.raw),
        dtype=read_dtype(c.raw),
        language_key=key,
        groups=(*text.groups, *(tower.layers for tower in towers)),
        rest=(*text.rest, *(module for tower in towers for module in tower.rest), *joint),
    )


def _vision_of(c: Config, base: str, fallback: str) -> Tower:
    v = c.sub("vision_config", fallback)
    if not v.raw and fallback == "clip_vision_model":  # LLaVA's own default: CLIP ViT-L/14 at 336 pixels
        v = Config({"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14,
                    "image_size": 336}, fallback)  # fmt: skip
    kind = v.model_type or fallback
    if "pixtral" in kind:
        return pixtral_vision(v, base)
    if "siglip" in kind or kind in ("idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision"):
        return clip_vision(v, base)
    if "clip" in kind:
        return clip_vision(v, base, siglip=False)
    raise LayoutUnknown(f"vision_config.model_type is {kind[:60]!r}: its layers are not known here")


def llava(c: Config) -> ModelShape:
    """LLaVA, LLaVA-NeXT, LLaVA-OneVision, Mistral3: tower, two linear layers, language model."""
    kind = c.model_type
    text = _text(c, "text_config", {"mistral3": "mistral", "llava_onevision": "qwen2"}.get(kind or "", "llama"),
                 "model.language_model")  # fmt: skip
    fallback = {"mistral3": "pixtral", "llava_onevision": "siglip_vision_model"}.get(kind or "", "clip_vision_model")
    tower = _vision_of(c, "model.vision_tower", fallback)
    width = text.hidden_size or 0
    chosen = c.value("vision_feature_layer")
    many = len(chosen) if isinstance(chosen, list) and chosen else 1
    biased = c.flag("multimodal_projector_bias", default=kind != "mistral3")
    at = "model.multi_modal_projector"
    joint = []
    if kind == "mistral3":
        merge = c.number("spatial_merge_size", default=2, least=1) or 2
        joint += [
            norm(f"{at}.norm", tower.width),
            linear(f"{at}.patch_merger.merging_layer", tower.width * merge * merge, tower.width),
        ]
    joint += [
        linear(f"{at}.linear_1", tower.width * many, width, biased),
        linear(f"{at}.linear_2", width, width, biased),
    ]
    if kind in ("llava_next", "llava_next_video", "llava_onevision"):
        joint.append(parameter("model.image_newline", width))
    return _joined(c, text, [tower], joint, "text_config")


def gemma3(c: Config) -> ModelShape:
    """Gemma 3 (SigLIP, one projection matrix) and PaliGemma (SigLIP, one linear layer)."""
    pali = c.model_type == "paligemma"
    text = _text(c, "text_config", "gemma" if pali else "gemma3_text", "model.language_model")
    tower = _vision_of(c, "model.vision_tower", "siglip_vision_model")
    width = text.hidden_size or 0
    if pali:
        v = c.sub("vision_config", "siglip_vision_model")
        width = v.number("projection_dim") or c.number("projection_dim") or width
        joint = [linear("model.multi_modal_projector.linear", tower.width, width, True)]
    else:
        joint = [
            parameter("model.multi_modal_projector.mm_input_projection_weight", tower.width, width),
            norm("model.multi_modal_projector.mm_soft_emb_norm", tower.width),
        ]
    return _joined(c, text, [tower], joint, "text_config")


def idefics3(c: Config) -> ModelShape:
    """Idefics3 and SmolVLM: SigLIP, pixel shuffle, one linear layer."""
    text = _text(c, "text_config", "llama", "model.text_model")
    tower = _vision_of(c, "model.vision_model", "idefics3_vision")
    factor = c.number("scale_factor", default=2, least=1) or 2
    width = text.hidden_size or 0
    joint = [linear("model.connector.modality_projection.proj", tower.width * factor * factor, width)]
    return _joined(c, text, [tower], joint, "text_config")


def qwen_vl(c: Config) -> ModelShape:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL; the older files are flat, with the text's numbers on top."""
    kind = c.model_type or ""
    generation = {"qwen2_vl": 20, "qwen2_5_vl": 25}.get(kind, 30)
    key = "text_config" if isinstance(c.raw.get("text_config"), Mapping) else None
    text_kind = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}.get(
        kind, {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}.get(kind, "qwen3")
    )
    nested = dict(c.raw[key]) if key else {k: v for k, v in c.raw.items() if k != "vision_config"}
    defaults = Config({}, {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}.get(kind, f"{kind}_text"))
    nested = {**defaults.defaults, **nested, "model_type": text_kind}
    text = _text(Config({**c.raw, "text_config": nested}), "text_config", text_kind, "model.language_model")
    tower = qwen_vision(c.sub("vision_config", "qwen3_5_vision" if "3_5" in kind else f"{kind}_vision"),
                        "model.visual", generation, text.hidden_size or 0)  # fmt: skip
    if "3_5" in kind:  # Qwen3.5 hands on only the last layer of its tower
        tower = replace(tower, rest=tuple(m for m in tower.rest if "deepstack" not in m.path))
    return _joined(c, text, [tower], [], key)


def internvl(c: Config) -> ModelShape:
    """InternVL in transformers' layout, and InternVLChat in that of its published remote code."""
    remote = c.model_type != "internvl"
    key = language_part(c.raw)[0] or "text_config"
    text = _text(c, key, "qwen2", "language_model" if remote else "model.language_model")
    v = c.sub("vision_config", "internvl_vision")
    tower = internvl_vision(v, "vision_model" if remote else "model.vision_tower", remote)
    times = int(1 / c.fraction("downsample_ratio", 0.5)) ** 2
    width, first = text.hidden_size or 0, tower.width * times
    names = ("mlp1.0", "mlp1.1", "mlp1.3") if remote else (
        "model.multi_modal_projector.layer_norm",
        "model.multi_modal_projector.linear_1",
        "model.multi_modal_projector.linear_2",
    )  # fmt: skip
    joint = [
        norm(names[0], first, True),
        linear(names[1], first, width, True),
        linear(names[2], width, width, True),
    ]
    shape = _joined(c, text, [tower], joint, key)
    if remote and not text.tied_embeddings:
        shape = replace(shape, head_path=f"language_model.{text.head_path}",
                        rest=tuple(replace(m, path=f"language_model.{m.path}") if text.is_head(m) else m
                                   for m in shape.rest))  # fmt: skip
    return shape


def qwen2_audio(c: Config) -> ModelShape:
    """Qwen2-Audio: Whisper's encoder, one linear layer, Qwen2."""
    text = _text(c, "text_config", "qwen2", "model.language_model")
    tower = whisper_audio(c.sub("audio_config", "qwen2_audio_encoder"), "model.audio_tower")
    joint = [linear("model.multi_modal_projector.linear", tower.width, text.hidden_size or 0, True)]
    return _joined(c, text, [tower], joint, "text_config")


def qwen1_visual(c: Config, text: ModelShape) -> ModelShape:
    """Qwen-VL (first generation): a ViT-bigG tower and a resampler, by its published visual.py."""
    v = c.sub("visual")
    hidden, layers = v.number("width", default=1664, least=1) or 1664, v.number("layers", default=48, least=1) or 48
    patch = v.number("patch_size", default=14, least=1) or 14
    queries, out = v.number("n_queries", default=256) or 256, v.number("output_dim", default=4096, least=1) or 4096
    inner = int(hidden * v.fraction("mlp_ratio", 4.9231))
    at = "transformer.visual.transformer.resblocks.*"
    modules = (
        norm(f"{at}.ln_1", hidden, True),
        norm(f"{at}.ln_2", hidden, True),
        linear(f"{at}.attn.in_proj", hidden, 3 * hidden, True),
        linear(f"{at}.attn.out_proj", hidden, hidden, True),
        linear(f"{at}.mlp.c_fc", hidden, inner, True),
        linear(f"{at}.mlp.c_proj", inner, hidden, True),
    )
    base = "transformer.visual"
    # The positions are learned for 16 x 16 patches and stretched; the resampler's keys have fixed positions.
    rest = [
        parameter(f"{base}.conv1", hidden, 3, patch, patch, kind="conv"),
        parameter(f"{base}.positional_embedding", 256, hidden),
        norm(f"{base}.ln_pre", hidden, True),
        parameter(f"{base}.attn_pool.pos_embed", queries, out),
        parameter(f"{base}.attn_pool.query", queries, out),
        linear(f"{base}.attn_pool.kv_proj", hidden, out),
        parameter(f"{base}.attn_pool.attn.in_proj_weight", 3 * out, out, bias=3 * out),
        linear(f"{base}.attn_pool.attn.out_proj", out, out, True),
        norm(f"{base}.attn_pool.ln_q", out, True),
        norm(f"{base}.attn_pool.ln_kv", out, True),
        norm(f"{base}.ln_post", out, True),
        parameter(f"{base}.proj", out, out),
    ]
    tower = Tower(Layers(layers, "attention", modules, stack="vision"), tuple(rest), out)
    return _joined(c, text, [tower], [], None)


BUILDERS: dict[str, Callable[[Config], ModelShape]] = {
    "llava": llava,
    "llava_next": llava,
    "llava_next_video": llava,
    "llava_onevision": llava,
    "mistral3": llava,
    "gemma3": gemma3,
    "paligemma": gemma3,
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "qwen2_vl": qwen_vl,
    "qwen2_5_vl": qwen_vl,
    "qwen3_vl": qwen_vl,
    "qwen3_vl_moe": qwen_vl,
    "qwen3_5": qwen_vl,
    "qwen3_5_moe": qwen_vl,
    "internvl": internvl,
    "internvl_chat": internvl,
    "qwen2_audio": qwen2_audio,
}
