"""What JSON value does a model's output hold, and what had to be peeled off or forgiven to get at it?

Nothing is guessed: an output with two different answers, one that was cut, or one whose strings cannot be told apart
has no value. Nothing is evaluated as code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

# Deeper nesting than this is an attack or a runaway model; both parsers below recurse.
MAX_DEPTH = 200


@dataclass(frozen=True)
class Recovered:
    """The JSON value of one output.

    `strict`: the whole text is one JSON value. `found`: there is exactly one value that can be meant.
    `how`: what was peeled off or forgiven, in reading order; () when strict.
    `problem`: "" or one of empty, no-json, broken-json, truncated, multiple-json-values, duplicate-keys,
    non-finite-number, nested-too-deep; then `found` is False. `values`: every candidate, for the message.
    """

    value: Any = None
    how: tuple[str, ...] = ()
    strict: bool = False
    problem: str = ""
    detail: str = ""
    values: tuple[Any, ...] = ()

    @property
    def found(self) -> bool:
        """There is one value that can be meant."""
        return not self.problem

    @property
    def values_found(self) -> int:
        """How many different JSON values the output holds."""
        return len(self.values)


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


# ---------------------------------------------------------------------------------------------------------------------
# Reading one value


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
_KEY = re.compile(r"[A-Za-z_$][\w$-]*(?=\s*:)")
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
_AFTER_VALUE = re.compile(r"\s*(?:[,:}\])]|$|//|/\*|#)")


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
            self.at = number.end()
            self.repairs["number-spelling"] = None
            return _odd_number(number.group())
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
            if self.peek() != ":":
                raise Broken(self.at, "a key without `:` behind it")
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
        if character == ",":
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


# ---------------------------------------------------------------------------------------------------------------------
# Finding the value in an output

_REASONING = (
    r"think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratch_?pad|analysis|inner_monologue|seed:think|antthinking"
    r"|chain_of_thought|cot|deliberation|plan(?:ning)?"
)
_ANSWER = r"answer|final_answer|final|output|json|result|response|solution|json_output|structured_output"
_CALL = r"tool_calls?|function_calls?|toolcall|\|tool_call\||\|tool_call_begin\||\|python_tag\|"
_TOKENS = re.compile(
    rf"(?P<open><(?:{_REASONING})(?:\s[^<>]*)?>|\[THINK\]|\u25c1think\u25b7|<\|begin_of_thought\|>"
    r"|<\|START_THINKING\|>|<\|think\|>|<unused94>|<\|channel>(?:thought|analysis)"
    r"|<\|channel\|>\s*(?:analysis|commentary)\b(?:(?!to=)[^<])*<\|message\|>)"
    rf"|(?P<close></(?:{_REASONING})>|\[/THINK\]|\u25c1/think\u25b7|<\|end_of_thought\|>|<\|END_THINKING\|>"
    r"|<\|/think\|>|<unused95>|<channel\|>|<\|end\|>|<\|channel\|>\s*final\b[^<]*<\|message\|>)"
    r"|(?P<fence>(?P<ticks>`{3,}|~{3,})[ \t]*(?P<info>[A-Za-z0-9_+.-]*))"
    rf"|(?P<answer><(?:{_ANSWER})>)|(?P<answered></(?:{_ANSWER})>)"
    rf"|(?P<call><(?:{_CALL})>|\[TOOL_CALLS\]|<function=[^>]*>)|(?P<called></(?:{_CALL}|function)>)"
    r"|(?P<bracket>[\[{])",
    re.IGNORECASE,
)
_END_MARKERS = re.compile(
    r"(?:\s*(?:<\|(?:im_end|eot_id|end|endoftext|end_of_text|eom_id|return|call|END_RESPONSE|END_OF_TURN_TOKEN"
    r"|end_of_turn|user|observation)\|>|</s>|<eos>|<end_of_turn>|<\uff5cend\u2581of\u2581sentence\uff5c>|\[/?INST\]))+\s*\Z"
)
_START_MARKERS = re.compile(
    r"\A(?:\s*(?:<s>|<\|(?:begin_of_text|startoftext)\|>|(?:<\|im_start\|>|<\|start\|>)\s*assistant\s*(?:\n|(?=<\|))"
    r"|<\|start_header_id\|>\s*assistant\s*<\|end_header_id\|>|<start_of_turn>model|<\|START_RESPONSE\|>"
    r"|<\|assistant\|>))+"
)
_JSON_INFO = {"json", "json5", "jsonc", "jsonl", "ndjson"}
_CODE_INFO = {
    "python", "py", "javascript", "js", "typescript", "ts", "java", "go", "rust", "c", "cpp", "bash", "sh", "shell",
    "sql", "html", "css", "yaml", "yml", "xml", "toml", "diff", "php", "ruby", "jsonschema", "schema",
}  # fmt: skip


@dataclass(frozen=True)
class _Candidate:
    """A place in the output where a value begins. `rank`: 3 in a JSON fence or answer tag, 2 other fence, 1 bare."""

    start: int
    end: int
    rank: int
    value: Any = None
    repairs: tuple[str, ...] = ()
    failure: str = ""  # "", truncated, broken-json, nested-too-deep
    detail: str = ""
    marks: tuple[str, ...] = ()


@dataclass
class _Scan:
    candidates: list[_Candidate]
    reasoning: list[tuple[int, int]]
    tokens: list[tuple[int, int]]
    unclosed_reasoning: bool = False


def recover(text: str, types: Collection[str] | None = None) -> Recovered:
    """The one JSON value that an output holds.

    `types`: the JSON types ("object", "array", "string" …) the answer can have, when a schema tells; candidates of
    other types are then passed over, and a string that holds JSON text of a fitting type is opened once.
    """
    if not text.strip():
        return Recovered(problem="empty", detail="the output is empty")
    strict = _whole(text)
    if strict is not None:
        if "non-finite-number" not in strict.repairs and not _opens(strict.value, types):
            return _judged([strict], (), True)
        return _opened(_judged([strict], (), True), types)
    peeled, how = _peel(text)
    whole = _whole(peeled)
    if whole is not None and how:
        return _opened(_judged([whole], how, False), types)
    unescaped = _unescaped(peeled)
    if unescaped is not None:
        return _judged([unescaped], (*how, "escaped-quotes"), False)
    return _opened(_choose(peeled, how, types), types)


def json_type(value: Any) -> str:
    """The JSON Schema name of a value's type; a float without a fraction is "number" here, as it was written."""
    if value is None:
        return "null"
    for python, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, python):
            return name
    return "object"


