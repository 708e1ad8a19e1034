"""Interpreters with the library versions that a measurement was taken under, made once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from preflight import processes
from preflight.console import UsageError
from preflight.findings import say
from preflight.machine import Machine
from preflight.software.installers import Environment, find_installer, read_pip_settings

_WANTED = ("transformers", "peft", "bitsandbytes", "accelerate")
_made: dict[str, tuple[str, str]] = {}


def python_with(versions: Mapping[str, str], current: str) -> tuple[str, str]:
    """(interpreter, note): one with these versions; the current one when they are not stated or do not install.

    torch stays the one that is installed here: old CPU builds are on no registry, and the layers decide most.
    """
    pins = sorted(_pin(name, versions[name]) for name in _WANTED if name in versions)
    if "transformers" not in versions:
        return current, "current versions: the row states none"
    key = " ".join(pins)
    if key not in _made:
        _made[key] = _make(pins, current)
    return _made[key]


def _pin(name: str, version: str) -> str:
    """The requirement for a version. What was never released (0.19.2.dev0) becomes the nearest release before it."""
    stable, found, _ = version.partition(".dev")
    return f"{name}<={stable},>={stable.rsplit('.', 1)[0]}" if found else f"{name}=={version}"


def _make(pins: list[str], current: str) -> tuple[str, str]:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "finetune-preflight", "versions")
    folder = cache / hashlib.sha256(" ".join(pins).encode()).hexdigest()[:16]
    done = folder / "complete"
    note = " ".join(pins)
    settings = read_pip_settings(Machine(), sys.executable)
    made = Environment(find_installer(), settings, folder, sys.executable, {}, timeout_s=900.0)
    if done.exists() and Path(made.python).exists():
        return made.python, note
    say(f"installing {note}")
    asked = processes.run([current, "-c", "import torch; print(torch.__version__.split('+')[0])"], 120)
    shutil.rmtree(folder, ignore_errors=True)  # a run that was killed here left a half
    try:
        folder.mkdir(parents=True)
        made.create()
        ended = made.install([f"torch=={asked.text.strip()}", *pins])
    except (OSError, UsageError) as error:
        return current, f"current versions: {note} could not be installed ({error})"[:300]
    if not ended.ok:
        last = (ended.text.strip().splitlines() or [""])[-1][:200]
        return current, f"current versions: {note} does not install ({last})"
    done.touch()
    return made.python, note
