"""State-space and recurrent decoders (Mamba, RWKV-like) and hybrids that mix them with attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from preflight.model.families.moe import FAMILIES, Experts, expert_modules, sparse_layers
from preflight.model.families.parts import (
    PLAIN,
    Decoder,
    Style,
    decoder,
    decoder_shape,
    embedding,
    is_tied,
    layer_types,
    linear,
    norm,
    outside,
    parameter,
    prefixed,
)
from preflight.model_shape import Config, ConfigTrouble, Layers, ModelShape, Module, Moe


def mamba1(c: Config, at: str, hidden: int, norms: bool = False) -> list[Module]:
    """A Mamba (first generation) mixer: selective scan with a low-rank time step."""
    inner = c.number("intermediate_size") if c.model_type != "jamba" else None
    inner = inner or (c.number("mamba_expand", "expand", default=2) or 2) * hidden
    state = c.number("mamba_d_state", "state_size", default=16) or 16
    kernel = c.number("mamba_d_conv", "conv_kernel", default=4) or 4
    rank = c.value("mamba_dt_rank", "time_step_rank", default="auto")
    rank = rank if isinstance(rank, int) and rank > 0 else -(-hidden // 16)
    biased = c.flag("mamba_proj_bias", "use_bias")
    made = [
        parameter(f"{at}.A_log", inner, state),
        parameter(f"{at}.D", inner),
        parameter(f"{at}.conv1d", inner, 1, kernel, kind="conv",
                  bias=inner if c.flag("mamba_conv_bias", "use_conv_bias", default=True) else 0),
        linear(f"{at}.in_proj", hidden, 2 * inner, biased),
        linear(f"{at}.x_proj", inner, rank + 2 * state),
        linear(f"{at}.dt_proj", rank, inner, True),
        linear(f"{at}.out_proj", inner, hidden, biased),
    ]  # fmt: skip
    if norms:
        made += [
            norm(f"{at}.dt_layernorm", rank),
            norm(f"{at}.b_layernorm", state),
            norm(f"{at}.c_layernorm", state),
        ]
    return made


def mamba2(c: Config, at: str, hidden: int, inner: int, heads: int, gated_norm: bool = True) -> list[Module]:
    """A Mamba-2 mixer: `heads` time steps, keys and values shared by groups."""
    groups = c.number("mamba_n_groups", "n_groups", "mamba_ngroups", "mamba_num_groups", default=1) or 1
    state = c.number("mamba_d_state", "ssm_state_size", "state_size", default=128) or 128
    kernel = c.number("mamba_d_conv", "conv_kernel", default=4) or 4
    biased = c.flag("mamba_proj_bias", "use_bias", "add_bias_linear")
    width = inner + 2 * groups * state
    made = [
        parameter(f"{at}.dt_bias", heads),
        parameter(f"{at}.A_log", heads),
        parameter(f"{at}.D", heads),
        parameter(f"{at}.conv1d", width, 1, kernel, kind="conv",
                  bias=width if c.flag("mamba_conv_bias", "use_conv_bias", default=True) else 0),
        linear(f"{at}.in_proj", hidden, inner + width + heads, biased),
        linear(f"{at}.out_proj", inner, hidden, biased),
    ]  # fmt: skip
    return [*made, norm(f"{at}.norm", inner)] if gated_norm else made


def pure_mamba(c: Config) -> ModelShape:
    """Mamba, Falcon-Mamba, Mamba-2: no attention and no MLP at all."""
    second = c.model_type == "mamba2"
    hidden = c.need("hidden_size")
    style = Style(base="backbone", embed="embeddings", final="norm_f", tied=not second)
    d = replace_numbers(decoder(c, style))
    at = "layers.*.mixer"
    if second:
        inner = int((c.number("expand", default=2) or 2) * hidden)
        mixer = mamba2(c, at, hidden, inner, c.number("num_heads", least=1) or inner // 64)
    else:
        mixer = mamba1(c, at, hidden)
    modules = prefixed("backbone", [norm("layers.*.norm", hidden), *mixer])
    layer = Layers(d.layers, "mamba2" if second else "mamba", modules, mlp="none")
    tied = is_tied(c, style)
    return replace(
        decoder_shape(d, [layer], outside(d, tied), tied), heads=None, kv_heads=None, head_dim=None, gated_mlp=None
    )


def replace_numbers(d: Decoder) -> Decoder:
    """For models without attention: heads mean something else there."""
    d.heads = d.kv_heads = 1
    return d


def _hybrid(c: Config, style: Style, kinds: list[str], parts: dict[str, list[Module]], mlps: list[list[Module]],
            norms: list[Module], moe: Moe | None = None, sparse: list[bool] | None = None) -> ModelShape:  # fmt: skip
    """Layers of several kinds, each with its mixer, an MLP and norms."""
    d = decoder(c, style)
    layers = []
    for index, kind in enumerate(kinds):
        mlp = mlps[index]
        what = "none" if not mlp else "moe" if sparse and sparse[index] else "dense"
        layers.append(Layers(1, kind, prefixed(style.base, [*parts[kind], *mlp, *norms]), mlp=what))
    tied = is_tied(c, style)
    return decoder_shape(d, layers, outside(d, tied), tied, moe=moe)


def jamba(c: Config) -> ModelShape:
    """Jamba: one attention layer in eight, the rest Mamba; experts in every other layer."""
    style = replace(PLAIN, mlp="feed_forward", norms=("input_layernorm", "pre_ff_layernorm"), final="final_layernorm")
    d = decoder(c, style)
    period, offset = c.number("attn_layer_period", default=8) or 8, c.number("attn_layer_offset", default=4) or 0
    kinds = ["attention" if index % period == offset else "mamba" for index in range(d.layers)]
    rule = Experts(style, mlp="feed_forward", router="router", width=("intermediate_size",))
    every, first = c.number("expert_layer_period", default=2) or 1, c.number("expert_layer_offset", default=1) or 0
    several = (c.number("num_experts", default=1) or 1) > 1
    sparse = [several and index % every == first for index in range(d.layers)]
    experts, moe = expert_modules(d, rule, "layers.*.feed_forward")
    mlps = [experts if each else d.dense() for each in sparse]
    parts = {"attention": d.attention(), "mamba": mamba1(c, "layers.*.mamba", d.hidden, norms=True)}
    return _hybrid(c, style, kinds, parts, mlps, d.norms(), moe if any(sparse) else None, sparse)


def bamba(c: Config) -> ModelShape:
    """Bamba and Granite 4: Mamba-2 with a few attention layers, gated MLP (or experts and a shared MLP) in each."""
    granite = c.model_type == "granitemoehybrid"
    style = replace(
        PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias",
        mlp="shared_mlp" if granite else "feed_forward", final="norm" if granite else "final_layernorm",
        norms=("input_layernorm", "post_attention_layernorm" if granite else "pre_ff_layernorm"),
    )  # fmt: skip
    d = decoder(c, style)
    inner = (c.number("mamba_expand", default=2) or 2) * d.hidden
    heads = c.number("mamba_n_heads", default=128, least=1) or 128
    listed = layer_types(c, d.layers)
    if listed is None:
        at = {index for index in c.list_of("attn_layer_indices") or [] if isinstance(index, int)}
        listed = ["attention" if index in at else "mamba" for index in range(d.layers)]
    kinds = ["attention" if "attention" in kind else "mamba2" for kind in listed]
    parts = {"attention": d.attention(), "mamba2": mamba2(c, "layers.*.mamba", d.hidden, inner, heads)}
    mlp, moe = d.dense(), None
    if granite:
        shared = c.number("shared_intermediate_size", default=1024) or 1024
        mlp = [
            linear("layers.*.shared_mlp.input_linear", d.hidden, 2 * shared),
            linear("layers.*.shared_mlp.output_linear", shared, d.hidden),
        ]
        if c.number("num_local_experts"):
            rule = replace(FAMILIES["granitemoe"], style=style)
            experts, moe = expert_modules(d, rule, "layers.*.block_sparse_moe")
            mlp = [*experts, *mlp]
            moe = replace(moe, shared_width=shared)
    sparse = [moe is not None] * d.layers
    return _hybrid(c, style, kinds, parts, [mlp] * d.layers, d.norms(), moe, sparse)


def falcon_h1(c: Config) -> ModelShape:
    """Falcon-H1: attention and Mamba-2 side by side in every layer."""
    style = replace(
        PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", mlp="feed_forward",
        norms=("input_layernorm", "pre_ff_layernorm"), final="final_layernorm",
    )  # fmt: skip
    d = decoder(c, style)
    inner = c.number("mamba_d_ssm") or int((c.number("mamba_expand", default=2) or 2) * d.hidden)
    mixer = mamba2(c, "layers.*.mamba", d.hidden, inner, c.number("mamba_n_heads", default=128, least=1) or 128,
                   c.flag("mamba_rms_norm"))  # fmt: skip
    modules = prefixed(style.base, [*d.attention(), *mixer, *d.dense(), *d.norms()])
    tied = is_tied(c, style)
    return decoder_shape(d, [Layers(d.layers, "attention", modules)], outside(d, tied), tied)


_NEMOTRON_PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(c: Config) -> ModelShape:
    """Nemotron-H: every layer is one thing only: Mamba-2 (M), attention (*), a plain MLP (-) or experts (E)."""
    style = replace(PLAIN, embed="embeddings", attn="mixer", mlp="mixer", gate=None, norms=("norm",), final="norm_f",
                    qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")  # fmt: skip
    pattern = c.word("hybrid_override_pattern")
    listed = c.list_of("layers_block_type")
    if pattern:
        try:
            kinds = [_NEMOTRON_PATTERN[letter] for letter in pattern.replace("|", "")]
        except KeyError as error:
            raise ConfigTrouble(f"hybrid_override_pattern holds {error}; M, *, - and E are known") from error
    elif listed:
        kinds = [{"mamba": "mamba2"}.get(str(kind), str(kind)) for kind in listed]
    else:
        kinds = ["mamba2", "moe", "attention", "mlp"]
    c = Config({**c.raw, "num_hidden_layers": len(kinds)})
    d = decoder(c, style)
    heads = c.number("mamba_num_heads", default=128, least=1) or 128
    inner = heads * (c.number("mamba_head_dim", default=64, least=1) or 64)
    rule = Experts(style, mlp="mixer", gated=False, shared="moe_shared_expert_intermediate_size")
    experts, moe = expert_modules(d, rule, "layers.*.mixer")
    choices: dict[str, tuple[str, list[Module], str]] = {
        "mamba2": ("mamba2", mamba2(c, "layers.*.mixer", d.hidden, inner, heads), "none"),
        "attention": ("attention", d.attention(), "none"),
        "mlp": ("none", d.dense(), "dense"),
        "moe": ("none", experts, "moe"),
    }
    layers = []
    for kind in kinds:
        if kind not in choices:
            raise ConfigTrouble(f"layers_block_type holds {kind!r}; mamba, attention, mlp and moe are known")
        mixer, modules, mlp = choices[kind]
        layers.append(Layers(1, mixer, prefixed(style.base, [*modules, *d.norms()]), mlp=mlp))
    tied = is_tied(c, style)
    shape = decoder_shape(d, layers, outside(d, tied), tied, moe=moe if "moe" in kinds else None)
    return replace(shape, gated_mlp=False)


def recurrent_gemma(c: Config) -> ModelShape:
    """RecurrentGemma (Griffin): two recurrent blocks to one block of local attention."""
    d = decoder(c, replace(PLAIN, attn="temporal_block", mlp="mlp_block", mlp_bias=True, o_bias=True, tied=True,
                           final="final_norm", qkv_bias="attention_bias"))  # fmt: skip
    pattern = [str(item) for item in c.list_of("block_types") or ["recurrent", "recurrent", "attention"]]
    kinds = (pattern * d.layers)[: d.layers]
    width = c.number("lru_width") or d.hidden
    block, at = width // d.heads, "layers.*.temporal_block"
    recurrent = [
        linear(f"{at}.linear_y", d.hidden, width, True),
        linear(f"{at}.linear_x", d.hidden, width, True),
        linear(f"{at}.linear_out", width, d.hidden, True),
        parameter(f"{at}.conv_1d", width, 1, c.number("conv1d_width", default=4) or 4, kind="conv", bias=width),
        parameter(f"{at}.rg_lru.recurrent_param", width),
        *(
            made
            for gate in ("input_gate", "recurrent_gate")
            for made in (
                parameter(f"{at}.rg_lru.{gate}_weight", d.heads, block, block),
                parameter(f"{at}.rg_lru.{gate}_bias", d.heads, block),
            )
        ),
    ]
    d.inner //= 2  # the file counts both halves of the gate
    norms = [norm("layers.*.temporal_pre_norm", d.hidden), norm("layers.*.channel_pre_norm", d.hidden)]
    parts = {"attention": d.attention(), "recurrent": recurrent}
    window = c.number("attention_window_size")
    layers = [
        Layers(1, kind, prefixed("model", [*parts[kind], *d.dense(), *norms]),
               window if kind == "attention" else None)
        for kind in kinds if kind in parts
    ]  # fmt: skip
    tied = is_tied(c, d.s)
    return decoder_shape(d, layers, outside(d, tied), tied)


def lfm2(c: Config) -> ModelShape:
    """LFM2: short convolutions with a few attention layers; the mixture of experts is LFM2-MoE."""
    style = replace(PLAIN, o="out_proj", qk_norm="head", q_norm="q_layernorm", k_norm="k_layernorm", tied=True,
                    mlp="feed_forward", gate="w1", up="w3", down="w2", norms=("operator_norm", "ffn_norm"),
                    final="embedding_norm")  # fmt: skip
    d = decoder(c, style)
    if c.model_type == "lfm2" and c.flag("block_auto_adjust_ff_dim", default=True):
        d.inner = int(2 * d.inner / 3)
        d.inner = int(c.fraction("block_ffn_dim_multiplier", 1.0) * d.inner)
        multiple = c.number("block_multiple_of", default=256) or 256
        d.inner = multiple * (-(-d.inner // multiple))
    listed = layer_types(c, d.layers)
    if listed is None:
        full = c.list_of("full_attn_idxs")
        listed = ["full_attention" if full is None or index in full else "conv" for index in range(d.layers)]
    kinds = ["attention" if "attention" in kind else "conv" for kind in listed]
    biased, kernel = c.flag("conv_bias"), c.number("conv_L_cache", default=3) or 3
    conv = [
        parameter("layers.*.conv.conv", d.hidden, 1, kernel, kind="conv", bias=d.hidden if biased else 0),
        linear("layers.*.conv.in_proj", d.hidden, 3 * d.hidden, biased),
        linear("layers.*.conv.out_proj", d.hidden, d.hidden, biased),
    ]
    moe, sparse = None, [False] * d.layers
    mlps = [d.dense()] * d.layers
    if c.model_type == "lfm2_moe":
        rule = replace(FAMILIES["lfm2_moe"], style=style, mlp="feed_forward")
        sparse = sparse_layers(d, rule)
        experts, moe = expert_modules(d, rule, "layers.*.feed_forward")
        mlps = [experts if each else d.dense() for each in sparse]
    return _hybrid(c, style, kinds, {"attention": d.attention(), "conv": conv}, mlps, d.norms(), moe, sparse)


def delta_net(c: Config) -> ModelShape:
    """Qwen3-Next and Qwen3.5: gated delta-net layers, every fourth with gated attention."""
    style = replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head")
    kind = c.model_type or ""
    experts_too = kind in ("qwen3_next", "qwen3_5_moe_text")
    d = decoder(c, style)
    every = c.number("full_attention_interval", default=4) or 4
    listed = layer_types(c, d.layers) or [
        "full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(d.layers)
    ]
    keys = (c.number("linear_num_key_heads", default=16) or 16) * (c.number("linear_key_head_dim", default=128) or 128)
    heads, dim = c.number("linear_num_value_heads", default=32) or 32, c.number("linear_value_head_dim") or 128
    values = heads * dim
    at = "layers.*.linear_attn"
    projections = (
        [
            linear(f"{at}.in_proj_qkvz", d.hidden, 2 * keys + 2 * values),
            linear(f"{at}.in_proj_ba", d.hidden, 2 * heads),
        ]
        if kind == "qwen3_next"
        else [
            linear(f"{at}.in_proj_qkv", d.hidden, 2 * keys + values),
            linear(f"{at}.in_proj_z", d.hidden, values),
            linear(f"{at}.in_proj_b", d.hidden, heads),
            linear(f"{at}.in_proj_a", d.hidden, heads),
        ]
    )
    delta = [
        parameter(f"{at}.dt_bias", heads),
        parameter(f"{at}.A_log", heads),
        parameter(f"{at}.conv1d", 2 * keys + values, 1, c.number("linear_conv_kernel_dim", default=4) or 4,
                  kind="conv"),
        *projections,
        norm(f"{at}.norm", dim),
        linear(f"{at}.out_proj", values, d.hidden),
    ]  # fmt: skip
    attention = d.attention()
    gated = attention[0]  # the query projection also makes the output gate
    wide = gated.out_features * 2
    attention[0] = replace(gated, shape=(wide, d.hidden), bias=wide if gated.bias else 0)
    mlps, sparse, moe = [d.dense()] * d.layers, [False] * d.layers, None
    if experts_too:
        rule = replace(FAMILIES["qwen2_moe"], style=style)
        sparse = sparse_layers(d, rule)
        experts, moe = expert_modules(d, rule, "layers.*.mlp")
        mlps = [experts if each else d.dense() for each in sparse]
    kinds = ["attention" if "full" in item else "linear_attention" for item in listed]
    parts = {"attention": attention, "linear_attention": delta}
    return _hybrid(c, style, kinds, parts, mlps, d.norms(), moe, sparse)


def rwkv(c: Config) -> ModelShape:
    """RWKV-4: no attention heads; time mixing and channel mixing."""
    hidden = c.need("hidden_size")
    inner = c.number("intermediate_size") or 4 * hidden
    width = c.number("attention_hidden_size") or hidden
    d = replace_numbers(decoder(c, Style(base="rwkv", embed="embeddings", final=None, head="head")))
    at, ff = "blocks.*.attention", "blocks.*.feed_forward"
    modules = [
        norm("blocks.*.ln1", hidden, True),
        norm("blocks.*.ln2", hidden, True),
        *(parameter(f"{at}.{name}", width) for name in ("time_decay", "time_first")),
        *(parameter(f"{at}.time_mix_{name}", 1, 1, hidden) for name in ("key", "value", "receptance")),
        *(linear(f"{at}.{name}", hidden, width) for name in ("key", "value", "receptance")),
        linear(f"{at}.output", width, hidden),
        *(parameter(f"{ff}.time_mix_{name}", 1, 1, hidden) for name in ("key", "receptance")),
        linear(f"{ff}.key", hidden, inner),
        linear(f"{ff}.receptance", hidden, hidden),
        linear(f"{ff}.value", inner, hidden),
    ]
    rest = [
        embedding("rwkv.embeddings", c.need("vocab_size"), hidden),
        norm("rwkv.blocks.0.pre_ln", hidden, True),
        norm("rwkv.ln_out", hidden, True),
        linear("head", hidden, c.need("vocab_size")),
    ]
    shape = decoder_shape(d, [Layers(d.layers, "recurrent", prefixed("rwkv", modules))], rest, False)
    return replace(shape, heads=None, kv_heads=None, head_dim=None, gated_mlp=False, intermediate_size=inner)


BUILDERS: dict[str, Callable[[Config], ModelShape]] = {
    "mamba": pure_mamba,
    "falcon_mamba": pure_mamba,
    "mamba2": pure_mamba,
    "jamba": jamba,
    "bamba": bamba,
    "granitemoehybrid": bamba,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "recurrent_gemma": recurrent_gemma,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "qwen3_next": delta_net,
    "qwen3_5_text": delta_net,
    "qwen3_5_moe_text": delta_net,
    "rwkv": rwkv,
}
