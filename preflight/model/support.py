"""Which versions of transformers, Python and torch can load this architecture, and does it need its own code?"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from preflight import facts
from preflight.findings import Finding, Level, quote
from preflight.machine import Interpreter, Machine
from preflight.model.model_directory import ModelDirectory
from preflight.model_shape import ModelShape

PACKAGES = (
    "transformers", "peft", "torch", "accelerate", "bitsandbytes", "trl", "gptqmodel", "auto-gptq", "autoawq",
    "compressed-tensors", "torchao", "flash-attn", "kernels", "mamba-ssm", "causal-conv1d", "triton", "hqq", "optimum",
)  # fmt: skip
_SOURCE = "facts/arch_support.json (auto classes of transformers 4.25.1 to 5.24.0)"


@dataclass(frozen=True)
class Versions:
    """Installed (or planned) versions by package; a package that is absent is not in it. None: could not be asked."""

    python: str | None
    packages: Mapping[str, str] | None
    planned: tuple[str, ...] = ()

    def of(self, name: str) -> str | None:
        """The version of a package, None when it is absent or unknown."""
        return (self.packages or {}).get(name)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: "5.24.0.dev1" -> (5, 24, 0); the local part and suffixes are left out."""
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def at_least(version: str, floor: str) -> bool:
    """Whether a version is the floor or newer."""
    return _padded(version) >= _padded(floor)


def _padded(version: str) -> tuple[int, ...]:
    numbers = release(version)
    return numbers + (0,) * (4 - len(numbers))


def read_versions(machine: Machine, python: Interpreter | None, planned: Mapping[str, str]) -> Versions:
    """Versions in the interpreter under test, replaced by those that are planned. Nothing is imported there."""
    seen = machine.see("installed packages", lambda: _look_at(python)) if python is not None else None
    found: dict[str, str] | None = None
    running: str | None = None
    if isinstance(seen, dict) and isinstance(seen.get("packages"), dict):
        found = {str(name): str(version) for name, version in seen["packages"].items()}
        running = str(seen["python"]) if seen.get("python") else None
    if planned:
        found = {**(found or {}), **planned}
    return Versions(running, found, tuple(sorted(planned)))


def _look_at(python: Interpreter) -> dict[str, Any] | None:
    """Python's version and the packages of an interpreter."""
    if python.ours:
        return {"python": ".".join(str(part) for part in sys.version_info[:3]), "packages": _our_packages()}
    code = (
        "import importlib.metadata as m, json, platform\n"
        "out = {}\n"
        f"for n in {list(PACKAGES)!r}:\n"
        "    try: out[n] = m.version(n)\n"
        "    except Exception: pass\n"
        "print(json.dumps({'python': platform.python_version(), 'packages': out}))"
    )
    lines = Machine().run([python.path, "-c", code], timeout_s=20).lines_of_json()
    return lines[-1] if lines else None


