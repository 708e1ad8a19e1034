#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10"
# dependencies = ["jinja2>=3.1", "PyYAML>=6", "filelock>=3.12"]
# ///
"""What is this model made of, which adapters fit it, and how much memory does fine-tuning it take?

Reads a model directory or a hub id. No code of the model is run; torch is not needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from preflight import plan as plans
from preflight.console import parser, run_main, run_stage
from preflight.findings import Finding, Level, Section, quote, run_checks, say
from preflight.machine import Machine, choose_python
from preflight.model.adapter_choice import (
    check_adapters,
    check_asked_targets,
    check_heads,
    check_structure,
)
from preflight.model.attention import check_attention
from preflight.model.chat_template import (
    check_special_tokens,
    check_template,
    check_token_ids,
    check_tokenizer_config,
    eos_ids,
)
from preflight.model.config_values import check_values
from preflight.model.directory_checks import (
    check_adapter_beside,
    check_config,
    check_links,
    check_weights,
)
from preflight.model.hub import HubTrouble
from preflight.model.model_facts import SHOWN, facts_of
from preflight.model.model_look import Seen, look, read_card
from preflight.model.module_tree import check_tree
from preflight.model.phone import add_flags as phone_flags
from preflight.model.quantised import (
    check_four_bit,
    check_quantised,
)
from preflight.model.support import (
    check_support,
    read_versions,
)
from preflight.model.tokenizer_checks import check_tokenizer_files, check_tokens_there
from preflight.model_shape import ModelShape

STAGE = "model_analyzer"


def make_parser() -> argparse.ArgumentParser:
    """The flags of this stage."""
    made = parser(__doc__, "python model_analyzer.py ./my-model --gpu-vram-gb 24 --method qlora")
    made.add_argument("models", nargs="+", metavar="MODEL", help="model directory or hub id; several are compared")
    plans.add_flags(made)
    here = made.add_argument_group("where it will run")
    here.add_argument("--gpu-vram-gb", type=float, metavar="GIB", help="judge for a card of this size")
    here.add_argument("--gpu", metavar="NAME", help='judge for this card, for example "RTX 3090" or "8.6"')
    here.add_argument("--here", action="store_true", help="judge for this machine even when it has no GPU (its RAM)")
    here.add_argument("--python", metavar="PATH", help="interpreter whose packages are judged")
    here.add_argument("--transformers", metavar="VERSION", help="judge for this version instead of the installed one")
    here.add_argument("--peft", metavar="VERSION", help="the same for PEFT")
    here.add_argument(
        "--write-launch", metavar="DIR",
        help="write what accelerate, torchrun or DeepSpeed need to run the plan on its GPUs into a new folder",
    )  # fmt: skip
    here.add_argument("--recommend", action="store_true", help="also show what would fit when the plan fits already")
    proof = made.add_argument_group("evidence for the memory")
    proof.add_argument(
        "--evidence", choices=("closed", "auto", "rehearsed"), default="closed",
        help="closed: formulas, at once; rehearsed: the training step on fake tensors with the packages under test "
        "(seconds, no GPU, no weights); auto: rehearsed where torch, transformers and peft are installed, else closed "
        "(default: closed; `python -m preflight` takes auto)",
    )  # fmt: skip
    proof.add_argument("--rehearse", action="store_true", help="the same as --evidence rehearsed")
    proof.add_argument(
        "--measure", action="store_true",
        help="also run the step for real with random weights: on the GPU, or on the CPU for small models",
    )  # fmt: skip
    proof.add_argument("--compare", action="store_true", help="closed form, rehearsed and measured side by side")
    proof.add_argument("--compare-to", metavar="FILE", help="the same, and append it as one row to FILE (JSON Lines)")
    phone_flags(made)
    data = made.add_argument_group("data and limits")
    data.add_argument("--tokens", type=int, metavar="N", help="tokens that will be trained on (for the LoRA rank)")
    data.add_argument(
        "--data", metavar="FILE",
        help="training data: how many updates and hours; with --recommend its tokens are counted by the tokenizer",
    )  # fmt: skip
    data.add_argument("--epochs", type=float, metavar="N", help="passes over the data (default: the configuration's)")
    data.add_argument(
        "--module-tree", choices=("auto", "always", "never"), default="auto",
        help="build the model on the meta device with the transformers under test: auto, when the architecture is not "
        "known here; always, to check the counts (default: auto)",
    )  # fmt: skip
    data.add_argument(
        "--trust-remote-code", action="store_true", help="let the model's own code run, in a child, for the module tree"
    )
    data.add_argument("--follow-links", action="store_true", help="read through links that lead out of the directory")
    return made


def check_directory(seen: Seen) -> list[Finding]:
    """The directory, its configuration and its weights."""
    return [
        *check_config(seen.directory, seen.shape_trouble),
        *check_values(seen.directory.config.object, seen.shape),
        *check_links(seen.directory),
        *check_adapter_beside(seen.directory),
        *check_weights(seen.directory, seen.shape),
    ]


def check_parameters(seen: Seen) -> list[Finding]:
    """Whether the parameters could be counted."""
    shape = seen.shape
    if shape is None:
        return []
    if shape.structure == "language part":
        return [
            Finding(
                "towers-unknown",
                Level.WARN,
                f"The language model inside ({quote(shape.language_key, 60)}) has {shape.counted_parameters:,} "
                f"parameters: {shape.layers} layers of width {shape.hidden_size}; the rest was not counted.",
                "The layers of its vision or audio part are in the model's own code, which is not run.",
                ("take the size of the whole model from its weight files or its page",),
                "preflight/families",
            )
        ]
    if shape.parameters is None:
        return [
            Finding(
                "parameters-unknown",
                Level.UNKNOWN,
                f"Could not count the parameters: the layers of {quote(shape.model_type or '?', 60)} are not known.",
                "Neither this program nor the transformers that was asked knows this type.",
                ("install a transformers that knows it and name its interpreter with `--python`",),
                "preflight/families",
            )
        ]
    if shape.vocab_size is None:
        return [
            Finding(
                "not-a-language-model",
                Level.WARN,
                f"{shape.parameters:,} parameters and no vocabulary: this is not a language model.",
                "Chat templates, sequence lengths and the memory of a language model's loss do not apply to it.",
                ("name a language model, or plan the training with the tools made for this kind of model",),
                "config.json (no vocab_size)",
            )
        ]
    towers = f" ({shape.other_tower_parameters:,} of them in vision or audio towers)" if shape.language_key else ""
    tied = "tied to the output head" if shape.tied_embeddings else "beside an output head of its own"
    return [
        Finding(
            "parameters",
            Level.OK,
            f"{shape.parameters:,} parameters{towers}: {shape.layers} layers of width {shape.hidden_size}, "
            f"vocabulary {shape.vocab_size:,} {tied}.",
            source=f"preflight/families ({shape.structure}); counts checked in tests/test_model_shape.py",
        )
    ]


def check_module_tree(seen: Seen) -> list[Finding]:
    """Whether transformers' own modules say the same."""
    return check_tree(seen.tree, seen.shape)


