"""What families of architectures are built from: modules, the layout of a decoder layer, and a decoder's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from preflight.model_shape import Config, ConfigTrouble, Layers, ModelShape, Module, grouped, read_dtype

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
        new = c.flag("new_decoder_architecture") or c.raw.get("model_type") == "RefinedWeb"
        kv_heads = (c.common("kv_heads") or heads) if new else 1 if c.flag("multi_query", default=True) else heads
    elif c.model_type == "gpt_bigcode":
        kv_heads = 1 if c.flag("multi_query", default=True) else heads
    elif c.model_type == "chatglm" and not c.flag("multi_query_attention"):
        kv_heads = heads
    if kv_heads > heads:
        raise ConfigTrouble(f"num_key_value_heads is {kv_heads}, more than the {heads} attention heads")
    head_dim = c.common("head_dim") or max(1, hidden // heads)
    inner = c.common("intermediate_size") or 4 * hidden
    if c.model_type == "mpt":
        inner = hidden * (c.number("expansion_ratio", default=4, least=1) or 4)
    if c.model_type == "qwen":
        inner //= 2  # the file counts both halves of the gate
    return Decoder(c, style, hidden, layers, heads, kv_heads, head_dim, inner)


def outside(d: Decoder, tied: bool) -> list[Module]:
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


def prefixed(base: str, modules: list[Module]) -> tuple[Module, ...]:
    return tuple(replace(module, path=f"{base}.{module.path}") for module in modules)


def decoder_shape(d: Decoder, layers: list[Layers], rest: list[Module], tied: bool, **more: Any) -> ModelShape:
    c, s = d.c, d.s
    return ModelShape(
        model_type=c.model_type,
        architecture=architecture(c.raw),
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


def is_tied(c: Config, style: Style) -> bool:
    return c.flag("tie_word_embeddings", default=style.tied)


def architecture(raw: Mapping[str, Any]) -> str | None:
    listed = raw.get("architectures")
    return str(listed[0]) if isinstance(listed, (list, tuple)) and listed else None
