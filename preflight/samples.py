"""Which questions does a data file ask, and by what rule is each answer judged?

Records come from `records.py`; here each becomes a Sample that a model can be asked and a scorer can judge, or a
Problem that names the record and what is wrong with it. Nothing is dropped silently.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import quote
from preflight.records import BadRecord, Unreadable, read_records
from preflight.scoring import BadScorer, Scorer, read_scorer, scorer_for_reference

# What people call the right answer, best known first.
REFERENCES = (
    "reference", "answer", "answers", "target", "expected_output", "ideal", "gold", "label", "completion", "response",
    "output", "chosen",
)  # fmt: skip
QUESTIONS = ("prompt", "question", "instruction", "query", "input", "text")
_ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "prompter": "user", "question": "user", "answer": "assistant", "function": "tool", "observation": "tool",
    "function_response": "tool", "ipython": "tool", "instruction": "user",
}  # fmt: skip
_KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool"}


@dataclass(frozen=True)
class Sample:
    """One question that can be asked and judged. `place` says where it stands ("line 3"); `number` counts from 1."""

    id: str
    task: str
    number: int
    place: str
    messages: tuple[Mapping[str, Any], ...]
    scorer: Scorer
    reference: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    max_new_tokens: int | None = None
    fingerprint: str = ""
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Problem:
    """A record that cannot be asked or judged. `reason` is a slug; `detail` says what was seen."""

    number: int
    place: str
    reason: str
    detail: str


@dataclass
class SampleFile:
    """All of one data file. Lists of numbers count records from 1."""

    file: str
    container: str = ""
    encoding: str | None = None
    shapes: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    samples: list[Sample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    duplicates: list[list[int]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    left_out: int = 0

    @property
    def repeated(self) -> set[int]:
        """Numbers of the records that repeat an earlier one."""
        return {number for group in self.duplicates for number in group[1:]}

    def numbers(self, *reasons: str) -> list[int]:
        """The records with one of these problems."""
        return [problem.number for problem in self.problems if problem.reason in reasons]

    def as_json(self) -> dict[str, Any]:
        """What the report keeps of the file."""
        return {
            "file": Path(self.file).name,
            "container": self.container,
            "encoding": self.encoding,
            "shapes": dict(sorted(self.shapes.items())),
            "rows": self.rows,
            "scorable": _shortened([sample.number for sample in self.samples]),
            "scorable_count": len(self.samples),
            "left_out_by_limit": self.left_out,
            "duplicates": self.duplicates[:50],
            "empty_reference": _shortened(self.numbers("empty-reference")),
            "non_string_content": _shortened(self.numbers("non-string-content")),
            "no_messages": _shortened(self.numbers("no-messages")),
            "unreadable": _shortened(self.numbers("unreadable")),
            "without_reference": _shortened(self.numbers("no-reference")),
            "bad_scorer": _shortened(self.numbers("bad-scorer")),
            "notes": dict(sorted(self.notes.items())),
            "problems": [
                {"record": p.number, "place": p.place, "reason": p.reason, "detail": quote(p.detail, 200)}
                for p in self.problems[:50]
            ],
        }


def _shortened(numbers: list[int], limit: int = 200) -> list[int]:
    return numbers[:limit]


@dataclass(frozen=True)
class ReadingRules:
    """What the command line says about every record: its scorer, its schema, the limit of new tokens."""

    scorer: str | None = None
    schema: Any = None
    rouge_threshold: float | None = None
    limit: int = 200
    seed: int = 0
    encoding: str | None = None


def read_samples(path: str, rules: ReadingRules) -> SampleFile:
    """The samples of one data file; at most `rules.limit` of them, drawn with the seed and kept in order.

    Raises UsageError when the file as a whole cannot be read.
    """
    try:
        records = read_records(path, rules.encoding)
    except Unreadable as error:
        fix = f"; {error.fix[0]}" if error.fix else ""
        raise UsageError(f"--data {path}: {error.what}{fix}") from error
    made = SampleFile(path, records.container, records.encoding)
    loader = _SchemaLoader(Path(path).parent)
    seen: dict[str, list[int]] = {}
    ids: set[str] = set()
    draw = random.Random(rules.seed)
    task = Path(path).name.split(".")[0] or "data"
    accepted = 0
    for record in records:
        made.rows += 1
        if isinstance(record, BadRecord):
            made.problems.append(
                Problem(record.number, record.place, "unreadable", f"{record.reason}: {record.detail}")
            )
            continue
        place = f"line {record.line}" if record.line is not None else f"record {record.number}"
        try:
            sample = read_sample(record.value, record.number, place, task, rules, loader)
        except _Unusable as error:
            made.problems.append(Problem(record.number, place, error.reason, error.detail))
            continue
        shape = str(sample.record.get("_shape", ""))
        made.shapes[shape] = made.shapes.get(shape, 0) + 1
        group = seen.setdefault(sample.fingerprint, [])
        group.append(record.number)
        sample = _with_unique_id(sample, ids)
        accepted += 1
        # Reservoir sampling: every sample has the same chance, and memory does not grow with the file.
        if len(made.samples) < rules.limit:
            made.samples.append(sample)
        else:
            slot = draw.randrange(accepted)
            if slot < rules.limit:
                made.samples[slot] = sample
    made.left_out = accepted - len(made.samples)
    made.samples.sort(key=lambda sample: sample.number)
    made.duplicates = [group for group in seen.values() if len(group) > 1]
    made.notes = {name: count for name, count in records.notes.items() if count}
    made.encoding = records.encoding
    return made


class _Unusable(ValueError):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class _SchemaLoader:
    """Schema files that records name: beside the data file only, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._read = folder, {}  # type: Path, dict[str, Any]

    def __call__(self, name: str) -> Any:
        if name not in self._read:
            path = (self.folder / name).resolve()
            if self.folder.resolve() not in path.parents:
                raise BadScorer(f"the schema {quote(name, 60)!r} lies outside the data file's folder")
            self._read[name] = read_schema(path)
        return self._read[name]


