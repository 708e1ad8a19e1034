"""Results that appear as a whole or not at all, whatever ends the program."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from preflight.console import UsageError

MARK = "summary.json"  # a folder that holds it was written by us, and may be replaced


@contextlib.contextmanager
def workshop(target: Path | None) -> Iterator[Path]:
    """A folder for unfinished work, on the target's file system; removed at the end, also one that a killed run left.

    Without a target it lies in the system's folder for temporary files.
    """
    parent = target.parent if target is not None else Path(tempfile.gettempdir())
    prefix = f".{target.name}.part-" if target is not None else "preflight-data-"
    if target is not None:
        for left in parent.glob(f"{prefix}*"):
            claim = _claimed(left)
            if claim is not None:  # else another run is at work there
                claim.close()
                shutil.rmtree(left, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise UsageError(f"{parent}: cannot be written ({error.strerror})") from error
    held = _claimed(folder)
    try:
        yield folder
    finally:
        if held:
            held.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Claim:
    """A folder that is ours as long as we live: the system gives the lock back whatever ends us."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def close(self) -> None:
        self._lock.release()


def _claimed(folder: Path) -> _Claim | None:
    """The claim on a folder, or None when another process holds it (or filelock is not installed)."""
    try:
        from filelock import FileLock, Timeout
    except ImportError:
        return None
    lock = FileLock(folder / "owner.lock")
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return None
    return _Claim(lock)


def check_target(target: Path, inputs: list[Path]) -> None:
    """Raises UsageError when writing to `target` would touch an input or something that is not ours."""
    resolved = target.resolve()
    for source in inputs:
        at = source.resolve()
        if at == resolved or resolved in at.parents:
            raise UsageError(
                f"--out {target}: is or holds the input {source}; name another place, the input stays as it is"
            )
        if target.exists() and source.exists() and target.samefile(source):
            raise UsageError(f"--out {target}: is the input {source}; name another file")
    if not resolved.parent.is_dir():
        raise UsageError(f"--out {target}: the folder {resolved.parent} does not exist")
    if target.suffix == ".jsonl":
        if target.is_dir():
            raise UsageError(f"--out {target}: is a folder; a name ending in .jsonl means one file")
    elif target.is_file():
        raise UsageError(f"--out {target}: is a file; name a folder, or a file ending in .jsonl")
    elif target.is_dir() and any(target.iterdir()) and not (target / MARK).is_file():
        raise UsageError(f"--out {target}: holds other files; name a new or an empty folder, or one written before")


def publish_file(made: Path, target: Path) -> None:
    """Put a finished file in the place of the target in one step. Readers see the old or the new one."""
    _sync(made)
    os.replace(made, target)
    _sync(target.parent)


def publish_folder(made: Path, target: Path) -> None:
    """Put a finished folder in the place of the target: in one step where the system can exchange folders (Linux,
    macOS), else by two renames, the second of which the next run repairs."""
    for item in made.iterdir():
        _sync(item)
    _sync(made)
    if not target.exists():
        os.rename(made, target)
    elif not _exchange(made, target):
        aside = made.with_name(made.name + "-old")
        os.rename(target, aside)
        os.rename(made, target)
        shutil.rmtree(aside, ignore_errors=True)
    _sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically (renameat2 with RENAME_EXCHANGE, renamex_np with RENAME_SWAP); False if unknown."""
    import ctypes

    try:
        library = ctypes.CDLL(None, use_errno=True)
        first, second = os.fsencode(one), os.fsencode(other)
        system = str(sys.platform)
        if system == "linux":
            return bool(library.renameat2(-100, first, -100, second, 2) == 0)
        if system == "darwin":
            return bool(library.renamex_np(first, second, 2) == 0)
    except (OSError, AttributeError, TypeError):
        return False
    return False


def _sync(path: Path) -> None:
    """Have the system write it to the disk; folders too, where they can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