def _fits(value: Any, types: Collection[str] | None) -> bool:
    if types is None:
        return True
    kind = json_type(value)
    return kind in types or (kind in ("integer", "number") and bool({"integer", "number"} & set(types)))


def _opens(value: Any, types: Collection[str] | None) -> bool:
    """A string where no string can be, so that it may be JSON text put into quotes."""
    return isinstance(value, str) and types is not None and "string" not in types


def _opened(found: Recovered, types: Collection[str] | None) -> Recovered:
    if not found.found or not _opens(found.value, types):
        return found
    inner = _whole(found.value)
    if inner is None or not _fits(inner.value, types):
        return found
    return _judged([inner], (*found.how, "json-in-string"), False)


def _whole(text: str) -> Parsed | None:
    """The text as exactly one JSON value, or None."""
    body = text.strip(" \t\r\n")
    try:
        parsed = parse_strict(body)
    except (ValueError, RecursionError):
        return None
    return parsed if parsed.end == len(body) else None


def _judged(parsed: list[Parsed], how: tuple[str, ...], strict: bool) -> Recovered:
    """The result for one value that was read; what no JSON value can stand for becomes a problem."""
    value, repairs = parsed[0].value, parsed[0].repairs
    how = tuple(dict.fromkeys((*how, *repairs)))
    if "duplicate-keys" in repairs:
        return Recovered(None, how, False, "duplicate-keys", "a key stands twice with different values", (value,))
    if "non-finite-number" in repairs:
        detail = "NaN or Infinity, which JSON does not have"
        return Recovered(None, how, False, "non-finite-number", detail, (value,))
    return Recovered(value, how, strict and not how, values=(value,))


def _peel(text: str) -> tuple[str, tuple[str, ...]]:
    """The text without what surely stands around the answer: marks, a leading reasoning block, one fence."""
    how: list[str] = []
    if text[:1] == "\ufeff":
        text = text[1:]
        how.append("bom")
    for pattern, at_start in ((_START_MARKERS, True), (_END_MARKERS, False)):
        match = pattern.search(text)
        if match:
            text = text[match.end() :] if at_start else text[: match.start()]
            how.append("end-marker")
    while True:
        match = _TOKENS.match(text, len(text) - len(text.lstrip()))
        if not match or not match.group("open"):
            break
        end = _reasoning_end(text, match)
        if end is None:
            break
        text = text[end:]
        how.append("reasoning-block")
    body = text.strip()
    fence = re.match(r"(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+.-]*)[ \t]*\n(.*?)\n?[ \t]*\1[`~]*\Z", body, re.DOTALL)
    if fence and fence.group(2).lower() not in _CODE_INFO and _whole(fence.group(3)) is not None:
        return fence.group(3), tuple(dict.fromkeys([*how, "code-fence"]))
    tagged = re.match(rf"<({_ANSWER})>(.*)</\1>\Z", body, re.DOTALL | re.IGNORECASE)
    if tagged and _whole(tagged.group(2)) is not None:
        return tagged.group(2), tuple(dict.fromkeys([*how, "answer-tag"]))
    return text, tuple(dict.fromkeys(how))


