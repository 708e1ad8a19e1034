"""Where does the generated text stand in the records that common programs save?"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.data.encodings import detect_encoding
from preflight.data.records import BadRecord, Unreadable, read_records

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
    `response.body`); a messages list, whose last assistant turn counts; content parts; Gemini candidates; the Responses
    API's `output`; vLLM's `outputs`; Ollama's `message`. Where an answer has no text its one tool call counts.
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
        if text is None:
            text = _call_of(holder)
        if text is None and isinstance(holder.get("refusal"), str):
            text = holder["refusal"]
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
    outputs = body.get("output")
    if body.get("object") == "response" and isinstance(outputs, list):  # OpenAI's Responses API
        for item in outputs:
            if isinstance(item, dict) and item.get("type") == "message":
                details = body.get("incomplete_details")
                why = details.get("reason") if isinstance(details, dict) else None
                yield {"content": item.get("content"), "finish_reason": why}, f"{prefix}output[].content"
    outputs = body.get("outputs")
    if isinstance(outputs, list) and len(outputs) == 1 and isinstance(outputs[0], dict) and "text" in outputs[0]:
        yield outputs[0], f"{prefix}outputs[0].text"  # vLLM's RequestOutput
    message = body.get("message")
    if isinstance(message, dict) and message.get("role") == "assistant":  # Ollama
        yield {**message, "finish_reason": body.get("done_reason")}, f"{prefix}message.content"


def _call_of(holder: dict[str, Any]) -> str | None:
    """The arguments of the one tool call that stands for the answer, as JSON text; None for none and for several."""
    calls = [call.get("function") for call in holder.get("tool_calls") or [] if isinstance(call, dict)]
    parts = holder.get("content")
    made = [call.get("arguments") for call in calls if isinstance(call, dict)]
    made += [part.get("input") for part in _dicts(parts) if part.get("type") == "tool_use"]
    made += [
        part["functionCall"].get("args")
        for part in _dicts(holder.get("parts"))
        if isinstance(part.get("functionCall"), dict)
    ]
    if len(made) != 1:
        return None
    return made[0] if isinstance(made[0], str) else json.dumps(made[0], ensure_ascii=False)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text_of(value: Any) -> str | None:
    """A text, or the text parts of a content list joined; None when it is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        parts = [part.get("text") for part in value if isinstance(part.get("text"), str)]
        return "".join(str(part) for part in parts) if parts else None
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Files of outputs

_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
_WHOLE_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class PlacedOutput:
    """One output and where it stands. `text` None: `trouble` says why there is none."""

    place: str
    text: str | None
    finish_reason: str | None = None
    trouble: str = ""
    field: str = ""


def read_outputs(
    path: str, how: str = "auto", field: str | None = None, own_keys: Collection[str] = ()
) -> tuple[str, Iterator[PlacedOutput]]:
    """How the file is read (whole, lines, records or folder), and its outputs.

    auto: a text is one output; a folder holds one output a file; in JSON Lines, CSV and Parquet each record holds one
    in a known field, or, when it has none (or has the `own_keys` of the answer itself), each line is one.
    Raises UsageError when the file cannot be read at all.
    """
    if path == "-":
        return "whole", iter([PlacedOutput("stdin", sys.stdin.read())])
    file = Path(path)
    if file.is_dir():
        inner = sorted(item for item in file.iterdir() if item.is_file() and not item.name.startswith("."))
        return "folder", (PlacedOutput(item.name, _whole_text(item)) for item in inner)
    if not file.exists():
        raise UsageError(f"--outputs {path}: no such file")
    if how == "whole":
        return "whole", iter([PlacedOutput(file.name, _whole_text(file))])
    if how == "auto" and not _holds_records(file, own_keys):
        return "whole", iter([_one_answer(file, own_keys)])
    try:
        records = read_records(file)
        if how == "auto":
            how = _records_or_lines(records, field, own_keys)
        if how == "lines":
            return "lines", _line_outputs(records)
        return "records", _record_outputs(records, field)
    except Unreadable as error:
        raise UsageError(f"--outputs {path}: {error.what}; {error.fix[0] if error.fix else error.why}") from error


def _one_answer(file: Path, own_keys: Collection[str]) -> PlacedOutput:
    """A file with one output: its text, or the text in the reply of an API that was saved as it came."""
    text = _whole_text(file)
    if text.lstrip().startswith("{"):
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            reply = None
        if isinstance(reply, dict) and not set(own_keys) & reply.keys() and next(_completions(reply), None):
            saved = output_in(reply, ())
            if saved.text is not None:
                return PlacedOutput(file.name, saved.text, saved.finish_reason, field=saved.field)
    return PlacedOutput(file.name, text)


def _whole_text(file: Path) -> str:
    try:
        if file.stat().st_size > _WHOLE_LIMIT_BYTES:
            raise UsageError(f"--outputs {file}: {file.stat().st_size} bytes; allowed for one output: 64 MiB")
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"--outputs {file}: cannot be read ({error.strerror})") from error
    encoding = detect_encoding(data)
    return data.decode("utf-8-sig" if encoding == "utf-8" else encoding, errors="replace")


def _holds_records(file: Path, own_keys: Collection[str]) -> bool:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if any(suffix in _RECORD_SUFFIXES for suffix in suffixes):
        return True
    if ".json" not in suffixes:
        return False
    try:
        records = read_records(file)
        first = next(iter(records), None)
    except Unreadable:
        return False
    # One JSON document may be the output itself; it holds several only when it is a list of saved records.
    if first is None or isinstance(first, BadRecord) or records.container not in ("json-array", "jsonl"):
        return False
    if isinstance(first.value, dict) and set(own_keys) & first.value.keys():
        return False
    return output_in(first.value).text is not None


def _records_or_lines(records: Any, field: str | None, own_keys: Collection[str]) -> str:
    if field is not None or records.container != "jsonl":
        return "records"
    for record in records:
        if isinstance(record, BadRecord):
            continue
        value = record.value
        if isinstance(value, str):
            return "records"
        own = isinstance(value, dict) and set(own_keys) & value.keys()
        return "lines" if own or output_in(value).text is None else "records"
    return "lines"


def _line_outputs(records: Any) -> Iterator[PlacedOutput]:
    for number, line in records.lines():
        if isinstance(line, BadRecord):
            yield PlacedOutput(f"line {number}", None, trouble=line.detail)
        else:
            yield PlacedOutput(f"line {number}", line)


def _record_outputs(records: Any, field: str | None) -> Iterator[PlacedOutput]:
    for record in records:
        place = f"line {record.line}" if record.line is not None else f"record {record.number}"
        if isinstance(record, BadRecord):
            yield PlacedOutput(place, None, trouble=f"{record.reason}: {record.detail}")
            continue
        saved = output_in(record.value, (field,) if field else OUTPUT_FIELDS)
        if saved.text is None:
            named = f"the field '{field}' holds" if field else "the record holds"
            yield PlacedOutput(place, None, trouble=f"{named} no text")
        else:
            yield PlacedOutput(place, saved.text, saved.finish_reason, field=saved.field)
