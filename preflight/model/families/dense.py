"""Decoders whose layers all have attention and one MLP: one row per family."""

from __future__ import annotations

from dataclasses import replace

from preflight.model.families.parts import (
    LLAMA,
    PLAIN,
    Decoder,
    Style,
    decoder,
    decoder_shape,
    is_tied,
    linear,
    norm,
    outside,
    parameter,
    prefixed,
)
from preflight.model_shape import Config, Layers, ModelShape, Module

_GPT2 = Style(
    base="transformer", layer="h.*", embed="wte", positions="wpe", attn="attn", qkv="c_attn", qkv_bias=True, o="c_proj",
    o_bias=True, gate=None, up="c_fc", down="c_proj", mlp_bias=True, norms=("ln_1", "ln_2"), norm_bias=True,
    final="ln_f", tied=True, transposed=True,
)  # fmt: skip
_NEOX = Style(
    base="gpt_neox", embed="embed_in", attn="attention", qkv="query_key_value", o="dense", gate=None,
    up="dense_h_to_4h", down="dense_4h_to_h", mlp_bias=True, norm_bias=True, final="final_layer_norm",
    qkv_bias="attention_bias", o_bias="attention_bias",
)  # fmt: skip
_OPT = Style(
    base="model.decoder", positions="embed_positions", o="out_proj", qkv_bias=True, o_bias=True, mlp="", gate=None,
    up="fc1", down="fc2", mlp_bias=True, norms=("self_attn_layer_norm", "final_layer_norm"), norm_bias=True,
    final="final_layer_norm", tied=True,
)  # fmt: skip
_POST = ("post_attention_layernorm", "post_feedforward_layernorm")
_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

