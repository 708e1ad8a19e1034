"""Which modules does each architecture have? One layout per family; the numbers come from config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from preflight.model_shape import (
    Config,
    ConfigTrouble,
    Layers,
    ModelShape,
    Module,
    grouped,
    language_part,
    read_dtype,
)

MOST_LAYERS = 4096


def linear(path: str, inputs: int, outputs: int, bias: bool = False, each: int = 1) -> Module:
    """An nn.Linear; its weight is stored [out, in]."""
    return Module(path, "linear", (outputs, inputs), outputs if bias else 0, each)


def conv1d(path: str, inputs: int, outputs: int) -> Module:
    """GPT-2's Conv1D: a linear layer whose weight is stored [in, out]."""
    return Module(path, "conv1d", (inputs, outputs), outputs)


def norm(path: str, width: int, bias: bool = False, each: int = 1) -> Module:
    """A normalisation with a scale and perhaps a shift."""
    return Module(path, "norm", (width,), width if bias else 0, each)


def embedding(path: str, rows: int, width: int) -> Module:
    """A table of vectors."""
    return Module(path, "embedding", (rows, width))


def parameter(path: str, *shape: int, kind: str = "parameter", bias: int = 0, each: int = 1) -> Module:
    """A bare parameter of a module."""
    return Module(path, kind, shape, bias, each)


