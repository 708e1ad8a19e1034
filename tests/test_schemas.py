"""Values against schemas: drafts, references, patterns; expected results worked out by hand."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from preflight.console import UsageError
from preflight.outputs.schemas import Validator, python_pattern, read_schema


@pytest.mark.parametrize(
    ("named", "draft"),
    [
        ("http://json-schema.org/draft-04/schema#", "4"),
        ("http://json-schema.org/draft-06/schema#", "6"),
        ("http://json-schema.org/draft-07/schema#", "7"),
        ("https://json-schema.org/draft/2019-09/schema", "2019-09"),
        ("https://json-schema.org/draft/2020-12/schema", "2020-12"),
        (None, "2020-12"),
    ],
)
def test_each_draft_is_read_as_it_says(named: str | None, draft: str) -> None:
    schema = {"type": "integer", **({"$schema": named} if named else {})}
    validator = Validator(schema)
    assert validator.draft == draft and not validator.problem
    # Since draft 6 a number without a fraction is an integer however it is written.
    assert validator.check(42.0).valid is (draft != "4")
    assert validator.check("42").valid is False


def test_a_schema_in_draft_4_style_without_a_name_is_read_so_and_said() -> None:
    validator = Validator({"type": "number", "minimum": 3, "exclusiveMinimum": True})
    assert validator.draft == "4" and validator.notes
    assert validator.check(3).valid is False and validator.check(4).valid is True


def test_items_as_a_list_mean_a_tuple_in_draft_7_only() -> None:
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]}
    assert Validator(old).check(["x"]).valid is False
    new = {"prefixItems": [{"type": "integer"}]}
    assert Validator(new).check(["x"]).valid is False


def test_an_invalid_schema_compares_nothing() -> None:
    validator = Validator({"type": "strin"})
    assert validator.problem.startswith("/type") and validator.check(1).valid is None


def errors(schema: Any, value: Any) -> list[tuple[str, str, str, str]]:
    return [(e.pointer, e.rule, e.expected, e.got) for e in Validator(schema).check(value).errors]


def test_errors_say_pointer_rule_expected_and_got() -> None:
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0},
            "kind": {"enum": ["a", "b"]},
            "a/b": {"type": ["string", "null"]},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["age", "name"],
        "additionalProperties": False,
    }
    value = {"age": -1, "kind": "c", "a/b": 1, "list": [True, "false", True], "more": 1}
    assert errors(schema, value) == [
        ("", "additionalProperties", "only the properties 'age', 'kind', 'a/b', 'list'", "'more'"),
        ("/age", "minimum", ">= 0", "-1"),
        ("/a~1b", "type", "string or null", "integer"),
        ("/kind", "enum", 'one of ["a", "b"]', '"c"'),
        ("/list", "maxItems", "at most 2 items", '[true, "false", true]'),
        ("/list/1", "type", "boolean", "string"),
        ("/name", "required", "the property 'name'", "absent"),
    ]


def test_a_failed_choice_names_the_closest_branch() -> None:
    schema = {"anyOf": [{"type": "object", "properties": {"n": {"type": "integer"}}}, {"type": "null"}]}
    (error,) = Validator(schema).check({"n": "1"}).errors
    assert error.rule == "anyOf" and "/n integer, got string" in error.message


def test_nothing_is_fetched_from_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    validator = Validator({"$ref": "https://example.com/schema.json"})
    assert validator.open_refs == ["https://example.com/schema.json"]
    fit = validator.check(1)
    assert fit.valid is None and "network" in fit.unknown


def test_references_reach_definitions_and_files_beside_the_schema(tmp_path: Path) -> None:
    (tmp_path / "parts.json").write_text('{"$defs": {"n": {"type": "integer"}}}', encoding="utf-8")
    schema = {
        "properties": {"a": {"$ref": "#/$defs/s"}, "b": {"$ref": "parts.json#/$defs/n"}},
        "$defs": {"s": {"type": "string"}},
    }
    validator = Validator(schema, tmp_path)
    assert validator.open_refs == []
    assert [e.pointer for e in validator.check({"a": 1, "b": "x"}).errors] == ["/a", "/b"]
    outside = Validator({"$ref": "../parts.json"}, tmp_path / "inner")
    assert outside.open_refs == ["../parts.json"], "files outside the schema's folder are not read"


def test_a_schema_that_refers_to_itself_ends() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    assert Validator(tree).check({"child": {"child": {}}}).valid is True
    assert Validator(tree).check({"child": {"x": 1}}).valid is False
    assert Validator({"$ref": "#"}).check(1).valid is None


def test_a_runaway_pattern_is_stopped() -> None:
    validator = Validator({"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}, "required": ["b"]})
    assert validator.runaway_patterns == ["^(a+)+$"]
    assert validator.check({"a": "aaa", "b": 1}).valid is True
    began = time.monotonic()
    fit = validator.check({"a": "a" * 60 + "!", "b": 1})
    assert time.monotonic() - began < 15
    assert fit.valid is None and "(a+)+" in fit.unknown


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="alarms")
def test_somebody_elses_alarm_goes_on() -> None:
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    outer = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert Validator({"pattern": "^(a+)+$"}).check("a" * 60 + "!").valid is None
        remaining, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 900 < remaining < 1000 and rang == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, before)


def test_runaway_pattern_properties_are_stopped_too() -> None:
    validator = Validator({"patternProperties": {"^(x|x)*$": {}}, "additionalProperties": False})
    assert validator.check({"x" * 60 + "!": 1}).valid is None


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("^a$", "a\n", False),  # Python's own `$` would match before the line end
        ("^\\d+$", "\u0663", False),  # ECMA digits are ASCII
        ("^\\w+$", "\u00e9", False),
        ("^[\\w-]+$", "a-b", True),
        ("^(?<y>a)\\k<y>$", "aa", True),
        ("^a\\/b$", "a/b", True),
        ("^\\u{1F600}$", "\U0001f600", True),
        ("^[[]$", "[", True),
        ("^\\S+$", "a", True),
    ],
)
def test_patterns_are_read_as_ecma_262_reads_them(pattern: str, text: str, matches: bool) -> None:
    python_pattern(pattern)
    assert Validator({"type": "string", "pattern": pattern}).check(text).valid is matches


def test_a_pattern_that_python_does_not_know_is_unknown_and_not_passed() -> None:
    validator = Validator({"type": "object", "properties": {"a": {"type": "string", "pattern": "^\\p{L}+$"}}})
    assert validator.unknown_patterns == ["^\\p{L}+$"]
    assert validator.check({"a": "x"}).valid is None
    assert validator.check({"a": 1}).valid is False, "what can be told is told"


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "object"}, ("object",)),
        ({"type": ["array", "null"]}, ("array", "null")),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, ("object",)),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, ("object", "string")),
        ({"enum": ["a", 1]}, ("string", "integer")),
        ({}, None),
        (True, None),
    ],
)
def test_the_types_at_the_root_are_known(schema: Any, types: Any) -> None:
    assert Validator(schema).types == types


@pytest.mark.parametrize(
    ("text", "part"), [("{not json", "not JSON"), ("[1, 2]", "a list without tools"), ('"x"', "string")]
)
def test_what_is_no_schema_is_one_line(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_schema(file)
    assert str(file) in str(caught.value) and (part in str(caught.value) or "a list without tool" in str(caught.value))


def test_a_schema_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"type": "object"}).encode())
    assert read_schema(file).main.schema == {"type": "object"}
