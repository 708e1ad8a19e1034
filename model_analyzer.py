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
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from preflight import plan as plans
from preflight.adapter_choice import (
    Choice,
    Rank,
    adapter_facts,
    asked_facts,
    check_adapters,
    check_asked_targets,
    check_heads,
    check_structure,
    choices,
    recommend_rank,
    recommended,
)
from preflight.attention import Supported, Taken, attention_facts, check_attention, read_supported, taken
from preflight.chat_template import (
    Rendered,
    Tokenizer,
    check_special_tokens,
    check_template,
    check_token_ids,
    check_tokenizer_config,
    eos_ids,
    read_tokenizer,
    render_templates,
    template_facts,
)
from preflight.console import UsageError, parser, run_main, run_stage
from preflight.directory_checks import (
    adapter_facts as saved_adapter_facts,
)
from preflight.directory_checks import (
    check_adapter_beside,
    check_config,
    check_links,
    check_weights,
)
from preflight.findings import Finding, Level, Section, crashed, quote, run_checks, say
from preflight.hub import HubTrouble, fetch_model, is_hub_id
from preflight.machine import Interpreter, Machine, choose_python
from preflight.memory.budget import Budget, named_card
from preflight.model_directory import ModelDirectory, read_model_directory, stored_bytes
from preflight.model_shape import ConfigTrouble, ModelShape, read_dtype, read_shape
from preflight.module_tree import Tree, ask_tree, check_tree, lora_requests, tree_facts, wanted
from preflight.phone import add_flags as phone_flags
from preflight.phone import phone
from preflight.plan import Plan
from preflight.quantised import (
    Quantised,
    check_four_bit,
    check_quantised,
    four_bit_bytes,
    four_bit_coverage,
    method_on,
    packed_bytes,
    quantised_facts,
    read_quantised,
)
from preflight.support import (
    Support,
    Versions,
    at_least,
    check_support,
    read_support,
    read_versions,
    support_facts,
    versions_facts,
)

STAGE = "model_analyzer"
# What a comparison shows of every model, also of one whose shape could not be read.
SHOWN = (
    "params", "params_active", "params_towers", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "dtype", "kv_bytes_per_token_bf16", "weight_bytes",
)  # fmt: skip
# English text and code: 3.5 to 4.5 bytes a token with the tokenizers of current models.
BYTES_PER_TOKEN = 4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Card:
    """The card that is judged for. `gpu` False: none, training would run on the CPU; None: not known."""

    gpu: bool | None
    capability: str | None
    name: str | None
    budget: Budget | None


@dataclass(frozen=True)
class Seen:
    """Everything that was looked at; the checks judge nothing else."""

    name: str
    directory: ModelDirectory
    shape: ModelShape | None
    shape_trouble: str
    versions: Versions
    support: Support
    quantised: Quantised | None
    tokenizer: Tokenizer
    rendered: dict[str, Rendered]
    made: list[Choice]
    rank: Rank | None
    plan: Plan
    card: Card
    supported: Supported
    taken: Taken | None
    memory: dict[str, Any]
    memory_findings: tuple[Finding, ...]
    tree: Tree | None = None
    phone: dict[str, Any] | None = None
    phone_findings: tuple[Finding, ...] = ()


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
    here.add_argument("--recommend", action="store_true", help="also show what would fit when the plan fits already")
    here.add_argument(
        "--rehearse", action="store_true",
        help="run the training step of this plan on fake tensors with the packages under test (minutes, no GPU)",
    )  # fmt: skip
    phone_flags(made)
    data = made.add_argument_group("data and limits")
    data.add_argument("--tokens", type=int, metavar="N", help="tokens that will be trained on (for the LoRA rank)")
    data.add_argument("--data", metavar="FILE", help="training data, to estimate its tokens (for the LoRA rank)")
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


