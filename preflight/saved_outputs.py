"""Where does the generated text stand in the records that common programs save?"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

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
