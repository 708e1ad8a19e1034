"""The validator through its command line: files of outputs, providers, and what people are told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import validate_output_schema
from preflight.console import UsageError, run_main
from preflight.outputs.schemas import Validator
from validate_output_schema import PlacedOutput, judge_output

ROOT = Path(__file__).resolve().parent.parent
OK, PEELED, BAD = "valid", "recoverable", "invalid"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    return file


def judged(schema: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = validate_output_schema.main(["--schema", str(schema), *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "text", "read_as", "levels"),
    [
        ("o.txt", '{"a": 1}', "whole", ["valid"]),
        ("o.json", '{"a": 1}', "whole", ["valid"]),
        ("o.jsonl", '{"a": 1}\n{"a": "1"}\n```{"a": 1}```\nno\n', "lines", [OK, BAD, PEELED, BAD]),
        ("o.jsonl", '{"output": "{\\"a\\": 1}"}\n{"output": "x"}\n{"id": 1}\n', "records", [OK, BAD, BAD]),
        ("o.jsonl", '"{\\"a\\": 1}"\n', "records", ["valid"]),
        ("o.json", '[{"response": "{\\"a\\": 1}"}, {"response": "```\\n{\\"a\\": 2}\\n```"}]', "records", [OK, PEELED]),
        ("o.csv", 'id,output\n1,"{""a"": 1}"\n', "records", ["valid"]),
        ("o.jsonl", '{"choices": [{"message": {"content": "{\\"a\\": "}}]}\n', "records", ["invalid"]),
    ],
)  # fmt: skip
def test_files_of_outputs_are_read_as_programs_write_them(
    tmp_path: Path,
    schema: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    read_as: str,
    levels: list[str],
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    code, document = judged(schema, capsys, "--outputs", str(tmp_path / name))
    assert document["observed"]["outputs_read_as"] == [read_as]
    assert [result["level"] for result in document["observed"]["results"]] == levels
    assert code == (1 if "invalid" in levels else 0)


def test_an_output_cut_by_its_length_is_truncated_even_without_a_bracket(schema: Path) -> None:
    result = judge_output(PlacedOutput("x", "Let me think", "length"), Validator(SCHEMA))
    assert result["code"] == "truncated"


def test_the_arguments_inside_a_tool_call_are_compared() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    result = judge_output(PlacedOutput("x", text), Validator(SCHEMA))
    assert result["level"] == "recoverable" and result["extracted"] == {"a": 1}
    assert "tool-call-arguments" in result["recovered_by"]


def test_a_call_is_compared_with_the_tool_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
    (tmp_path / "tools.json").write_text(json.dumps(tools), encoding="utf-8")
    calls = [
        '{"name": "f", "arguments": {"a": 1}}',
        '[TOOL_CALLS][{"name": "g", "arguments": {"a": "1"}}]',
        '{"name": "rm", "arguments": {"a": 1}}',
        '{"name": "f", "arguments": "{\\"a\\": 2}"}',
    ]
    file = tmp_path / "o.jsonl"
    file.write_text("".join(json.dumps({"output": call}) + "\n" for call in calls), encoding="utf-8")
    _, document = judged(tmp_path / "tools.json", capsys, "--outputs", str(file))
    results = document["observed"]["results"]
    assert [result["level"] for result in results] == ["valid", "invalid", "invalid", "valid"]
    assert results[1]["errors"][0]["path"] == "a" and "one of the tools f, g" in results[2]["errors"][0]["expected"]


def test_a_folder_and_several_files_are_read(tmp_path: Path, schema: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "outs"
    folder.mkdir()
    (folder / "1.txt").write_text('{"a": 1}', encoding="utf-8")
    (folder / "2.txt").write_bytes(b"\xff\xfe" + '{"a": 2}'.encode("utf-16-le"))
    code, document = judged(schema, capsys, "--outputs", str(folder), str(folder / "1.txt"))
    assert code == 0 and document["observed"]["valid"] == 3


def test_without_a_provider_it_says_who_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    file.write_text('{"type": "object", "properties": {"a": {"type": "string"}}}', encoding="utf-8")
    code, document = judged(file, capsys)
    assert code == 0
    assert document["observed"]["errors_by_provider"]["openai-strict"] == 2
    (note,) = [finding for finding in document["findings"] if finding["code"] == "provider-not-named"]
    assert "openai-strict (2)" in note["what"] and "2026-11-30" in note["what"]


def test_gemini_is_told_which_field_takes_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    code, document = judged(file, capsys, "--provider", "gemini")
    warned = [finding for finding in document["findings"] if finding["level"] == "warn"]
    assert code == 0 and warned and "responseJsonSchema" in warned[0]["fix"][0]


def test_an_invalid_schema_is_a_fail_and_outputs_are_not_blamed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.json").write_text('{"type": "strin"}', encoding="utf-8")
    (tmp_path / "o.txt").write_text("{}", encoding="utf-8")
    code, document = judged(tmp_path / "s.json", capsys, "--outputs", str(tmp_path / "o.txt"))
    levels = {finding["code"]: finding["level"] for finding in document["findings"]}
    assert levels["schema-invalid"] == "fail" and levels["outputs-not-compared"] == "unknown"
    assert document["observed"]["invalid"] == 0 and code == 1


def test_a_runaway_pattern_ends_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.json").write_text('{"type": "string", "pattern": "^(a+)+$"}', encoding="utf-8")
    (tmp_path / "o.json").write_text(json.dumps("a" * 60 + "!"), encoding="utf-8")
    code, document = judged(tmp_path / "s.json", capsys, "--outputs", str(tmp_path / "o.json"))
    assert code == 3
    assert {f["code"] for f in document["findings"] if f["level"] != "ok"} == {"slow-pattern", "not-compared"}


def test_every_warn_and_fail_has_a_why_a_fix_and_a_source(
    tmp_path: Path, schema: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [
        "",
        "no",
        '{"a":1}{"a":2}',
        '{"a',
        '{"a": x}',
        '{"a": NaN}',
        '{"a":1,"a":2}',
        '{"a": "1"}',
        '{"b": 1}',
        "'",
    ]
    outputs += ["[" * 5000, '```{"a": 1}```']
    file = tmp_path / "o.jsonl"
    file.write_text("".join(json.dumps({"output": text}) + "\n" for text in outputs), encoding="utf-8")
    for provider in ("openai", "anthropic", "gemini", "llama.cpp"):
        code, document = judged(schema, capsys, "--outputs", str(file), "--provider", provider)
        assert code == 1 and document["observed"]["outputs"] == 12
        for finding in document["findings"]:
            if finding["level"] in ("warn", "fail"):
                assert finding["why"] and finding["fix"] and finding["source"], finding["code"]
            if finding["level"] == "unknown":
                assert finding["why"]


def test_bad_usage_is_one_line(tmp_path: Path, schema: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(validate_output_schema.main, ["--schema", str(tmp_path / "none.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "none.json" in error
    with pytest.raises(UsageError, match="no such file"):
        validate_output_schema.main(["--schema", str(schema), "--outputs", str(tmp_path / "none.txt")])


def test_help_comes_at_once() -> None:
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, str(ROOT / "validate_output_schema.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "Do model outputs fit" in ended.stdout
    assert time.monotonic() - began < 1.5


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def schema_of(value: Any) -> dict[str, Any]:
    """A schema that only this value fits, by its types and keys."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {key: schema_of(item) for key, item in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list) and not value:
        return {"type": "array", "maxItems": 0}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [schema_of(item) for item in value], "items": False}
    return {"const": value}


