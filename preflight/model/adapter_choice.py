"""Which LoRA fits this model: target modules that exist, what they reach, how large a rank, alpha and learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from preflight import facts
from preflight.findings import Finding, Level, quote
from preflight.model.lora import ALL_LINEAR, RANKS, Reach, default_targets, reach
from preflight.model_shape import ModelShape, Module, is_routed_expert

COPIED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# fp32 adapter weight, gradient and two Adam states: what PEFT and the Trainer keep by default.
ADAPTER_BYTES = 4 + 4 + 8
_RULES = "PEFT 0.21.2, tuners/tuners_utils.py and utils/constants.py; meta-device counts: tests/test_model_lora.py"
_RANKS = (
    "LoRA Without Regret (Thinking Machines, 2025; TRL guide); QLoRA paper, section 5 (all linear layers decide, r "
    "does not); PEFT and Unsloth documentation"
)


@dataclass(frozen=True)
class Choice:
    """A choice of targets with what it reaches at r = 8. `parameters` are target_parameters."""

    name: str
    targets: str | tuple[str, ...]
    parameters: tuple[str, ...]
    reached: Reach

    def trainable(self, r: int) -> int | None:
        """Trained elements at rank r: they grow in proportion to r."""
        return None if self.reached.trainable is None else self.reached.trainable * r // self.reached.r


def linear_names(shape: ModelShape, attention_only: bool = False) -> tuple[str, ...]:
    """Names of the linear modules of the language model that an adapter can take, in the order of the layer."""
    rules = facts.table("peft_rules")["refused"]
    refused = set(rules["names"]) if shape.model_type in rules["model_types"] else set()
    names: list[str] = []
    for group in shape.groups:
        if group.stack in ("vision", "audio", "mtp"):
            continue
        for module in group.modules:
            if module.kind not in ("linear", "conv1d") or module.name in refused or _is_small(module):
                continue
            if attention_only and not _in_attention(module):
                continue
            name = _exact_name(shape, module) if attention_only else module.name
            if name not in names:
                names.append(name)
    return tuple(names)


def _exact_name(shape: ModelShape, module: Module) -> str:
    """The module's name, with its parent's where the MLP uses the same name (GPT-2 has two c_proj)."""
    twins = [m for g in shape.groups for m in g.modules if m.name == module.name and not _in_attention(m)]
    return ".".join(module.path.split(".")[-2:]) if twins else module.name


def _is_small(module: Module) -> bool:
    """Gates and routers with one output, and per-head scalars: an adapter there costs and changes nothing."""
    small = ("shared_expert_gate", "gate", "router", "in_proj_ba", "in_proj_a", "in_proj_b")
    return module.out_features < 8 or module.name in small


def _in_attention(module: Module) -> bool:
    path = module.path.lower()
    words = ("attn", "attention", "selfattention", "encdecattention", ".mixer.")
    if ".mixer." in path:
        return module.name in ("q_proj", "k_proj", "v_proj", "o_proj")
    return any(word in path for word in words) or (
        ".temporal_block." in path and module.name in ("q_proj", "k_proj", "v_proj", "o_proj")
    )


def _towers_share_names(shape: ModelShape, names: Sequence[str]) -> bool:
    others = {m.name for m, _, stack in shape.occurrences() if stack in ("vision", "audio") and m.kind == "linear"}
    return bool(others & set(names))


def language_pattern(shape: ModelShape, names: Sequence[str]) -> str | tuple[str, ...]:
    """The names, or a regular expression that keeps to the language model when a tower uses the same names."""
    if not _towers_share_names(shape, names):
        return tuple(names)
    path = next(m.path for g in shape.groups if g.stack == "decoder" for m in g.modules if m.kind == "linear")
    root = path.split(".*")[0]  # "model.language_model.layers"
    return rf".*{root.split('.')[-2]}\.{root.split('.')[-1]}\..*\.({'|'.join(names)})"


def choices(shape: ModelShape, native: bool = True) -> list[Choice]:
    """The choices worth comparing, the recommended one first. [] when the structure is not known.

    `native`: transformers has the architecture; PEFT's all-linear is not relied on for classes of remote code.
    """
    if shape.structure == "unknown":
        return []
    made: list[Choice] = []
    every = linear_names(shape)
    attention = linear_names(shape, attention_only=True)

    def add(name: str, targets: str | tuple[str, ...], parameters: tuple[str, ...] = ()) -> None:
        made.append(Choice(name, targets, parameters, reach(shape, targets, 8, parameters)))

    whole = reach(shape, ALL_LINEAR, 8)
    stacks = any(module.kind == "experts" for module, _, _ in shape.occurrences())
    towers = shape.other_tower_parameters > 0
    if whole.refused or stacks or towers or not native:
        add("language-linear", language_pattern(shape, every if not stacks else _outside_experts(shape, every)))
    add(ALL_LINEAR, ALL_LINEAR)
    default = default_targets(shape.model_type)
    if default is not None:
        add("peft-default", default if isinstance(default, str) else tuple(default))
    if attention and set(attention) != set(every):
        add("attention-only", language_pattern(shape, attention))
    if stacks:
        parameters = tuple(
            sorted({".".join(m.path.split(".")[-2:]) for m, _, _ in shape.occurrences() if m.kind == "experts"})
        )
        add("attention-and-experts", tuple(attention or every), parameters)
    return made


def _outside_experts(shape: ModelShape, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that PEFT would not turn into the stacked experts (with gate_proj it would take them along)."""
    fused = facts.table("peft_rules")["fused_experts"]
    family = fused["model_types"].get(shape.model_type or "")
    renamed = set(fused["names"][family]) if family else set()
    return tuple(name for name in names if name not in renamed)


