"""One record on its way into a training file: read, cleaned, instructed, compared with the schema, made comparable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from preflight.data.conversations import (
    FAMILY,
    Conversation,
    Message,
    Problem,
    clean_text,
    looks_misdecoded,
    read_conversation,
    text_of,
)
from preflight.data.personal_data import personal_data
from preflight.data.strict_instruction import StrictInstruction
from preflight.outputs.json_outputs import recover
from preflight.outputs.schemas import Validator


@dataclass(frozen=True)
class Recipe:
    """What is done to every record."""

    role_map: Mapping[str, str] = field(default_factory=dict)
    instruction: StrictInstruction | None = None
    schema: Any = None
    check_targets: str = "all"  # all, last or none of the assistant's text turns must fit the schema
    recover_targets: bool = True
    tool_arguments: str = "keep"  # keep, object or text
    output_format: str = "messages"  # or prompt-completion
    keep_columns: tuple[str, ...] = ()
    group_by: str | None = None  # a column whose equal values must not be split apart
    near_texts: bool = True
    look_for_personal_data: bool = True


@dataclass
class Prepared:
    """One record, ready. `line` is what is written (empty when it is set aside for `problems`).

    `identity`: equal for records with the same conversation, whatever else stands in them. `prompt`: equal for records
    that ask the same. `group`: equal for records that must stay on one side of a split. `near_text`: the words without
    case and spacing, prompt and answer apart by U+001E.
    """

    shape: str
    family: str
    line: bytes = b""
    identity: bytes = b""
    prompt: bytes = b""
    near_text: bytes = b""
    group: bytes = b""
    problems: list[Problem] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    personal: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    turns: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    tools: bool = False
    arguments: set[str] = field(default_factory=set)
    characters: int = 0
    weighted: bool = False


class Preparer:
    """Applies one Recipe to record after record."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.validator = Validator(recipe.schema) if recipe.schema is not None else None
        self._encode = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": "), allow_nan=False).encode

    def __call__(self, value: Any, notes: tuple[str, ...] = ()) -> Prepared:
        """The record, prepared. Never raises for odd records: they come back with problems."""
        found = read_conversation(value, self.recipe.role_map)
        made = Prepared(found.shape, FAMILY[found.shape], problems=found.problems, changes=found.changes)
        made.roles = found.roles_seen
        made.tools = found.has_tools
        if "duplicate-keys" in notes:
            made.changes.append("duplicate-keys-last-kept")
        if found.text is not None:
            return self._text(made, found)
        self._clean(found, made)
        self._arguments(found, made)
        made.turns = tuple(message["role"] for message in found.messages)
        if found.problems:
            return made
        if self.recipe.instruction is not None and self.recipe.instruction.add_to(found.messages):
            made.changes.append("instruction-added")
        if self.validator is not None and self.recipe.check_targets != "none":
            self._check_targets(found, made)
        if found.problems:
            return made
        try:
            self._finish(found, made)
        except (ValueError, RecursionError) as error:  # NaN inside tool arguments, or nested without end
            found.problem("not-writable", f"cannot be written as JSON ({str(error)[:80]})")
        return made

    def _text(self, made: Prepared, found: Conversation) -> Prepared:
        text, changes = clean_text(found.text or "")
        made.changes += changes
        if found.problems:
            return made
        made.line = self._encode({"text": text}).encode()
        made.identity = made.prompt = made.group = _digest(made.line)
        made.characters = len(text)
        if self.recipe.near_texts:
            made.near_text = b"\x1e" + near_text(text)
        if self.recipe.look_for_personal_data:
            made.personal = personal_data(text)
        return made

    def _all_messages(self, found: Conversation) -> list[Message]:
        return [*found.messages, *(found.chosen or ()), *(found.rejected or ())]

    def _clean(self, found: Conversation, made: Prepared) -> None:
        messages = self._all_messages(found)
        texts = [message.get("content") for message in messages]
        # Most records are clean: one look at all of it, before looking at each turn.
        if all(isinstance(text, str) and text and not text[-1].isspace() for text in texts):
            together = " ".join(texts)  # type: ignore[arg-type]
            if together.isascii() and together.replace("\n", " ").replace("\t", " ").isprintable():
                made.weighted = any("weight" in message for message in messages if len(message) > 2)
                return
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                cleaned, changes = clean_text(content)
                if changes:
                    message["content"] = cleaned
                    made.changes += changes
                if not content.isascii() and looks_misdecoded(content):
                    made.changes.append("looks-misdecoded")
            elif isinstance(content, list):
                for part in content:
                    if isinstance(part, dict) and isinstance(part.get("text"), str):
                        part["text"], changes = clean_text(part["text"])
                        made.changes += changes
            if "weight" in message:
                made.weighted = True

    def _arguments(self, found: Conversation, made: Prepared) -> None:
        if not made.tools:
            return
        for message in self._all_messages(found):
            for call in message.get("tool_calls") or () if isinstance(message.get("tool_calls"), list) else ():
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict) or "arguments" not in function:
                    continue
                arguments = function["arguments"]
                if isinstance(arguments, str) and self.recipe.tool_arguments == "object":
                    try:
                        function["arguments"] = json.loads(arguments) if arguments.strip() else {}
                        made.changes.append("arguments-to-objects")
                    except (ValueError, RecursionError):
                        pass  # already a problem of the record
                elif not isinstance(arguments, str) and self.recipe.tool_arguments == "text":
                    function["arguments"] = json.dumps(arguments, ensure_ascii=False)
                    made.changes.append("arguments-to-text")
                made.arguments.add("text" if isinstance(function["arguments"], str) else "object")

    def _check_targets(self, found: Conversation, made: Prepared) -> None:
        """Each answer that is trained on must fit the schema; one that only needs peeling is rewritten."""
        assert self.validator is not None
        answers = [
            (number, message)
            for number, message in enumerate(found.messages, 1)
            if message["role"] == "assistant" and isinstance(message.get("content"), str) and message["content"]
        ]
        answers = [pair for pair in answers if not pair[1].get("tool_calls")]
        answers += [(len(found.messages) + 1, message) for message in found.chosen or () if text_of(message)]
        if self.recipe.check_targets == "last":
            answers = answers[-1:]
        for number, message in answers:
            out = recover(message["content"], self.validator.types)
            if not out.found:
                found.problem("target-" + out.problem, f"the answer in turn {number}: {out.detail}", number)
                continue
            fit = self.validator.check(out.value, limit=3)
            if fit.valid is None:
                found.problem("target-not-compared", f"the answer in turn {number}: {fit.unknown}", number)
            elif not fit.valid:
                error = fit.errors[0]
                where = error.pointer or "the root"
                what = f"the answer in turn {number} does not fit the schema: {where} {error.expected}, got {error.got}"
                found.problem("target-schema-mismatch", what, number)
            elif not out.strict:
                if self.recipe.recover_targets:
                    message["content"] = json.dumps(out.value, ensure_ascii=False)
                    made.changes.append("target-rewritten-as-json")
                else:
                    what = f"the answer in turn {number} is not strict JSON ({', '.join(out.how)})"
                    found.problem("target-not-strict", what, number)

    def _finish(self, found: Conversation, made: Prepared) -> None:
        body = self._body(found, made)
        made.left_out = tuple(key for key in found.extras if key not in self.recipe.keep_columns)
        identity = self._encode(body)
        kept = {key: found.extras[key] for key in self.recipe.keep_columns if key in found.extras}
        made.line = (self._encode({**body, **_finite(kept)}) if kept else identity).encode()
        made.identity = _digest(identity.encode())
        texts = [text_of(message) for message in found.messages]
        if found.chosen is not None:
            asked, answers = texts, [text_of(message) for message in (*found.chosen, *(found.rejected or ()))]
            texts = texts + answers
        else:
            answer = _last_answer(found.messages)
            asked, answers = texts[:answer], texts[answer:]
        if found.messages and found.messages[0]["role"] == "system":
            asked = asked[1:]
        if found.label is not None:
            answers.append("good" if found.label else "bad")
        question = near_text("\n".join(asked))
        made.prompt = made.group = _digest(question)
        if self.recipe.group_by is not None and self.recipe.group_by in found.extras:
            made.group = _digest(self._encode(_finite(found.extras[self.recipe.group_by])).encode())
        if self.recipe.near_texts:
            made.near_text = question + b"\x1e" + near_text("\n".join(answers))
        whole = "\n".join(texts)
        made.characters = len(whole)
        if self.recipe.look_for_personal_data:
            made.personal = personal_data(whole)

    def _body(self, found: Conversation, made: Prepared) -> dict[str, Any]:
        if found.chosen is not None:
            body: dict[str, Any] = {"prompt": found.messages, "chosen": found.chosen, "rejected": found.rejected}
        elif made.family == "unpaired-preference":
            cut = _last_answer(found.messages)
            body = {"prompt": found.messages[:cut], "completion": found.messages[cut:], "label": found.label}
        elif self.recipe.output_format == "prompt-completion":
            cut = _last_answer(found.messages)
            body = {"prompt": found.messages[:cut], "completion": found.messages[cut : cut + 1]}
        else:
            body = {"messages": found.messages}
        if found.tools is not None:
            # One text a record: a table of nested objects gives every tool the parameters of all the others, as nulls.
            body["tools"] = json.dumps(found.tools, ensure_ascii=False)
        return body


def _last_answer(messages: list[Message]) -> int:
    """The index of the last assistant turn; their number when there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index
    return len(messages)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# Not `!` or `?`: in code they carry meaning.
_MARKS = dict.fromkeys(map(ord, ".,;:\u3002\uff0c\uff1b\uff1a\u3001"), " ")


# The same for ASCII alone, as bytes: a quarter of the time.
_ASCII_WORDS = bytes(
    ord(" ") if chr(code) in ".,;:" or chr(code).isspace() else ord(chr(code).lower()) if code < 128 else code
    for code in range(256)
)


def near_text(text: str) -> bytes:
    """The words of a text without case, spacing, full stops and commas, as UTF-8."""
    if text.isascii():
        return b" ".join(text.encode("ascii").translate(_ASCII_WORDS).split())
    return " ".join(text.translate(_MARKS).lower().split()).encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