STYLES: dict[str, Style] = {
    "llama": LLAMA,
    "mistral": PLAIN,
    "ministral": PLAIN,
    "ministral3": PLAIN,
    "cwm": PLAIN,
    "helium": replace(LLAMA, mlp_bias=False),
    "granite": LLAMA,
    "smollm3": LLAMA,
    "nanochat": replace(PLAIN, gate=None, up="fc1", down="fc2", norm_weights=False, qkv_bias="attention_bias",
                        o_bias="attention_bias"),
    "exaone4": replace(PLAIN, qk_norm="head", norms=_POST),
    "qwen2": replace(PLAIN, qkv_bias=True),
    "mimo": replace(PLAIN, qkv_bias=True, extra=("mtp",)),
    "qwen3": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head"),
    "gemma": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", tied=True),
    "gemma2": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", tied=True, norms=_SANDWICH),
    "vaultgemma": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", tied=True,
                          norms=("input_layernorm", "pre_feedforward_layernorm")),
    "gemma3_text": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", tied=True, norms=_SANDWICH,
                           qk_norm="head"),
    "olmo": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", norm_weights=False),
    "olmo2": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", norms=_POST, qk_norm="full"),
    "olmo3": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", norms=_POST, qk_norm="full"),
    "seed_oss": replace(LLAMA, o_bias="attention_out_bias"),
    "arcee": replace(LLAMA, gate=None),
    "apertus": replace(PLAIN, gate=None, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head",
                       mlp_bias="mlp_bias", norms=("attention_layernorm", "feedforward_layernorm"), extra=("xielu",)),
    "phi3": replace(PLAIN, qkv="qkv_proj", gate_up="gate_up_proj"),
    "phi": replace(PLAIN, qkv_bias=True, o="dense", o_bias=True, gate=None, up="fc1", down="fc2", mlp_bias=True,
                   norms=("input_layernorm",), norm_bias=True, final="final_layernorm", head_bias=True),
    "stablelm": replace(PLAIN, qkv_bias="use_qkv_bias", norm_bias=True, extra=("stablelm",)),
    "starcoder2": replace(PLAIN, qkv_bias="use_bias", o_bias="use_bias", gate=None, up="c_fc", down="c_proj",
                          mlp_bias="use_bias", norm_bias=True, tied=True),
    "cohere": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", norms=("input_layernorm",), tied=True,
                      extra=("cohere",)),
    "cohere2": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", norms=("input_layernorm",),
                       tied=True),
    "nemotron": replace(LLAMA, gate=None, norm_bias=True),
    "glm": replace(PLAIN, qkv_bias="attention_bias", gate_up="gate_up_proj"),
    "glm4": replace(PLAIN, qkv_bias="attention_bias", gate_up="gate_up_proj",
                    norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
                           "post_mlp_layernorm")),
    "hunyuan_v1_dense": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head",
                                q_norm="query_layernorm", k_norm="key_layernorm"),
    "ernie4_5": replace(PLAIN, qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", tied=True),
    "persimmon": replace(PLAIN, qkv="query_key_value", qkv_bias=True, o="dense", o_bias=True, gate=None,
                         up="dense_h_to_4h", down="dense_4h_to_h", mlp_bias=True, norm_bias=True,
                         final="final_layernorm", extra=("persimmon",)),
    "diffllama": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", extra=("diffllama",)),
    "bitnet": replace(PLAIN, qkv_bias="attention_bias", o_bias="attention_bias", extra=("bitnet",)),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, transposed=False),
    "gpt_neox": _NEOX,
    "opt": _OPT,
    "gptj": Style(base="transformer", layer="h.*", embed="wte", attn="attn", qkv_bias=False, o="out_proj",
                  o_bias=False, gate=None, up="fc_in", down="fc_out", mlp_bias=True, norms=("ln_1",), norm_bias=True,
                  final="ln_f", head_bias=True),
    "codegen": Style(base="transformer", layer="h.*", embed="wte", attn="attn", qkv="qkv_proj", qkv_bias=False,
                     o="out_proj", o_bias=False, gate=None, up="fc_in", down="fc_out", mlp_bias=True, norms=("ln_1",),
                     norm_bias=True, final="ln_f", head_bias=True),
    "gpt_neo": Style(base="transformer", layer="h.*", embed="wte", positions="wpe", attn="attn.attention",
                     qkv_bias=False, o="out_proj", o_bias=True, gate=None, up="c_fc", down="c_proj", mlp_bias=True,
                     norms=("ln_1", "ln_2"), norm_bias=True, final="ln_f", tied=True),
    "bloom": Style(base="transformer", layer="h.*", embed="word_embeddings", attn="self_attention",
                   qkv="query_key_value", qkv_bias=True, o="dense", o_bias=True, gate=None, up="dense_h_to_4h",
                   down="dense_4h_to_h", mlp_bias=True, norm_bias=True, final="ln_f", tied=True, extra=("bloom",)),
    "falcon": Style(base="transformer", layer="h.*", embed="word_embeddings", attn="self_attention",
                    qkv="query_key_value", qkv_bias="bias", o="dense", o_bias="bias", gate=None, up="dense_h_to_4h",
                    down="dense_4h_to_h", mlp_bias="bias", norm_bias=True, final="ln_f", tied=True, extra=("falcon",)),
    "mpt": Style(base="transformer", layer="blocks.*", embed="wte", attn="attn", qkv="Wqkv", qkv_bias=False,
                 o="out_proj", o_bias=False, mlp="ffn", gate=None, up="up_proj", down="down_proj", mlp_bias=False,
                 norms=("norm_1", "norm_2"), final="norm_f", tied=True),
    # remote code only, by the layers their published modeling files build
    "qwen": Style(base="transformer", layer="h.*", embed="wte", attn="attn", qkv="c_attn", qkv_bias=True, o="c_proj",
                  o_bias=False, gate="w1", up="w2", down="c_proj", mlp_bias=False, norms=("ln_1", "ln_2"),
                  final="ln_f"),
    "chatglm": Style(base="transformer", layer="encoder.layers.*", embed="embedding.word_embeddings",
                     attn="self_attention", qkv="query_key_value", qkv_bias="add_qkv_bias", o="dense",
                     o_bias="add_bias_linear", gate_up="dense_h_to_4h", down="dense_4h_to_h",
                     mlp_bias="add_bias_linear", final="encoder.final_layernorm", head="transformer.output_layer"),
    "baichuan": replace(PLAIN, qkv="W_pack"),
    "internlm": replace(PLAIN, qkv_bias="bias", o_bias="bias"),
    "internlm2": Style(embed="tok_embeddings", attn="attention", qkv="wqkv", qkv_bias="bias", o="wo", o_bias="bias",
                       mlp="feed_forward", gate="w1", up="w3", down="w2", mlp_bias=False,
                       norms=("attention_norm", "ffn_norm"), head="output"),
    "internlm3": replace(PLAIN, qkv_bias="qkv_bias", o_bias="bias", mlp_bias="bias"),
    "minicpm": replace(PLAIN, tied=True),
    "xverse": PLAIN,
    "yi": PLAIN,
    "aquila": PLAIN,
    "orion": replace(PLAIN, norm_bias=True),
    "exaone": Style(base="transformer", layer="h.*", embed="wte", attn="attn.attention", qkv_bias=False, o="out_proj",
                    o_bias=False, gate="c_fc_0", up="c_fc_1", down="c_proj", mlp_bias=False, norms=("ln_1", "ln_2"),
                    final="ln_f"),
}  # fmt: skip