@settings(max_examples=60, deadline=None)
@given(value=values, wrap=st.sampled_from(["{}", "```json\n{}\n```", "<think>no</think>\n{}"]))
def test_any_json_value_survives_wrap_recover_and_validate(value: Any, wrap: str) -> None:
    before, _, after = wrap.partition("{}")
    output = PlacedOutput("x", before + json.dumps(value) + after)
    result = judge_output(output, Validator(schema_of(value)))
    assert result["level"] == ("valid" if wrap == "{}" else "recoverable"), result
    assert result["extracted"] == value


@pytest.mark.parametrize("name", ["reply.json", "reply.txt"])
def test_the_reply_of_an_api_saved_as_it_came_is_opened(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = {"choices": [{"message": {"role": "assistant", "content": '{"a": 1'}, "finish_reason": "length"}]}
    (tmp_path / name).write_text(json.dumps(reply, indent=1), encoding="utf-8")
    (tmp_path / "s.json").write_text('{"type": "object", "required": ["a"]}', encoding="utf-8")
    arguments = ["--schema", str(tmp_path / "s.json"), "--outputs", str(tmp_path / name), "--json"]
    assert validate_output_schema.main(arguments) == 1
    (only,) = json.loads(capsys.readouterr().out)["observed"]["results"]
    assert only["code"] == "truncated"