# How one family names and shapes the parts of a decoder layer -------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """The layout of a decoder. Biases are True, False, or the name of the config key that says so.

    `qkv` or `gate_up` set: one fused projection of that name. `gate` None: the MLP has no gate. `norm_bias`: LayerNorm
    with shift. `qk_norm`: "" none, "head" one vector of head_dim, "full" one of heads x head_dim, "per-head" a matrix.
    """

    base: str = "model"
    layer: str = "layers.*"
    embed: str = "embed_tokens"
    positions: str | None = None
    attn: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    o: str = "o_proj"
    qkv: str | None = None
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    qk_norm: str = ""
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str | None = None
    mlp_bias: bool | str = "mlp_bias"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False
    norm_weights: bool = True
    final: str | None = "norm"
    head: str = "lm_head"
    head_bias: bool = False
    tied: bool = False
    transposed: bool = False  # GPT-2's Conv1D
    extra: tuple[str, ...] = ()


LLAMA = Style()
PLAIN = Style(qkv_bias=False, o_bias=False, mlp_bias=False)
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
    "mimo": replace(PLAIN, qkv_bias=True),
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
    "telechat": replace(PLAIN, o_bias=True),
    "exaone": Style(base="transformer", layer="h.*", embed="wte", attn="attn.attention", qkv_bias=False, o="out_proj",
                    o_bias=False, gate="c_fc_0", up="c_fc_1", down="c_proj", mlp_bias=False, norms=("ln_1", "ln_2"),
                    final="ln_f"),
}  # fmt: skip

# Families whose layers are those of another, sometimes under another name of the type.
SAME_AS = {
    "code_llama": "llama", "llama_moe": "llama", "yayi": "llama", "deepseek": "llama", "solar": "llama",
    "RefinedWeb": "falcon", "RefinedWebModel": "falcon", "gpt-sw3": "gpt2", "InternLM": "internlm",
    "InternLM2ForCausalLM": "internlm2", "Yi": "yi", "gemma3n": "gemma3n_text", "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "llava_qwen": "qwen2", "llava_llama": "llama",
    "phi3_v": "phi3", "hyperclovax": "granite", "mellum": "mellum",
}  # fmt: skip


@dataclass
class Decoder:
    """A decoder under construction: its numbers, read once."""

    c: Config
    s: Style
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    def biased(self, rule: bool | str) -> bool:
        return rule if isinstance(rule, bool) else self.c.flag(rule)

    def attention(self) -> list[Module]:
        s, head_dim, at = self.s, self.head_dim, f"{self.s.layer}.{self.s.attn}"
        wide, narrow = self.heads * head_dim, self.kv_heads * head_dim
        biased = self.biased(s.qkv_bias)
        if s.transposed:
            made = [conv1d(f"{at}.{s.qkv}", self.hidden, wide + 2 * narrow), conv1d(f"{at}.{s.o}", wide, self.hidden)]
        elif s.qkv:
            made = [linear(f"{at}.{s.qkv}", self.hidden, wide + 2 * narrow, biased)]
        else:
            made = [
                linear(f"{at}.{s.q}", self.hidden, wide, biased),
                linear(f"{at}.{s.k}", self.hidden, narrow, biased),
                linear(f"{at}.{s.v}", self.hidden, narrow, biased),
            ]
        if not s.transposed:
            made.append(linear(f"{at}.{s.o}", wide, self.hidden, self.biased(s.o_bias)))
        if s.qk_norm == "head":
            made += [norm(f"{at}.{s.q_norm}", head_dim), norm(f"{at}.{s.k_norm}", head_dim)]
        elif s.qk_norm == "full":
            made += [norm(f"{at}.{s.q_norm}", wide), norm(f"{at}.{s.k_norm}", narrow)]
        return made

    def dense(self, inner: int | None = None, at: str | None = None) -> list[Module]:
        s, width = self.s, self.inner if inner is None else inner
        at = f"{s.layer}.{s.mlp}".rstrip(".") if at is None else at
        biased = self.biased(s.mlp_bias)
        if s.transposed:
            return [conv1d(f"{at}.{s.up}", self.hidden, width), conv1d(f"{at}.{s.down}", width, self.hidden)]
        if s.gate_up:
            first = [linear(f"{at}.{s.gate_up}", self.hidden, 2 * width, biased)]
        else:
            first = [linear(f"{at}.{name}", self.hidden, width, biased) for name in (s.gate, s.up) if name]
        return [*first, linear(f"{at}.{s.down}", width, self.hidden, biased)]

    def norms(self) -> list[Module]:
        if not self.s.norm_weights:
            return []
        return [norm(f"{self.s.layer}.{name}", self.hidden, self.s.norm_bias) for name in self.s.norms]

    def windows(self) -> list[int | None]:
        """The sliding window of each layer, None where it sees everything."""
        window = self.c.number("sliding_window", "sliding_window_size", "attention_window_size")
        if not window:
            return [None] * self.layers
        types = layer_types(self.c, self.layers)
        if types:
            return [window if str(t).startswith(("sliding", "local")) else None for t in types]
        pattern = self.c.number("sliding_window_pattern", "_sliding_window_pattern")
        kind = self.c.model_type
        if kind in ("gemma2", "gpt_oss"):
            return [window if index % 2 == 0 else None for index in range(self.layers)]
        if kind in ("gemma3_text", "cohere2", "olmo3", "exaone4"):
            every = pattern or {"gemma3_text": 6}.get(kind, 4)
            return [None if (index + 1) % every == 0 else window for index in range(self.layers)]
        if kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl", "qwen2_5_vl"):
            if not self.c.flag("use_sliding_window"):
                return [None] * self.layers
            full = self.c.number("max_window_layers", default=0) or 0
            return [window if index >= full else None for index in range(self.layers)]
        return [window] * self.layers


def layer_types(c: Config, layers: int) -> list[str] | None:
    """`layer_types` of the config when it has one entry a layer."""
    for key in ("layer_types", "layers_block_type", "block_types"):
        listed = c.list_of(key)
        if listed and len(listed) == layers:
            return [str(item) for item in listed]
    return None


def decoder(c: Config, style: Style) -> Decoder:
    """The numbers of a decoder, with the derivations that transformers makes."""
    hidden, layers = c.need("hidden_size"), c.need("layers")
    if layers > MOST_LAYERS:
        raise ConfigTrouble(f"the number of layers is {layers}; at most {MOST_LAYERS} are believed")
    heads = c.common("heads") or 1
    kv_heads = c.common("kv_heads") or heads
    if c.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        new = c.flag("new_decoder_architecture") or c.model_type == "RefinedWeb"
        kv_heads = (c.common("kv_heads") or heads) if new else 1 if c.flag("multi_query", default=True) else heads
    elif c.model_type == "gpt_bigcode":
        kv_heads = 1 if c.flag("multi_query", default=True) else heads
    elif c.model_type == "chatglm" and not c.flag("multi_query_attention"):
        kv_heads = heads
    if kv_heads > heads:
        raise ConfigTrouble(f"num_key_value_heads is {kv_heads}, more than the {heads} attention heads")
    head_dim = c.common("head_dim") or max(1, hidden // heads)
    inner = c.common("intermediate_size") or 4 * hidden
    if c.model_type == "qwen":
        inner //= 2  # the file counts both halves of the gate
    return Decoder(c, style, hidden, layers, heads, kv_heads, head_dim, inner)


# One function per kind of decoder ------------------------------------------------------------------------------------


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
            if c.model_type == "RefinedWeb" or c.flag("new_decoder_architecture"):
                two = c.number("num_ln_in_parallel_attn", default=2) == 2
                names = ("ln_attn", "ln_mlp") if two else ("input_layernorm",)
                norms[:] = [norm(f"{layer}.{name}", d.hidden, True) for name in names]
            elif c.flag("parallel_attn", default=True):
                norms[:] = norms[:1]


def _outside(d: Decoder, tied: bool) -> list[Module]:
    """Embeddings, final norm and head."""
    s, c = d.s, d.c
    rows = c.need("vocab_size")
    width = c.number("word_embed_proj_dim", "embedding_size", default=d.hidden) or d.hidden
    made = [embedding(f"{s.base}.{s.embed}", rows, width)]
    positions = c.common("max_position")
    if s.positions and positions:
        made.append(embedding(f"{s.base}.{s.positions}", positions + (2 if c.model_type == "opt" else 0), d.hidden))
    if "bloom" in s.extra:
        made.append(norm(f"{s.base}.word_embeddings_layernorm", d.hidden, True))
    if width != d.hidden:
        made += [linear(f"{s.base}.project_out", d.hidden, width), linear(f"{s.base}.project_in", width, d.hidden)]
    if s.final and s.norm_weights and not (c.model_type == "opt" and not c.flag("do_layer_norm_before", default=True)):
        made.append(norm(f"{s.base}.{s.final}", d.hidden, s.norm_bias))
    if not tied:
        made.append(linear(s.head, width, rows, s.head_bias))
    elif s.head_bias:
        made.append(parameter(f"{s.head}.bias", rows))
    return made


def _prefixed(base: str, modules: list[Module]) -> tuple[Module, ...]:
    return tuple(replace(module, path=f"{base}.{module.path}") for module in modules)


def _shape(d: Decoder, layers: list[Layers], rest: list[Module], tied: bool, **more: Any) -> ModelShape:
    c, s = d.c, d.s
    return ModelShape(
        model_type=c.model_type,
        architecture=_architecture(c.raw),
        structure="known",
        hidden_size=d.hidden,
        layers=d.layers,
        heads=d.heads,
        kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        intermediate_size=d.inner,
        vocab_size=c.need("vocab_size"),
        max_position=c.common("max_position"),
        gated_mlp=bool(s.gate or s.gate_up),
        activation=c.word("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
        tied_embeddings=tied,
        dtype=read_dtype(c.raw),
        groups=grouped(layers),
        rest=tuple(rest),
        head_path=s.head,
        softcap=c.value("attn_logit_softcapping") is not None,
        **more,
    )


def _tied(c: Config, style: Style) -> bool:
    return c.flag("tie_word_embeddings", default=style.tied)


def dense_decoder(c: Config, style: Style) -> ModelShape:
    """A decoder whose layers all have attention and one MLP."""
    d = decoder(c, style)
    tied = _tied(c, style)
    layers = []
    made: dict[int | None, tuple[Module, ...]] = {}
    for window in d.windows():
        if window not in made:
            attention, mlp, norms = d.attention(), d.dense(), d.norms()
            _extras(d, attention, mlp, norms)
            made[window] = _prefixed(style.base, [*attention, *mlp, *norms])
        layers.append(Layers(1, "attention", made[window], window))
    return _shape(d, layers, _outside(d, tied), tied)


def _architecture(raw: Mapping[str, Any]) -> str | None:
    listed = raw.get("architectures")
    return str(listed[0]) if isinstance(listed, (list, tuple)) and listed else None


BUILDERS: dict[str, Callable[[Config], ModelShape]] = {}


def read(raw: Mapping[str, Any]) -> ModelShape:
    """The shape of any config. Raises ConfigTrouble."""
    key, language = language_part(raw)
    model_type = raw.get("model_type")
    model_type = model_type if isinstance(model_type, str) else None
    if model_type in BUILDERS:
        return BUILDERS[model_type](Config(raw))
    if key is None and model_type is not None:
        name = SAME_AS.get(model_type, model_type)
        if name in STYLES:
            return dense_decoder(Config(raw, name if name in ("falcon",) else None), STYLES[name])
    return _unknown(Config(language if key else raw), raw, key)


def _unknown(c: Config, raw: Mapping[str, Any], key: str | None) -> ModelShape:
    """A type whose layout is not known here: the numbers it states, and no modules."""
    numbers = {name: c.common(name) for name in ("hidden_size", "layers", "heads", "head_dim", "intermediate_size")}
    heads, hidden = numbers["heads"], numbers["hidden_size"]
    return ModelShape(
        model_type=raw.get("model_type") if isinstance(raw.get("model_type"), str) else None,
        architecture=_architecture(raw),
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
