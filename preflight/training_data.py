"""The user's records as data to train on, to validate with and to evaluate on; no prompt lies on two sides."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.console import UsageError


@dataclass(frozen=True)
class Split:
    """How many conversations went where, and what was left out (reason → how many)."""

    train: int
    valid: int
    eval: int
    left_out: dict[str, int]


def conversation_of(value: Any) -> tuple[list[dict[str, Any]], list[Any] | None] | str:
    """(messages, tools) of one record, ending in an answer to train on; else, in a few words, why it has none.

    Evaluation samples count as well when their right answer is one text or one JSON value.
    """
    from preflight.data.conversations import read_conversation

    found = read_conversation(value)
    if [problem.code for problem in found.problems] == ["no-assistant-turn"] and isinstance(value, dict):
        answer = _right_answer(value)
        if answer is not None:
            turns = [*found.messages, {"role": "assistant", "content": answer}]
            found = read_conversation({"messages": turns, **({"tools": found.tools} if found.tools else {})})
    if found.problems:
        return found.problems[0].code
    messages = [dict(message) for message in found.messages]
    while messages and messages[-1]["role"] != "assistant":  # a question left open at the end
        messages.pop()
    if not any(message["role"] == "assistant" for message in messages[1:]):
        return "no-answer"
    return messages, found.tools


def _right_answer(value: Mapping[str, Any]) -> str | None:
    scorer = value.get("scorer")
    candidates = [value.get(key) for key in ("expected", "reference", "answer", "target")]
    if isinstance(scorer, Mapping):
        candidates += [scorer.get("answer"), scorer.get("expected"), scorer.get("reference")]
    for item in candidates:
        if isinstance(item, str) and item.strip():
            return item
        if isinstance(item, bool) or item is None:
            continue
        if isinstance(item, (int, float)):
            return str(item)
        if isinstance(item, (dict, list)) and item:
            return json.dumps(item, ensure_ascii=False)
    return None


def prompt_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """What makes two conversations the same task: everything before the first answer, apart from white space."""
    before = []
    for message in messages:
        if message["role"] == "assistant":
            break
        before.append([message["role"], re.sub(r"\s+", " ", str(message.get("content"))).strip()])
    return hashlib.sha256(json.dumps(before, ensure_ascii=False).encode()).hexdigest()


def _conversations(path: Path, left_out: dict[str, int]) -> Iterator[tuple[Any, str, list[dict[str, Any]], Any]]:
    from preflight.data.records import BadRecord, Unreadable, read_records

    try:
        for record in read_records(path):
            if isinstance(record, BadRecord):
                left_out[record.reason] = left_out.get(record.reason, 0) + 1
                continue
            found = conversation_of(record.value)
            if isinstance(found, str):
                left_out[found] = left_out.get(found, 0) + 1
                continue
            yield record.value, prompt_key(found[0]), *found
    except Unreadable as trouble:
        raise UsageError(f"--data {path}: {trouble.what}; {'; '.join(trouble.fix)}") from trouble


def write_data(folder: Path, train_data: Path, eval_data: Path | None) -> Split:
    """Writes train.jsonl, valid.jsonl and eval.jsonl. Equal prompts never lie on both sides.

    Without `eval_data` the held-out records themselves are what `evaluate.py` asks. Raises UsageError when nothing is
    left to train on.
    """
    asked: set[str] = set()
    evaluated = 0
    if eval_data is not None:
        evaluated = _copy_evaluation(eval_data, folder, asked)
    left_out: dict[str, int] = {}
    keys = {key for _, key, _, _ in _conversations(train_data, left_out)}
    trainable = sorted(keys - asked)
    if not trainable:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(left_out.items())) or "it holds none"
        raise UsageError(
            f"--data {train_data}: no conversation with an answer to train on ({reasons}"
            f"{'; all others are in the evaluation data' if keys else ''}); `python data_preprocessor.py` says more"
        )
    share = (
        max(round(len(trainable) * 0.1), min(20, len(trainable) // 4)) if eval_data is None else len(trainable) // 20
    )
    # By hash, not by place in the file: files are often sorted, and the choice stays when records are added.
    held_out = set(trainable[: min(share, 500)])
    left_out = {}
    counts = {"train": 0, "valid": 0}
    with _fresh(folder / "train.jsonl") as train, _fresh(folder / "valid.jsonl") as valid:
        evaluation = _fresh(folder / "eval.jsonl") if eval_data is None else None
        try:
            for value, key, messages, tools in _conversations(train_data, left_out):
                if key in asked:
                    left_out["in-evaluation-data"] = left_out.get("in-evaluation-data", 0) + 1
                    continue
                line = json.dumps({"messages": messages, **({"tools": tools} if tools else {})}, ensure_ascii=False)
                name = "valid" if key in held_out else "train"
                counts[name] += 1
                (valid if name == "valid" else train).write(line + "\n")
                if evaluation is not None and name == "valid":
                    evaluated += 1
                    evaluation.write(json.dumps(_as_evaluation(value, messages, tools), ensure_ascii=False) + "\n")
        finally:
            if evaluation is not None:
                evaluation.close()
    if eval_data is None:
        _copy_schemas(train_data.parent, folder, folder / "eval.jsonl")
    return Split(counts["train"], counts["valid"], evaluated, left_out)


def _fresh(path: Path) -> Any:
    return path.open("w", encoding="utf-8", newline="\n")


def _as_evaluation(value: Any, messages: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """The record as the evaluator reads it: itself when it brings its own rule, else prompt and reference answer."""
    if isinstance(value, dict) and any(
        key in value for key in ("scorer", "keywords", "expected", "schema", "reference")
    ):
        return value
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    asked: dict[str, Any] = {"messages": messages[:last]}
    if tools:
        asked["tools"] = tools
    content = messages[last].get("content")
    parsed = _json_or_none(content)
    asked["expected"] = content if parsed is None else parsed
    return asked


def _json_or_none(text: Any) -> Any:
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, (dict, list)) else None


def _copy_evaluation(source: Path, folder: Path, asked: set[str]) -> int:
    """Copies the evaluation samples as they are (as JSON Lines) and notes their prompts."""
    from preflight.data.conversations import read_conversation
    from preflight.data.records import BadRecord, Unreadable, read_records

    count = 0
    try:
        with _fresh(folder / "eval.jsonl") as out:
            for record in read_records(source):
                if isinstance(record, BadRecord):
                    continue
                asked.add(prompt_key(read_conversation(record.value).messages))
                out.write(json.dumps(record.value, ensure_ascii=False) + "\n")
                count += 1
    except Unreadable as trouble:
        raise UsageError(f"--data {source}: {trouble.what}; {'; '.join(trouble.fix)}") from trouble
    _copy_schemas(source.parent, folder, folder / "eval.jsonl")
    return count


def _copy_schemas(source: Path, folder: Path, samples: Path) -> None:
    """Schema files that samples name relative to their own place come along, under the same relative name."""
    names = set()
    for line in samples.read_text(encoding="utf-8").splitlines():
        for name in re.findall(r'"(?:schema|json_schema)"\s*:\s*"([^"{}]+\.json)"', line):
            names.add(name)
    for name in names:
        target = (folder / name).resolve()
        if (source / name).is_file() and target.is_relative_to(folder.resolve()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
