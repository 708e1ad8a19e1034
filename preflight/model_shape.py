"""What is this model made of? Reads config.json of any architecture as a ModelShape: numbers only, no code is run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from preflight import facts

LIMIT = 1 << 40  # no dimension of a real model comes near it; larger ones are a damaged or hostile file


class ConfigTrouble(ValueError):
    """A value in config.json that no model can have: names the key, the value and what is allowed."""


@dataclass(frozen=True)
class Module:
    """A kind of module that holds parameters, as it occurs in one layer (or once, outside the layers).

    `path` has `*` where a layer or expert number stands. `kind` is one of: linear, conv1d (GPT-2's transposed linear),
    embedding, norm, experts (a stack of expert matrices in one 3-D parameter), router, conv, parameter.
    `shape` is the weight's: linear [out, in], conv1d [in, out], experts [experts, out, in] (or [experts, in, out]).
    `bias` is the number of bias elements, `per_layer` how often it occurs in one layer. `subclass`: of a class derived
    from nn.Linear (Falcon's), which 4-bit loading passes over.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    bias: int = 0
    per_layer: int = 1
    subclass: bool = False

    @property
    def name(self) -> str:
        """The last part of the path that is no number: what `target_modules` is compared with."""
        return next((part for part in reversed(self.path.split(".")) if part != "*"), self.path)

    @property
    def in_features(self) -> int:
        """Width of the input of a linear, conv1d or expert matrix."""
        return self.shape[0] if self.kind == "conv1d" else self.shape[-1]

    @property
    def out_features(self) -> int:
        """Width of the output of a linear, conv1d or expert matrix."""
        return self.shape[1] if self.kind == "conv1d" else self.shape[-2]

    @property
    def weights(self) -> int:
        """Elements of the weight of one such module, without its bias."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def parameters(self) -> int:
        """Elements of weight and bias, for all of them in one layer."""
        return (self.weights + self.bias) * self.per_layer

    @property
    def quantised_by_bitsandbytes(self) -> bool:
        """Whether 4-bit or 8-bit loading replaces it: only nn.Linear itself and Conv1D, never stacked 3-D experts.

        Source: transformers 5.24, integrations/bitsandbytes.py, replace_with_bnb_linear. The output head is kept, too:
        see `ModelShape.is_head`.
        """
        return self.kind in ("linear", "conv1d") and not self.subclass


@dataclass(frozen=True)
class Layers:
    """Layers that are all alike, and how many there are.

    `mixer`: attention, mla, mamba, mamba2, linear_attention, recurrent, conv or none. `window` is the number of tokens
    that sliding attention sees, None for all. `mlp`: dense, moe, dense+moe or none. `stack`: decoder, encoder, vision,
    audio.
    """

    count: int
    mixer: str
    modules: tuple[Module, ...]
    window: int | None = None
    mlp: str = "dense"
    stack: str = "decoder"
    cross_attention: bool = False

    @property
    def parameters(self) -> int:
        """Elements in one such layer."""
        return sum(module.parameters for module in self.modules)


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: how many there are, how many a token visits, how wide each is."""

    experts: int
    per_token: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek): what is cached is `kv_rank + rope_dim` values per token and layer."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model. Unknown is None; a count it cannot know is None.

    `layers` counts decoder layers (encoder layers of an encoder-only model). `structure` says how the modules were
    found: "known" (this architecture's layout), "module tree" (transformers' own modules on the meta device), "language
    part" (only the language model inside is known; its towers are not counted) or "unknown" (no modules).
    """

    model_type: str | None
    architecture: str | None
    structure: str
    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    max_position: int | None = None
    gated_mlp: bool | None = None
    activation: str | None = None
    tied_embeddings: bool | None = None
    dtype: str | None = None
    groups: tuple[Layers, ...] = ()
    rest: tuple[Module, ...] = ()
    moe: Moe | None = None
    mla: Mla | None = None
    language_key: str | None = None
    encoder_decoder: bool = False
    encoder_only: bool = False
    head_path: str = "lm_head"
    softcap: bool = False
    notes: tuple[str, ...] = field(default=())

    def occurrences(self) -> Iterator[tuple[Module, int, str]]:
        """Every kind of module with how many layers hold it (1 outside layers) and its stack ("" outside)."""
        for group in self.groups:
            for module in group.modules:
                yield module, group.count, group.stack
        for module in self.rest:
            yield module, 1, ""

    @cached_property
    def parameters(self) -> int | None:
        """All elements, a tied output head counted once. None when the structure is not known."""
        if self.structure in ("unknown", "language part"):
            return None
        return sum(module.parameters * times for module, times, _ in self.occurrences())

    @cached_property
    def counted_parameters(self) -> int:
        """Elements of the modules that are known, whether or not they are all there are."""
        return sum(module.parameters * times for module, times, _ in self.occurrences())

    def is_head(self, module: Module) -> bool:
        """Whether it is the output embedding (kept in 16 bit by 4-bit loading, left out by PEFT's all-linear)."""
        return module.path == self.head_path

    @cached_property
    def embedding_parameters(self) -> int:
        """Elements of the input embedding of tokens."""
        return sum(m.parameters for m in self.rest if m.kind == "embedding" and _part(m) == "embedding")

    @cached_property
    def head_parameters(self) -> int:
        """Elements of the output head, 0 when it is tied to the input embedding."""
        return sum(module.parameters for module in self.rest if self.is_head(module))

    @cached_property
    def other_tower_parameters(self) -> int:
        """Elements of vision and audio towers and the projectors that join them to the language model."""
        layers = sum(group.parameters * group.count for group in self.groups if group.stack in ("vision", "audio"))
        return layers + sum(m.parameters for m in self.rest if _part(m) in ("vision", "audio", "projector"))

    @cached_property
    def active_parameters(self) -> int | None:
        """Elements that one token uses: of the routed experts only the chosen ones. All of them must be in memory."""
        if self.parameters is None:
            return None
        if self.moe is None:
            return self.parameters
        routed = sum(m.parameters * times for m, times, _ in self.occurrences() if is_routed_expert(m))
        return self.parameters - routed + routed * self.moe.per_token // max(1, self.moe.experts)

    @cached_property
    def bitsandbytes_weights(self) -> int:
        """Elements that 4-bit loading would really quantise: weights of linear modules other than the output head."""
        return sum(
            module.weights * module.per_layer * times
            for module, times, _ in self.occurrences()
            if module.quantised_by_bitsandbytes and not self.is_head(module)
        )

    @cached_property
    def kv_values_per_token(self) -> int | None:
        """Values that one token leaves in the caches of all decoder layers (keys and values; the latent for MLA)."""
        if self.structure == "unknown":
            return None
        total = 0
        for group in self.groups:
            if group.stack != "decoder":
                continue
            if group.mixer == "mla" and self.mla is not None:
                total += group.count * (self.mla.kv_rank + self.mla.rope_dim)
            elif group.mixer == "attention":
                if self.kv_heads is None or self.head_dim is None:
                    return None
                total += group.count * self.kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))
        return total


