"""What JSON value does a model's output hold, and what had to be peeled off or forgiven to get at it?

Nothing is guessed: an output with two different answers, one that was cut, or one whose strings cannot be told apart
has no value. Nothing is evaluated as code.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from preflight.outputs.lenient_json import Broken, Cut, Parsed, fingerprint, json_type, parse_lenient, parse_strict


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
    r"|<\|/think\|>|<unused95>|<channel\|>|<\|end\|>|<\|channel\|>\s*final\b[^<]*<\|message\|>|assistantfinal(?=[\s{\[`]))"
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
    if "&quot;" in peeled and '"' not in peeled:
        plain = _whole(html.unescape(peeled).strip())
        if plain is not None:
            return _judged([plain], (*how, "html-entities"), False)
    return _opened(_choose(peeled, how, types), types)


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
    ("think", "thinking", "thought", "thoughts", "reason", "reasoning", "reflection", "scratchpad", "analysis", "cot")
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
    scan = _scan(text, "reasoning-block" in how)
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
        if rest and rest[0] in "\"'" and "\n" not in rest:
            return Recovered(how=tuple(found), problem="truncated", detail="the output ends inside a string")
    except Broken:
        pass
    if re.search(r"<parameter=|<invoke\b|<arg_key>", text):
        return Recovered(how=tuple(found), problem="no-json", detail="a tool call written in XML, not JSON")
    if re.search(r"^\s*(?:```tool_code\s*|<\|python_tag\|>)?\[?[A-Za-z_][\w.]*\((?:\s*[A-Za-z_]\w*\s*=|\s*\))", text):
        return Recovered(how=tuple(found), problem="no-json", detail="a tool call written as Python, not JSON")
    return Recovered(how=tuple(found), problem="no-json", detail="there is no JSON value in the output")


def _scan(text: str, reasoned: bool) -> _Scan:
    """Every place where a value begins, outside reasoning; what stands inside a value's strings is not looked at.

    `reasoned`: a reasoning block was taken off before, so that another closing mark at the end is only a slip.
    """
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
            reasoned = True
            at = end
        elif token.group() == "<|end|>" or (token.group("close") and reasoned and not text[at:].strip()):
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