def read_schema(path: str | Path) -> Any:
    """A JSON Schema from a file. Raises BadScorer when it is none."""
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadScorer(f"the schema {Path(path).name} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise BadScorer(f"the schema {Path(path).name} is not JSON ({quote(error, 100)})") from error
    if not isinstance(loaded, (dict, bool)):
        raise BadScorer(f"the schema {Path(path).name} is not an object")
    return loaded


def read_sample(value: Any, number: int, place: str, task: str, rules: ReadingRules, loader: Any) -> Sample:
    """One record as a sample. Raises _Unusable with the reason when it cannot be asked or judged."""
    record: Mapping[str, Any] = value if isinstance(value, Mapping) else {"text": value}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        record = {"messages": value}
    messages, reference, shape = conversation(record)
    scorer = _scorer(record, reference, rules, loader)
    limit = record.get("max_new_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit <= 1 << 20):
        raise _Unusable("bad-scorer", f"`max_new_tokens` is {quote(limit, 40)}; it must be a whole number above 0")
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = None
    name = record.get("id", record.get("name"))
    named = isinstance(name, (str, int)) and not isinstance(name, bool) and str(name).strip()
    return Sample(
        id=quote(name, 80) if named else f"{task}:{number}",
        task=quote(record["task"], 60) if isinstance(record.get("task"), str) and record["task"].strip() else task,
        number=number,
        place=place,
        messages=tuple(messages),
        scorer=scorer,
        reference=reference,
        tools=tuple(tool for tool in tools if isinstance(tool, Mapping)) if isinstance(tools, list) else (),
        max_new_tokens=limit,
        fingerprint=_fingerprint(messages, reference, scorer),
        record={**record, "_shape": shape},
    )


def _fingerprint(messages: Sequence[Mapping[str, Any]], reference: str | None, scorer: Scorer) -> str:
    text = json.dumps([list(messages), reference, scorer.kind], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _with_unique_id(sample: Sample, ids: set[str]) -> Sample:
    from dataclasses import replace

    name = sample.id
    if name in ids:
        name = f"{sample.id} ({sample.place})"
    ids.add(name)
    return sample if name == sample.id else replace(sample, id=name)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes of conversations


def conversation(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None, str]:
    """(the turns to send, the reference answer or None, the shape) of a record. Raises _Unusable.

    The last assistant turn is the reference and is not sent.
    """
    for key in ("messages", "conversations", "conversation", "dialogue", "chat"):
        if key in record and not isinstance(record[key], str):
            return _from_turns(record, key)
    if isinstance(record.get("prompt"), list):
        inner = {**record, "messages": record["prompt"]}
        turns, _, _ = _from_turns(inner, "messages")
        return turns, _reference_in(record), "prompt turns"
    return _from_fields(record)


def _from_turns(record: Mapping[str, Any], key: str) -> tuple[list[dict[str, Any]], str | None, str]:
    given = record[key]
    if not isinstance(given, list) or not given:
        raise _Unusable("no-messages", f"`{key}` holds no messages")
    turns = [_turn(item, index, key) for index, item in enumerate(given, 1)]
    shape = "messages" if any(isinstance(item, Mapping) and "role" in item for item in given) else "sharegpt"
    for name in ("system", "system_prompt"):
        if isinstance(record.get(name), str) and record[name].strip() and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": record[name]})
    reference = None
    if turns[-1]["role"] == "assistant":
        last = turns.pop()
        calls = last.get("tool_calls")
        reference = json.dumps(_call(calls[0])) if calls else str(last.get("content") or "")
    if not any(turn["role"] == "user" and _has_text(turn) for turn in turns):
        raise _Unusable("no-messages", "there is no user turn to answer")
    explicit = _reference_in(record) if reference is None else None
    return turns, explicit if explicit is not None else reference, shape


def _turn(item: Any, index: int, key: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise _Unusable("non-string-content", f"`{key}[{index}]` is {_kind(item)}, not a turn")
    role = item.get("role", item.get("from"))
    role = str(role).strip().lower() if isinstance(role, str) else ""
    role = _ROLES.get(role, role)
    if role not in _KNOWN_ROLES:
        raise _Unusable("no-messages", f"turn {index} has the role {quote(item.get('role', item.get('from')), 40)!r}")
    content = item.get("content", item.get("value"))
    calls = item.get("tool_calls")
    calls = calls if isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls) else None
    if content is not None and not isinstance(content, str) and not _is_parts(content):
        raise _Unusable("non-string-content", f"turn {index} ({role}) holds {_kind(content)} where text must stand")
    turn: dict[str, Any] = {"role": role, "content": _joined_parts(content) if _is_parts(content) else content}
    if calls:
        turn["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if isinstance(item.get(name), str):
            turn[name] = item[name]
    return turn


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, (str, Mapping)) for part in content)


def _joined_parts(parts: Sequence[Any]) -> str:
    found = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            kind = part.get("type", "another") if isinstance(part, Mapping) else "another"
            raise _Unusable("non-string-content", f"a content part of type {quote(kind, 30)!r}: only text can be asked")
        found.append(text)
    return "\n".join(found)


def _has_text(turn: Mapping[str, Any]) -> bool:
    return bool(str(turn.get("content") or "").strip())


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass
    return {"name": function.get("name") if isinstance(function, Mapping) else None, "arguments": arguments}


def _kind(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    names = {bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list"}
    return "null" if value is None else names.get(type(value), "text" if isinstance(value, str) else "another value")


def _from_fields(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None, str]:
    used = next((name for name in QUESTIONS if record.get(name) is not None), None)
    if used is None:
        raise _Unusable("no-messages", f"no question: none of messages, {', '.join(QUESTIONS)} is there")
    question = record[used]
    if not isinstance(question, str):
        raise _Unusable("non-string-content", f"`{used}` holds {_kind(question)} where text must stand")
    if not question.strip():
        raise _Unusable("no-messages", f"`{used}` is empty")
    shape = {"instruction": "alpaca", "prompt": "prompt/completion", "text": "plain text"}.get(used, "question/answer")
    extra = record.get("input", record.get("context")) if used != "input" else record.get("context")
    if isinstance(extra, str) and extra.strip():
        question = f"{question}\n\n{extra}"
    choices = record.get("choices")
    if isinstance(choices, list) and choices and all(isinstance(item, str) for item in choices):
        labelled = "\n".join(f"{chr(ord('A') + index)}. {text}" for index, text in enumerate(choices[:26]))
        question = f"{question}\n\n{labelled}\n\nAnswer with the letter of the right choice."
        shape = "multiple choice"
    turns = [{"role": "user", "content": question}]
    system = record.get("system", record.get("system_prompt"))
    if isinstance(system, str) and system.strip():
        turns.insert(0, {"role": "system", "content": system})
    return turns, _reference_in(record), shape


def _reference_in(record: Mapping[str, Any]) -> str | None:
    for name in REFERENCES:
        value = record.get(name)
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):
            value = value[-1].get("content", value[-1].get("value"))  # turns, as in preference pairs
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            value = value[0]
        if isinstance(value, str):
            return value
        if isinstance(value, float) and not math.isfinite(value):
            raise _Unusable("non-string-content", f"`{name}` holds {_kind(value)}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, Mapping):
            return json.dumps(value, ensure_ascii=False)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# By which rule


def _scorer(record: Mapping[str, Any], reference: str | None, rules: ReadingRules, loader: Any) -> Scorer:
    """The rule for this record: its own `scorer`, its keywords, its schema or choices, else its reference answer."""
    try:
        given = record.get("scorer")
        if given is not None:
            return _filled_in(given, reference, loader)
        for name, mode in (("keywords", "all"), ("keywords_all", "all"), ("keywords_any", "any")):
            if record.get(name) is not None:
                return read_scorer({"type": "contains", mode: record[name]}, loader)
        schema = record.get("schema") if record.get("schema") is not None else rules.schema
        if schema is not None and not rules.scorer:
            rule: dict[str, Any] = {"type": "json_schema", "schema": schema}
            if isinstance(record.get("expected"), Mapping):
                rule["expected"] = dict(record["expected"])
            return read_scorer(rule, loader)
        if isinstance(record.get("choices"), (list, Mapping)) and rules.scorer in (None, "choice"):
            rule = {"type": "choice", "choices": record["choices"]}
            rule["answer"] = record.get("answer", record.get("label"))
            return read_scorer(rule, loader)
        if reference is None:
            raise _Unusable("no-reference", "no keywords, schema, scorer or reference answer to judge by")
        if not reference.strip():
            raise _Unusable("empty-reference", "the reference answer is empty; an empty keyword would match everything")
        return _with_threshold(scorer_for_reference(rules.scorer, reference, loader), rules)
    except BadScorer as error:
        raise _Unusable("bad-scorer", str(error)) from error


def _filled_in(given: Any, reference: str | None, loader: Any) -> Scorer:
    """A scorer that names only its type takes the record's reference as its answer."""
    if isinstance(given, list):
        return (
            Scorer("all_of", {"scorers": [_filled_in(item, reference, loader) for item in given]})
            if given
            else (read_scorer(given, loader))
        )
    if isinstance(given, str):
        given = {"type": given}
    if isinstance(given, Mapping) and reference is not None:
        judged_by = {"answer", "answers", "all", "any", "keywords", "pattern", "schema"}
        if not judged_by & given.keys():
            given = {**given, "answer": reference}
    return read_scorer(given, loader)


def _with_threshold(scorer: Scorer, rules: ReadingRules) -> Scorer:
    if scorer.kind == "rouge_l" and rules.rouge_threshold is not None:
        return Scorer(scorer.kind, {**scorer.rule, "threshold": rules.rouge_threshold})
    return scorer


def answer_to_show(sample: Sample) -> str | None:
    """A right answer as text, for a few-shot example; None when the rule does not tell one."""
    if sample.reference and sample.reference.strip():
        return sample.reference
    rule = sample.scorer.rule
    if sample.scorer.kind == "contains":
        words = rule["keywords"]
        return str(words[0]) if rule["mode"] == "any" else ", ".join(words)
    if sample.scorer.kind == "json_schema" and isinstance(rule.get("expected"), Mapping):
        answer = json.dumps(rule["expected"], ensure_ascii=False)
        from preflight.scoring import schema_problem

        return answer if not schema_problem(rule["schema"], dict(rule["expected"])) else None
    if sample.scorer.kind == "numeric":
        return f"{rule['answer']:g}"
    if sample.scorer.kind == "choice":
        return str(rule["answer"])
    return None