def _reasoning_end(text: str, opening: re.Match[str]) -> int | None:
    """Where the reasoning block that `opening` starts is closed (nested ones of the same kind counted), or None."""
    name = re.sub(r"[<>\[\]|/\u25c1\u25b7]", "", opening.group()).split()[0].lower()
    depth = 1
    for token in _TOKENS.finditer(text, opening.end()):
        if token.group("open"):
            other = re.sub(r"[<>\[\]|/\u25c1\u25b7]", "", token.group()).split()[0].lower()
            if other == name and name.isalpha():
                depth += 1
        elif token.group("close"):
            closing = re.sub(r"[<>\[\]|/\u25c1\u25b7]", "", token.group()).split()[0].lower()
            if name.isalpha() and name in _SAME_NAME and closing != name:
                continue
            depth -= 1
            if depth == 0:
                return token.end()
    if depth > 1:  # an opening tag mentioned inside the block: its first closing tag ends it
        for token in _TOKENS.finditer(text, opening.end()):
            if token.group("close"):
                return token.end()
    return None


# Tags that are closed by their own name only; the others have one closing mark for several opening ones.
_SAME_NAME = frozenset(
    ("think", "thinking", "thought", "thoughts", "reason", "reasoning", "reflection")
    + ("scratchpad", "analysis", "cot", "plan", "planning", "deliberation")
)