def is_routed_expert(module: Module) -> bool:
    """Whether the module belongs to the routed experts (not to a shared one)."""
    return module.kind == "experts" or ".experts.*" in module.path


def of_a_tower(module: Module, stack: str) -> bool:
    """Whether a module belongs to a vision or audio tower, or to what joins one to the language model."""
    return stack in ("vision", "audio") or (stack == "" and _part(module) in ("vision", "audio", "projector"))


def _part(module: Module) -> str:
    """What a module outside the decoder layers belongs to."""
    path = module.path
    if any(word in path for word in ("vision", "visual", "image", "patch_embed")):
        return "vision"
    if any(word in path for word in ("audio", "speech", "whisper")):
        return "audio"
    if any(word in path for word in ("projector", "connector", "mlp1", "merger", "aligner")):
        return "projector"
    others = ("position", "wpe", "token_type", "relative_attention_bias", "per_layer")
    if module.kind == "embedding" and any(word in path for word in others):
        return "positions"
    return module.kind


# ---------------------------------------------------------------------------------------------------------------------
# reading numbers out of config.json


_ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers",
               "num_transformer_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "d_kv", "attention_key_dim"),
    "intermediate_size": (
        "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "ffn_size", "decoder_ffn_dim",
        "hidden_dim", "mlp_hidden_size",
    ),
    "vocab_size": ("padded_vocab_size", "vocab_size", "n_vocab"),
    "max_position": (
        "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length", "n_ctx",
        "max_target_positions", "model_max_length", "max_context_length",
    ),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act",
                   "dense_act_fn", "afn"),
}  # fmt: skip


class LayoutUnknown(ConfigTrouble):
    """A part of the model has a layout that is not known here: nothing is wrong with the file."""


