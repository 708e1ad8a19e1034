"""Keeps the bytecode that a sandbox compiled, so that the next one does not compile torch and transformers again.

Compiling what the stages import takes about 7 s of 13 (measured, two cores). Python itself checks that a .pyc belongs
to its source (time and size), and replaces it when not; uv's hard links keep a source's time, pip's copies do not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from preflight.software.sandbox import cache_folder

_LIMIT_FOLDERS = 150  # one per distribution and version; a stack has about 40


def _site_packages(environment: Path) -> Path | None:
    found = [*environment.glob("lib/python3*/site-packages"), *environment.glob("Lib/site-packages")]
    return found[0] if found else None


def _shelf(environment: Path) -> Path:
    """Where bytecode of this Python version is kept."""
    version = "python"
    with contextlib.suppress(OSError):
        for line in (environment / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition("=")
            if name.strip() in ("version_info", "version", "implementation"):
                version += "-" + value.strip()
    return cache_folder() / "bytecode" / version


def restore(environment: Path) -> int:
    """Put kept .pyc files into a fresh virtualenv; how many."""
    packages, shelf = _site_packages(environment), _shelf(environment)
    if packages is None or not shelf.is_dir():
        return 0
    count = 0
    for info in packages.glob("*.dist-info"):
        kept = shelf / info.name
        if not kept.is_dir():
            continue
        with contextlib.suppress(OSError):
            os.utime(kept)
        for source in kept.rglob("*.pyc"):
            target = packages / source.relative_to(kept)
            with contextlib.suppress(OSError):
                if target.parent.parent.is_dir():
                    target.parent.mkdir(exist_ok=True)
                    _link(source, target)
                    count += 1
    return count


def keep(environment: Path) -> int:
    """Keep the .pyc files that a virtualenv compiled; how many are new. A full disk or a read-only home keeps none."""
    packages, shelf = _site_packages(environment), _shelf(environment)
    if packages is None:
        return 0
    owners: dict[str, str] = {}
    for info in packages.glob("*.dist-info"):
        with contextlib.suppress(OSError):
            for line in (info / "RECORD").read_text(encoding="utf-8", errors="replace").splitlines():
                owners.setdefault(line.partition("/")[0].partition(",")[0], info.name)
    count = 0
    with contextlib.suppress(OSError):
        for source in packages.rglob("__pycache__/*.pyc"):
            relative = source.relative_to(packages)
            owner = owners.get(relative.parts[0])
            if owner is None or (relative.parts[0] == "__pycache__"):
                continue
            target = shelf / owner / relative
            if target.exists():
                if os.path.samestat(target.stat(), source.stat()):
                    continue
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_suffix(f".{os.getpid()}.part")
            shutil.copyfile(source, temporary)
            temporary.replace(target)
            count += 1
        _prune(shelf.parent)
    return count


def _link(source: Path, target: Path) -> None:
    # Python replaces a stale .pyc by renaming a new one over it, so the shared file is never written to.
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _prune(top: Path) -> None:
    """Drop what was not used for longest, down to the limit."""
    folders = sorted(top.glob("*/*"), key=lambda folder: folder.stat().st_mtime)
    for folder in folders[: max(0, len(folders) - _LIMIT_FOLDERS)]:
        if time.time() - folder.stat().st_mtime > 3600:  # not what another run is using now
            shutil.rmtree(folder, ignore_errors=True)
