"""Everything that is looked at about one model: the plain data that the model stage judges."""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from preflight import plan as plans
from preflight.console import UsageError
from preflight.findings import Finding, Level, crashed, quote
from preflight.machine import Interpreter, Machine
from preflight.memory.budget import Budget, named_card
from preflight.model.adapter_choice import (
    Choice,
    Rank,
    choices,
    recommend_rank,
    recommended,
)
from preflight.model.attention import Supported, Taken, read_supported, taken
from preflight.model.chat_template import (
    Rendered,
    Tokenizer,
    read_tokenizer,
    render_templates,
)
from preflight.model.hub import HubTrouble, fetch_model, is_hub_id
from preflight.model.model_directory import ModelDirectory, read_model_directory
from preflight.model.module_tree import Tree, ask_tree, lora_requests, wanted
from preflight.model.phone import phone
from preflight.model.quantised import (
    Quantised,
    method_on,
    read_quantised,
)
from preflight.model.support import (
    Support,
    Versions,
    at_least,
    read_support,
)
from preflight.model_shape import ConfigTrouble, ModelShape, read_shape
from preflight.plan import Plan

if TYPE_CHECKING:
    from preflight.memory.schedule import Lengths

T = TypeVar("T")

# English text and code: 3.5 to 4.5 bytes a token with the tokenizers of current models.
BYTES_PER_TOKEN = 4


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