class Config:
    """config.json with the class defaults of its model_type behind it.

    A key that is absent takes transformers' default for the type (published Gemma files leave such keys out); a key
    that is present and null means "derive it", as in transformers.
    """

    def __init__(self, raw: Mapping[str, Any], model_type: str | None = None) -> None:
        self.raw = raw
        given = raw.get("model_type")
        self.model_type = model_type or (given if isinstance(given, str) else None)
        known = facts.table("config_defaults")["model_types"].get(self.model_type or "", {})
        self.known = bool(known)
        self.defaults: Mapping[str, Any] = known.get("defaults", {})
        self.names: Mapping[str, str] = known.get("names", {})

    def value(self, *names: str, default: Any = None) -> Any:
        """The first of the names that is set, else the class default of the first that has one, else `default`."""
        wanted = [*names, *(self.names[name] for name in names if name in self.names)]
        for name in wanted:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if any(name in self.raw for name in wanted):
            return default  # present and null
        for name in wanted:
            if self.defaults.get(name) is not None:
                return self.defaults[name]
        return default

    def number(self, *names: str, default: int | None = None, least: int = 0) -> int | None:
        """The same as an integer. Raises ConfigTrouble when it is none, or below `least`, or absurdly large."""
        value = self.value(*names)
        if value is None:
            return default
        key = next((name for name in names if name in self.raw), names[0])
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < LIMIT:
            raise ConfigTrouble(f"{key} is {str(value)[:60]!r}; an integer of at least {least} is needed")
        return value

    def fraction(self, name: str, default: float) -> float:
        """A positive ratio. Raises ConfigTrouble when it is none."""
        value = self.value(name, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-6 < value < 1e6:
            raise ConfigTrouble(f"{name} is {str(value)[:60]!r}; a positive number is needed")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """The same as a truth value."""
        return bool(self.value(*names, default=default))

    def word(self, *names: str, default: str | None = None) -> str | None:
        """The same as text; what is no text counts as absent."""
        value = self.value(*names, default=default)
        return value if isinstance(value, str) else default

    def common(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """A number that goes by several names (`_ALIASES`), whichever this file uses."""
        for source in (self.raw, self.defaults):
            for alias in (*_ALIASES[name], *(self.names.get(a, a) for a in _ALIASES[name])):
                if source.get(alias) is not None:
                    return self.number(alias, default=default, least=least)
            if source is self.raw and any(a in self.raw or self.names.get(a, a) in self.raw for a in _ALIASES[name]):
                return default
        return default

    def common_word(self, name: str) -> str | None:
        """A word that goes by several names, as the file itself states it; None when it does not."""
        return next((v for alias in _ALIASES[name] if isinstance(v := self.raw.get(alias), str)), None)

    def need(self, name: str) -> int:
        """The same, when nothing can be said without it. Raises ConfigTrouble when it is absent."""
        found = self.common(name)
        if found is None:
            raise ConfigTrouble(f"none of {', '.join(_ALIASES[name])} is set; without it nothing can be counted")
        return found

    def sub(self, key: str, model_type: str | None = None) -> Config:
        """A nested configuration (`text_config`, `vision_config`, …); empty when it is absent."""
        nested = self.raw.get(key)
        nested = nested if isinstance(nested, Mapping) else {}
        return Config(nested, None if isinstance(nested.get("model_type"), str) else model_type)

    def list_of(self, key: str) -> list[Any] | None:
        """A list, None when it is absent or something else."""
        value = self.value(key)
        return list(value) if isinstance(value, (list, tuple)) else None


LANGUAGE_KEYS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config", "decoder")


def language_part(config: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The key of the nested language model configuration, and that configuration; (None, config) for text models.

    Follows nested ones ("thinker_config" holds a "text_config").
    """
    key_path: list[str] = []
    here = config
    for _ in range(4):
        key = next((k for k in LANGUAGE_KEYS if isinstance(here.get(k), Mapping) and here[k]), None)
        if key is None:
            break
        key_path.append(key)
        here = here[key]
    return (".".join(key_path) or None), here


_DTYPES = {"float": "float32", "half": "float16"}


def read_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that the file names: `dtype` (transformers 5), `torch_dtype` (4), else the old bf16/fp16 flags."""
    for source in (config, language_part(config)[1]):
        for key in ("dtype", "torch_dtype"):
            value = source.get(key)
            if isinstance(value, str) and value:
                name = value.removeprefix("torch.")
                return _DTYPES.get(name, name)
    for key, name in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        if config.get(key) is True:
            return name
    return None


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that config.json describes. Raises ConfigTrouble for values that no model can have.

    Modules are laid out as transformers 5.24 does it (fused experts are one 3-D parameter); for remote-code
    architectures as their published code does. Counts are checked against the meta device in tests/test_model_shape.py.
    """
    from preflight.model import families

    if not isinstance(config, Mapping):
        raise ConfigTrouble("config.json does not hold a JSON object")
    return families.read(config)


def grouped(layers: Iterable[Layers]) -> tuple[Layers, ...]:
    """Equal layers put together, in the order in which each kind first appears."""
    counts: dict[Layers, int] = {}
    for layer in layers:
        plain = replace(layer, count=1)
        counts[plain] = counts.get(plain, 0) + layer.count
    return tuple(replace(layer, count=count) for layer, count in counts.items())


def shape_from_tree(config: Mapping[str, Any], tree: Mapping[str, Any]) -> ModelShape:
    """The shape whose modules are those that transformers itself builds (the answer of children/meta_model.py).

    The numbers of the config are read as in `read_shape`, where they can be.
    """
    try:
        basis = read_shape(config)
    except ConfigTrouble:
        basis = ModelShape(None, None, "unknown")
    groups = tuple(
        Layers(
            count=int(group["count"]),
            mixer=str(group["mixer"]),
            modules=tuple(_module(item) for item in group["modules"]),
            window=group.get("window"),
            mlp=str(group["mlp"]),
            stack=str(group["stack"]),
        )
        for group in tree["groups"]
    )
    rest = tuple(_module(item) for item in tree["rest"])
    return replace(
        basis,
        structure="module tree",
        groups=groups,
        rest=rest,
        architecture=str(tree["class"]),
        tied_embeddings=bool(tree["tied"]),
        head_path=str(tree.get("head") or "lm_head"),
        notes=(),
    )


def _module(item: Mapping[str, Any]) -> Module:
    shape = tuple(int(size) for size in item["shape"])
    return Module(
        str(item["path"]), str(item["kind"]), shape, int(item["bias"]), int(item["per_layer"]), bool(item["subclass"])
    )
