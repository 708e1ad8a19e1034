"""The values of a JSON array, or of objects that follow one another, read from a stream in bounded memory."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any, Protocol

from preflight.outputs.lenient_json import Broken, Cut, parse_lenient

_CHUNK = 1 << 18
_GAP = re.compile(r"[\s\ufeff\x1e]*")
_BALANCE = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)

# (line, value, notes, (reason, detail) of a bad one or None)
Item = tuple[int, Any, tuple[str, ...], tuple[str, str] | None]


class _Progress(Protocol):
    read_bytes: int


class _Text:
    """A growing window on a stream of UTF-8: `text[at:]` is what has not been consumed."""

    def __init__(self, stream: IO[bytes], progress: _Progress) -> None:
        self._stream, self._progress = stream, progress
        # Bad bytes become lone surrogates, so that only the record that holds them is bad.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self.text, self.at, self.line = "", 0, 1
        self.done = False

    def more(self) -> bool:
        """Read on; False at the end. Each call reads as much as is waiting, so that long records cost linear time."""
        if self.done:
            return False
        data = self._stream.read(max(_CHUNK, len(self.text) - self.at))
        self._progress.read_bytes += len(data)
        self.done = not data
        self.text = self.text[self.at :] + self._decoder.decode(data, final=self.done)
        self.at = 0
        return not self.done or bool(data)

    def advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def skip_gap(self) -> str:
        """Step over white space; the next character, "" at the end."""
        while True:
            match = _GAP.match(self.text, self.at)
            if match:
                self.advance(match.end())
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def values_of(stream: IO[bytes], array: bool, notes: Counter[str], progress: _Progress) -> Iterator[Item]:
    """The values in the stream, each with the line it begins on. `array`: they stand in `[…]` (or `{"data": […]}`)."""
    from preflight.data.file_kinds import wrapped_array_start
    from preflight.data.records import RECORD_LIMIT_BYTES, JsonReader

    window = _Text(stream, progress)
    reader = JsonReader()
    closed = not array
    wrapped = False
    if array:
        window.skip_gap()
        if window.text[window.at] == "{":
            start = wrapped_array_start(window.text[window.at :])
            if start is None:
                return
            window.advance(window.at + start)
            wrapped = True
            notes["wrapped-rows"] += 1
        else:
            window.advance(window.at + 1)
    comma = False
    while True:
        character = window.skip_gap()
        if character == "":
            break
        if character == ",":
            comma = True
            window.advance(window.at + 1)
            continue
        if array and character == "]":
            if comma:
                notes["trailing-comma"] += 1
            window.advance(window.at + 1)
            closed = True
            following = window.skip_gap()
            if wrapped and following == ",":
                window.advance(window.at + 1)
                window.skip_gap()
                key = re.compile(r'"([^"\\]{0,60})"').match(window.text, window.at)
                # Another list in the same object is often another split: never mixed in silently.
                notes[f"left-out:{key.group(1) if key else '?'}"] += 1
                break
            if following and not (wrapped and following == "}"):
                notes["text-after-array"] += 1
            if following != "[":
                break
            closed, comma = False, False
            window.advance(window.at + 1)  # arrays that follow one another: several exports put into one file
            continue
        if window.text.startswith(("//", "/*", "#"), window.at):
            _skip_comment(window)
            notes["comment-lines"] += 1
            continue
        comma = False
        line = window.line
        while True:
            try:
                value, end, seen = reader.at(window.text, window.at)
                if end == len(window.text) and not window.done and window.more():
                    continue
                bad = _undecodable(window.text, window.at, end)
                window.advance(end)
                yield line, value, seen, bad
                break
            except RecursionError:
                yield line, None, (), ("nested-too-deep", "nested deeper than can be read")
                if not _resync(window):
                    return
                break
            except ValueError as error:
                position = getattr(error, "pos", window.at)
                waiting = len(window.text) - window.at
                near_end = position > len(window.text) - 64 or "Unterminated" in str(error)
                if near_end and waiting < RECORD_LIMIT_BYTES and window.more():
                    continue
                item = _lenient(window, line)
                if item[3] is not None and item[3][0] == "truncated" and waiting >= RECORD_LIMIT_BYTES:
                    item = (line, None, (), ("record-too-long", "no end of the record within the size read as one"))
                yield item
                if item[3] is not None and not _resync(window):
                    closed = closed or item[3][0] != "truncated"
                    if item[3][0] == "truncated":
                        return
                break
    if not closed:
        notes["array-not-closed"] += 1


def _lenient(window: _Text, line: int) -> Item:
    """What the lenient parser makes of the value here."""
    try:
        parsed = parse_lenient(window.text, window.at)
    except Cut:
        return line, None, (), ("truncated", "the file ends in the middle of this record")
    except Broken as broken:
        at_line = window.line + window.text.count("\n", window.at, broken.position)
        return line, None, (), ("not-json", f"{broken}, on line {at_line}")
    bad = _undecodable(window.text, window.at, parsed.end)
    window.advance(parsed.end)
    return line, parsed.value, parsed.repairs, bad


def _undecodable(text: str, start: int, end: int) -> tuple[str, str] | None:
    part = text[start:end]
    if part.isascii() or not re.search("[\udc80-\udcff]", part):
        return None
    return "undecodable", "bytes that are not UTF-8"


def _skip_comment(window: _Text) -> None:
    ending = "*/" if window.text.startswith("/*", window.at) else "\n"
    while (end := window.text.find(ending, window.at)) < 0:
        if not window.more():
            window.advance(len(window.text))
            return
    window.advance(end + len(ending))


def _resync(window: _Text) -> bool:
    """Go to the end of the broken value here; False when it cannot be found.

    In a pretty-printed file that is where the next value begins with the same indentation, which holds even when a
    quote was lost; else the matching bracket.
    """
    line_start = window.text.rfind("\n", 0, window.at) + 1
    indent = window.text[line_start : window.at]
    if indent.strip() == "" and window.text[window.at : window.at + 1] in ("{", "["):
        next_value = re.compile(rf"\n{re.escape(indent)}[}}\]]\s*,?\s*(?=\n{re.escape(indent)}[{{\[]|\n?\s*\]\s*\Z)")
        while True:
            match = next_value.search(window.text, window.at)
            if match:
                window.advance(match.end())
                return True
            if len(window.text) - window.at > (4 << 20) or not window.more():
                break
    while True:
        depth = 0
        for token in _BALANCE.finditer(window.text, window.at):
            if token.group() in ("{", "["):
                depth += 1
            elif token.group() in ("}", "]"):
                depth -= 1
            if depth <= 0:
                window.advance(token.end())
                return True
        if len(window.text) - window.at > (64 << 20) or not window.more():
            window.advance(len(window.text))
            return False