def read_card(machine: Machine, args: argparse.Namespace) -> Card:
    """The card to judge for: named on the command line, else the first that is here, else none."""
    from preflight.gpus import read_gpus
    from preflight.hardware.capability import capability_from_name, completed

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
        from preflight.host import read_environments

        places = read_environments(machine)
        windows = gpu.driver_model is not None and gpu.driver_model.upper() == "WDDM"
        budget = Budget(
            free,
            gpu.total_bytes,
            gpu.used_bytes,
            unified_memory=bool(gpu.unified_memory),
            mig=gpu.parent is not None,
            windows=windows,
            wsl="wsl2" in places or "wsl1" in places,
            name=gpu.name,
        )
        return Card(True, gpu.compute_capability, gpu.name, budget)
    if args.gpu:
        from preflight.memory.speed import card_named

        published = card_named(args.gpu)
        return Card(True, named, args.gpu, named_card(published.memory_gib) if published else None)
    if args.here:
        from preflight.host import read_host

        host = read_host(machine)
        return Card(
            False,
            None,
            "CPU",
            Budget(host.ram_available_bytes, host.ram_total_bytes, cpu=True, name="this machine's RAM"),
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
    tokenizer = read_tokenizer(directory, args.follow_links)
    rendered = _meanwhile(lambda: render_templates(tokenizer))  # a child of its own; the rest needs one core
    shape, trouble = None, ""
    if directory.config.object:
        try:
            shape = read_shape(directory.config.object)
        except ConfigTrouble as error:
            trouble = str(error)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:  # values of odd types
            trouble = f"its values do not fit together ({type(error).__name__}: {error})"
    support = read_support(directory, shape, versions)
    tree = None
    if wanted(args, directory, shape, support, versions):
        tree = ask_tree(machine, python.path, directory, args.trust_remote_code, lora_requests())
        if tree.shape is not None and (shape is None or shape.structure in ("unknown", "language part")):
            shape, trouble = tree.shape, ""
    version = versions.of("transformers")
    if shape is not None and version and not at_least(version, "5.0"):
        from preflight.model.families.moe import as_transformers_4

        shape = as_transformers_4(shape)
    quantised = read_quantised(directory.config.object, directory)
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
    lengths = read_data(machine, args, python, directory)
    memory, findings = (
        read_memory(shape, plan, choose, card, quantised, args.recommend, lengths) if shape is not None else ({}, [])
    )
    if memory and shape is not None:
        findings = deepened(machine, args, python, directory, shape, plan, choose, card, versions, support, memory,
                            findings)  # fmt: skip
    if memory.get("plan") and shape is not None:
        plan = plans.plan_of(memory["plan"])
        if lengths is not None:
            memory["schedule"], told = timed(shape, plan, lengths, args, card)
            findings = [*findings, *told]
        findings = [*findings, *beside_the_gpu(machine, shape, plan, card, memory)]
    findings = [*findings, *config_notes(args)]
    on_phone, phone_findings = phone(shape, args)
    return Seen(
        name=name if fetched else directory.path.resolve().name if name in (".", "..") else Path(name).name or name,
        directory=directory,
        shape=shape,
        shape_trouble=trouble,
        versions=versions,
        support=support,
        quantised=quantised,
        tokenizer=tokenizer,
        rendered=rendered(),
        made=made,
        rank=rank,
        plan=plan,
        card=card,
        supported=supported,
        taken=taken(shape, plan, supported, card.capability, versions, card.gpu) if shape is not None else None,
        memory=memory,
        memory_findings=tuple(findings),
        tree=tree,
        phone=on_phone,
        phone_findings=tuple(phone_findings),
    )


def beside_the_gpu(
    machine: Machine, shape: ModelShape, plan: Plan, card: Card, memory: dict[str, Any]
) -> list[Finding]:
    """RAM and disk that training takes of the host; compared with this machine when it is the one that is judged."""
    from preflight.host import read_host
    from preflight.memory.host_needs import host_needs, judge_host

    needs = host_needs(shape, plan, on_cpu=card.budget is not None and card.budget.cpu)
    if needs is None:
        return []
    memory["host"] = {name: [need.as_json() for need in found] for name, found in needs.items()}
    here = card.budget is not None and not card.budget.assumed
    return judge_host(needs, read_host(machine, disks=True) if here else None)


def _meanwhile(work: Callable[[], T]) -> Callable[[], T]:
    """Start `work` on a thread; the call of what comes back waits for its result, or raises what it raised."""
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> T:
        thread.join()
        if failed:
            raise failed[0]
        return done[0]

    return result


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


def read_memory(
    shape: ModelShape,
    plan: Plan,
    choose: bool,
    card: Card,
    quantised: Quantised | None,
    recommend: bool,
    lengths: Lengths | None = None,
) -> tuple[dict[str, Any], list[Finding]]:
    """What the plan takes and whether that fits; without a card only what it takes.

    A quantised base has one way only: LoRA on what it is once it is loaded.
    """
    from preflight.memory.report import memory
    from preflight.memory.speed import card_named

    if shape.vocab_size is None and shape.structure != "unknown":
        return {}, []  # not a language model: the formulas do not apply, and another finding says so
    only = method_on(quantised) if quantised is not None else None
    if only is not None and (choose or plan.method in ("full", "lora", "qlora")):
        plan, choose = replace(plan, method=only), False
    budget = card.budget or Budget(None)
    try:
        longest = lengths.longest if lengths is not None and lengths.counted_by == "tokenizer" else None
        observed, findings = memory(shape, plan, budget, choose, recommend, card_named(card.name), longest)
    except Exception as error:  # a layer that the estimate does not know must not cost the rest of this section
        return {}, [crashed("memory", error)]
    if only is not None and (made := observed.get("estimate")):
        sizes = {key: made[key] for key in ("allocated_bytes", "reserved_bytes")}
        observed["by_method"] = {only: {**sizes, "verdict": observed.get("verdict")}}
    partly = shape.structure == "language part"
    if partly and card.budget is not None and observed.get("verdict") != "no":
        return observed, [
            Finding(
                "memory-of-language-part",
                Level.UNKNOWN,
                f"Could not tell whether it fits: the language model alone takes {_gib(observed)} at the peak.",
                "The vision or audio part comes on top, and its size is not known here.",
                ("add the size of those weights to this figure",),
                "preflight/memory/closed_form.py",
            )
        ]
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
                f"Peak of training with {where}: {needs}{' (the language model alone)' if partly else ''}.",
                note,
                source="preflight/memory/closed_form.py",
            )
        ]
    return observed, [_on_cpu(finding) for finding in findings] if card.gpu is False else findings


def _gib(observed: dict[str, Any]) -> str:
    made = observed.get("estimate")
    return f"{made['allocated_bytes'] / 2**30:.1f} GiB" if made else "an unknown amount"


