"""Reads one JSON value, by the standard or forgiving what can mean only one thing; nothing is evaluated as code."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# Deeper nesting than this is an attack or a runaway model; both parsers recurse.
MAX_DEPTH = 200


class Cut(ValueError):
    """The text ends inside a value."""


class Broken(ValueError):
    """Not JSON, not even when read leniently. `position` is where it stops making sense."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(why)
        self.position = position


@dataclass(frozen=True)
class Parsed:
    """One value read from a text: where it ends and what had to be forgiven."""

    value: Any
    end: int
    repairs: tuple[str, ...] = ()


class _Notes:
    """Collects what the standard parser lets pass silently."""

    def __init__(self) -> None:
        self.repairs: dict[str, None] = {}

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs) and _conflicting(pairs):
            self.repairs["duplicate-keys"] = None
        return made

    def constant(self, name: str) -> float:
        self.repairs["non-finite-number"] = None
        return float(name.replace("Infinity", "inf"))

    def number(self, text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):  # 1e400: by the grammar a number, but none that can be kept
            self.repairs["non-finite-number"] = None
        return value


def _conflicting(pairs: list[tuple[str, Any]]) -> bool:
    """The same key stands twice with different values (the same value twice means only one thing)."""
    seen: dict[str, str] = {}
    return any(seen.setdefault(key, fingerprint(value)) != fingerprint(value) for key, value in pairs)


