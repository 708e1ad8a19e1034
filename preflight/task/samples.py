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
from preflight.data.conversations import kind_of, read_conversation
from preflight.data.records import BadRecord, Unreadable, read_records
from preflight.findings import quote
from preflight.outputs.schemas import read_schema
from preflight.task.scoring import BadScorer, Scorer, is_blank, read_scorer, scorer_for_reference

# What people call the right answer where it stands beside the question, best known first.
REFERENCES = (
    "reference", "answer", "answers", "target", "expected_output", "ideal", "gold", "label", "completion", "response",
    "output", "chosen",
)  # fmt: skip
QUESTIONS = ("prompt", "question", "instruction", "query", "input", "text")


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
            "unknown_role": _shortened(self.numbers("unknown-role")),
            "bad_tools": _shortened(self.numbers("bad-tools")),
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
            try:
                self._read[name] = read_schema(path).main.schema
            except UsageError as error:
                reason = str(error).partition(": ")[2]
                raise BadScorer(f"the schema {quote(name, 60)!r} {quote(reason, 160)}") from error
        return self._read[name]


def read_sample(value: Any, number: int, place: str, task: str, rules: ReadingRules, loader: Any) -> Sample:
    """One record as a sample. Raises _Unusable with the reason when it cannot be asked or judged."""
    record: Mapping[str, Any] = value if isinstance(value, Mapping) else {"text": value}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        record = {"messages": value}
    messages, reference, tools, shape = conversation(record)
    scorer = _scorer(record, reference, rules, loader)
    limit = record.get("max_new_tokens")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 < limit <= 1 << 20):
        raise _Unusable("bad-scorer", f"`max_new_tokens` is {quote(limit, 40)}; it must be a whole number above 0")
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
        tools=tuple(tools),
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
# What is asked

# Of all that can be wrong with a conversation, what keeps it from being asked.
_BLOCKING = {
    "no-messages": "no-messages",
    "unknown-role": "unknown-role",
    "no-role": "unknown-role",
    "turn-not-an-object": "non-string-content",
    "non-string-content": "non-string-content",
    "empty-question": "no-messages",
    "empty-text": "no-messages",
    "tools-not-json": "bad-tools",
    "tools-not-a-list": "bad-tools",
}


def conversation(record: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], str | None, list[Any], str]:
    """(the turns to send, the reference answer or None, the tools, the shape) of a record. Raises _Unusable.

    The last assistant turn is the reference and is not sent.
    """
    if _is_bare_question(record):
        return _bare_question(record)
    found = read_conversation(dict(record))
    for problem in found.problems:
        if problem.code in _BLOCKING:
            raise _Unusable(_BLOCKING[problem.code], problem.what)
    if found.shape in ("unknown", "text"):
        raise _Unusable("no-messages", f"no question: none of messages, {', '.join(QUESTIONS)} is there")
    turns: list[Mapping[str, Any]] = list(found.messages)
    reference = None
    if found.chosen is not None:
        reference = _answer_of(found.chosen[0]) if found.chosen else None
    elif turns and turns[-1]["role"] == "assistant":
        reference = _answer_of(turns.pop())
    for turn in turns:
        content = turn.get("content")
        if content is not None and not isinstance(content, str):
            raise _Unusable("non-string-content", "a turn holds more than text; only text can be asked")
    if not any(turn["role"] == "user" for turn in turns):
        raise _Unusable("no-messages", "there is no user turn to answer")
    beside = _reference_in(record) if reference is None else None
    return turns, beside if beside is not None else reference, found.tools or [], found.shape


def _is_bare_question(record: Mapping[str, Any]) -> bool:
    """A question in a field of its own, with choices, keywords or another rule instead of a written answer."""
    if "choices" in record or any(isinstance(record.get(name), list) for name in ("messages", "conversations")):
        return "choices" in record and any(isinstance(record.get(name), str) for name in QUESTIONS)
    has_rule = any(record.get(name) is not None for name in _RULES) or _is_number(record.get("answer"))
    return has_rule and any(isinstance(record.get(name), str) for name in QUESTIONS)


_RULES = ("scorer", "keywords", "keywords_any", "keywords_all", "schema", "reference", "answers", "ideal", "gold")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bare_question(record: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], str | None, list[Any], str]:
    used = next(name for name in QUESTIONS if isinstance(record.get(name), str))
    question: str = record[used]
    if not question.strip():
        raise _Unusable("no-messages", f"`{used}` is empty")
    shape = "question with a rule"
    extra = record.get("input", record.get("context")) if used != "input" else record.get("context")
    if isinstance(extra, str) and extra.strip():
        question = f"{question}\n\n{extra}"
    choices = record.get("choices")
    if isinstance(choices, list) and choices and all(isinstance(item, str) for item in choices):
        labelled = "\n".join(f"{chr(ord('A') + index)}. {text}" for index, text in enumerate(choices[:26]))
        question = f"{question}\n\n{labelled}\n\nAnswer with the letter of the right choice."
        shape = "multiple choice"
    turns: list[Mapping[str, Any]] = [{"role": "user", "content": question}]
    system = record.get("system", record.get("system_prompt"))
    if isinstance(system, str) and system.strip():
        turns.insert(0, {"role": "system", "content": system})
    return turns, _reference_in(record), [], shape


def _answer_of(turn: Mapping[str, Any]) -> str:
    calls = turn.get("tool_calls")
    if isinstance(calls, list) and calls and isinstance(calls[0], Mapping):
        return json.dumps(_call(calls[0]), ensure_ascii=False)
    content = turn.get("content")
    if content is not None and not isinstance(content, str):
        raise _Unusable("non-string-content", "the answer holds more than text")
    return content or ""


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return {"name": None, "arguments": None}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass
    return {"name": function.get("name"), "arguments": arguments}


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
            raise _Unusable("non-string-content", f"`{name}` holds {kind_of(value)}")
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
        if rules.scorer == "function":
            return Scorer("function", {})
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
        lists = (record.get(name) for name in ("answers", "ideal", "gold", "reference"))
        several = next((value for value in lists if _texts_in(value)), None)
        if several is not None and rules.scorer in (None, "contains", "exact", "rouge_l"):
            return _any_of(several, rules, loader)
        if reference is None:
            raise _Unusable("no-reference", "no keywords, schema, scorer or reference answer to judge by")
        if is_blank(reference):
            raise _Unusable("empty-reference", "the reference answer is empty; an empty keyword would match everything")
        return _with_threshold(scorer_for_reference(rules.scorer, reference, loader), rules)
    except BadScorer as error:
        raise _Unusable("bad-scorer", str(error)) from error


def _texts_in(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(item, str) for item in value)


def _any_of(answers: list[str], rules: ReadingRules, loader: Any) -> Scorer:
    """Several right answers: one of them is enough."""
    kind = rules.scorer or scorer_for_reference(None, max(answers, key=len), loader).kind
    if kind in ("exact", "rouge_l"):
        return _with_threshold(read_scorer({"type": kind, "answers": answers}, loader), rules)
    return read_scorer({"type": "contains", "any": answers}, loader)


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
        return answer if rule["validator"].check(dict(rule["expected"])).valid else None
    if sample.scorer.kind == "numeric":
        return f"{rule['answer']:g}"
    if sample.scorer.kind == "choice":
        return str(rule["answer"])
    return None
