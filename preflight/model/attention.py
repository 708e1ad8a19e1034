"""Which attention will training really take in this model on this card, and does it keep memory that grows with s²?"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from preflight import facts
from preflight.findings import Finding, Level, quote
from preflight.memory.blocks import sdpa_backend
from preflight.model.model_directory import ModelDirectory, Reader
from preflight.model.support import Versions, at_least
from preflight.model_shape import ModelShape
from preflight.plan import Plan

MOST_CODE_BYTES = 2 << 20
_SOURCE = "facts/FACTS.md section 5 (pytorch sdp_utils.cpp; transformers 5.24, integrations/sdpa_attention.py)"


@dataclass(frozen=True)
class Supported:
    """Attention implementations that the architecture has; None: could not be told. `where` says how it is known."""

    sdpa: bool | None
    flash: bool | None
    flex: bool | None
    where: str
    flash_required: bool = False


@dataclass(frozen=True)
class Taken:
    """What training takes: `implementation` (sdpa, eager, flash_attention_2), and the SDPA `backend` on this card.

    `quadratic_bytes` is the size of one [batch, heads, s, s] tensor of one layer where the way keeps such tensors,
    0 where it does not, None when the card or the model is not known.
    """

    implementation: str
    backend: str | None
    quadratic_bytes: int | None
    reason: str
    trouble: str = ""


def read_supported(shape: ModelShape | None, directory: ModelDirectory, versions: Versions, native: bool) -> Supported:
    """What the architecture supports: from the table for transformers' own, from the source text for remote code."""
    kind = (shape.model_type if shape else None) or ""
    types = facts.table("arch_support")["model_types"]
    # The table has the flags of gemma3_text and its like under gemma3.
    row = next((types[name] for name in (kind, kind.removesuffix("_text")) if "latest" in types.get(name, {})), None)
    if native and row:
        version = versions.of("transformers")
        latest = row["latest"]
        sdpa = bool(latest["sdpa"])
        since = row.get("sdpa_since")
        if sdpa and since and version and not str(since).startswith("<=") and not at_least(version, since):
            sdpa = False
        where = f"transformers {version or facts.table('arch_support')['latest_transformers']}"
        return Supported(sdpa, bool(latest["flash"]), bool(latest["flex"]), where)
    if not native and directory.code_files:
        return parse_modeling(directory)
    return Supported(None, None, None, "could not tell")


