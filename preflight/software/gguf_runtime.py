"""Does llama.cpp's Python binding load a GGUF file here, and does a GPU really take part?"""

from __future__ import annotations

import json
import os
import random
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from preflight import facts
from preflight.findings import Finding, Level, quote
from preflight.machine import Answer, Machine
from preflight.software.explain import fill, first_match

_SOURCE = "preflight/children/load_gguf.py, run in a child"


# --- a GGUF file of our own ----------------------------------------------------------------------------------------


def write_tiny_gguf(path: Path, seed: int = 0) -> None:
    """Write a random llama of one layer (embedding 32, 2 heads, 295 tokens, 150 kB) as GGUF version 3.

    Source of the format: ggml docs/gguf.md. Little-endian; tensors are aligned to 32 bytes, first dimension fastest.
    """
    width, heads, inner, layers = 32, 2, 64, 1
    letters = [f"▁{chr(code)}" for code in range(ord("a"), ord("a") + 26)] + list("helo wrd.,")
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{code:02X}>" for code in range(256)], *dict.fromkeys(letters)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)  # unknown, control, control, byte …, normal …
    scores = [0.0] * 259 + [-float(index) for index in range(len(tokens) - 259)]
    values: list[tuple[str, bytes]] = [
        ("general.architecture", _text("llama")),
        ("general.name", _text("preflight tiny random llama")),
        ("llama.context_length", _number(128)),
        ("llama.embedding_length", _number(width)),
        ("llama.block_count", _number(layers)),
        ("llama.feed_forward_length", _number(inner)),
        ("llama.attention.head_count", _number(heads)),
        ("llama.attention.head_count_kv", _number(heads)),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<If", 6, 1e-5)),
        ("llama.rope.dimension_count", _number(width // heads)),
        ("llama.vocab_size", _number(len(tokens))),
        ("tokenizer.ggml.model", _text("llama")),
        ("tokenizer.ggml.tokens", _array(8, [_string(token) for token in tokens])),
        ("tokenizer.ggml.scores", _array(6, [struct.pack("<f", score) for score in scores])),
        ("tokenizer.ggml.token_type", _array(5, [struct.pack("<i", kind) for kind in kinds])),
        ("tokenizer.ggml.bos_token_id", _number(1)),
        ("tokenizer.ggml.eos_token_id", _number(2)),
        ("tokenizer.ggml.unknown_token_id", _number(0)),
    ]
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (width, len(tokens))),
        ("output_norm.weight", (width,)),
        ("output.weight", (width, len(tokens))),
    ]
    for layer in range(layers):
        shapes += [
            (f"blk.{layer}.attn_norm.weight", (width,)),
            *[(f"blk.{layer}.attn_{name}.weight", (width, width)) for name in ("q", "k", "v", "output")],
            (f"blk.{layer}.ffn_norm.weight", (width,)),
            (f"blk.{layer}.ffn_gate.weight", (width, inner)),
            (f"blk.{layer}.ffn_up.weight", (width, inner)),
            (f"blk.{layer}.ffn_down.weight", (inner, width)),
        ]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(values))
    head += b"".join(_string(name) + value for name, value in values)
    offset, data, numbers = 0, [], random.Random(seed)
    for name, shape in shapes:
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        one = "norm" in name
        raw = array("f", (1.0 if one else numbers.gauss(0.0, 0.2) for _ in range(count))).tobytes()
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)  # type 0: F32
        padded = raw + b"\0" * (-len(raw) % 32)
        data.append(padded)
        offset += len(padded)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + b"".join(data))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _text(text: str) -> bytes:
    return struct.pack("<I", 8) + _string(text)


