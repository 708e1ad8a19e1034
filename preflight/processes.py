"""Starting other programs so that none outlives us: own process group, time limit, size limit, killed as a whole."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a program ended. `exit_code` is None when it never started; a signal N on POSIX is -N.

    `trouble` is "" or one of: absent, not-executable, timeout.
    """

    text: str
    errors: str
    exit_code: int | None
    trouble: str
    seconds: float


def _die_with_parent() -> None:
    """In the child on Linux: be killed when our process dies, even by SIGKILL (prctl PR_SET_PDEATHSIG)."""
    import ctypes

    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `command` in a process group of its own, with no standard input. Raises OSError when it cannot start."""
    options.setdefault("stdin", subprocess.DEVNULL)
    if os.name == "posix":
        options["start_new_session"] = True
        if sys.platform == "linux":
            options["preexec_fn"] = _die_with_parent
    else:
        options["creationflags"] = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    return subprocess.Popen(list(command), **options)


def kill(process: subprocess.Popen[bytes], grace_s: float = 3.0) -> None:
    """End the process and its whole group: TERM, then KILL after `grace_s`."""
    if os.name == "posix":
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    else:
        with contextlib.suppress(OSError):
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def run(
    command: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    limit_bytes: int = 8 << 20,
    while_running: Callable[[], None] | None = None,
    grace_s: float = 3.0,
) -> Ended:
    """Run `command` to its end or to its time limit; its group is gone when this returns, also on Ctrl-C.

    Output goes through files, so that a grandchild that keeps a pipe open cannot hold us up. At most `limit_bytes` of
    each stream are kept (the first half and the last half). `while_running` is called about every 0.1 s.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = start(command, stdout=out, stderr=err, env=dict(env) if env is not None else None, cwd=cwd)
        except FileNotFoundError:
            return Ended("", "", None, "absent", time.monotonic() - began)
        except (OSError, ValueError) as error:
            return Ended("", str(error), None, "not-executable", time.monotonic() - began)
        trouble = ""
        pause_s = 0.002
        try:
            while True:
                if _ends_within(process, pause_s):
                    break
                pause_s = min(pause_s * 2, 0.1)
                if while_running is not None:
                    while_running()
                if time.monotonic() - began > timeout_s:
                    trouble = "timeout"
                    break
        finally:
            if process.returncode is None:
                kill(process, grace_s)
            elif os.name == "posix":  # leave no grandchild behind
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        if while_running is not None:
            while_running()
        return Ended(
            _tail(out, limit_bytes), _tail(err, limit_bytes), process.returncode, trouble, time.monotonic() - began
        )


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends in that time. Linux tells the moment; Popen.wait would look every 50 ms only."""
    if hasattr(os, "pidfd_open") and process.poll() is None:
        try:
            handle = os.pidfd_open(process.pid)
        except OSError:  # an old kernel, or no handle left
            handle = -1
        if handle >= 0:
            try:
                watch = select.poll()
                watch.register(handle, select.POLLIN)
                watch.poll(seconds * 1000)
            finally:
                os.close(handle)
            return process.poll() is not None
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _tail(stream: Any, limit_bytes: int) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size <= limit_bytes:
        data = stream.read()
    else:
        half = limit_bytes // 2
        data = stream.read(half) + b"\n[... left out ...]\n"
        stream.seek(size - half)
        data += stream.read(half)
    return decode(data)


def decode(data: bytes) -> str:
    """Bytes from a program or file as text: UTF-8, UTF-16 with its mark (PowerShell redirections), else replaced."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace").replace("\r\n", "\n")
    return data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