def deepened(
    machine: Machine,
    args: argparse.Namespace,
    python: Interpreter,
    directory: ModelDirectory,
    shape: ModelShape,
    plan: Plan,
    choose: bool,
    card: Card,
    versions: Versions,
    support: Support,
    memory: dict[str, Any],
    findings: list[Finding],
) -> list[Finding]:
    """The findings after better evidence than formulas was looked for, as far as that was asked; fills `memory`."""
    compare = args.compare or args.compare_to is not None
    must = args.rehearse or args.evidence == "rehearsed" or compare
    if not must and not args.measure and args.evidence == "closed":
        return findings
    from preflight.memory import evidence

    needs_code = not support.native

    rehearse = evidence.wanted("rehearsed" if must else args.evidence, versions.packages, versions.planned, needs_code)
    if not rehearse and not args.measure and not compare:
        return findings
    if args.compare_to is not None:
        evidence.check_file(args.compare_to)
    asked = evidence.Question(
        python.path,
        directory.path.name,
        directory.config.object,
        shape,
        replace(plan, method=memory["plan"]["method"]),
        card.budget,
        choose,
        str(directory.path.resolve()) if args.trust_remote_code else None,
    )
    if rehearse:
        findings = evidence.rehearsed(machine, asked, memory, findings, must)
        asked = replace(asked, plan=plans.plan_of(memory["plan"]))
    if args.measure or compare:
        findings = [*findings, evidence.measured(machine, asked, memory)]
    if compare:
        memory["comparison"] = evidence.comparison(memory)
        findings = [*findings, evidence.compared(memory)]
    if args.compare_to is not None:
        evidence.append(args.compare_to, evidence.row(asked.name, memory, card.name))
    return findings


def read_data(
    machine: Machine, args: argparse.Namespace, python: Interpreter, directory: ModelDirectory
) -> Lengths | None:
    """Token lengths of `--data`: with `--recommend` real ones, else about four bytes a token, at once."""
    if args.data is None:
        return None
    from preflight.memory.schedule import read_lengths

    if not Path(args.data).is_file():
        raise UsageError(f"--data {args.data}: {'is a directory' if Path(args.data).is_dir() else 'no such file'}")
    real = python.path if args.recommend and directory.path.is_dir() else None
    return read_lengths(machine, real, str(directory.path), args.data)


def timed(
    shape: ModelShape, plan: Plan, lengths: Lengths, args: argparse.Namespace, card: Card
) -> tuple[dict[str, Any] | None, list[Finding]]:
    """How many updates and hours the run on `--data` is."""
    from preflight.memory.schedule import check_schedule, schedule
    from preflight.memory.speed import card_named

    if not lengths.samples:
        return None, [check_schedule(None, lengths.trouble)]
    epochs = args.epochs
    if epochs is not None and not 0 < epochs < 10_000:
        raise UsageError(f"--epochs {epochs}: a number above 0 is needed")
    if epochs is None and args.config:
        value = plans.read_configuration(args.config).raw.get("num_train_epochs")
        epochs = float(value) if isinstance(value, (int, float)) and 0 < value < 10_000 else None
    made = schedule(shape, plan, lengths, epochs, card_named(card.name))
    return made, [check_schedule(made)]


def config_notes(args: argparse.Namespace) -> list[Finding]:
    """What of `--config` was not taken over, one finding each."""
    if not args.config:
        return []
    found = plans.read_configuration(args.config)
    return [
        Finding(
            "config-not-taken-over",
            Level.WARN,
            f"Of the {found.format} configuration {quote(Path(args.config).name, 80)}: {quote(note)}.",
            "What is judged here differs from what that file would run in this point, and so may the memory it takes.",
            ("add the flag that says it (`python model_analyzer.py --help`), or judge a training_config.yaml",),
            "preflight/foreign_configs.py",
        )
        for note in found.notes
    ]


def _on_cpu(finding: Finding) -> Finding:
    """The same about training in this machine's RAM: there is no CUDA context there."""
    what = re.sub(r", plus about [\d.]+ GiB of CUDA context", "", finding.what)
    note = " The figures are those of the same run on a GPU; the CPU keeps the same tensors."
    return replace(finding, what=what, why=finding.why + note)