def _number(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def _array(kind: int, items: Sequence[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)


# --- looking -------------------------------------------------------------------------------------------------------


def load(
    machine: Machine, python: str, folder: str, model: str | None, variables: Mapping[str, str], limit_s: float
) -> dict[str, Any]:
    """What the binding says and does in a child of `python`, as plain JSON data."""
    path = model or os.path.join(folder, "tiny.gguf")
    if model is None and not machine.replayed:
        write_tiny_gguf(Path(path))
    spec = json.dumps({"model": path, "gpu_layers": -1})
    answer = machine.ask("load_gguf", python, [spec], limit_s, env=dict(variables), kind="load_gguf", cwd=folder)
    return read_answer(answer, "the given file" if model else "a tiny random llama made for this")


def read_answer(answer: Answer, model: str) -> dict[str, Any]:
    """The child's events as facts; what it printed tells how many layers were really offloaded."""
    events = answer.lines_of_json()
    steps = [
        {key: event.get(key) for key in ("step", "ok", "seconds", "facts", "error")}
        for event in events
        if event.get("event") == "step"
    ]
    started = [str(event["step"]) for event in events if event.get("event") == "start"]
    finished = [str(step["step"]) for step in steps]
    died = next((name for name in started if name not in finished), None)
    known: dict[str, Any] = {}
    for step in steps:
        known.update(step.get("facts") or {})
    offloaded = re.findall(r"offloaded (\d+)/(\d+) layers to GPU", answer.errors)
    # The first pass only measures; the last line tells what the model really uses.
    return {
        "model": model,
        "steps": steps,
        "died_in": died,
        "how": None if died is None else (answer.trouble or f"exit code {answer.exit_code}"),
        "version": known.get("version"),
        "backends": known.get("backends"),
        "devices": known.get("devices"),
        "gpu_offload_compiled_in": known.get("gpu_offload_compiled_in"),
        "system_info": known.get("system_info"),
        "layers_offloaded": int(offloaded[-1][0]) if offloaded else None,
        "layers": int(offloaded[-1][1]) if offloaded else None,
        "token": known.get("token"),
        "printed": answer.errors[-3000:],
    }


# --- judging -------------------------------------------------------------------------------------------------------


def check_gguf(found: Mapping[str, Any], vendor: str | None) -> list[Finding]:
    """Whether a GGUF file loads and generates, and whether a GPU takes part. `vendor`: nvidia, amd, …; None: no GPU."""
    bad = next((step for step in found["steps"] if not step["ok"]), None)
    if bad is not None:
        return [_failed(bad, vendor, str(found["printed"]))]
    if found["died_in"] is not None:
        match = first_match(str(found["printed"]))
        return [
            Finding(
                "gguf-runtime-crashed",
                Level.FAIL,
                f"`{found['died_in']}` kills the interpreter ({quote(found['how'])}).",
                fill(str(match.signature.row["cause"]), match.fields)
                if match
                else "A compiled library crashed: usually one built for another CPU (GGML_NATIVE is on by default).",
                (
                    "rebuild it here: `CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --force-reinstall --no-cache-dir "
                    "--no-binary :all: llama-cpp-python`",
                ),
                _SOURCE,
            )
        ]
    if not found["steps"]:
        return [
            Finding(
                "gguf-runtime-unknown",
                Level.UNKNOWN,
                "Could not tell: the child gave no answer.",
                "Nothing was loaded.",
                ("name an interpreter with `--python PATH`",),
                _SOURCE,
            )
        ]
    backends = ", ".join(found["backends"] or []) or "could not tell which"
    findings = [
        Finding(
            "gguf-runtime-loads",
            Level.OK,
            f"llama-cpp-python {found['version']} loads {found['model']} and generates a token. Backends: {backends}.",
            str(facts.table("gguf_backends")["android"]),
            source=_SOURCE,
        )
    ]
    return [*findings, check_offload(found, vendor)]


def check_offload(found: Mapping[str, Any], vendor: str | None) -> Finding:
    """Whether GPU offload is compiled in, and whether it really happened."""
    done, total = found["layers_offloaded"], found["layers"]
    gpus = [device["name"] for device in found["devices"] or [] if "gpu" in str(device["kind"])]
    if done:
        return Finding(
            "gguf-offload",
            Level.OK,
            f"{done} of {total} layers were offloaded ({', '.join(gpus) or 'device not named'}).",
            source="llama.cpp's own log of the load",
        )
    if found["gpu_offload_compiled_in"]:
        return Finding(
            "gguf-offload-not-used",
            Level.WARN,
            "GPU offload is compiled in, but no layer was offloaded"
            + (f" (devices: {', '.join(gpus)})." if gpus else ": the library sees no GPU."),
            "The build is right and the GPU is not reached: driver, container without a GPU, or a hidden device.",
            ("`python gpu_probe.py` tells whether the GPU answers",),
            "llama.cpp's own log of the load",
        )
    if vendor is None:
        return Finding(
            "gguf-cpu-only",
            Level.OK,
            "Only the CPU takes part: no GPU was found here, and no GPU backend is compiled in.",
            "On a machine with a GPU, build with its backend: " + "; ".join(flags("nvidia") + flags("any")) + ".",
            source="llama_supports_gpu_offload()",
        )
    return Finding(
        "gguf-no-gpu-backend",
        Level.WARN,
        f"A GPU is here ({vendor}), but no GPU backend is compiled into this llama-cpp-python.",
        "The wheel on PyPI is built from source, and without a flag for the CPU only.",
        tuple(f"rebuild: `{command}`" for command in commands(vendor))[:3],
        "llama_supports_gpu_offload(); facts/gguf_backends.json",
    )


def flags(vendor: str) -> list[str]:
    """The CMake flag for an accelerator, with what it needs."""
    rows = facts.table("gguf_backends")["backends"]
    return [f"{row['backend']} `{row['cmake']}` ({row['needs']})" for row in rows if row["accelerator"] == vendor]


def commands(vendor: str) -> list[str]:
    """The commands that build the binding with a GPU backend, the vendor's own first, then Vulkan."""
    rows = facts.table("gguf_backends")["backends"]
    chosen = [row for row in rows if row["accelerator"] == vendor] + [
        row for row in rows if row["accelerator"] == "any"
    ]
    return [
        f'CMAKE_ARGS="{row["cmake"]}" pip install --force-reinstall --no-cache-dir llama-cpp-python' for row in chosen
    ]


def _failed(step: Mapping[str, Any], vendor: str | None, printed: str) -> Finding:
    chain = step["error"]
    root = chain[-1]
    said = f"{root['type']}: {quote(root['message'], 240)}"
    if step["step"] == "import llama_cpp" and "No module named 'llama_cpp'" in root["message"]:
        return Finding(
            "gguf-runtime-missing",
            Level.UNKNOWN,
            "Could not tell: llama-cpp-python is not installed in this interpreter.",
            "There is no wheel of it on PyPI: installing compiles it, about 5 minutes on two cores.",
            (
                *[
                    f"install it: `{command.replace(' --force-reinstall --no-cache-dir', '')}`"
                    for command in commands(vendor or "")
                ][: 1 if vendor else 0],
                "install it for the CPU: `pip install llama-cpp-python`",
                "or name the interpreter that has it: `--python PATH`",
            )[:3],
            "llama-cpp-python README",
        )
    if step["step"] == "load the GGUF file":
        told = re.search(
            r"unknown model architecture: '[^']+'|invalid magic[^\n]*|not within the file bounds[^\n]*|"
            r"unknown (?:pre-tokenizer|tokenizer) type[^\n]*|failed to read[^\n]*|wrong number of tensors[^\n]*",
            printed,
        )
        said = quote(told.group(0), 160) if told else said
        return Finding(
            "gguf-file-not-loaded",
            Level.FAIL,
            f"The binding works, and this file cannot be loaded: {said}.",
            "The file is cut off or no GGUF file, or its architecture is newer than this llama.cpp.",
            (
                "download or convert the file again, and compare its size with the source",
                "or raise llama-cpp-python to a release that knows the architecture",
            ),
            "llama.cpp's own log of the load",
        )
    for item in reversed(chain):
        match = first_match(f"{item['type']}: {item['message']}")
        if match is not None:
            row = match.signature.row
            return Finding(
                match.code,
                Level.FAIL,
                f"`{step['step']}` fails: {said}.",
                fill(str(row["cause"]), match.fields),
                tuple(fill(fix, match.fields) for fix in row["fix"])[:3],
                f"facts/error_signatures.json, {row['id']}: {row['source']}",
            )
    return Finding(
        "gguf-step-failed",
        Level.FAIL,
        f"`{step['step']}` fails: {said}.",
        "The binding is installed and does not work; pip sees nothing of this.",
        (
            "reinstall it from source on this machine: `pip install --force-reinstall --no-binary :all: "
            "llama-cpp-python`",
        ),
        _SOURCE,
    )
