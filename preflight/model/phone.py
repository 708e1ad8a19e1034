"""Could this model run on an Android phone through Vulkan? Only what files and given figures can honestly say."""

from __future__ import annotations

import argparse
from typing import Any

from preflight import facts
from preflight.console import UsageError
from preflight.findings import Finding, Level, quote
from preflight.model.support import at_least
from preflight.model_shape import ModelShape

_SOURCE = "facts/gguf_architectures.json; facts/FACTS.md section 10 (llama.cpp docs/ops.md, docs/backend/OPENCL.md)"
_GIB = 2**30
# What the program itself, its compute buffers and the tokenizer take beside weights and cache.
RUNTIME_BYTES = 300 << 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the phone check."""
    group = parser.add_argument_group("phone")
    group.add_argument("--target-platform", choices=("android-vulkan",), help="also check for running on a phone")
    group.add_argument("--ram-gb", type=float, metavar="GIB", help="the phone's RAM")
    group.add_argument("--gguf-type", default="Q4_0", metavar="TYPE", help="quantisation of the file (default: Q4_0)")
    group.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of context (default: 4096)")
    group.add_argument("--vulkan-version", metavar="X.Y", help="the phone's Vulkan version")
    group.add_argument("--android-api", type=int, metavar="N", help="the phone's Android API level")


def phone(shape: ModelShape | None, args: argparse.Namespace) -> tuple[dict[str, Any] | None, list[Finding]]:
    """(observed, findings) for `--target-platform android-vulkan`; nothing without it. Raises UsageError."""
    if args.target_platform is None or shape is None:
        return None, []
    table = facts.table("gguf_architectures")
    kind = str(args.gguf_type).upper()
    bits = table["bits_per_weight"].get(kind)
    if bits is None:
        raise UsageError(f"--gguf-type {args.gguf_type}: one of {', '.join(table['bits_per_weight'])}")
    if args.context < 1 or (args.ram_gb is not None and not 0 < args.ram_gb < 1024):
        raise UsageError("--context and --ram-gb: numbers above 0 are needed")
    name = gguf_name(shape.model_type)
    weights = round(shape.parameters * bits / 8) if shape.parameters is not None else None
    values = shape.kv_values_per_token
    cache = values * 2 * args.context if values is not None else None
    observed = {
        "platform": args.target_platform,
        "gguf_architecture": name,
        "gguf_type": kind,
        "gguf_bytes": weights,
        "gguf_bytes_by_type": {
            key: round(shape.parameters * width / 8) if shape.parameters is not None else None
            for key, width in table["bits_per_weight"].items()
        },
        "context_tokens": args.context,
        "kv_cache_bytes": cache,
        "ram_bytes": int(args.ram_gb * _GIB) if args.ram_gb is not None else None,
        "opencl_types": table["opencl_types"],
        "training_on_phone": False,
    }
    findings = [
        _converter(shape, name),
        _memory(weights, cache, args.ram_gb, kind, args.context),
        _operators(shape, table),
        *_device(args, table),
    ]
    return observed, findings


def gguf_name(model_type: str | None) -> str | None:
    """The architecture's name in GGUF, None when the list has none for this type."""
    table = facts.table("gguf_architectures")
    if model_type in table["model_types"]:
        return str(table["model_types"][model_type])
    plain = (model_type or "").lower()
    known = set(table["architectures"])
    return next((each for each in (plain, plain.replace("_", "-"), plain.replace("_", "")) if each in known), None)


def _converter(shape: ModelShape, name: str | None) -> Finding:
    kind = quote(shape.model_type or "?", 60)
    if name is None:
        return Finding(
            "phone-converter-unknown",
            Level.UNKNOWN,
            f"Could not tell whether llama.cpp's converter knows {kind}: it is not in the list of gguf 0.19.",
            "Without a GGUF there is nothing to run; a newer llama.cpp may know it.",
            ("run `python convert_hf_to_gguf.py MODEL --outtype f16` of a current llama.cpp",),
            _SOURCE,
        )
    tower = " Its vision or audio tower goes into a file of its own (--mmproj)." if shape.other_tower_parameters else ""
    return Finding(
        "phone-converter",
        Level.OK,
        f"llama.cpp knows this architecture as {name}.",
        f"A LoRA has to be merged into the model, or converted with convert_lora_to_gguf.py, first.{tower}",
        source=_SOURCE,
    )