def read_card(machine: Machine, args: argparse.Namespace) -> Card:
    """The card to judge for: named on the command line, else the first that is here, else none."""
    from preflight.capability import capability_from_name, completed
    from preflight.gpus import read_gpus

    if args.gpu_vram_gb is not None and not 0 < args.gpu_vram_gb < 100_000:
        raise UsageError(f"--gpu-vram-gb {args.gpu_vram_gb}: a size in GiB above 0 is needed")
    named = capability_from_name(args.gpu) if args.gpu else None
    if args.gpu and named is None:
        raise UsageError(f"--gpu {args.gpu}: not a known card; name it as nvidia-smi does, or give 8.6 and the like")
    if args.gpu_vram_gb is not None:
        return Card(True, named, args.gpu, named_card(args.gpu_vram_gb))
    gpus = [] if args.gpu else [completed(gpu) for gpu in read_gpus(machine)]
    if gpus:
        gpu = max(gpus, key=lambda each: each.free_bytes or each.total_bytes or 0)
        free = gpu.free_bytes if gpu.free_bytes is not None else gpu.total_bytes
        budget = Budget(free, gpu.total_bytes, gpu.used_bytes, unified_memory=bool(gpu.unified_memory), name=gpu.name)
        return Card(True, gpu.compute_capability, gpu.name, budget)
    if args.gpu:
        return Card(True, named, args.gpu, None)
    if args.here:
        from preflight.host import read_host

        host = read_host(machine)
        return Card(
            False, None, "CPU", Budget(host.ram_available_bytes, host.ram_total_bytes, name="this machine's RAM")
        )
    return Card(None, None, None, None)


def look(
    machine: Machine, name: str, args: argparse.Namespace, card: Card, versions: Versions, python: Interpreter
) -> Seen:
    """Everything about one model."""
    fetched = fetch_model(machine, python.path, name) if is_hub_id(name) else None
    if fetched is not None and fetched.trouble:
        raise HubTrouble(name, fetched)
    directory = read_model_directory(
        fetched.folder if fetched else name, args.follow_links, fetched.listing if fetched else None
    )
    shape, trouble = None, ""
    if directory.config.object:
        try:
            shape = read_shape(directory.config.object)
        except ConfigTrouble as error:
            trouble = str(error)
    support = read_support(directory, shape, versions)
    tree = None
    if wanted(args, directory, shape, support, versions):
        tree = ask_tree(machine, python.path, directory, args.trust_remote_code, lora_requests())
        if tree.shape is not None and (shape is None or shape.structure == "unknown"):
            shape, trouble = tree.shape, ""
    quantised = read_quantised(directory.config.object, directory)
    tokenizer = read_tokenizer(directory, args.follow_links)
    rendered = render_templates(tokenizer)
    plan, choose = plans.plan_from_flags(args)
    plan = replace(plan, compute_capability=card.capability or plan.compute_capability)
    if plan.transformers is None:
        plan = replace(plan, transformers=versions.of("transformers"))
    unsaid = args.autocast is None and args.weight_dtype is None and not args.config
    if unsaid and card.capability is not None and not at_least(card.capability, "8.0"):
        plan = replace(plan, autocast="fp16", weight_dtype="fp16")  # these cards only emulate bf16
    if args.sequence_tokens is None and not args.config and shape is not None and shape.max_position:
        plan = replace(plan, sequence_tokens=min(plan.sequence_tokens, shape.max_position))
    made = choices(shape, support.native) if shape is not None else []
    tokens = trained_tokens(args)
    rank = recommend_rank(shape, recommended(made), tokens) if shape is not None else None
    supported = read_supported(shape, directory, versions, support.native)
    if tree is not None and tree.shape is not None:
        has = tree.attention
        where = f"transformers {tree.versions.get('transformers', '?')}"
        supported = Supported(has.get("sdpa"), has.get("flash"), has.get("flex"), where)
    memory, findings = (
        read_memory(shape, plan, choose, card, quantised, args.recommend) if shape is not None else ({}, [])
    )
    if args.rehearse and memory:
        chosen = replace(plan, method=memory["plan"]["method"])
        memory["rehearsal"], findings = rehearsed(machine, python.path, directory, chosen, card, args, findings)
    on_phone, phone_findings = phone(shape, args)
    chosen = plan if not memory else replace(plan, method=memory["plan"]["method"])
    return Seen(
        name=name if fetched else directory.path.resolve().name if name in (".", "..") else Path(name).name or name,
        directory=directory,
        shape=shape,
        shape_trouble=trouble,
        versions=versions,
        support=support,
        quantised=quantised,
        tokenizer=tokenizer,
        rendered=rendered,
        made=made,
        rank=rank,
        plan=chosen,
        card=card,
        supported=supported,
        taken=taken(shape, chosen, supported, card.capability, versions, card.gpu) if shape is not None else None,
        memory=memory,
        memory_findings=tuple(findings),
        tree=tree,
        phone=on_phone,
        phone_findings=tuple(phone_findings),
    )


