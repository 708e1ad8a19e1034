"""Which records can be asked and judged, by what rule, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from preflight.console import UsageError
from preflight.task.few_shot import split_shots, with_examples
from preflight.task.samples import ReadingRules, Sample, SampleFile, answer_to_show, read_samples


def read(folder: Path, *records: Any, rules: ReadingRules | None = None, name: str = "data.jsonl") -> SampleFile:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return read_samples(str(path), rules or ReadingRules())


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("record", "scorer", "question", "reference"),
    [
        ({"messages": [turn("user", "q"), turn("assistant", "a")]}, "contains", "q", "a"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "contains", "q", "a"),
        ({"instruction": "q", "input": "x", "output": "a"}, "contains", "q\n\nx", "a"),
        ({"prompt": "q", "completion": "a"}, "contains", "q", "a"),
        ({"question": "q", "answer": "a"}, "contains", "q", "a"),
        ({"question": "q", "answer": 4}, "contains", "q", "4"),
        ({"question": "q", "keywords": ["a", "b"]}, "contains", "q", None),
        ({"question": "q", "ideal": ["a", "b"]}, "contains", "q", "a"),
        ({"question": "q", "scorer": {"type": "numeric", "answer": 1}}, "numeric", "q", None),
        ({"question": "q", "answer": "12", "scorer": "numeric"}, "numeric", "q", "12"),
        ({"question": "q", "schema": {"type": "object"}}, "json_schema", "q", None),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "contains", "q", "a"),
        ({"messages": [turn("user", "q"), turn("assistant", '{"x": 1}')]}, "json_equal", "q", '{"x": 1}'),
        ({"messages": [turn("user", "q"), turn("assistant", "word " * 30)]}, "rouge_l", "q", "word " * 30),
    ],
)
def test_common_shapes_become_a_question_and_a_rule(
    tmp_path: Path, record: Any, scorer: str, question: str, reference: str | None
) -> None:
    found = read(tmp_path, record)
    assert not found.problems
    sample = found.samples[0]
    assert (sample.scorer.kind, sample.messages[-1]["content"], sample.reference) == (scorer, question, reference)
    assert sample.messages[-1]["role"] == "user"


def test_multiple_choice_lists_the_choices_in_the_question(tmp_path: Path) -> None:
    found = read(tmp_path, {"question": "Capital of France?", "choices": ["Rome", "Paris"], "answer": 1})
    assert found.samples[0].messages[0]["content"] == (
        "Capital of France?\n\nA. Rome\nB. Paris\n\nAnswer with the letter of the right choice."
    )
    assert found.samples[0].scorer.rule["answer"] == "B"


def test_a_tool_call_is_a_reference_too(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = read(tmp_path, {"messages": [turn("user", "q"), {**turn("assistant", None), "tool_calls": [call]}]})
    assert found.samples[0].scorer.kind == "json_equal"
    assert found.samples[0].scorer.rule["answer"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, "no-messages"),
        ({"messages": [turn("system", "s")]}, "no-messages"),
        ({"messages": [turn("user", "q"), turn("assistant", "")]}, "empty-reference"),
        ({"messages": [turn("user", "q"), turn("assistant", " \n\t")]}, "empty-reference"),
        ({"messages": [turn("user", "q"), turn("assistant", None)]}, "empty-reference"),
        ({"messages": [turn("user", "q"), turn("assistant", "\u200b")]}, "empty-reference"),
        ({"question": float("nan"), "answer": "a"}, "non-string-content"),
        ({"question": "q", "answer": float("nan")}, "non-string-content"),
        ({"question": "q", "keywords": [float("nan")]}, "bad-scorer"),
        ({"messages": None}, "no-messages"),
        ({"messages": [turn("user", "q"), turn("assistant", float("nan"))]}, "non-string-content"),
        ({"messages": [turn("user", 3), turn("assistant", "a")]}, "non-string-content"),
        ({"messages": [turn("user", "q")]}, "no-reference"),
        ({"messages": [turn("bing", "q"), turn("assistant", "a")]}, "unknown-role"),
        ({"messages": [turn("user", " "), turn("assistant", "a")]}, "no-messages"),
        ({"messages": [turn("user", [{"type": "image_url", "image_url": "x"}]), turn("assistant", "a")]}, None),
        ({"text": "no question"}, "no-messages"),
        ({"score": 1}, "no-messages"),
        ("text", "no-messages"),
        (5, "no-messages"),
        (None, "no-messages"),
        ({"question": "q", "keywords": [""]}, "bad-scorer"),
        ({"question": "q", "keywords": []}, "bad-scorer"),
        ({"question": "q", "scorer": []}, "bad-scorer"),
        ({"question": "q", "schema": "absent.json"}, "bad-scorer"),
        ({"question": "q", "schema": "../data.jsonl"}, "bad-scorer"),
        ({"question": "q", "answer": "a", "max_new_tokens": 0}, "bad-scorer"),
        ({"question": "q", "answer": "a", "max_new_tokens": True}, "bad-scorer"),
    ],
)
def test_what_cannot_be_asked_or_judged_is_named(tmp_path: Path, record: Any, reason: str | None) -> None:
    found = read(tmp_path, record, {"question": "q", "answer": "a"})
    assert [sample.number for sample in found.samples] == [2]
    assert [problem.number for problem in found.problems] == [1]
    assert found.problems[0].place == "line 1"
    if reason is not None:
        assert found.problems[0].reason == reason


def test_a_broken_line_does_not_stop_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n{"question": \n{"question": "r", "answer": "b"}\n')
    found = read_samples(str(path), ReadingRules())
    assert [sample.number for sample in found.samples] == [1, 3]
    assert found.numbers("unreadable") == [2]


def test_repeats_are_found_whatever_else_the_record_holds(tmp_path: Path) -> None:
    one, two = {"question": "q", "answer": "a", "score": 1}, {"question": "q", "answer": "a", "score": 2}
    found = read(tmp_path, one, {"question": "r", "answer": "a"}, two, two)
    assert found.duplicates == [[1, 3, 4]]
    assert found.repeated == {3, 4}


def test_the_limit_draws_by_seed_and_keeps_the_order(tmp_path: Path) -> None:
    records = [{"question": f"q{index}", "answer": "a"} for index in range(50)]
    first = read(tmp_path, *records, rules=ReadingRules(limit=7, seed=1))
    again = read(tmp_path, *records, rules=ReadingRules(limit=7, seed=1))
    other = read(tmp_path, *records, rules=ReadingRules(limit=7, seed=2))
    numbers = [sample.number for sample in first.samples]
    assert numbers == sorted(numbers) and len(numbers) == 7 and first.left_out == 43
    assert numbers == [sample.number for sample in again.samples] != [sample.number for sample in other.samples]


def test_samples_have_unique_ids_and_tasks(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {"id": "x", "question": "q", "answer": "a"},
        {"id": "x", "question": "r", "answer": "a"},
        {"question": "s", "answer": "a", "task": "sums"},
        name="geo.test.jsonl",
    )
    assert [sample.id for sample in found.samples] == ["x", "x (line 2)", "geo:3"]
    assert [sample.task for sample in found.samples] == ["geo", "geo", "sums"]


def test_a_schema_beside_the_data_is_used(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "object", "required": ["a"]}')
    found = read(tmp_path, {"question": "q", "schema": "s.json", "expected": {"a": 1}})
    assert answer_to_show(found.samples[0]) == '{"a": 1}'


@pytest.mark.parametrize("content", [b"", b"  \n", b"\x00" * 100])
def test_a_file_without_records_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    try:
        found = read_samples(str(path), ReadingRules())
    except UsageError as error:
        assert "data.jsonl" in str(error)
    else:
        assert not found.samples


def test_an_absent_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_samples(str(tmp_path / "absent.jsonl"), ReadingRules())


def samples(count: int, folder: Path) -> list[Sample]:
    return read(folder, *[{"question": f"q{n}", "keywords_any": [f"a{n}", "b"]} for n in range(count)]).samples


def test_examples_are_shown_and_not_asked(tmp_path: Path) -> None:
    shown, left = split_shots(samples(5, tmp_path), 2)
    assert [sample.number for sample in shown["data"]] == [1, 2]
    assert [sample.number for sample in left] == [3, 4, 5]
    turns = with_examples(left[0], shown["data"])
    assert [(t["role"], t["content"]) for t in turns] == [
        ("user", "q0"),
        ("assistant", "a0"),
        ("user", "q1"),
        ("assistant", "a1"),
        ("user", "q2"),
    ]


def test_the_system_turn_stays_first_and_stays_single(tmp_path: Path) -> None:
    record = {"messages": [turn("system", "s"), turn("user", "q"), turn("assistant", "a")]}
    found = read(
        tmp_path, record, {**record, "messages": [turn("system", "s"), turn("user", "r"), turn("assistant", "b")]}
    )
    turns = with_examples(found.samples[1], found.samples[:1])
    assert [t["role"] for t in turns] == ["system", "user", "assistant", "user"]
