"""Each scorer on answers as models write them: right, wrong, and in a form that cannot be judged."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflight.task.regexes import TooSlow, _in_a_child, search_bounded
from preflight.task.scoring import (
    BadScorer,
    chosen_label,
    has_keyword,
    numbers_in,
    read_scorer,
    rouge_l,
    score,
    scorer_for_reference,
)

RIGHT, WRONG, FORM = "right", "wrong", "wrong form"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


def no_schema(name: str) -> Any:
    raise BadScorer(f"no schema {name}")


def judged(rule: Any, output: str) -> str:
    scored = score(read_scorer(rule, no_schema), output)
    assert scored.reason
    if scored.passed:
        assert (not scored.wrong_form and scored.value == 1.0) or rule.get("type") == "rouge_l"
        return RIGHT
    return FORM if scored.wrong_form else WRONG


@pytest.mark.parametrize(
    ("rule", "output", "verdict"),
    [
        ({"type": "contains", "all": ["Paris"]}, "It is paris.", RIGHT),
        ({"type": "contains", "all": ["Paris"], "case_sensitive": True}, "It is paris.", WRONG),
        ({"type": "contains", "all": ["Au"]}, "In August", WRONG),
        ({"type": "contains", "any": ["seven", "7"]}, "There are 7 days.", RIGHT),
        ({"type": "contains", "any": ["7"]}, "about 17 or 7.5 or 1,007", WRONG),
        ({"type": "contains", "any": ["0°"]}, "at -18.0°C", WRONG),
        ({"type": "contains", "any": ["7"]}, "It is -7.", WRONG),
        ({"type": "contains", "any": ["7"]}, "10-7", RIGHT),
        ({"type": "contains", "all": ["H2O"]}, "H₂O", RIGHT),
        ({"type": "contains", "all": ["巴黎"]}, "法国的首都是巴黎。", RIGHT),
        ({"type": "contains", "all": ["a", "b"]}, "only a", WRONG),
        ({"type": "contains", "all": ["yes"], "none": ["no"]}, "yes and no", WRONG),
        ({"type": "exact", "answer": "yes"}, " yes\n", RIGHT),
        ({"type": "exact", "answer": "yes"}, "Yes", WRONG),
        ({"type": "exact", "answer": "yes", "ignore_case": True, "ignore_punctuation": True}, "Yes!", RIGHT),
        ({"type": "exact", "answers": ["yes", "yep"]}, "yep", RIGHT),
        ({"type": "regex", "pattern": r"\b\d{4}-\d\d-\d\d\b"}, "on 2024-02-29", RIGHT),
        ({"type": "regex", "pattern": r"\d+", "full": True}, "12 apples", WRONG),
        ({"type": "numeric", "answer": 7}, "3 + 4 = 7", RIGHT),
        ({"type": "numeric", "answer": 1234.5}, "about 1,234.5 km", RIGHT),
        ({"type": "numeric", "answer": 1000}, "$1,000", RIGHT),
        ({"type": "numeric", "answer": -5}, "x = −5", RIGHT),
        ({"type": "numeric", "answer": 42}, "\\boxed{42}, because 6 * 7", RIGHT),
        ({"type": "numeric", "answer": 12}, "The answer is 12 because of rule 3", RIGHT),
        ({"type": "numeric", "answer": 18}, "9 and 9\n#### 18", RIGHT),
        ({"type": "numeric", "answer": 3.14159, "tolerance": 0.01}, "3.14", RIGHT),
        ({"type": "numeric", "answer": 100, "relative_tolerance": 0.05}, "104", RIGHT),
        ({"type": "numeric", "answer": 100, "relative_tolerance": 0.05}, "106", WRONG),
        ({"type": "numeric", "answer": 7}, "seven", FORM),
        ({"type": "choice", "choices": ["Rome", "Paris"], "answer": "B"}, "(B) Paris", RIGHT),
        ({"type": "choice", "choices": ["Rome", "Paris"], "answer": "B"}, "The answer is **A**.", WRONG),
        ({"type": "choice", "choices": ["Rome", "Paris"], "answer": 1}, "Paris", RIGHT),
        ({"type": "choice", "choices": ["Rome", "Paris"], "answer": "B"}, "I cannot say.", FORM),
        ({"type": "json_schema", "schema": PERSON}, '{"name": "Ann", "age": 3}', RIGHT),
        ({"type": "json_schema", "schema": PERSON}, '```json\n{"name": "Ann"}\n```', RIGHT),
        ({"type": "json_schema", "schema": PERSON, "strict": True}, '```json\n{"name": "Ann"}\n```', FORM),
        ({"type": "json_schema", "schema": PERSON}, '{"age": 3}', FORM),
        ({"type": "json_schema", "schema": PERSON}, '{"name": "An', FORM),
        ({"type": "json_schema", "schema": PERSON}, "Ann is three", FORM),
        ({"type": "json_schema", "schema": PERSON, "expected": {"age": 3}}, '{"name": "Ann", "age": 3.0}', RIGHT),
        ({"type": "json_schema", "schema": PERSON, "expected": {"age": 3}}, '{"name": "Ann", "age": 4}', WRONG),
        ({"type": "json_schema", "schema": {}, "expected": {"/a/0/b": 1}}, '{"a": [{"b": 1}]}', RIGHT),
        ({"type": "json_schema", "schema": {}, "expected": {"x": 1}}, '{"x": true}', WRONG),
        ({"type": "json_equal", "answer": {"a": 1, "b": 2}}, '{"b": 2, "a": 1}', RIGHT),
        ({"type": "json_equal", "answer": '{"a": 1}'}, '{"a": 1, "b": 2}', WRONG),
        ({"type": "rouge_l", "answer": "the cat sat on the mat", "threshold": 0.8}, "the cat on the mat", RIGHT),
        ({"type": "rouge_l", "answer": "the cat sat on the mat"}, "a dog", WRONG),
        ({"type": "contains", "all": ["Paris"]}, "", FORM),
        ({"type": "contains", "all": ["Paris"]}, "<think>Paris?</think> Rome", WRONG),
        ({"type": "contains", "all": ["Paris"]}, "<think>Paris, so the answer", FORM),
    ],
)
def test_verdicts(rule: Any, output: str, verdict: str) -> None:
    assert judged(rule, output) == verdict


def test_several_scorers_must_all_pass() -> None:
    both = [{"type": "contains", "all": ["Paris"]}, {"type": "regex", "pattern": r"\.\Z"}]
    scorer = read_scorer(both, no_schema)
    assert score(scorer, "Paris.").passed
    failed = score(scorer, "Paris")
    assert not failed.passed and "does not match" in failed.reason


@pytest.mark.parametrize(
    "rule",
    [
        [],
        {"type": "magic"},
        {"type": "contains", "all": []},
        {"type": "contains", "all": [""]},
        {"type": "contains", "all": [" \n"]},
        {"type": "contains", "all": [{"a": 1}]},
        {"type": "contains", "all": [float("nan")]},
        {"type": "contains", "all": ["x"], "mod": "any"},
        {"type": "exact"},
        {"type": "regex", "pattern": "("},
        {"type": "numeric", "answer": "many"},
        {"type": "numeric", "answer": float("nan")},
        {"type": "numeric", "answer": 1, "tolerance": -1},
        {"type": "choice", "choices": ["a", "b"], "answer": "C"},
        {"type": "choice", "choices": ["a", "b"], "answer": 2},
        {"type": "json_schema", "schema": 5},
        {"type": "json_schema", "schema": {"type": "objekt"}},
        {"type": "json_schema", "schema": {"$ref": "https://example.com/schema.json"}},
        {"type": "json_schema", "schema": {}, "expected": 3},
        {"type": "json_equal", "answer": "{"},
        {"type": "rouge_l", "answer": "..."},
        {"type": "rouge_l", "answer": "a", "threshold": 0},
        {"type": "function"},
        7,
    ],
)
def test_a_rule_that_would_accept_anything_or_nothing_is_refused(rule: Any) -> None:
    with pytest.raises(BadScorer):
        read_scorer(rule, no_schema)


@pytest.mark.parametrize("reference", ["", " \n"])
def test_an_empty_reference_is_refused(reference: str) -> None:
    with pytest.raises(BadScorer):
        scorer_for_reference(None, reference, no_schema)


def test_a_reference_chooses_its_scorer_by_its_form() -> None:
    assert scorer_for_reference(None, "Paris", no_schema).kind == "contains"
    assert scorer_for_reference(None, '{"a": 1}', no_schema).kind == "json_equal"
    assert scorer_for_reference(None, "word " * 20, no_schema).kind == "rouge_l"
    assert scorer_for_reference("exact", "Paris", no_schema).kind == "exact"


def test_rouge_l_equals_lins_example() -> None:
    # Lin 2004, §2.1: "police kill the gunman" against "police killed the gunman": LCS 3 of 4 and 4; "the gunman kill
    # police": LCS 2.
    assert rouge_l("police kill the gunman", "police killed the gunman") == pytest.approx(0.75)
    assert rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(0.5)
    assert rouge_l("今天天气好", "今天天气很好") == pytest.approx(2 * 5 / 11)
    assert rouge_l("", "x") == 0.0


@given(st.text(max_size=60), st.text(max_size=60))
def test_rouge_l_is_a_symmetric_share(left: str, right: str) -> None:
    value = rouge_l(left, right)
    assert 0 <= value <= 1
    assert value == pytest.approx(rouge_l(right, left))


def test_numbers_are_read_as_people_write_them() -> None:
    assert numbers_in("1,234.5 and -3 and 2e3 and 50% and v2.0.1") == [1234.5, -3.0, 2000.0, 50.0]
    assert numbers_in("no number here") == []


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("B", "B"),
        ("b)", "B"),
        ("**C**", "C"),
        ("Answer: (a)", "A"),
        ("The answer is C, not B.", "C"),
        ("I think A or B", None),
        ("Berlin", "C"),
        ("Rome or Berlin", None),
        ("A good question", None),
    ],
)
def test_a_choice_is_only_read_when_one_is_named(text: str, label: str | None) -> None:
    assert chosen_label({"A": "Rome", "B": "Paris", "C": "Berlin"}, text) == label


@given(st.text(max_size=40), st.text(min_size=1, max_size=10).filter(lambda text: text.strip()))
def test_looking_for_a_keyword_never_fails(text: str, keyword: str) -> None:
    has_keyword(text, keyword)


@given(st.text(max_size=80))
def test_no_output_makes_a_scorer_fail(output: str) -> None:
    rules: list[Any] = [
        {"type": "numeric", "answer": 1},
        {"type": "choice", "choices": ["x", "y"], "answer": "A"},
        {"type": "json_schema", "schema": PERSON},
        {"type": "json_equal", "answer": {"a": None}},
        {"type": "rouge_l", "answer": "some words"},
    ]
    for rule in rules:
        scored = score(read_scorer(rule, no_schema), output)
        assert 0 <= scored.value <= 1 and scored.reason


def test_a_pattern_that_never_ends_is_stopped() -> None:
    began = time.monotonic()
    with pytest.raises(TooSlow):
        search_bounded("^(a+)+$", "a" * 60 + "b", limit_s=0.2)
    assert time.monotonic() - began < 5
    assert judged({"type": "regex", "pattern": "^(a+)+$"}, "a" * 60 + "b") == FORM


def test_the_way_without_signals_gives_the_same_answers() -> None:
    assert _in_a_child("a+b", "xaab", 0, False, 5) is True
    assert _in_a_child("a+b", "xaab", 0, True, 5) is False
    with pytest.raises(TooSlow):
        _in_a_child("^(a+)+$", "a" * 60 + "b", 0, False, 0.1)