def asked_facts(shape: ModelShape, asked: Sequence[str], r: int) -> dict[str, Any]:
    """What the target modules that the plan names would train, as plain data."""
    found = reach(shape, tuple(asked) if asked else ALL_LINEAR, r)
    return {
        "target_modules": list(asked) if asked else ALL_LINEAR,
        "r": r,
        "trainable_params": found.trainable,
        "matched": found.matched,
        "ignored": list(found.ignored),
        "error": found.refused or None,
    }


def adapter_facts(shape: ModelShape, made: Sequence[Choice], rank: Rank) -> dict[str, Any]:
    """The facts as plain data: every choice with trainable parameters and memory for r = 8 … 256."""
    decoder = _decoder_layers(shape)
    weights = _language_weights(shape)
    rows = []
    for choice in made:
        found = choice.reached
        rows.append(
            {
                "name": choice.name,
                "target_modules": choice.targets if isinstance(choice.targets, str) else list(choice.targets),
                "target_parameters": list(choice.parameters),
                "modules": found.modules,
                "layers": found.layers,
                "share_of_layers": round(found.layers / decoder, 4) if decoder else None,
                "share_of_parameters": round(found.weights / weights, 4) if weights else None,
                "ignored": list(found.ignored),
                "error": found.refused or None,
                "trainable_params_by_rank": {str(r): choice.trainable(r) for r in RANKS},
                "adapter_bytes_by_rank": {
                    str(r): None if (n := choice.trainable(r)) is None else n * ADAPTER_BYTES for r in RANKS
                },
            }
        )
    best = recommended(made)
    targets: Any = None
    if best is not None:
        targets = best.targets if isinstance(best.targets, str) else list(best.targets)
    return {
        "recommended_target_modules": targets,
        "recommended_r": rank.r,
        "linear_module_names": list(linear_names(shape)),
        "lora_alpha": rank.alpha,
        "rank_reason": rank.reason,
        "hidden_size_rule": rank.rule,
        "learning_rate": {"low": 1e-4, "high": 5e-4, "about": "ten times that of full fine-tuning"},
        "fan_in_fan_out": any(m.kind == "conv1d" for m, _, _ in shape.occurrences()),
        "choices": rows,
    }


def recommended(made: Sequence[Choice]) -> Choice | None:
    """The first choice that PEFT accepts."""
    return next((choice for choice in made if not choice.reached.refused), None)


def _decoder_layers(shape: ModelShape) -> int:
    return sum(group.count for group in shape.groups if group.stack in ("decoder", "encoder"))