def fingerprint(value: Any) -> str:
    """A text that is equal for equal JSON values, telling `true` from `1`, whatever the order of keys."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(key)}:{fingerprint(item)}" for key, item in sorted(value.items(), key=_first))
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(fingerprint(item) for item in value) + "]"
    return json.dumps(value)


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def parse_strict(text: str, start: int = 0) -> Parsed:
    """The JSON value at `start` by the standard; duplicate keys and NaN are noted as repairs.

    Raises ValueError when there is none, RecursionError when it is nested too deep.
    """
    notes = _Notes()
    decoder = json.JSONDecoder(object_pairs_hook=notes.pairs, parse_constant=notes.constant, parse_float=notes.number)
    value, end = decoder.raw_decode(text, start)
    return Parsed(value, end, tuple(notes.repairs))


_SPACE = re.compile(r"[\s\ufeff\u200b]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_ODD_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])")
_WORD = re.compile(r"[A-Za-z_$][\w$]*")
_KEY = re.compile("[A-Za-z_$][\\w$-]*(?=\\s*[:\uff1a])")
_WORDS: dict[str, tuple[Any, str]] = {
    "true": (True, ""),
    "false": (False, ""),
    "null": (None, ""),
    "True": (True, "python-literals"),
    "False": (False, "python-literals"),
    "None": (None, "python-literals"),
    "NaN": (float("nan"), "non-finite-number"),
    "nan": (float("nan"), "non-finite-number"),
    "Infinity": (float("inf"), "non-finite-number"),
    "inf": (float("inf"), "non-finite-number"),
}
_CLOSERS = {
    '"': '"',
    "'": "'",
    "\u201c": "\u201d\u201c",
    "\u201d": "\u201d",
    "\u2018": "\u2019",
    "\u201e": "\u201d\u201c",
}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "'": "'", "\n": ""}
_AFTER_VALUE = re.compile("\\s*(?:[,:}\\])\uff0c\uff1a]|$|//|/\\*|#|\\\\[nrt])")


class _Lenient:
    """A parser for what people and models write instead of JSON. Accepts only what can mean one thing."""

    def __init__(self, text: str, position: int) -> None:
        self.text, self.at = text, position
        self.repairs: dict[str, None] = {}

    def value(self, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise Broken(self.at, "nested too deep")
        self.space()
        character = self.peek()
        if character == "{":
            return self.object(depth)
        if character in "[(":
            return self.array(depth)
        if character in _CLOSERS:
            return self.string()
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            return _number(number.group())
        number = _ODD_NUMBER.match(self.text, self.at)
        if number:
            try:
                value = _odd_number(number.group())
            except ValueError as error:
                raise Broken(self.at, str(error)[:80]) from error
            self.at = number.end()
            self.repairs["number-spelling"] = None
            return value
        return self.word()

    def peek(self) -> str:
        if self.at >= len(self.text):
            raise Cut("the text ends inside a value")
        return self.text[self.at]

    def space(self) -> None:
        """Skip white space and comments."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.text.startswith(("\\n", "\\t", "\\r"), self.at):
                # A line end written out as two characters: the text was quoted once too often.
                self.at += 2
                self.repairs["escaped-whitespace"] = None
                continue
            if self.text.startswith(("//", "#"), self.at):
                end = self.text.find("\n", self.at)
                if end < 0:
                    self.at = len(self.text)
                    return
                self.at = end + 1
            elif self.text.startswith("/*", self.at):
                end = self.text.find("*/", self.at + 2)
                if end < 0:
                    raise Cut("the text ends inside a comment")
                self.at = end + 2
            else:
                return
            self.repairs["comments"] = None

    def object(self, depth: int) -> dict[str, Any]:
        self.at += 1
        pairs: list[tuple[str, Any]] = []
        while True:
            self.space()
            if self.peek() == "}":
                self.at += 1
                break
            key = self.key()
            self.space()
            if self.peek() not in ":\uff1a":
                raise Broken(self.at, "a key without `:` behind it")
            if self.text[self.at] != ":":
                self.repairs["full-width-marks"] = None
            self.at += 1
            pairs.append((key, self.value(depth + 1)))
            if not self.separator("}"):
                break
        made = dict(pairs)
        if len(made) != len(pairs) and _conflicting(pairs):
            self.repairs["duplicate-keys"] = None
        return made

    def array(self, depth: int) -> list[Any]:
        closer = "]" if self.text[self.at] == "[" else ")"
        if closer == ")":
            self.repairs["python-literals"] = None
        self.at += 1
        items: list[Any] = []
        while True:
            self.space()
            if self.peek() == closer:
                self.at += 1
                return items
            items.append(self.value(depth + 1))
            if not self.separator(closer):
                return items

    def separator(self, closer: str) -> bool:
        """Step over what follows a member; False when it was the last."""
        before = self.at
        self.space()
        character = self.peek()
        if character == closer:
            self.at += 1
            return False
        if character in ",\uff0c":
            if character != ",":
                self.repairs["full-width-marks"] = None
            self.at += 1
            self.space()
            if self.at < len(self.text) and self.text[self.at] == closer:
                self.repairs["trailing-comma"] = None
                self.at += 1
                return False
            return True
        # A line end between two members can only be a forgotten comma; on one line it may be an unescaped quote.
        member = r'\s*"[^"\n]*"\s*:' if closer == "}" else r"\s*[{\[]"
        if "\n" in self.text[before : self.at] and re.compile(member).match(self.text, self.at):
            self.repairs["missing-comma"] = None
            return True
        raise Broken(self.at, f"neither `,` nor `{closer}` after a value (an unescaped quote or a missing comma?)")

    def key(self) -> str:
        if self.peek() in _CLOSERS:
            return self.string()
        word = _KEY.match(self.text, self.at)
        if word:
            self.repairs["unquoted-keys"] = None
        else:
            word = re.compile(r"-?\d+(?=\s*:)").match(self.text, self.at)
            if not word:
                if self.text.startswith(("...", "\u2026"), self.at):
                    raise Broken(self.at, "`...` stands where members were left out")
                if not self.text[self.at :].strip(" \t\r\n\"'"):
                    raise Cut("the text ends before a key")
                if re.compile(r"[A-Za-z_$][\w$-]*\s*\Z").match(self.text, self.at):
                    raise Cut("the text ends inside a key")
                raise Broken(self.at, "no key where one must stand")
            self.repairs["python-literals"] = None
        self.at = word.end()
        return word.group()

    def word(self) -> Any:
        match = _WORD.match(self.text, self.at)
        if match and match.group() in _WORDS:
            self.at = match.end()
            value, repair = _WORDS[match.group()]
            if repair:
                self.repairs[repair] = None
            return value
        if self.text.startswith(("-Infinity", "-inf"), self.at):
            self.at += 9 if self.text.startswith("-Infinity", self.at) else 4
            self.repairs["non-finite-number"] = None
            return float("-inf")
        if match and match.group() in ("u", "U") and self.text[match.end() : match.end() + 1] in ("'", '"'):
            self.at = match.end()
            self.repairs["python-literals"] = None
            return self.string()
        rest = self.text[self.at : self.at + 12]
        cut = self.at + len(rest) == len(self.text)
        if cut and (rest in ("-", "+", "\\") or any(word.startswith(rest) for word in (*_WORDS, "-Infinity"))):
            raise Cut("the text ends inside a value")
        if rest.startswith(("...", "\u2026")):
            raise Broken(self.at, "`...` stands where members were left out")
        raise Broken(self.at, "no JSON value where one must stand")

    def string(self) -> str:
        strict = _STRING.match(self.text, self.at)
        if strict and not (strict.end() - self.at == 2 and self.text.startswith('"""', self.at)):
            self.at = strict.end()
            return str(json.loads(strict.group()))
        opener = self.text[self.at]
        triple = opener * 3
        if opener in "\"'" and self.text.startswith(triple, self.at):
            self.at += 3
            self.repairs["triple-quotes"] = None
            return self.characters(lambda: self.text.startswith(triple, self.at), 3)
        if opener == "'":
            self.repairs["single-quotes"] = None
        elif opener != '"':
            self.repairs["smart-quotes"] = None
        closers = _CLOSERS[opener]
        self.at += 1
        return self.characters(lambda: self.text[self.at] in closers, 1)

    def characters(self, at_end: Any, width: int) -> str:
        made: list[str] = []
        while not (self.peek() and at_end()):
            character = self.text[self.at]
            if character == "\\":
                made.append(self.escape())
                continue
            if character < " " and width == 1:
                self.repairs["raw-control-characters"] = None
            made.append(character)
            self.at += 1
        self.at += width
        if self.at < len(self.text) and not _AFTER_VALUE.match(self.text, self.at):
            following = _SPACE.match(self.text, self.at)
            # A line end may stand for a forgotten comma, which `separator` decides.
            if "\n" not in (following.group() if following else ""):
                raise Broken(self.at, "text right behind a string (an unescaped quote?)")
        # Surrogate pairs were appended as two halves.
        return "".join(made).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def escape(self) -> str:
        self.at += 1
        character = self.peek()
        width = {"u": 4, "x": 2, "U": 8}.get(character)
        if width:
            digits = self.text[self.at + 1 : self.at + 1 + width]
            if len(digits) < width and self.at + 1 + width > len(self.text):
                raise Cut("the text ends inside an escape")
            if re.fullmatch(r"[0-9a-fA-F]+", digits) and len(digits) == width and int(digits, 16) <= 0x10FFFF:
                self.at += 1 + width
                if character != "u":
                    self.repairs["python-literals"] = None
                return chr(int(digits, 16))
        if character in _ESCAPES:
            if character in "'\n":
                self.repairs["odd-escape"] = None
            self.at += 1
            return _ESCAPES[character]
        raise Broken(self.at - 1, f"`\\{character}` is no escape of JSON (a backslash in a string is written `\\\\`)")