def parse_modeling(directory: ModelDirectory) -> Supported:
    """What modeling_*.py supports, read with `ast`; nothing is imported."""
    sdpa = flash = flex = required = False
    read = []
    reader = Reader(directory.path, False)
    for name in directory.code_files:
        if not name.startswith("modeling") or directory.files[name] > MOST_CODE_BYTES:
            continue
        try:
            tree = ast.parse(reader.head(name, MOST_CODE_BYTES))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        read.append(name)
        guarded = _guarded(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is True:
                names = {target.id for target in node.targets if isinstance(target, ast.Name)}
                sdpa |= "_supports_sdpa" in names
                flash |= bool(names & {"_supports_flash_attn", "_supports_flash_attn_2"})
                flex |= "_supports_flex_attn" in names
            elif isinstance(node, (ast.Attribute, ast.Name)):
                word = node.attr if isinstance(node, ast.Attribute) else node.id
                sdpa |= word in ("scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                if any(module.split(".")[0] == "flash_attn" for module in modules):
                    flash = True
                    required |= id(node) not in guarded
    if not read:
        return Supported(None, None, None, "could not tell")
    return Supported(sdpa, flash, flex, ", ".join(quote(name, 60) for name in read), required)


def _guarded(tree: ast.AST) -> set[int]:
    """The nodes inside try, if and functions: an import there need not succeed."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Try, ast.If, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.update(id(inner) for inner in ast.walk(node) if inner is not node)
    return found


def taken(
    shape: ModelShape, plan: Plan, supported: Supported, capability: str | None, versions: Versions, gpu: bool | None
) -> Taken:
    """The implementation and backend of a training step under this plan. `gpu` False: training on the CPU."""
    wanted = plan.attention
    if wanted in ("sdpa_math", "sdpa_mem_efficient", "sdpa_flash"):
        wanted = "sdpa"
    has_mixers = any(group.mixer in ("attention", "mla") for group in shape.groups) or shape.structure == "unknown"
    if not has_mixers:
        return Taken("none", None, 0, "this architecture has no attention")
    if wanted == "flash_attention_2":
        trouble = ""
        if supported.flash is False:
            trouble = f"this architecture does not support it ({supported.where}): from_pretrained raises ValueError"
        elif gpu is False:
            trouble = "it needs a CUDA GPU"
        elif capability is not None and not at_least(capability, "8.0"):
            trouble = f"it needs compute capability 8.0, this card has {capability}: it fails in the first forward pass"
        elif versions.packages is not None and not versions.of("flash-attn") and not versions.of("kernels"):
            trouble = "neither flash-attn nor kernels is installed: from_pretrained raises ImportError"
        return Taken("flash_attention_2", None, 0, "asked for", trouble)
    if wanted == "eager":
        return Taken("eager", None, quadratic_bytes(shape, plan), "asked for")
    if supported.sdpa is False:
        return Taken("eager", None, quadratic_bytes(shape, plan), f"no SDPA in this architecture ({supported.where})")
    if supported.sdpa is None:
        return Taken("could not tell", None, None, "the architecture's code was not seen")
    if gpu is False:
        return Taken("sdpa", "cpu", 0, "the CPU's fused kernel works in blocks")
    if capability is None:
        return Taken("sdpa", None, None, "no card was named")
    backend, reason = choose_backend(shape, plan, capability)
    square = quadratic_bytes(shape, plan) if backend == "math" else 0
    return Taken("sdpa", backend, square, reason)


def choose_backend(shape: ModelShape, plan: Plan, capability: str) -> tuple[str, str]:
    """flash, efficient or math, with the reason; for the layers that fare worst."""
    head_dim = shape.head_dim or 64
    value_dim = shape.v_head_dim or head_dim
    gqa = shape.heads != shape.kv_heads and shape.mla is None
    width = 2 if plan.autocast or not plan.upcast else 4
    if plan.weight_dtype == "fp32" and not plan.autocast:
        width = 4
    dtype = plan.autocast or plan.weight_dtype
    windows = {group.window for group in shape.groups if group.stack == "decoder" and group.mixer == "attention"}
    masked = plan.attention_mask or any(window is not None and window <= plan.sequence_tokens for window in windows)
    # transformers passes enable_gqa only without a mask; with one it repeats K and V to all heads.
    shares = gqa and not masked
    if plan.attention.startswith("sdpa_"):
        pinned = {"sdpa_math": "math", "sdpa_mem_efficient": "efficient", "sdpa_flash": "flash"}[plan.attention]
        return pinned, "pinned by the plan"
    backend = sdpa_backend(width, dtype, head_dim, value_dim, masked, shares, float(capability))
    old = not at_least(capability, "8.0")
    reasons = []
    if width == 4:
        reasons.append("hidden states are fp32 (k-bit preparation without autocast)" if plan.upcast else "fp32")
    if old:
        reasons.append(f"compute capability {capability} has no flash kernel")
        if dtype == "bf16" and width == 2:
            reasons.append("no bf16 in the memory-efficient kernel either")
    if masked:
        reasons.append("a mask is passed")
    if head_dim != value_dim:
        reasons.append(f"keys are {head_dim} wide and values {value_dim}")
    if head_dim > 256:
        reasons.append(f"head_dim {head_dim} is over 256")
    if shares and backend == "math":
        reasons.append(f"the memory-efficient kernel takes no GQA ({shape.kv_heads} of {shape.heads} heads)")
    return backend, "; ".join(reasons) or "half precision, no mask, head_dim up to 256"


def quadratic_bytes(shape: ModelShape, plan: Plan) -> int | None:
    """Bytes of one [batch, heads, s, s] tensor in fp32, of one layer; None when the heads are not known."""
    if shape.heads is None:
        return None
    return plan.micro_batch * shape.heads * plan.sequence_tokens**2 * 4


def attention_facts(supported: Supported, what: Taken | None, plan: Plan) -> dict[str, Any]:
    """The facts as plain data."""
    made: dict[str, Any] = {
        "supports": {"sdpa": supported.sdpa, "flash_attention": supported.flash, "flex_attention": supported.flex},
        "known_from": supported.where,
        "implementation": None,
    }
    if what is not None:
        made |= {
            "implementation": what.implementation,
            "sdpa_backend": what.backend,
            "quadratic_bytes_per_layer": what.quadratic_bytes,
            "sequence_tokens": plan.sequence_tokens,
            "reason": what.reason,
        }
    return made


def check_attention(supported: Supported, what: Taken | None, plan: Plan, shape: ModelShape | None) -> list[Finding]:
    """What attention training takes, and what its memory does when sequences get longer."""
    if what is None or shape is None or what.implementation == "none":
        return []
    if supported.flash_required:
        return [
            Finding(
                "flash-attn-required",
                Level.WARN,
                "The model's own code imports flash_attn without a guard: it cannot be imported where that is missing.",
                "transformers checks the imports of remote code before it runs it and stops with an ImportError.",
                ("`pip install flash-attn --no-build-isolation` (compute capability 8.0 or newer)",),
                _SOURCE,
            )
        ]
    if what.trouble:
        return [
            Finding(
                "attention-not-available",
                Level.FAIL,
                f"attn_implementation=flash_attention_2 cannot run: {what.trouble}.",
                "There is no silent way back: transformers raises an error. The default (sdpa) needs no extra package.",
                ("leave attn_implementation out, or set it to sdpa",),
                _SOURCE,
            )
        ]
    if what.implementation == "could not tell":
        return [
            Finding(
                "attention-unknown",
                Level.OK,
                "Which attention this architecture takes could not be told.",
                "Neither the table nor code in the directory says what it supports; `--module-tree always` asks "
                "transformers.",
                source=_SOURCE,
            )
        ]
    square = what.quadratic_bytes
    tokens = plan.sequence_tokens
    way = what.implementation if what.implementation == "eager" else f"{what.implementation}, {what.backend} backend"
    if square:
        size = f"{square / 2**30:.2f} GiB" if square >= 2**30 else f"{square / 2**20:.0f} MiB"
        fixes = _ways_out(supported, what, plan, shape)
        heavy = square >= 2**28
        return [
            Finding(
                "attention-quadratic",
                Level.WARN if heavy else Level.OK,
                f"Attention will run as {way}: it keeps [batch, heads, s, s], {size} a layer at {tokens} tokens.",
                f"Why: {what.reason}. At twice the tokens it is four times as much.",
                fixes if heavy else (),
                _SOURCE,
            )
        ]
    if what.backend is None and what.implementation == "sdpa":
        return [
            Finding(
                "attention-sdpa",
                Level.OK,
                "Attention will run as sdpa (transformers' default here); which of its kernels depends on the card.",
                "Name one with `--gpu NAME` to see it.",
                source=_SOURCE,
            )
        ]
    return [
        Finding(
            "attention-fused",
            Level.OK,
            f"Attention will run as {way}: its memory grows with the tokens, not with their square.",
            f"Why: {what.reason}.",
            source=_SOURCE,
        )
    ]


def _ways_out(supported: Supported, what: Taken, plan: Plan, shape: ModelShape) -> tuple[str, ...]:
    fixes = []
    if what.implementation == "eager" and supported.flash and what.reason != "asked for":
        fixes.append('set `attn_implementation="flash_attention_2"` on a card of compute capability 8.0 or newer')
    if what.backend == "math":
        if plan.upcast and not plan.autocast:
            fixes.append("train with bf16=True (autocast): queries and keys are then half precision again")
        elif "compute capability" in what.reason:
            fixes.append("load in fp16 and pass an attention mask: K and V are then repeated and a fused kernel runs")
    fixes.append(f"use shorter sequences: `--seq-len {max(256, plan.sequence_tokens // 2)}` needs a quarter of it")
    return tuple(fixes[:3])