def _language_weights(shape: ModelShape) -> int:
    return sum(
        m.weights * m.per_layer * times
        for m, times, stack in shape.occurrences()
        if stack in ("decoder", "encoder") and m.kind in ("linear", "conv1d", "experts")
    )


# ---------------------------------------------------------------------------------------------------------------------
# the rank


@dataclass(frozen=True)
class Rank:
    """A recommended rank with its reason, and what the rule by hidden size would have given."""

    r: int
    alpha: int
    reason: str
    rule: dict[str, Any]


def recommend_rank(shape: ModelShape, choice: Choice | None, tokens: int | None) -> Rank:
    """The rank for this number of trained tokens; 16 to start with when it is not known.

    A LoRA should have at least as many parameters as the tokens whose loss it learns from (at about 2 bits a
    parameter); from 1e7 tokens on that asks for r = 32 and more. Never above 256, never below 8.
    """
    rule: dict[str, Any] = {"name": "hidden_size/64 to hidden_size/16", "used": False}
    if shape.hidden_size:
        rule["would_give"] = [shape.hidden_size // 64, shape.hidden_size // 16]
    rule["why_not"] = "no source recommends it; the rank needed depends on how much there is to learn, not on the width"
    if tokens is None:
        return Rank(
            16, 32, "16 to start with, the number of trained tokens is not known (--data FILE, --tokens N)", rule
        )
    per_rank = choice.trainable(1) if choice is not None else None
    per_rank = per_rank or (choice.reached.trainable // 8 if choice and choice.reached.trainable else None)
    if not per_rank:
        return Rank(16, 32, "r = 16 to start with: the parameters a rank adds could not be counted", rule)
    needed = tokens / per_rank
    r = min(256, max(8, 2 ** math.ceil(math.log2(max(1.0, needed)))))
    if tokens >= 10_000_000:
        r = max(r, 32)
    r = max(r, 16) if tokens >= 100_000 else r
    held = per_rank * r
    reason = f"{tokens:,} trained tokens; r = {r} gives {held:,} parameters to hold what is in them"
    if held < tokens:
        reason += " (fewer than the tokens, even at the highest rank: consider full fine-tuning)"
    return Rank(r, 32, reason, rule)


# ---------------------------------------------------------------------------------------------------------------------
# checks


def check_adapters(shape: ModelShape | None, made: Sequence[Choice], rank: Rank | None) -> list[Finding]:
    """Which targets to use, and which often-copied ones would be ignored or refused."""
    best = recommended(made)
    if shape is None or rank is None:
        return []
    if best is None or best.reached.trainable is None:
        return [
            Finding(
                "lora-targets-unknown",
                Level.UNKNOWN,
                "Could not tell which modules LoRA could adapt: the structure of this model is not known here.",
                "Guessed names are refused or silently ignored.",
                (
                    "install a transformers that knows this type, in the interpreter that `--python` names: its "
                    "modules are then read",
                    'or let PEFT choose: `target_modules="all-linear"`',
                ),
                _RULES,
            )
        ]
    trained = best.trainable(rank.r)
    total = shape.parameters or 0
    share = f" ({trained / total:.2%} of the model)" if trained and total else ""
    notes = [f"{best.reached.modules} modules in {best.reached.layers} of {_decoder_layers(shape)} layers."]
    default = default_targets(shape.model_type)
    if default is None:
        kind = quote(shape.model_type, 40)
        notes.append(f"PEFT has no default for {kind}: without target_modules it raises ValueError.")
    else:
        usual = next((choice for choice in made if choice.name == "peft-default"), None)
        if usual is not None and usual.reached.trainable is not None:
            notes.append(
                f"PEFT's default ({_shown(usual.targets)}) reaches {usual.reached.layers} layers, "
                f"{usual.reached.weights / max(1, _language_weights(shape)):.0%} of the weights."
            )
    copied = reach(shape, COPIED, 8)
    if copied.ignored and not copied.refused:
        notes.append(
            f"Of the often copied list {', '.join(COPIED)}, these do not exist here and PEFT ignores them without a "
            f"word: {', '.join(copied.ignored)}."
        )
    elif copied.refused:
        notes.append("The often copied names q_proj … down_proj do not exist here.")
    whole = next((choice for choice in made if choice.name == ALL_LINEAR), None)
    if whole is not None and whole.reached.refused:
        notes.append(f"all-linear is refused: {whole.reached.refused}")
    notes.append(f"Rank: {rank.reason}; lora_alpha {rank.alpha}.")
    return [
        Finding(
            "lora-targets",
            Level.OK,
            f"LoRA: target_modules={_shown(best.targets)} with r = {rank.r} trains {trained:,} parameters{share}.",
            " ".join(notes),
            source=f"{_RULES}; {_RANKS}",
        )
    ]


def _shown(targets: str | Sequence[str]) -> str:
    return f'"{targets}"' if isinstance(targets, str) else "[" + ", ".join(targets) + "]"


def check_asked_targets(shape: ModelShape | None, asked: Sequence[str], r: int) -> list[Finding]:
    """Whether the target modules that the plan names exist in this model."""
    if shape is None or not asked or shape.structure == "unknown":
        return []
    found = reach(shape, tuple(asked), r)
    names = ", ".join(quote(name, 60) for name in asked)
    instead = f"use {_shown(language_pattern(shape, linear_names(shape)))}"
    if found.refused:
        return [
            Finding(
                "lora-targets-refused",
                Level.FAIL,
                f"PEFT refuses target_modules [{names}] for this model: {quote(found.refused)}",
                "get_peft_model raises this before anything is trained.",
                (instead,),
                _RULES,
            )
        ]
    if found.ignored:
        return [
            Finding(
                "lora-targets-ignored",
                Level.WARN,
                f"No module here is called {', '.join(quote(name, 60) for name in found.ignored)}: PEFT ignores that "
                "without a word.",
                f"Only {', '.join(name for name in asked if name not in found.ignored)} would be trained: "
                f"{found.trainable:,} parameters at r = {r}.",
                (instead,),
                _RULES,
            )
        ]
    return [
        Finding(
            "lora-targets-asked",
            Level.OK,
            f"All of [{names}] exist: {found.trainable:,} trainable parameters at r = {r}.",
            f"{found.modules} modules in {found.layers} of {_decoder_layers(shape)} layers.",
            source=_RULES,
        )
    ]


def check_structure(shape: ModelShape | None) -> list[Finding]:
    """What is special about this structure and changes how it is fine-tuned."""
    if shape is None or shape.structure == "unknown":
        return []
    found: list[Finding] = []
    mixers = {group.mixer for group in shape.groups if group.stack == "decoder"}
    stacked = [m for m, _, _ in shape.occurrences() if m.kind == "experts"]
    state = mixers & {"mamba", "mamba2"}
    names = ", ".join(linear_names(shape))
    if state:
        counts: dict[str, int] = {}
        for group in shape.groups:
            key = group.mixer if group.mixer != "none" else group.mlp if group.mlp != "dense" else "mlp"
            counts[key] = counts.get(key, 0) + group.count
        layers = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        kernels = "Without mamba-ssm and causal-conv1d transformers takes a slow path that keeps much more memory."
        refused = reach(shape, ALL_LINEAR, 8).refused
        what = "hybrid of Mamba and attention" if "attention" in mixers else "pure state-space model"
        found.append(
            Finding(
                "hybrid-mamba" if "attention" in mixers else "state-space",
                Level.WARN,
                f"This is a {what}: {layers}.",
                f"Only attention layers have a KV cache. {refused + ' ' if refused else ''}{kernels}",
                (
                    f"target these modules: {names}",
                    "`pip install mamba-ssm causal-conv1d` (builds CUDA code), or accept the slow path",
                ),
                _RULES + "; huggingface/peft#3554",
            )
        )
    if shape.moe is not None and stacked:
        moe = shape.moe
        routed = sum(m.parameters * t for m, t, _ in shape.occurrences() if is_routed_expert(m))
        share = routed / max(1, shape.counted_parameters)
        active = shape.counted_parameters - routed + routed * moe.per_token // max(1, moe.experts)
        safe = ", ".join(_outside_experts(shape, linear_names(shape)))
        parts = sorted({m.path.split(".")[-1] for m in stacked})
        mla = ""
        if shape.mla is not None:
            cached = shape.mla.kv_rank + shape.mla.rope_dim
            mla = (
                f"Attention is MLA: queries and keys are {shape.head_dim} wide, {cached} values per token and layer "
                f"are cached{'' if shape.mla.q_rank else ', queries have no low rank (q_proj, not q_a_proj)'}. "
            )
        found.append(
            Finding(
                "mla-moe" if shape.mla is not None else "moe-fused-experts",
                Level.WARN,
                f"Mixture of experts: {moe.experts} experts, {moe.per_token} a token; {shape.counted_parameters:,} "
                f"parameters, all of them in memory ({active:,} are active for a token).",
                f"{mla}Since transformers 5 the experts ({share:.0%} of the parameters) are stacked 3-D parameters "
                f"({', '.join(parts)}): 4-bit loading leaves them in 16 bit, and LoRA reaches them only through "
                "target_parameters.",
                (
                    f"target the modules outside the experts: {safe}",
                    f"for the experts, too: target_parameters=[{', '.join('experts.' + part for part in parts)}] "
                    "(PEFT 0.17 or newer)",
                ),
                _RULES + "; huggingface/peft#3009",
            )
        )
    elif shape.moe is not None:
        experts = sum(m.parameters * t for m, t, _ in shape.occurrences() if is_routed_expert(m))
        found.append(
            Finding(
                "moe-experts",
                Level.WARN,
                f"Mixture of experts: {shape.moe.experts} experts, {shape.moe.per_token} a token; "
                f"{shape.counted_parameters:,} parameters, all of them in memory.",
                "In transformers 4 each expert has linear layers of its own "
                f"({experts / shape.counted_parameters:.0%} of the parameters): 4-bit loading reaches them, and "
                "all-linear gives every expert an adapter.",
                (f"for a smaller adapter target attention only: {', '.join(linear_names(shape, True))}",),
                _RULES,
            )
        )
    elif shape.mla is not None:
        found.append(
            Finding(
                "mla",
                Level.OK,
                f"Attention is multi-head latent attention: {shape.mla.kv_rank + shape.mla.rope_dim} cached values "
                "a token and layer.",
                f"Queries and keys are {shape.head_dim} wide, values {shape.v_head_dim}.",
                source=_RULES,
            )
        )
    if any(m.kind == "conv1d" for m, _, _ in shape.occurrences()):
        found.append(
            Finding(
                "conv1d",
                Level.OK,
                f"The linear layers are Conv1D (weights stored transposed): {names}.",
                "Set fan_in_fan_out=True in the LoRA configuration (PEFT sets it itself, with a warning). There is no "
                "q_proj or v_proj.",
                source="PEFT 0.21.2, tuners/lora/model.py; huggingface/peft#758",
            )
        )
    if shape.encoder_only:
        found.append(
            Finding(
                "encoder-only",
                Level.WARN,
                "This is an encoder (BERT-like): it classifies or embeds, it does not generate text.",
                "The plans here are for causal language models; the adapter's task type must be SEQ_CLS or the like.",
                ("use task_type=SEQ_CLS or TOKEN_CLS in LoraConfig, and a model with that head",),
                "PEFT documentation, task types",
            )
        )
    return found


def check_heads(shape: ModelShape | None) -> list[Finding]:
    """Whether keys and values are shared by several query heads."""
    if shape is None or shape.heads is None or shape.kv_heads is None or shape.structure == "unknown":
        return []
    values = shape.kv_values_per_token
    cache = f"{values * 2:,} bytes of KV cache a token in 16 bit" if values is not None else "KV cache: could not tell"
    if shape.mla is not None:
        kind = "MLA"
    elif shape.kv_heads == shape.heads:
        kind = "multi-head attention (no sharing)"
    elif shape.kv_heads == 1:
        kind = "multi-query attention: one K and V head for all"
    else:
        kind = f"grouped-query attention: {shape.heads // shape.kv_heads} query heads share one K and V head"
    return [
        Finding(
            "attention-heads",
            Level.OK,
            f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} for keys and values; {kind}.",
            f"{cache}.",
            source="config.json",
        )
    ]
