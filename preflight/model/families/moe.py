"""Decoders with mixtures of experts, and those with multi-head latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from preflight import facts
from preflight.model.families.parts import (
    PLAIN,
    Decoder,
    Style,
    decoder,
    decoder_shape,
    embedding,
    is_tied,
    linear,
    norm,
    outside,
    parameter,
    prefixed,
)
from preflight.model_shape import Config, Layers, Mla, ModelShape, Module, Moe

_BIASED = replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias")


@dataclass(frozen=True)
class Experts:
    """How one family lays out its experts.

    `width` names the config keys of an expert's inner width, `shared` is "" or how the shared expert's width is told:
    "times" (number of shared experts x width) or a config key. `transposed`: experts are stored [experts, in, out].
    """

    style: Style = PLAIN
    mlp: str = "mlp"
    router: str = "gate"
    router_bias: bool = False
    width: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    gated: bool = True
    transposed: bool = False
    biased: bool = False
    shared: str = ""
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    shared_fused: bool = False
    first_dense: tuple[str, ...] = ("first_k_dense_replace",)
    latent: bool = False
    sinks: bool = False
    router_extra: str = ""
    dense_too: bool = False


FAMILIES: dict[str, Experts] = {
    "mixtral": Experts(width=("intermediate_size",)),
    "phimoe": Experts(replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", norm_bias=True),
                      router="router", width=("intermediate_size",)),
    "qwen2_moe": Experts(replace(PLAIN, qkv_bias="qkv_bias"), shared="shared_expert_intermediate_size",
                         shared_name="shared_expert", shared_gate=True),
    "qwen3_moe": Experts(replace(_BIASED, qk_norm="head")),
    "olmoe": Experts(replace(_BIASED, qk_norm="full"), width=("intermediate_size",)),
    "flex_olmo": Experts(replace(_BIASED, qk_norm="full",
                                 norms=("post_attention_layernorm", "post_feedforward_layernorm")),
                         width=("intermediate_size",)),
    "granitemoe": Experts(replace(_BIASED, tied=False), mlp="block_sparse_moe", router="router",
                          width=("intermediate_size",)),
    "granitemoeshared": Experts(_BIASED, mlp="block_sparse_moe", router="router", width=("intermediate_size",),
                                shared="shared_intermediate_size", shared_name="shared_mlp", shared_fused=True),
    "gpt_oss": Experts(replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias"), router="router",
                       router_bias=True, width=("intermediate_size",), transposed=True, biased=True, sinks=True),
    "minimax_m2": Experts(replace(PLAIN, qk_norm="full"), width=("intermediate_size",)),
    "ernie4_5_moe": Experts(replace(PLAIN, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", tied=True),
                            shared="times", router_extra="moe_statics.e_score_correction_bias"),
    "glm4_moe": Experts(replace(PLAIN, qkv_bias="attention_bias", qk_norm="use_qk_norm"), shared="times"),
    "dots1": Experts(replace(_BIASED, qk_norm="head"), shared="times"),
    "exaone_moe": Experts(replace(PLAIN, qk_norm="head"), shared="times"),
    "solar_open": Experts(replace(PLAIN, qk_norm="use_qk_norm"), shared="times"),
    "llama4_text": Experts(_BIASED, mlp="feed_forward", router="router", width=("intermediate_size",), transposed=True,
                           shared="intermediate_size", shared_name="shared_expert"),
    "lfm2_moe": Experts(width=("moe_intermediate_size",), first_dense=("num_dense_layers",)),
    "deepseek_v2": Experts(_BIASED, shared="times", latent=True),
    "deepseek_v3": Experts(_BIASED, shared="times", latent=True),
    "deepseek_v32": Experts(_BIASED, shared="times", latent=True),
    "glm4_moe_lite": Experts(_BIASED, shared="times", latent=True),
    "minicpm3": Experts(_BIASED, latent=True),
    "youtu": Experts(_BIASED, latent=True),
}  # fmt: skip


def latent_attention(d: Decoder, mla: Mla, at: str) -> list[Module]:
    """Projections of MLA: queries and keys have nope_dim + rope_dim per head, values v_dim."""
    key_dim = mla.nope_dim + mla.rope_dim
    biased = d.biased(d.s.qkv_bias)
    if mla.q_rank:
        made = [
            linear(f"{at}.q_a_proj", d.hidden, mla.q_rank, biased),
            norm(f"{at}.q_a_layernorm", mla.q_rank),
            linear(f"{at}.q_b_proj", mla.q_rank, d.heads * key_dim),
        ]
    else:
        made = [linear(f"{at}.q_proj", d.hidden, d.heads * key_dim)]
    made += [
        linear(f"{at}.kv_a_proj_with_mqa", d.hidden, mla.kv_rank + mla.rope_dim, biased),
        norm(f"{at}.kv_a_layernorm", mla.kv_rank),
        linear(f"{at}.kv_b_proj", mla.kv_rank, d.heads * (mla.nope_dim + mla.v_dim)),
        linear(f"{at}.o_proj", d.heads * mla.v_dim, d.hidden, biased),
    ]
    if d.c.model_type == "deepseek_v32" and mla.q_rank:  # the lightning indexer that chooses which keys are seen
        heads, width = d.c.number("index_n_heads") or 64, d.c.number("index_head_dim") or 128
        made += [
            linear(f"{at}.indexer.wq_b", mla.q_rank, heads * width),
            linear(f"{at}.indexer.wk", d.hidden, width),
            norm(f"{at}.indexer.k_norm", width, True),
            linear(f"{at}.indexer.weights_proj", d.hidden, heads),
        ]
    return made


def read_mla(c: Config) -> Mla:
    """The ranks and widths of MLA."""
    return Mla(
        q_rank=c.number("q_lora_rank"),
        kv_rank=c.number("kv_lora_rank", default=512, least=1) or 512,
        nope_dim=c.number("qk_nope_head_dim", default=128) or 0,
        rope_dim=c.number("qk_rope_head_dim", default=64) or 0,
        v_dim=c.number("v_head_dim", least=1) or (_plain_head(c) if c.model_type == "minicpm3" else 128),
    )


def _plain_head(c: Config) -> int:
    return max(1, c.need("hidden_size") // (c.common("heads") or 1))


def expert_modules(d: Decoder, rule: Experts, at: str) -> tuple[list[Module], Moe]:
    """Router, stacked experts and shared expert of one layer."""
    c = d.c
    experts = c.number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", least=1) or 1
    per_token = c.number("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk") or 1
    width = c.number(*rule.width, least=1) or d.inner
    first = 2 * width if rule.gated else width
    name = "gate_up_proj" if rule.gated else "up_proj"
    router = f"{at}.{rule.router}"
    made = [parameter(router, experts, d.hidden, kind="router", bias=experts if rule.router_bias else 0)]
    if rule.router_extra:
        made.append(parameter(f"{router}.{rule.router_extra}", 1, experts))
    ways = [(d.hidden, first), (width, d.hidden)]
    for path, (inputs, outputs) in zip((f"{at}.experts.{name}", f"{at}.experts.down_proj"), ways, strict=True):
        sizes = (experts, inputs, outputs) if rule.transposed else (experts, outputs, inputs)
        made.append(parameter(path, *sizes, kind="experts", bias=experts * outputs if rule.biased else 0))
    shared = 0
    if rule.shared == "times":
        number = c.number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0
        shared = number * width
    elif rule.shared:
        shared = c.number(rule.shared) or 0
    if shared:
        where = f"{d.s.layer}.{rule.shared_name}" if rule.shared_fused else f"{at}.{rule.shared_name}"
        if rule.shared_fused:
            made += [
                linear(f"{where}.input_linear", d.hidden, 2 * shared),
                linear(f"{where}.output_linear", shared, d.hidden),
            ]
        else:
            made += d.dense(shared, where)
        if rule.shared_gate:
            made.append(linear(f"{at}.shared_expert_gate", d.hidden, 1))
    return made, Moe(experts, per_token, width, shared)


def sparse_layers(d: Decoder, rule: Experts) -> list[bool]:
    """For each layer whether it has experts (True) or one dense MLP."""
    c, every = d.c, range(d.layers)
    listed = c.list_of("mlp_layer_types")
    if listed and len(listed) == d.layers:
        return [str(kind) != "dense" for kind in listed]
    kind = c.model_type or ""
    if kind in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        dense = {index for index in c.list_of("mlp_only_layers") or [] if isinstance(index, int)}
        step = c.number("decoder_sparse_step", default=1) or 1
        return [index not in dense and (index + 1) % step == 0 for index in every]
    if kind == "ernie4_5_moe":
        start = c.number("moe_layer_start_index", default=1) or 0
        step = c.number("moe_layer_interval", default=1) or 1
        last = c.value("moe_layer_end_index")
        end = last if isinstance(last, int) and last >= 0 else d.layers - 1
        return [(index + 1) % step == 0 and start <= index <= end for index in every]
    if kind == "llama4_text":
        chosen = c.list_of("moe_layers")
        step = c.number("interleave_moe_layer_step", default=1) or 1
        return [index in chosen if chosen else (index + 1) % step == 0 for index in every]
    first = c.number(*rule.first_dense, default=1 if kind == "glm4_moe_lite" else 0) or 0
    frequency = c.value("moe_layer_freq")
    if isinstance(frequency, list) and len(frequency) == d.layers:
        return [bool(item) for item in frequency]
    return [index >= first for index in every]


def moe_decoder(c: Config, rule: Experts) -> ModelShape:
    """A decoder with attention or MLA in every layer and experts in some."""
    style = rule.style
    if style.qk_norm == "use_qk_norm":
        style = replace(style, qk_norm="head" if c.flag("use_qk_norm") else "")
    d = decoder(c, style)
    mla = read_mla(c) if rule.latent else None
    has_experts = c.number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
    sparse = sparse_layers(d, rule) if has_experts else [False] * d.layers
    at = f"{style.layer}.{rule.mlp}"
    moe = None
    layers = []
    for window, experts in zip(d.windows(), sparse, strict=True):
        attention = latent_attention(d, mla, f"{style.layer}.{style.attn}") if mla else d.attention()
        if rule.sinks:
            attention.append(parameter(f"{style.layer}.{style.attn}.sinks", d.heads))
        if experts:
            mlp, moe = expert_modules(d, rule, at)
        else:
            width = c.number("intermediate_size_mlp") if c.model_type == "llama4_text" else None
            mlp = d.dense(width or d.inner, at)
        modules = prefixed(style.base, [*attention, *mlp, *d.norms()])
        layers.append(Layers(1, "mla" if mla else "attention", modules, window, "moe" if experts else "dense"))
    tied = is_tied(c, style)
    shape = decoder_shape(d, layers, outside(d, tied), tied, moe=moe, mla=mla)
    if mla:
        shape = replace(shape, head_dim=mla.nope_dim + mla.rope_dim, v_head_dim=mla.v_dim, kv_heads=d.heads)
    return shape


def dbrx(c: Config) -> ModelShape:
    """DBRX: attention and experts are described in nested configurations."""
    attention, feed = c.sub("attn_config", "dbrx_attention"), c.sub("ffn_config", "dbrx_ffn")
    style = Style(base="transformer", layer="blocks.*", embed="wte", final="norm_f")
    d = decoder(c, style)
    kv_heads = attention.number("kv_n_heads", default=d.heads, least=1) or d.heads
    experts = feed.number("moe_num_experts", default=4, least=1) or 4
    width = feed.number("ffn_hidden_size", default=3584, least=1) or 3584
    at = "blocks.*.norm_attn_norm"
    modules = [
        linear(f"{at}.attn.Wqkv", d.hidden, (d.heads + 2 * kv_heads) * d.head_dim),
        linear(f"{at}.attn.out_proj", d.hidden, d.hidden),
        norm(f"{at}.norm_1", d.hidden),
        norm(f"{at}.norm_2", d.hidden),
        linear("blocks.*.ffn.router.layer", d.hidden, experts),
        *(
            parameter(f"blocks.*.ffn.experts.mlp.{name}", experts * width, d.hidden, kind="experts2d")
            for name in ("w1", "v1", "w2")
        ),
    ]
    layer = Layers(d.layers, "attention", prefixed("transformer", modules), mlp="moe")
    rest = [
        embedding("transformer.wte", c.need("vocab_size"), d.hidden),
        norm("transformer.norm_f", d.hidden),
        linear("lm_head", d.hidden, c.need("vocab_size")),
    ]
    top = feed.number("moe_top_k", default=1) or 1
    shape = decoder_shape(d, [layer], rest, False, moe=Moe(experts, top, width))
    return replace(shape, kv_heads=kv_heads, intermediate_size=width)


# Their router was an nn.Linear; DeepSeek's and its relatives' never was.
_LINEAR_ROUTERS = ("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe", "jamba")


def as_transformers_4(shape: ModelShape) -> ModelShape:
    """The same model as transformers 4 lays it out and loads it.

    Every expert is a module of its own, with linear layers, in the families whose experts transformers 5 stacked
    (gpt-oss, Llama 4 and Granite always had stacks); and 4-bit loading replaced classes derived from nn.Linear, too.
    """
    kind = shape.model_type or ""
    fused = facts.table("peft_rules")["fused_experts"]
    family = {"jamba": "qwen2_moe", "phimoe": "mixtral"}.get(kind, fused["model_types"].get(kind))

    def apart(module: Module) -> list[Module]:
        module = replace(module, subclass=False)
        if module.kind == "router" and kind in _LINEAR_ROUTERS:
            return [replace(module, kind="linear")]
        if module.kind != "experts" or family is None:
            return [module]
        count, outputs, inputs = module.shape
        at = module.path.rpartition(".")[0] + ".*"
        if module.name == "down_proj":
            return [linear(f"{at}.{'w2' if family == 'mixtral' else 'down_proj'}", inputs, outputs, each=count)]
        first = fused["together"][family]["gate_up_proj"]
        return [linear(f"{at}.{name}", inputs, outputs // 2, each=count) for name in first]

    groups = tuple(replace(g, modules=tuple(m for each in g.modules for m in apart(each))) for g in shape.groups)
    return replace(shape, groups=groups)


def _one(name: str) -> Callable[[Config], ModelShape]:
    return lambda c: moe_decoder(c, FAMILIES[name])


BUILDERS: dict[str, Callable[[Config], ModelShape]] = {name: _one(name) for name in FAMILIES if name != "lfm2_moe"}
BUILDERS["dbrx"] = dbrx