def _extras(d: Decoder, attention: list[Module], mlp: list[Module], norms: list[Module]) -> None:
    """Small differences of single families, put in place."""
    layer, at, c = d.s.layer, f"{d.s.layer}.{d.s.attn}", d.c
    for extra in d.s.extra:
        if extra == "xielu" and c.word("hidden_act", default="xielu") == "xielu":
            mlp += [parameter(f"{layer}.mlp.act_fn.alpha_p", 1), parameter(f"{layer}.mlp.act_fn.alpha_n", 1)]
        elif extra == "stablelm":
            if c.flag("use_parallel_residual"):
                norms[:] = norms[:1]
            if c.flag("qk_layernorm"):
                attention += [
                    norm(f"{at}.q_layernorm.norms.*", d.head_dim, each=d.heads),
                    norm(f"{at}.k_layernorm.norms.*", d.head_dim, each=d.kv_heads),
                ]
        elif extra == "cohere" and c.flag("use_qk_norm"):
            attention += [
                parameter(f"{at}.q_norm", d.heads, d.head_dim, kind="norm"),
                parameter(f"{at}.k_norm", d.kv_heads, d.head_dim, kind="norm"),
            ]
        elif extra == "persimmon" and c.flag("qk_layernorm", default=True):
            attention += [norm(f"{at}.q_layernorm", d.head_dim, True), norm(f"{at}.k_layernorm", d.head_dim, True)]
        elif extra == "diffllama":
            attention += [parameter(f"{at}.lambda_{name}", d.head_dim) for name in ("q1", "k1", "q2", "k2")]
        elif extra == "bitnet":
            attention.append(norm(f"{at}.attn_sub_norm", d.hidden))
            mlp.append(norm(f"{layer}.mlp.ffn_sub_norm", d.inner))
        elif extra == "falcon":
            if c.raw.get("model_type") == "RefinedWeb" or c.flag("new_decoder_architecture"):
                two = c.number("num_ln_in_parallel_attn", default=2) == 2
                names = ("ln_attn", "ln_mlp") if two else ("input_layernorm",)
                norms[:] = [norm(f"{layer}.{name}", d.hidden, True) for name in names]
            elif c.flag("parallel_attn", default=True):
                norms[:] = norms[:1]


def dense_decoder(c: Config, style: Style) -> ModelShape:
    """A decoder whose layers all have attention and one MLP."""
    d = decoder(c, style)
    tied = is_tied(c, style)
    layers = []
    made: dict[int | None, tuple[Module, ...]] = {}
    for window in d.windows():
        if window not in made:
            attention, mlp, norms = d.attention(), d.dense(), d.norms()
            _extras(d, attention, mlp, norms)
            modules = [*attention, *mlp, *norms]
            if "falcon" in style.extra:  # its FalconLinear is derived from nn.Linear
                modules = [replace(m, subclass=m.kind == "linear") for m in modules]
            made[window] = prefixed(style.base, modules)
        layers.append(Layers(1, "attention", made[window], window))
    if "mtp" in style.extra:
        layers += _mtp(d)
    return decoder_shape(d, layers, outside(d, tied), tied)


def _mtp(d: Decoder) -> list[Layers]:
    """MiMo's layers for multi-token prediction: one more block each, fed with the next token's embedding."""
    at = "mtp_layers.*"
    block = [replace(m, path=m.path.replace(d.s.layer, at)) for m in [*d.attention(), *d.dense(), *d.norms()]]
    block.append(linear(f"{at}.input_proj", 2 * d.hidden, d.hidden))
    block += [norm(f"{at}.{name}", d.hidden) for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")]
    count = d.c.number("num_nextn_predict_layers", default=0) or 0
    return [Layers(count, "attention", prefixed(d.s.base, block), stack="mtp")] if 0 < count < 100 else []