def _memory(weights: int | None, cache: int | None, ram_gb: float | None, kind: str, context: int) -> Finding:
    if weights is None or cache is None:
        return Finding(
            "phone-memory-unknown",
            Level.UNKNOWN,
            "Could not tell how large the GGUF would be: the parameters could not be counted.",
            "Its size follows from the number of parameters.",
            ("convert it and look at the file",),
            _SOURCE,
        )
    total = weights + cache + RUNTIME_BYTES
    parts = (
        f"{kind}: {weights / _GIB:.2f} GiB of weights, {cache / _GIB:.2f} GiB of KV cache for {context} tokens, about "
        f"{RUNTIME_BYTES / _GIB:.1f} GiB for the program"
    )
    if ram_gb is None:
        return Finding(
            "phone-memory",
            Level.OK,
            f"{parts}: {total / _GIB:.2f} GiB in all.",
            "Whether that fits was not judged: name the phone's RAM with --ram-gb.",
            source=_SOURCE,
        )
    share = total / (ram_gb * _GIB)
    if share > 1:
        return Finding(
            "phone-memory-too-small",
            Level.FAIL,
            f"{parts}: {total / _GIB:.2f} GiB do not fit into {ram_gb:g} GiB.",
            "CPU and GPU of a phone share its RAM; Android ends a program that takes too much.",
            ("take a smaller model or a smaller --gguf-type", "shorten --context"),
            _SOURCE,
        )
    if share > 0.6:
        return Finding(
            "phone-memory-tight",
            Level.WARN,
            f"{parts}: {total / _GIB:.2f} GiB of {ram_gb:g} GiB.",
            "Android and other apps hold a good part of the RAM, and the system ends the largest program first.",
            ("take a smaller --gguf-type or a shorter --context", "try it on the phone with nothing else running"),
            _SOURCE,
        )
    return Finding("phone-memory-fits", Level.OK, f"{parts}: {total / _GIB:.2f} GiB of {ram_gb:g} GiB.", source=_SOURCE)


def _operators(shape: ModelShape, table: dict[str, Any]) -> Finding:
    activation = (shape.activation or "").removeprefix("gated-")
    state = table["operators_in_ggml_vulkan"].get(activation)
    mixers = {group.mixer for group in shape.groups if group.stack == "decoder"}
    unusual = sorted(mixers - {"attention", "mla", "none"})
    note = (
        "Training on the phone's GPU is not to be had: ggml Vulkan has no CROSS_ENTROPY_LOSS. Train elsewhere and "
        "bring the result. OpenCL (Adreno) runs Q4_0, Q8_0, Q6_K and MXFP4 only."
    )
    if unusual:
        return Finding(
            "phone-operators-unknown",
            Level.UNKNOWN,
            f"Could not tell whether ggml Vulkan runs this model's {', '.join(unusual)} layers.",
            f"Operators that the GPU lacks run on the CPU, slowly. {note}",
            ("look the operators up in llama.cpp docs/ops.md, or run test-backend-ops on the phone",),
            _SOURCE,
        )
    word = f"its activation ({activation}) is there in full; " if state == "full" else ""
    return Finding(
        "phone-operators",
        Level.OK,
        f"ggml Vulkan has what this graph needs: {word}matrix products, RMS norm, RoPE and softmax are, too.",
        f"Its fused attention is partial, the unfused one is complete. The activation must not be exchanged. {note}",
        source=_SOURCE,
    )


def _device(args: argparse.Namespace, table: dict[str, Any]) -> list[Finding]:
    floor = table["vulkan_floor"]
    findings = []
    version = args.vulkan_version
    if version is not None:
        if not at_least(version, floor["executorch"]):
            verdict = f"neither ggml ({floor['ggml']}) nor ExecuTorch ({floor['executorch']}) runs on it"
            level = Level.FAIL
        elif not at_least(version, floor["ggml"]):
            verdict, level = f"ggml refuses below {floor['ggml']}; ExecuTorch takes {floor['executorch']}", Level.WARN
        else:
            verdict, level = f"ggml needs {floor['ggml']}", Level.OK
        others = ("use llama.cpp on the phone's CPU", "or export the model with ExecuTorch")
        findings.append(
            Finding(
                "phone-vulkan-version",
                level,
                f"The phone's Vulkan is {quote(version, 20)}: {verdict}.",
                "The version comes with the phone's GPU driver and changes only with system updates."
                if level is not Level.OK
                else "",
                others if level is not Level.OK else (),
                _SOURCE,
            )
        )
    if args.android_api is not None and args.android_api <= 27 and version is None:
        findings.append(
            Finding(
                "phone-android-old",
                Level.WARN,
                f"Android API level {args.android_api} (8.1 or older): most such phones have Vulkan 1.0 or 1.1.",
                f"ggml refuses below Vulkan {floor['ggml']}, ExecuTorch below {floor['executorch']}.",
                ("ask the phone: `adb shell cmd gpu vkjson | grep apiVersion`, then give --vulkan-version",),
                _SOURCE,
            )
        )
    return findings