def check_loading(seen: Seen) -> list[Finding]:
    """Versions and code that loading needs."""
    if seen.directory.config.trouble:
        return []
    return [check_support(seen.support, seen.versions, seen.directory, seen.shape)]


def check_base(seen: Seen) -> list[Finding]:
    """A quantised base, and what 4-bit loading would do."""
    card = seen.card
    return [
        *check_quantised(
            seen.quantised, seen.shape, seen.directory, seen.versions, card.capability, card.gpu
        ),
        *check_four_bit(seen.shape, seen.quantised),
    ]  # fmt: skip


def check_lora(seen: Seen) -> list[Finding]:
    """What the structure means for adapters, and which to use."""
    return [
        *check_structure(seen.shape),
        *check_heads(seen.shape),
        *check_adapters(seen.shape, seen.made, seen.rank),
        *check_asked_targets(seen.shape, seen.plan.target_modules, seen.plan.lora_rank),
    ]


def check_attention_taken(seen: Seen) -> list[Finding]:
    """Which attention training takes."""
    return check_attention(seen.supported, seen.taken, seen.plan, seen.shape)


def check_length(seen: Seen) -> list[Finding]:
    """Whether the planned sequences are longer than the model's positions."""
    longest = seen.shape.max_position if seen.shape else None
    tokens = seen.plan.sequence_tokens
    if longest is None or tokens <= longest:
        return []
    return [
        Finding(
            "sequence-too-long",
            Level.FAIL if seen.shape is not None and _learned_positions(seen.shape) else Level.WARN,
            f"The plan has {tokens} tokens a sequence, the model was made for {longest}.",
            "Beyond that the model has no learned positions (index error) or was never trained at them.",
            (f"plan with at most {longest}: `--seq-len {longest}`",),
            "config.json, max_position_embeddings",
        )
    ]


