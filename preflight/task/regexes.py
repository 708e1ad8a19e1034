"""Regular expressions from outside, applied with a time limit: some take longer than the universe on one short text."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

LIMIT_S = 1.0


class TooSlow(Exception):
    """The search was given up after its time limit."""


def search_bounded(pattern: str, text: str, flags: int = 0, *, full: bool = False, limit_s: float = LIMIT_S) -> bool:
    """Whether the pattern is found in the text (with `full`: is the whole text). Raises TooSlow after `limit_s`.

    Raises re.error when the pattern is none.
    """
    compiled = re.compile(pattern, flags)
    search = compiled.fullmatch if full else compiled.search
    # The engine looks at pending signals every few thousand steps; that works in the main thread of POSIX systems only.
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        with _alarm(pattern, limit_s):
            return search(text) is not None
    return _in_a_child(pattern, text, flags, full, limit_s)


@contextlib.contextmanager
def _alarm(pattern: str, limit_s: float) -> Iterator[None]:
    def give_up(number: int, frame: Any) -> None:
        raise TooSlow(_words(pattern, limit_s))

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _in_a_child(pattern: str, text: str, flags: int, full: bool, limit_s: float) -> bool:
    code = (
        "import json,re,sys; p,t,f,w=json.load(sys.stdin); c=re.compile(p,f); "
        "sys.exit(0 if (c.fullmatch if w else c.search)(t) is None else 7)"
    )
    import json

    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code],
            input=json.dumps([pattern, text, flags, full]).encode(),
            timeout=limit_s + 2,  # a process takes a moment to start
            check=False,
            capture_output=True,
        )
    except subprocess.TimeoutExpired as error:
        raise TooSlow(_words(pattern, limit_s)) from error
    return ended.returncode == 7


def _words(pattern: str, limit_s: float) -> str:
    shown = pattern if len(pattern) <= 60 else pattern[:57] + "..."
    return f"the pattern {shown!r} takes longer than {limit_s:g} s on this text"