def trained_tokens(args: argparse.Namespace) -> int | None:
    """Tokens that will be trained on: as given, else about four bytes of text each in the data file.

    Raises UsageError for a file that cannot be read.
    """
    if args.tokens is not None:
        if args.tokens < 1:
            raise UsageError(f"--tokens {args.tokens}: a number of at least 1 is needed")
        return int(args.tokens)
    if args.data is None:
        return None
    try:
        return max(1, Path(args.data).stat().st_size // BYTES_PER_TOKEN)
    except OSError as error:
        raise UsageError(f"--data {args.data}: cannot be read ({error.strerror})") from error


_FIT = {"memory-fits": "memory-fit-yes", "memory-marginal": "memory-fit-marginal", "memory-too-small": "memory-fit-no"}


def read_memory(
    shape: ModelShape, plan: Plan, choose: bool, card: Card, quantised: Quantised | None, recommend: bool
) -> tuple[dict[str, Any], list[Finding]]:
    """What the plan takes and whether that fits; without a card only what it takes.

    A quantised base has one way only: LoRA on what it is once it is loaded.
    """
    from preflight.memory.report import memory

    only = method_on(quantised) if quantised is not None else None
    if only is not None and (choose or plan.method in ("full", "lora", "qlora")):
        plan, choose = replace(plan, method=only), False
    budget = card.budget or Budget(None)
    try:
        observed, findings = memory(shape, plan, budget, choose, recommend)
    except Exception as error:  # a layer that the estimate does not know must not cost the rest of this section
        return {}, [crashed("memory", error)]
    if only is not None and (made := observed.get("estimate")):
        sizes = {key: made[key] for key in ("allocated_bytes", "reserved_bytes")}
        observed["by_method"] = {only: {**sizes, "verdict": observed.get("verdict")}}
    if card.budget is None and observed.get("by_method"):
        needs = ", ".join(
            f"{method} {item['allocated_bytes'] / 2**30:.1f} GiB" for method, item in observed["by_method"].items()
        )
        seen = "The memory of that card is not known" if card.gpu else "No GPU was seen here and none was named"
        note = f"{seen}: whether it fits was not judged (`--gpu-vram-gb N`, `--here`)."
        where = f"{plan.micro_batch} x {plan.sequence_tokens} tokens"
        return observed, [
            Finding(
                "memory-needs",
                Level.OK,
                f"Peak of training with {where}: {needs}.",
                note,
                source="preflight/memory/closed_form.py",
            )
        ]
    findings = [replace(finding, code=_FIT.get(finding.code, finding.code)) for finding in findings]
    return observed, [_on_cpu(finding) for finding in findings] if card.gpu is False else findings


def rehearsed(
    machine: Machine,
    python: str,
    directory: ModelDirectory,
    plan: Plan,
    card: Card,
    args: argparse.Namespace,
    findings: list[Finding],
) -> tuple[dict[str, Any], list[Finding]]:
    """What the rehearsal says; its verdict takes the place of the closed form's when there is a card to judge for."""
    from preflight.memory.budget import judge
    from preflight.memory.rehearsal import TIMEOUT_S, Job, rehearse
    from preflight.memory.report import describe

    say(f"rehearsing the training step (up to {TIMEOUT_S:.0f} s)")
    folder = str(directory.path.resolve()) if args.trust_remote_code else None
    job = Job(directory.config.object, plan, folder, args.trust_remote_code)
    made = rehearse(machine, python, [job])[0]
    if made.estimate is None:
        trouble = Finding(
            "rehearsal-failed",
            Level.UNKNOWN,
            f"The training step could not be rehearsed: {quote(made.trouble)}",
            f"It ended in the step {quote(made.step or 'start', 60)}; the closed form above is what is left.",
            ("name an interpreter with torch, transformers and peft: `--python PATH`",),
            "preflight/memory/rehearsal.py",
        )
        return {"trouble": quote(made.trouble), "estimate": None}, [*findings, trouble]
    observed = {"trouble": None, "estimate": made.estimate.as_json(), "seconds": made.seconds}
    if card.budget is None:
        peak = made.estimate.allocated_bytes / 2**30
        told = Finding(
            "memory-rehearsed",
            Level.OK,
            f"{describe(plan)}: the rehearsed step peaks at {peak:.2f} GiB of tensors (at: {made.estimate.moment}).",
            source="preflight/memory/rehearsal.py",
        )
        return observed, [*findings, told]
    verdict = judge(made.estimate, card.budget, f"{describe(plan)}, rehearsed with the packages under test,")
    verdict = replace(verdict, code=_FIT.get(verdict.code, verdict.code))
    return observed, [verdict, *(f for f in findings if not f.code.startswith("memory-fit-"))]


def _on_cpu(finding: Finding) -> Finding:
    """The same about training in this machine's RAM: there is no CUDA context there."""
    what = re.sub(r", plus about [\d.]+ GiB of CUDA context", "", finding.what).replace("is free.", "of RAM is free.")
    note = " The figures are those of the same run on a GPU; the CPU keeps the same tensors."
    return replace(finding, what=what, why=finding.why + note)


# ---------------------------------------------------------------------------------------------------------------------
# checks: each judges what was seen


def check_directory(seen: Seen) -> list[Finding]:
    """The directory, its configuration and its weights."""
    return [
        *check_config(seen.directory, seen.shape_trouble),
        *check_links(seen.directory),
        *check_adapter_beside(seen.directory),
        *check_weights(seen.directory, seen.shape),
    ]


def check_parameters(seen: Seen) -> list[Finding]:
    """Whether the parameters could be counted."""
    shape = seen.shape
    if shape is None:
        return []
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
        *check_template(seen.tokenizer, seen.rendered),
        *check_token_ids(seen.tokenizer, seen.shape, seen.directory.config.object),
        *check_special_tokens(seen.tokenizer, seen.rendered, stops),
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


def facts_of(seen: Seen) -> dict[str, Any]:
    """What was observed, as plain JSON data with flat names."""
    shape, directory = seen.shape, seen.directory
    dtype = read_dtype(directory.config.object)
    made: dict[str, Any] = {"model_name": quote(seen.name, 120)}
    made |= shape_facts(shape, dtype, directory, seen.quantised)
    made |= support_facts(seen.support, seen.versions, directory)
    made["config_bom"] = directory.config.bom
    made["weights"] = {
        "complete": directory.weights.complete if directory.weights.present else None,
        "missing": list(directory.weights.missing),
        "lfs_pointers": list(directory.weights.pointers),
        "damaged": [list(item) for item in directory.weights.damaged],
        "index_total_size": directory.weights.index_total_bytes,
        "elements": directory.weights.elements,
        "bytes_by_dtype": dict(directory.weights.bytes_by_dtype),
    }
    made["adapter"] = saved_adapter_facts(directory) or None
    made["quantization"] = (
        quantised_facts(seen.quantised, shape, directory, seen.versions, seen.card.capability, seen.card.gpu) or None
    )
    made |= {"four_bit": None, "lora": None, "tokenizer": None, "memory": seen.memory or None}
    if shape is not None and shape.parameters is not None and seen.quantised is None:
        made["four_bit"] = {"coverage": four_bit_coverage(shape), "weight_bytes": four_bit_bytes(shape)}
    if shape is not None and seen.rank is not None:
        made["lora"] = adapter_facts(shape, seen.made, seen.rank)
        made["lora"]["asked"] = asked_facts(shape, seen.plan.target_modules, seen.plan.lora_rank)
    made["attention"] = attention_facts(seen.supported, seen.taken, seen.plan)
    if seen.tokenizer.present:
        made["tokenizer"] = {
            **template_facts(seen.tokenizer, seen.rendered),
            "special_tokens": dict(seen.tokenizer.tokens),
            "max_token_id": seen.tokenizer.max_token_id,
            "embedding_rows": shape.vocab_size if shape else None,
        }
    made["phone"] = seen.phone
    made["module_tree"] = tree_facts(seen.tree)
    made["card"] = {"name": seen.card.name, "compute_capability": seen.card.capability}
    made["versions"] = versions_facts(seen.versions)
    return made


def shape_facts(
    shape: ModelShape | None, dtype: str | None, directory: ModelDirectory, quantised: Quantised | None
) -> dict[str, Any]:
    """The numbers of the model."""
    if shape is None:
        return dict.fromkeys(SHOWN) | {"dtype_in_config": dtype}
    width = BYTES.get(dtype or "bfloat16", 2)
    as_loaded = shape.parameters * width if shape.parameters else None
    if quantised is not None:
        as_loaded = packed_bytes(shape, quantised)
    values = shape.kv_values_per_token
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    counted = shape.parameters
    stored = stored_bytes(directory.weights)
    mixers: dict[str, int] = {}
    for group in shape.groups:
        if group.stack in ("decoder", "encoder"):
            key = group.mixer if group.mixer != "none" else group.mlp if group.mlp != "dense" else "mlp"
            mixers[key] = mixers.get(key, 0) + group.count
    decoder = [group for group in shape.groups if group.stack in ("decoder", "encoder")]
    made = {
        "params": counted,
        "params_active": shape.active_parameters,
        "params_embedding": shape.embedding_parameters,
        "params_head": shape.head_parameters,
        "params_towers": shape.other_tower_parameters,
        "structure": shape.structure,
        "dtype_in_config": dtype,
        "dtype": dtype,
        "weight_bytes": stored if stored is not None else as_loaded,
        "weight_bytes_bf16": counted * 2 if counted else None,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": shape.v_head_dim,
        "q_proj_out": heads * head_dim if heads and head_dim else None,
        "kv_proj_out": kv_heads * head_dim if kv_heads and head_dim else None,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position": shape.max_position,
        "mlp_is_gated": shape.gated_mlp,
        "activation": shape.activation,
        "tie_word_embeddings": shape.tied_embeddings,
        "kv_bytes_per_token_bf16": values * 2 if values is not None else None,
        "kv_bytes_per_token_fp16": values * 2 if values is not None else None,
        "layers": mixers,
        "moe_layers": sum(group.count for group in decoder if "moe" in group.mlp),
        "dense_layers": sum(group.count for group in decoder if group.mlp == "dense"),
        "multimodal": shape.other_tower_parameters > 0 or shape.language_key is not None,
        "language_config_key": shape.language_key,
        "encoder_decoder": shape.encoder_decoder,
    }
    if shape.moe is not None:
        made |= {"experts": shape.moe.experts, "experts_per_token": shape.moe.per_token}
    if shape.mla is not None:
        made |= {
            "attention_kind": "mla",
            "q_lora_rank": shape.mla.q_rank,
            "latent_cache_values_per_token_per_layer": shape.mla.kv_rank + shape.mla.rope_dim,
        }
    return made


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
    return run_stage(STAGE, make_parser().parse_args(argv), look_and_judge)


def command() -> None:
    """The entry point of the installed command."""
    sys.exit(run_main(main))


if __name__ == "__main__":
    command()