def _unescaped(text: str) -> Parsed | None:
    """JSON text that was escaped once too often: `{\\"a\\": 1}` without quotes around it."""
    body = text.strip().strip("`").removeprefix("json").strip()
    if not re.match(r'[\[{](?:\s|\\n|\\t|[\[{])*\\"', body):
        return None
    try:
        inner = json.loads('"' + body.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"')
    except (ValueError, RecursionError):
        return None
    return _whole(inner)


def _choose(text: str, how: tuple[str, ...], types: Collection[str] | None) -> Recovered:
    scan = _scan(text)
    if scan.unclosed_reasoning and not scan.candidates:
        detail = "the reasoning block is never closed: the answer was not reached"
        return Recovered(how=how, problem="truncated", detail=detail)
    if not scan.candidates:
        return _scalar(text, scan, how)
    top = max(candidate.rank for candidate in scan.candidates)
    group = [candidate for candidate in scan.candidates if candidate.rank == top]
    fitting = [candidate for candidate in group if candidate.failure or _fits(candidate.value, types)]
    if any(not candidate.failure for candidate in fitting):
        group = fitting
    if any(isinstance(candidate.value, dict) for candidate in group):  # [1] in prose is a citation, not an answer
        group = [candidate for candidate in group if candidate.failure or not _is_citation(candidate.value)]
    good = [candidate for candidate in group if not candidate.failure]
    failed = [candidate for candidate in group if candidate.failure]
    values = {fingerprint(candidate.value): candidate.value for candidate in good}
    if failed:
        first = failed[0]
        return Recovered(how=how, problem=first.failure, detail=first.detail, values=tuple(values.values()))
    if len(values) > 1:
        detail = f"{len(values)} different JSON values; which one is the answer cannot be told"
        return Recovered(how=how, problem="multiple-json-values", detail=detail, values=tuple(values.values()))
    chosen = good[0]
    found = list(how)
    if scan.reasoning:
        found.append("reasoning-block")
    found.extend(chosen.marks)
    if len(good) > 1:
        found.append("repeated")
    if _rest(text, scan, good):
        found.append("prose-around")
    if not found and not chosen.repairs:
        found.append("odd-whitespace")
    return _judged([Parsed(chosen.value, chosen.end, chosen.repairs)], tuple(dict.fromkeys(found)), False)


def _is_citation(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)


def _rest(text: str, scan: _Scan, taken: list[_Candidate]) -> str:
    """What is left of the output beside the answer, reasoning and marks."""
    spans = sorted([*scan.reasoning, *scan.tokens, *((one.start, one.end) for one in taken)])
    kept, at = [], 0
    for start, end in spans:
        kept.append(text[at:start] if start > at else "")
        at = max(at, end)
    kept.append(text[at:])
    return _END_MARKERS.sub("", "".join(kept)).strip()


def _scalar(text: str, scan: _Scan, how: tuple[str, ...]) -> Recovered:
    """A bare number, string or literal as the only thing beside reasoning and marks."""
    rest = _rest(text, scan, [])
    found = list(how) + (["reasoning-block"] if scan.reasoning else []) + (["code-fence"] if scan.tokens else [])
    parsed = _whole(rest)
    if parsed is not None:
        return _judged([parsed], tuple(dict.fromkeys(found or ["odd-whitespace"])), False)
    try:
        lenient = parse_lenient(rest)
        if lenient.end == len(rest):
            return _judged([lenient], tuple(dict.fromkeys(found)), False)
    except Cut:
        if rest[:1] in "\"'" and "\n" not in rest:
            return Recovered(how=tuple(found), problem="truncated", detail="the output ends inside a string")
    except Broken:
        pass
    if re.search(r"<parameter=|<invoke\b|<arg_key>", text):
        return Recovered(how=tuple(found), problem="no-json", detail="a tool call written in XML, not JSON")
    return Recovered(how=tuple(found), problem="no-json", detail="there is no JSON value in the output")


def _scan(text: str) -> _Scan:
    """Every place where a value begins, outside reasoning; what stands inside a value's strings is not looked at."""
    scan = _Scan([], [], [])
    fences: list[tuple[str, str]] = []
    tags: list[str] = []
    at = 0
    while True:
        token = _TOKENS.search(text, at)
        if token is None:
            return scan
        at = token.end()
        if token.group("open"):
            end = _reasoning_end(text, token)
            if end is None:
                scan.unclosed_reasoning = not scan.candidates
                return scan
            scan.reasoning.append((token.start(), end))
            at = end
        elif token.group() == "<|end|>":
            scan.tokens.append(token.span())
        elif token.group("close"):
            # Some templates open the block in the prompt: all before a lonely closing tag was reasoning.
            scan.candidates.clear()
            fences.clear()
            tags.clear()
            scan.reasoning.append((0, token.end()))
        elif token.group("fence"):
            scan.tokens.append(token.span())
            ticks, info = token.group("ticks"), token.group("info").lower()
            if fences and not info and ticks[0] == fences[-1][0][0] and len(ticks) >= len(fences[-1][0]):
                fences.pop()
            elif not (fences and not info):
                fences.append((ticks, info))
        elif token.group("answer") or token.group("call"):
            scan.tokens.append(token.span())
            tags.append("answer-tag" if token.group("answer") else "tool-call-tag")
        elif token.group("answered") or token.group("called"):
            scan.tokens.append(token.span())
            if tags:
                tags.pop()
        else:
            candidate = _candidate(text, token.start(), fences, tags)
            if candidate is not None:
                scan.candidates.append(candidate)
                at = candidate.end
                if candidate.failure in ("truncated", "nested-too-deep") or len(scan.candidates) > 1000:
                    return scan


def _candidate(text: str, start: int, fences: list[tuple[str, str]], tags: list[str]) -> _Candidate | None:
    """What the bracket at `start` begins; None when it is only a bracket in prose."""
    rank, marks = 1, []
    if fences:
        marks.append("code-fence")
        rank = 3 if fences[-1][1] in _JSON_INFO else 1 if fences[-1][1] in _CODE_INFO else 2
    if tags:
        marks.append(tags[-1])
        rank = max(rank, 3 if tags[-1] == "answer-tag" else 2)
    try:
        parsed = parse_strict(text, start)
        return _Candidate(start, parsed.end, rank, parsed.value, parsed.repairs, marks=tuple(marks))
    except RecursionError:
        detail = "nested deeper than any answer needs"
        return _Candidate(start, len(text), rank, failure="nested-too-deep", detail=detail)
    except ValueError:
        pass
    try:
        parsed = parse_lenient(text, start)
        return _Candidate(start, parsed.end, rank, parsed.value, parsed.repairs, marks=tuple(marks))
    except Cut as error:
        if not _looks_like_json(text, start):
            return None
        return _Candidate(start, len(text), rank, failure="truncated", detail=str(error), marks=tuple(marks))
    except Broken as error:
        if str(error) == "nested too deep":
            return _Candidate(start, len(text), rank, failure="nested-too-deep", detail=str(error))
        if not _looks_like_json(text, start):
            return None
        fence = text.find("```", start) if fences else -1
        if fence >= 0 and not text[error.position : fence].strip():
            detail = "the fence is closed before the value is"
            return _Candidate(start, fence, rank, failure="truncated", detail=detail, marks=tuple(marks))
        detail = f"{error}, at character {error.position + 1}"
        end = _balanced_end(text, start)
        return _Candidate(start, max(end, start + 1), rank, failure="broken-json", detail=detail, marks=tuple(marks))


def _looks_like_json(text: str, start: int) -> bool:
    """A bracket that was surely meant to begin JSON: quotes, a key or another value follow at once."""
    return bool(
        re.compile(
            r"\{\s*(?:[\"'\u201c\u2018]|[A-Za-z_$][\w$-]*\s*:|\}|\Z)|\[\s*(?:[\"'\u201c{\[]|-?\d+\s*,|\Z)"
        ).match(text, start)
    )


_BALANCE = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\[\]{}]')


