"""What does transformers itself build from this configuration? Asked of a child, on the meta device, no weights."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.findings import Finding, Level, quote, say
from preflight.machine import Machine
from preflight.model.lora import ALL_LINEAR, reach
from preflight.model.model_directory import ModelDirectory
from preflight.model.support import Support, Versions
from preflight.model_shape import ModelShape, shape_from_tree

LIMIT_S = 240.0
_SOURCE = "preflight/children/meta_model.py: transformers and PEFT in the interpreter under test"


@dataclass(frozen=True)
class Tree:
    """What the child said. `shape` is None when the model could not be built; `error` says why.

    `lora` holds (targets, r, trainable or None, error). `four_bit` is what bitsandbytes would quantise.
    """

    shape: ModelShape | None
    parameters: int | None
    versions: dict[str, str]
    lora: tuple[tuple[Any, int, int | None, str], ...]
    four_bit: int | None
    attention: dict[str, Any]
    error: str
    last_step: str


def wanted(
    args: argparse.Namespace, directory: ModelDirectory, shape: ModelShape | None, support: Support, versions: Versions
) -> bool:
    """Whether the child is asked: always, or when the layout is not known here and transformers may know it."""
    if args.module_tree == "never" or not directory.config.object:
        return False
    if args.module_tree == "always":
        return True
    if shape is not None and shape.structure not in ("unknown", "language part"):
        return False
    installed = versions.of("transformers") is not None and "transformers" not in versions.planned
    return installed and versions.of("torch") is not None and (support.native or args.trust_remote_code)


def lora_requests() -> list[list[Any]]:
    """What PEFT is asked to count."""
    return [[ALL_LINEAR, 8, []]]


def ask_tree(
    machine: Machine, python: str, directory: ModelDirectory, trust_remote_code: bool, lora: Sequence[Sequence[Any]]
) -> Tree:
    """The module tree of this configuration. The directory's own code runs only with `trust_remote_code`."""
    say(f"asking transformers for the module tree (up to {LIMIT_S:.0f} s)")
    job: dict[str, Any] = {"lora": [list(item) for item in lora], "four_bit": True}
    with tempfile.TemporaryDirectory(prefix="preflight-tree-") as folder:
        if trust_remote_code and directory.auto_map:
            job |= {"directory": str(directory.path.resolve()), "trust_remote_code": True}
        else:
            job["config"] = dict(directory.config.object)
        path = os.path.join(folder, "job.json")
        Path(path).write_text(json.dumps(job), encoding="utf-8")
        caches = {"HF_HOME": folder, "HF_MODULES_CACHE": os.path.join(folder, "modules"), "HF_HUB_OFFLINE": "1"}
        answer = machine.ask(
            "meta_model", python, [path], timeout_s=LIMIT_S, env=caches, kind="child meta_model", cwd=folder
        )
    return parse_tree(directory.config.object, answer.lines_of_json(), answer.trouble or str(answer.exit_code))


def parse_tree(config: Any, lines: Sequence[dict[str, Any]], ended: str) -> Tree:
    """The child's lines as a Tree."""
    steps = {str(line.get("step")): line for line in lines}
    tree = steps.get("tree")
    error = str(steps["failed"]["error"]) if "failed" in steps else ""
    last = str(lines[-1].get("step")) if lines else "start"
    shape = None
    if tree is not None:
        try:
            shape = shape_from_tree(config, tree)
        except (KeyError, TypeError, ValueError) as trouble:
            error = f"its answer could not be read ({type(trouble).__name__})"
    elif not error:
        error = f"the child ended ({ended}) after the step {last}"
    return Tree(
        shape=shape,
        parameters=tree.get("parameters") if tree else None,
        versions={name: str(steps[name]["version"]) for name in ("torch", "transformers", "peft") if _has(steps, name)},
        lora=tuple(
            (line.get("targets"), int(line.get("r", 8)), line.get("trainable"), str(line.get("error", "")))
            for line in lines
            if line.get("step") == "lora"
        ),
        four_bit=steps.get("four_bit", {}).get("quantised"),
        attention=dict(tree.get("attention") or {}) if tree else {},
        error=error,
        last_step=last,
    )


def _has(steps: dict[str, dict[str, Any]], name: str) -> bool:
    return "version" in steps.get(name, {})


def tree_facts(tree: Tree | None) -> dict[str, Any] | None:
    """The facts as plain data; None when the child was not asked."""
    if tree is None:
        return None
    return {
        "parameters": tree.parameters,
        "versions": tree.versions,
        "four_bit_quantised": tree.four_bit,
        "lora": [{"targets": t, "r": r, "trainable_params": n, "error": e or None} for t, r, n, e in tree.lora],
        "attention": tree.attention,
        "error": tree.error or None,
    }


def check_tree(tree: Tree | None, shape: ModelShape | None) -> list[Finding]:
    """Whether transformers' own modules agree with the layout that was read from the configuration."""
    if tree is None:
        return []
    if tree.shape is None:
        return [
            Finding(
                "module-tree-failed",
                Level.UNKNOWN,
                f"transformers could not build this model on the meta device: {quote(tree.error)}",
                f"The last step that ended was: {tree.last_step}. Loading the model would meet the same error.",
                ("read the error; compare config.json with the model's own repository",),
                _SOURCE,
            )
        ]
    said = ", ".join(f"{name} {version}" for name, version in tree.versions.items())
    troubles = []
    if shape is not None and shape.structure == "known" and shape.parameters != tree.parameters:
        troubles.append(f"parameters: {shape.parameters:,} by the layout, {tree.parameters:,} built")
    if shape is not None:
        for targets, r, trainable, error in tree.lora:
            mine = reach(shape, targets, r)
            if trainable is not None and mine.trainable != trainable:
                troubles.append(f"LoRA {targets} r={r}: {mine.trainable} by the layout, {trainable:,} by PEFT")
            if error and not mine.refused:
                troubles.append(f"LoRA {targets}: PEFT says {quote(error, 160)}")
    if troubles:
        return [
            Finding(
                "module-tree-differs",
                Level.WARN,
                f"transformers builds something else than was read from the configuration: {'; '.join(troubles)}.",
                f"The figures here follow the layout of transformers 5.24; this is {said}.",
                ("trust the figures of the module tree (module_tree in --json)",),
                _SOURCE,
            )
        ]
    return [
        Finding(
            "module-tree-agrees",
            Level.OK,
            f"transformers builds {tree.parameters:,} parameters on the meta device ({said}).",
            "Parameters and the LoRA count of all-linear are equal to those read here."
            if shape is not None and shape.structure != "module tree"
            else "The layers were read from these modules.",
            source=_SOURCE,
        )
    ]