def _number(text: str) -> int | float:
    return float(text) if re.search(r"[.eE]", text) else int(text)


def _odd_number(text: str) -> int | float:
    if re.match(r"[+-]?0\d", text):
        raise ValueError("a number with a leading zero, which may be a code or a number")
    plain = text.replace("_", "").lstrip("+")
    if "x" in plain.lower():
        return int(plain, 16)
    return float(plain) if re.search(r"[.eE]", plain) else int(plain)


def parse_lenient(text: str, start: int = 0) -> Parsed:
    """The value at `start`, forgiving what can mean only one thing; `repairs` says what.

    Forgiven: Python and JavaScript spellings, comments, trailing commas, smart quotes as delimiters, raw line ends in
    strings. Raises Cut when the text ends inside the value, Broken when it is none.
    """
    parser = _Lenient(text, start)
    try:
        value = parser.value()
    except (RecursionError, OverflowError) as error:
        raise Broken(start, "nested too deep") from error
    except (Broken, Cut):
        raise
    except ValueError as error:  # a number of more than 4300 digits
        raise Broken(start, str(error)[:80]) from error
    return Parsed(value, parser.at, tuple(parser.repairs))


def json_type(value: Any) -> str:
    """The JSON Schema name of a value's type; a float without a fraction is "number" here, as it was written."""
    if value is None:
        return "null"
    for python, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, python):
            return name
    return "object"