def _our_packages() -> dict[str, str]:
    """Versions of installed packages, from the names of their metadata folders (quicker than importlib.metadata)."""
    wanted = {name.replace("-", "_"): name for name in PACKAGES}
    found: dict[str, str] = {}
    for place in sys.path:
        try:
            entries = os.listdir(place or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith(".dist-info"):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                key = wanted.get(name.lower().replace("-", "_").replace(".", "_"))
                if key is not None:
                    found.setdefault(key, version)
    return found


@dataclass(frozen=True)
class Support:
    """What is published about an architecture. `first` is the first transformers release, None when it never had it.

    `native`: transformers has it. `needs_code`: it can only be loaded with the model's own Python files.
    """

    model_type: str | None
    architecture: str | None
    first: str | None
    removed: str | None
    native: bool
    needs_code: bool
    remote_note: str
    python_floor: str | None
    torch_floor: str | None


def read_support(directory: ModelDirectory, shape: ModelShape | None, versions: Versions) -> Support:
    """What the tables say about the architecture of this config, for the transformers version that counts."""
    config = directory.config.object
    table = facts.table("arch_support")
    given = config.get("model_type")
    model_type = given if isinstance(given, str) else None
    listed = config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else None
    by_type = table["model_types"].get(model_type or "")
    by_class = table["architectures"].get(architecture or "")
    # A published class under a type that transformers knows; the class alone decides for types that it does not list.
    first = (by_type or by_class or {}).get("first")
    if first is None and model_type and model_type in facts.table("config_defaults")["model_types"]:
        first = "<=" + table["latest_transformers"]
    removed = table["removed_folders"].get((model_type or "").replace("-", "_"))
    remote_note = next(
        (
            str(note)
            for names, note in table["remote_code_only"].items()
            if architecture and architecture in re.split(r"[ /()]+", names)
        ),
        "",
    )
    if model_type == "baichuan" and not remote_note:  # its first release spells the class BaiChuanForCausalLM
        remote_note = table["remote_code_only"]["BaichuanForCausalLM"]
    native = first is not None and not remote_note
    version = versions.of("transformers") or table["latest_transformers"]
    return Support(
        model_type,
        architecture,
        first if native else None,
        removed,
        native,
        (bool(directory.auto_map) and not native) or bool(remote_note),
        remote_note,
        _floor(table["python_floor"], version, "python"),
        _floor(table["torch_enforced_at_import"], version, "torch"),
    )


def _floor(rows: list[dict[str, Any]], version: str, key: str) -> str | None:
    """The floor in the row whose range ("4.48-4.51") holds the version."""
    numbers = release(version)[:2]
    for row in rows:
        low, _, high = str(row["transformers"]).partition("-")
        if release(low)[:2] <= numbers <= release(high or low)[:2]:
            return str(row[key]).removeprefix(">=")
    return None


def support_facts(support: Support, versions: Versions, directory: ModelDirectory) -> dict[str, Any]:
    """The facts as plain data."""
    return {
        "model_type": support.model_type,
        "architecture": support.architecture,
        "transformers_first": support.first,
        "transformers_removed": support.removed,
        "transformers_checked": versions.of("transformers"),
        "needs_trust_remote_code": support.needs_code,
        "missing_files": list(directory.missing_code),
        "modeling_file_present": any(name.startswith("modeling") for name in directory.code_files),
        "python_floor": support.python_floor,
        "torch_floor": support.torch_floor,
    }


def check_support(support: Support, versions: Versions, directory: ModelDirectory, shape: ModelShape | None) -> Finding:
    """Whether the transformers version that will be used knows this architecture."""
    version = versions.of("transformers")
    kind = quote(support.model_type or support.architecture or "?", 60)
    if not directory.config.object.get("model_type") and not directory.auto_map:
        known = f" Its architecture {quote(support.architecture, 60)} suggests one." if support.architecture else ""
        return Finding(
            "no-model-type",
            Level.FAIL,
            "config.json has no model_type.",
            "transformers stops with: Unrecognized model. Should have a `model_type` key in its config.json." + known,
            ("download config.json again from the model's own repository",),
            _SOURCE,
        )
    if support.native and support.first:
        if version and not support.first.startswith("<=") and not at_least(version, support.first):
            return Finding(
                "architecture-too-new",
                Level.FAIL,
                f"transformers {version} does not know {kind}; the first release that does is {support.first}.",
                "from_pretrained stops with: the checkpoint has model type "
                f"'{kind}' but Transformers does not recognize this architecture (4.36: KeyError).",
                (f'`pip install "transformers>={support.first}"`',),
                _SOURCE,
            )
        floors = f"Python >= {support.python_floor or '?'}, torch >= {support.torch_floor or '?'}"
        checked = f"transformers {version} has it" if version else "no transformers was found to check it with"
        since = support.first if support.first.startswith("<=") else f">= {support.first}"
        extra = " The code that auto_map names is not needed with it." if directory.auto_map else ""
        return Finding(
            "architecture-supported",
            Level.OK,
            f"{kind} is part of transformers ({since}); {checked}.",
            f"That version needs {floors}.{extra}",
            source=_SOURCE,
        )
    if support.removed:
        return Finding(
            "architecture-removed",
            Level.FAIL,
            f"{kind} was taken out of transformers; the last minor series that had it is {support.removed}.",
            "Newer versions stop with: does not recognize this architecture.",
            (f'`pip install "transformers=={support.removed}"` in an environment of its own',),
            _SOURCE,
        )
    published = shape is not None and shape.structure == "known"  # its layout is known from the code of its repository
    if support.needs_code or directory.auto_map or published:
        return _custom_code(support, versions, directory, shape)
    return Finding(
        "architecture-unknown",
        Level.FAIL,
        f"No released transformers (up to {facts.table('arch_support')['latest_transformers']}) knows the type {kind}, "
        "and the directory brings no code for it.",
        "from_pretrained stops with: does not recognize this architecture.",
        ("download the whole repository of the model, with its .py files, or a newer transformers if one has it",),
        _SOURCE,
    )


def _custom_code(support: Support, versions: Versions, directory: ModelDirectory, shape: ModelShape | None) -> Finding:
    kind = quote(support.model_type or support.architecture or "?", 60)
    missing = list(directory.missing_code)
    if not directory.auto_map and not directory.code_files:
        missing = ["configuration and modeling files"]
    only_config = not directory.weights.present and not any("token" in name for name in directory.files)
    layout_known = shape is not None and shape.structure != "unknown"
    note = support.remote_note
    source = "transformers documentation, custom models; facts/arch_support.json, remote_code_only"
    old = ""
    if support.model_type in ("chatglm", "baichuan", "qwen"):
        old = (
            " This code was written for transformers 4.30 to 4.44; newer versions break it "
            "(it works up to 4.44.2, or with refreshed files)."
        )
    if missing and not (only_config and layout_known):
        return Finding(
            "custom-code-missing",
            Level.FAIL,
            f"{kind} needs its own Python code, and it is not here: {', '.join(quote(name, 80) for name in missing)}.",
            "transformers has no such architecture; trust_remote_code=True alone does not help, because there is "
            "nothing to run." + old,
            (
                f"download {' and '.join(quote(name, 80) for name in missing)} from the model's own repository, review "
                "them, then load with trust_remote_code=True",
            ),
            source,
        )
    absent = f" {' and '.join(quote(name, 80) for name in missing)} are not in the folder." if missing else ""
    tower = shape is not None and shape.other_tower_parameters > 0
    fixes = ["review the .py files, then load with `trust_remote_code=True`"]
    if missing:
        fixes.insert(0, f"download {' and '.join(quote(name, 80) for name in missing)} from the model's own repository")
    if old:
        fixes.append('use an environment of its own with `pip install "transformers==4.44.2"`')
    return Finding(
        "custom-code-vlm" if tower or (shape is not None and shape.language_key) else "custom-code",
        Level.WARN,
        f"{kind} is not part of transformers: it loads only with the Python code of its repository."
        f"{absent}" + (f" ({note.split(':')[0]})" if note and len(note) < 60 else ""),
        "That code runs with your rights when trust_remote_code=True is given. It was not run here." + old,
        tuple(fixes[:3]),
        source,
    )


def versions_facts(versions: Versions) -> dict[str, Any]:
    """Versions as plain data."""
    return {"python": versions.python, "packages": dict(sorted((versions.packages or {}).items()))}


def parse_planned(values: Mapping[str, str | None]) -> dict[str, str]:
    """The versions given on the command line."""
    return {name: value for name, value in values.items() if value}
