"""A throw-away folder for one run: locked by its owner, always removed, and swept by the next start if it was not.

Measured against eight kinds of ending (Ctrl-C once and twice, TERM, HUP, an exception, a crash, kill -9, a full
disk): only a crash and kill -9 leave the folder behind, and the next `sweep` removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from preflight.console import UsageError

PREFIX = "preflight-sandbox-"
LOCK = "owner.lock"
OWNER_VARIABLE = "PREFLIGHT_SANDBOX"  # set for every process that runs inside, so that stragglers can be found


def cache_folder() -> Path:
    """The user's own cache folder for this program (not created here)."""
    try:
        home = Path.home()
    except RuntimeError:  # a user number without an entry, as in some containers
        home = Path(tempfile.gettempdir())
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or str(home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(home / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(home / ".cache")
    return Path(base) / "finetune-preflight"


def roots(explicit: str | None = None) -> list[Path]:
    """Where sandboxes may lie, best first.

    The user's cache folder comes before the temporary one: uv's cache usually lies on the same file system, so that
    packages are hard links (10 MB a sandbox and 0.9 s instead of 920 MB and 4 s, measured), and /tmp is often memory.
    """
    if explicit:
        return [Path(explicit)]
    return [cache_folder() / "sandboxes", Path(tempfile.gettempdir())]


def choose_root(explicit: str | None, needed_bytes: int) -> tuple[Path, int]:
    """The first root that can be written to and has `needed_bytes` free, and its free bytes.

    Raises UsageError naming what was tried when there is none.
    """
    tried = []
    for root in roots(explicit):
        try:
            root.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(root).free
            probe = tempfile.mkdtemp(prefix=PREFIX, dir=root)
            Path(probe).rmdir()
        except OSError as error:
            tried.append(f"{root}: {error.strerror or error}")
            continue
        if free >= needed_bytes:
            return root, free
        tried.append(f"{root}: {free / 2**30:.1f} GiB free, {needed_bytes / 2**30:.1f} GiB needed")
    where = "--sandbox-dir" if explicit else "sandbox"
    raise UsageError(
        f"{where}: no folder can take the sandbox ({'; '.join(tried)}); name another with --sandbox-dir DIR"
    )


def _take(stream: IO[str]) -> bool:
    """Whether the lock could be taken. It is released by the system when its owner ends, however it ends."""
    try:
        if os.name == "nt":
            import msvcrt

            stream.seek(0)
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def remove(folder: Path, tries: int = 4) -> bool:
    """Remove a folder with all that is in it; read-only and busy files are tried again. Whether it is gone."""

    def once_more(function: Any, path: str, _: object) -> None:
        with contextlib.suppress(OSError):
            Path(path).parent.chmod(0o700)
            os.chmod(path, stat.S_IRWXU)
            function(path)

    for number in range(tries):
        shutil.rmtree(folder, onerror=once_more)
        if not os.path.lexists(folder):
            return True
        time.sleep(0.2 * (number + 1))
    return False


def sweep(explicit: str | None = None) -> int:
    """Remove the sandboxes whose owner is gone; how many there were.

    Only folders with our prefix and our user's, never a link, and only when their lock can be taken: no process
    number is trusted. Processes that still run inside (a build that outlived a kill -9) are ended first.
    """
    removed = 0
    for root in dict.fromkeys([*roots(explicit), *roots(None)]):
        for folder in root.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                about = folder.lstat()
                mine = not hasattr(os, "getuid") or about.st_uid == os.getuid()
                if not mine or not stat.S_ISDIR(about.st_mode):
                    continue
                try:
                    lock = open(folder / LOCK, "r+", encoding="utf-8")  # noqa: SIM115
                except FileNotFoundError:
                    if time.time() - about.st_mtime < 5:  # its owner may be about to create the lock
                        continue
                    lock = None
                if lock is not None and not _take(lock):
                    lock.close()
                    continue
                young = time.time() - about.st_mtime < 5
                if lock is not None and young and not _owner(lock):  # made a moment ago, its owner is about to lock it
                    lock.close()
                    continue
                kept = lock is not None and "keep" in _owner(lock)
                if not kept:
                    _end_stragglers(folder)
                if lock is not None:
                    lock.close()
                if not kept:
                    removed += remove(folder)
    return removed


def _owner(lock: IO[str]) -> dict[str, Any]:
    try:
        lock.seek(0)
        value = json.loads(lock.read() or "{}")
    except (ValueError, OSError):
        return {}
    return value if isinstance(value, dict) else {}


def _end_stragglers(folder: Path) -> None:
    """End our user's processes that run inside the sandbox `folder` (Linux; elsewhere nothing)."""
    marker = f"{OWNER_VARIABLE}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            number = int(entry.name)
            if number != os.getpid() and marker in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(number, signal.SIGKILL)


class Sandbox:
    """A running sandbox: `folder` is removed at the end, `environment` is what every process inside gets."""

    def __init__(self, folder: Path, free_bytes: int) -> None:
        self.folder, self.free_bytes = folder, free_bytes
        self.keep = False
        for name in ("tmp", "home", "work"):
            (folder / name).mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that keep every write of a child inside the sandbox and every look outside offline.

        An empty value unsets it: Python treats an empty PYTHON… variable as absent. Without .pyc files every `import
        peft` would cost 11 s instead of 6, hence PYTHONDONTWRITEBYTECODE.
        """
        tmp, home = str(self.folder / "tmp"), str(self.folder / "home")
        return {
            OWNER_VARIABLE: str(self.folder),
            "TMPDIR": tmp,
            "TEMP": tmp,
            "TMP": tmp,
            "PYTHONPATH": "",
            "PYTHONHOME": "",
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            **offline_environment(home),
        }


def offline_environment(home: str) -> dict[str, str]:
    """Variables under which a library writes its caches below `home`, asks nothing, and does not go to a hub."""
    return {
        "HF_HOME": os.path.join(home, "huggingface"),
        "HF_MODULES_CACHE": os.path.join(home, "modules"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TRITON_CACHE_DIR": os.path.join(home, "triton"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(home, "inductor"),
        "TORCH_HOME": os.path.join(home, "torch"),
        "MPLCONFIGDIR": os.path.join(home, "matplotlib"),
        "NUMBA_CACHE_DIR": os.path.join(home, "numba"),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "WANDB_MODE": "offline",
    }


@contextlib.contextmanager
def sandbox(explicit_root: str | None = None, needed_bytes: int = 0, keep: bool = False) -> Iterator[Sandbox]:
    """A fresh sandbox, removed at the end whatever happens inside. Raises UsageError when none can be made.

    With `keep` it stays. Its owner's lock is held as long as we live; `processes.run` ends the children.
    """
    root, free = choose_root(explicit_root, needed_bytes)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root)).resolve()
    lock = None
    inside: Sandbox | None = None
    owner = os.getpid()
    try:
        lock = open(folder / LOCK, "w+", encoding="utf-8")  # noqa: SIM115
        if not _take(lock):
            raise UsageError(f"{folder}: the sandbox's lock could not be taken")
        json.dump({"process": owner, **({"keep": True} if keep else {})}, lock)
        lock.flush()
        inside = Sandbox(folder, free)
        inside.keep = keep
        yield inside
    except OSError as error:
        if error.errno == 28:  # ENOSPC while we write: say it as the user's trouble, not as a bug
            raise UsageError(
                f"{folder}: the disk is full; name a folder with more room with --sandbox-dir DIR"
            ) from error
        raise
    finally:
        if os.getpid() == owner:
            with _undisturbed():
                if lock is not None:
                    lock.close()
                if not (inside is not None and inside.keep):
                    if not remove(folder):
                        print(f"could not remove {folder}; the next start tries again", file=sys.stderr)
                    with contextlib.suppress(OSError):
                        if root.name == "sandboxes":
                            root.rmdir()  # only when it is empty


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C, TERM or HUP while cleaning up: a second one must not cut it short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
