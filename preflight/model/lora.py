"""Which modules would LoRA reach in this model, and how many parameters would it train? Exact, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from preflight import facts
from preflight.model_shape import ModelShape, Module

ALL_LINEAR = "all-linear"
RANKS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Reach:
    """What one choice of targets would adapt.

    `trainable` is None when PEFT refuses the choice (`refused` says why) or the structure is not known. `modules` is
    the number of adapted modules, `layers` how many of the decoder layers have one, `weights` the elements of the
    weights they adapt. `matched` counts modules for each name asked for, `ignored` are the names that match nothing
    and that PEFT passes over without a word.
    """

    targets: tuple[str, ...]
    r: int
    trainable: int | None
    modules: int
    layers: int
    weights: int
    matched: dict[str, int]
    ignored: tuple[str, ...]
    refused: str = ""


def trainable_parameters(
    shape: ModelShape, targets: str | Sequence[str], r: int, target_parameters: Sequence[str] = ()
) -> int | None:
    """LoRA parameters that `get_peft_model` would train; None when it refuses or the structure is not known.

    Units: elements. A linear layer gets A [r, in] and B [out, r]; a stack of experts gets both for each expert.
    Source: checked against get_peft_model on the meta device (PEFT 0.21.2) in tests/test_model_lora.py.
    """
    return reach(shape, targets, r, target_parameters).trainable


def reach(shape: ModelShape, targets: str | Sequence[str], r: int, target_parameters: Sequence[str] = ()) -> Reach:
    """What these targets adapt. `targets` is "all-linear", a list of names, or a regular expression (as in PEFT)."""
    rules = facts.table("peft_rules")
    asked = (targets,) if isinstance(targets, str) else tuple(targets)
    if shape.structure == "unknown":
        return Reach(asked, r, None, 0, 0, 0, {}, ())
    everything = [(module, times, stack) for module, times, stack in shape.occurrences()]
    names, parameters = _converted(shape, targets, target_parameters, rules, everything)
    if isinstance(parameters, str):
        return Reach(asked, r, None, 0, 0, 0, {}, (), refused=parameters)
    chosen: list[tuple[Module, int, str, int]] = []
    for module, times, stack in everything:
        rank = next((rank for name, rank in parameters.items() if _is_parameter(module, name)), None)
        if rank is not None:
            chosen.append((module, times, stack, rank * r))
        elif module.kind not in ("experts", "parameter") and _selected(shape, module, names):
            chosen.append((module, times, stack, r))
    matched = {name: _count(chosen, name, shape, rules) for name in asked} if not isinstance(targets, str) else {}
    ignored = tuple(name for name, number in matched.items() if number == 0)
    refused = _refused(shape, chosen, asked, rules)
    trainable = None if refused else sum(_adapter(module, rank) * times for module, times, _, rank in chosen)
    return Reach(
        asked,
        r,
        trainable,
        modules=sum(module.per_layer * times for module, times, _, _ in chosen),
        layers=_layers_reached(shape, chosen),
        weights=sum(module.weights * module.per_layer * times for module, times, _, _ in chosen),
        matched=matched,
        ignored=ignored,
        refused=refused,
    )


def converted_targets(shape: ModelShape, targets: str | Sequence[str]) -> tuple[str | tuple[str, ...], dict[str, int]]:
    """What these targets mean to PEFT: names of modules ("all-linear" stays), and stacks of experts and routers.

    The latter by path, with the multiple of r that each gets; none when PEFT refuses.
    """
    everything = list(shape.occurrences())
    names, parameters = _converted(shape, targets, (), facts.table("peft_rules"), everything)
    if isinstance(parameters, str):
        return names, {}
    return names, {
        module.path: multiple
        for module, _, _ in everything
        for name, multiple in parameters.items()
        if module.kind in ("experts", "router") and _is_parameter(module, name)
    }


def _adapter(module: Module, r: int) -> int:
    """Elements of A and B for one kind of module in one layer."""
    if module.kind in ("experts", "router") and len(module.shape) == 3:
        return r * module.shape[0] * (module.shape[1] + module.shape[2]) * module.per_layer
    if module.kind == "conv":  # A keeps the kernel, B is a 1x1 convolution
        return r * (module.weights // module.shape[0] + module.shape[0]) * module.per_layer
    return r * (module.shape[0] + module.shape[1]) * module.per_layer


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith("." + name)


def _is_parameter(module: Module, name: str) -> bool:
    """Whether a target parameter means this module: the stack itself, or the weight of a router."""
    if module.kind in ("experts", "parameter"):
        return _matches(module.path, name)
    return _matches(f"{module.path}.weight", name)


def _selected(shape: ModelShape, module: Module, names: str | tuple[str, ...]) -> bool:
    if names == ALL_LINEAR:
        return module.kind in ("linear", "conv1d") and not shape.is_head(module)
    if isinstance(names, str):
        try:
            return re.fullmatch(names, module.path.replace("*", "0")) is not None
        except (re.error, RecursionError):
            return False
    return any(_matches(module.path, name) for name in names)


def _converted(
    shape: ModelShape,
    targets: str | Sequence[str],
    target_parameters: Sequence[str],
    rules: dict[str, Any],
    everything: list[tuple[Module, int, str]],
) -> tuple[str | tuple[str, ...], dict[str, int] | str]:
    """The names to look for among modules, and the parameters to adapt with the multiple of r each gets.

    PEFT turns the expert names of transformers 4 into the fused parameters of transformers 5; two names that were
    fused into one parameter double its rank. A text instead of the parameters says why it refuses.
    """
    fused = rules["fused_experts"]
    family = fused["model_types"].get(shape.model_type or "")
    parameters = dict.fromkeys(target_parameters, 1)
    if family is None or not any(module.kind == "experts" for module, _, _ in everything):
        return (targets if isinstance(targets, str) else tuple(targets)), parameters
    renamed: dict[str, str] = fused["names"][family]
    if isinstance(targets, str):
        if targets.lower() != ALL_LINEAR:
            return targets, parameters
        linear = {m.name for m, _, _ in everything if m.kind in ("linear", "conv1d") and not shape.is_head(m)}
        targets = sorted(linear | set(renamed))
    rest = []
    present: dict[str, set[str]] = {}
    for name in targets:
        old = next((old for old in renamed if _matches(name, old)), None)
        if old is None:
            rest.append(name)
        else:
            present.setdefault(renamed[old], set()).add(old)
    for new, old_names in present.items():
        together = set(fused["together"][family].get(new, old_names))
        missing = together - old_names
        if missing:
            return tuple(rest), (
                f"ValueError: Cannot convert PEFT target(s) {', '.join(sorted(old_names))} without also targeting "
                f"{', '.join(sorted(missing))} because they are fused into {new}."
            )
        parameters[new] = len(together)
    return tuple(rest), parameters


def _count(chosen: Iterable[tuple[Module, int, str, int]], name: str, shape: ModelShape, rules: dict[str, Any]) -> int:
    """Modules that the name asked for reaches, also through the fused parameter it stands for."""
    fused = rules["fused_experts"]
    family = fused["model_types"].get(shape.model_type or "")
    new = fused["names"][family].get(name) if family else None
    return sum(
        module.per_layer * times
        for module, times, _, _ in chosen
        if _matches(module.path, name) or (new is not None and _is_parameter(module, new))
    )


def _layers_reached(shape: ModelShape, chosen: Iterable[tuple[Module, int, str, int]]) -> int:
    adapted = {id(module) for module, _, _, _ in chosen}
    return sum(
        group.count
        for group in shape.groups
        if group.stack in ("decoder", "encoder") and any(id(module) in adapted for module in group.modules)
    )


def _refused(
    shape: ModelShape, chosen: list[tuple[Module, int, str, int]], asked: tuple[str, ...], rules: dict[str, Any]
) -> str:
    if not chosen:
        names = ", ".join(repr(name) for name in sorted(asked))
        return f"ValueError: Target modules {{{names}}} not found in the base model."
    refused = rules["refused"]
    if shape.model_type in refused["model_types"]:
        bad = sorted({module.name for module, _, _, _ in chosen} & set(refused["names"]))
        if bad:
            return (
                f"ValueError: Module '{bad[0]}' is incompatible with Mamba-based models "
                f"(model_type='{shape.model_type}')."
            )
    odd = next((m for m, _, _, _ in chosen if m.kind in ("norm", "router") and len(m.shape) < 2), None)
    if odd is not None:
        return f"ValueError: Target module {odd.name} is not supported: a normalisation has no matrix to adapt."
    return ""


def default_targets(model_type: str | None) -> list[str] | str | None:
    """PEFT's own target modules for this type (a list, or a regular expression); None when it has none and refuses."""
    listed = facts.table("arch_support")["peft_default_lora_targets"]["map"]
    found: list[str] | str | None = listed.get(model_type or "")
    return found