def _balanced_end(text: str, start: int) -> int:
    """Where the bracket at `start` is closed, strings passed over; the end of the text when it is not."""
    depth = 0
    for token in _BALANCE.finditer(text, start):
        if token.group() in ("{", "["):
            depth += 1
        elif token.group() in ("}", "]"):
            depth -= 1
            if depth <= 0:
                return token.end()
    return len(text)


# ---------------------------------------------------------------------------------------------------------------------
# Outputs as programs save them

# Where the generated text stands in the records that common programs write, best known first.
OUTPUT_FIELDS = (
    "output",
    "response",
    "completion",
    "generated_text",
    "prediction",
    "generation",
    "answer",
    "raw_output",
    "text",
    "content",
    "result",
)


@dataclass(frozen=True)
class SavedOutput:
    """The generated text in a saved record, the field it stood in, and why generation stopped when the record says."""

    text: str | None
    field: str
    finish_reason: str | None = None


def output_in(record: Any, fields: Collection[str] = OUTPUT_FIELDS) -> SavedOutput:
    """The generated text in a record that a program saved; `text` is None when none of the known places holds one.

    Known: a bare string; the fields above; chat completions (`choices[0].message.content`, also inside a batch line's
    `response.body`); a messages list, whose last assistant turn counts; content parts; Gemini candidates.
    """
    if isinstance(record, str):
        return SavedOutput(record, "")
    if isinstance(record, list):
        if record and isinstance(record[0], dict) and {"role", "content"} <= record[0].keys():
            return output_in({"messages": record}, fields)
        if len(record) == 1:
            return output_in(record[0], fields)
        return SavedOutput(None, "")
    if not isinstance(record, dict):
        return SavedOutput(None, "")
    for holder, place in _completions(record):
        text = _text_of(holder.get("content", holder.get("parts")))
        if text is None:
            text = _text_of(holder.get("text"))
        if text is not None:
            reason = holder.get("finish_reason") or holder.get("stop_reason") or holder.get("finishReason")
            return SavedOutput(text, place, str(reason) if reason else None)
    reason = record.get("finish_reason") or record.get("stop_reason")
    for field in fields:
        if field in record:
            text = _text_of(record[field])
            if text is None and isinstance(record[field], dict):
                inner = output_in(record[field], fields)
                if inner.text is not None:
                    return SavedOutput(inner.text, f"{field}.{inner.field}".rstrip("."), inner.finish_reason)
            if text is not None:
                return SavedOutput(text, field, str(reason) if reason else None)
    return SavedOutput(None, "")


def _completions(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    response = record.get("response")
    inner = response.get("body") if isinstance(response, dict) else None
    body: dict[str, Any] = inner if isinstance(inner, dict) else record
    prefix = "response.body." if body is not record else ""
    choices = body.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        holder = {**(message if isinstance(message, dict) else choices[0])}
        holder.setdefault("finish_reason", choices[0].get("finish_reason"))
        yield holder, f"{prefix}choices[0].message.content"
    candidates = body.get("candidates")
    if isinstance(candidates, list) and candidates and isinstance(candidates[0], dict):
        content = candidates[0].get("content")
        if isinstance(content, dict):
            yield {**content, "finish_reason": candidates[0].get("finishReason")}, f"{prefix}candidates[0].content"
    for key in ("messages", "conversations"):
        turns = body.get(key)
        if isinstance(turns, list):
            for turn in reversed(turns):
                if isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("assistant", "gpt", "model"):
                    yield {"content": turn.get("content", turn.get("value"))}, f"{prefix}{key}[-1].content"
                    break
    if body.get("type") == "message" and body.get("role") == "assistant":
        yield body, f"{prefix}content"


def _text_of(value: Any) -> str | None:
    """A text, or the text parts of a content list joined; None when it is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        parts = [part.get("text") for part in value if isinstance(part.get("text"), str)]
        return "".join(str(part) for part in parts) if parts else None
    return None
