"""Interpreters with the library versions that a measurement was taken under, made once and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from preflight.findings import say

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
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "complete"
    note = " ".join(pins)
    if done.exists():
        return str(python), note
    say(f"installing {note}")
    torch = subprocess.run(
        [current, "-c", "import torch; print(torch.__version__.split('+')[0])"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        command = [str(python), "-m", "pip", "install", "-q", "--no-compile", f"torch=={torch}", *pins]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return current, f"current versions: {note} could not be installed ({type(error).__name__})"
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [""])[-1][:200]
        return current, f"current versions: {note} does not install ({last})"
    done.touch()
    return str(python), note