def _learned_positions(shape: ModelShape) -> bool:
    return any("position" in m.path or m.path.endswith("wpe") for m in shape.rest if m.kind == "embedding")


def check_tokenizer(seen: Seen) -> list[Finding]:
    """Tokenizer, special tokens and chat template."""
    stops = eos_ids(seen.directory.generation_config.object, seen.directory.config.object)
    return [
        *check_tokenizer_config(seen.tokenizer),
        *check_tokenizer_files(seen.tokenizer, seen.directory, seen.versions.of("transformers")),
        *check_template(seen.tokenizer, seen.rendered),
        *check_token_ids(seen.tokenizer, seen.shape, seen.directory.config.object),
        *check_special_tokens(seen.tokenizer, seen.rendered, stops),
        *check_tokens_there(seen.tokenizer, seen.rendered),
    ]


def check_memory(seen: Seen) -> list[Finding]:
    """What training takes, and whether it fits."""
    return list(seen.memory_findings)


def check_phone(seen: Seen) -> list[Finding]:
    """Whether it could run on a phone, when that was asked."""
    return list(seen.phone_findings)


CHECKS = (
    check_directory,
    check_parameters,
    check_module_tree,
    check_loading,
    check_base,
    check_lora,
    check_attention_taken,
    check_length,
    check_tokenizer,
    check_memory,
    check_phone,
)


def look_and_judge(machine: Machine, args: argparse.Namespace) -> Section:
    """The section about one model, or the comparison of several."""
    python = choose_python(machine, args.python, needs=("transformers",))
    planned = {name: value for name in ("transformers", "peft") if (value := getattr(args, name))}
    versions = read_versions(machine, python, planned)
    card = read_card(machine, args)
    if len(args.models) == 1:
        try:
            seen = look(machine, args.models[0], args, card, versions, python)
        except HubTrouble as trouble:
            return Section(STAGE, {"model_name": quote(args.models[0], 120)}, (trouble.finding,))
        return Section(STAGE, facts_of(seen), run_checks(CHECKS, seen))
    findings: list[Finding] = []
    models = []
    for name in args.models:
        try:
            one = look(machine, name, args, card, versions, python)
        except HubTrouble as trouble:
            findings.append(trouble.finding)
            models.append(dict.fromkeys(SHOWN) | {"model_name": quote(name, 120), "level": trouble.finding.level.value})
            continue
        judged = run_checks(CHECKS, one)
        findings += [replace(f, what=f"{quote(one.name, 60)}: {f.what}") for f in judged if f.level is not Level.OK]
        if all(f.level is Level.OK for f in judged):
            findings.append(Finding("model-ok", Level.OK, f"{quote(one.name, 60)}: nothing stands in the way."))
        facts = facts_of(one)
        if facts["memory"]:  # a comparison shows what each method takes, not every component of it
            facts["memory"] = {key: facts["memory"].get(key) for key in ("by_method", "verdict")}
        models.append(facts | {"level": max((f.level for f in judged), key=lambda level: level.weight).value})
    return Section(STAGE, {"models": models}, tuple(findings))


def main(argv: Sequence[str] | None = None) -> int:
    """Run this stage. Returns the exit code."""
    args = make_parser().parse_args(argv)
    if args.write_launch:
        from preflight.launch import write_launch

        for path in write_launch(args.write_launch, plans.plan_from_flags(args)[0]):
            say(f"Written: {path}")
    return run_stage(STAGE, args, look_and_judge)


def command() -> None:
    """The entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
