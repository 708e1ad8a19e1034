"""The F-output cases: each run through the command line, with the facts written by hand from the case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import validate_output_schema

CASES = Path(__file__).parent / "wild" / "F-output"


def judged(case: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    folder = CASES / case
    arguments = ["--schema", str(folder / "schema.json"), "--outputs", str(folder / "output.txt"), "--json", *more]
    code = validate_output_schema.main(arguments)
    return code, json.loads(capsys.readouterr().out)


def result(document: dict[str, Any]) -> dict[str, Any]:
    (only,) = document["observed"]["results"]
    assert isinstance(only, dict)
    return only


def codes(document: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in document["findings"] if finding["level"] != "ok"}


def test_f01_fence_then_prose_with_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = judged("F01-fence-then-prose-with-brackets", capsys)
    seen = result(document)
    assert seen["level"] == "recoverable" and seen["strict_valid"] is False
    assert seen["extracted"] == {"city": "Lyon", "age": 31, "note": "see `ls -l`"}
    assert seen["schema_valid_after_extraction"] is True
    assert seen["values_found"] == 1
    assert code == 0 and document["level"] == "warn"
    assert document["observed"]["valid"] == 0


def test_f02_think_then_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = judged("F02-think-then-json", capsys)
    seen = result(document)
    assert seen["level"] == "recoverable" and seen["strict_valid"] is False
    assert seen["extracted"] == {"city": "Paris", "age": 40}
    assert seen["schema_valid_after_extraction"] is True
    assert "reasoning-block" in seen["recovered_by"]


def test_f03_python_literals(capsys: pytest.CaptureFixture[str]) -> None:
    _, document = judged("F03-python-literals", capsys)
    seen = result(document)
    assert seen["level"] == "recoverable" and seen["strict_valid"] is False
    assert seen["extracted"] == {"city": "Saint-Denis de l'Hotel", "age": 7, "active": True, "note": None}
    assert seen["schema_valid_after_extraction"] is True
    (warned,) = [finding for finding in document["findings"] if finding["level"] == "warn"]
    assert "Python literals instead of JSON" in warned["what"]


def test_f04_types_as_strings(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = judged("F04-types-as-strings", capsys)
    seen = result(document)
    assert seen["level"] == "invalid" and seen["strict_valid"] is False and seen["json_parses"] is True
    found = sorted((error["path"], error["expected"], error["got"]) for error in seen["errors"])
    assert found == [("active", "boolean", "string"), ("age", "integer", "string")]
    assert seen["extracted"]["age"] == "42", "nothing is turned into a number silently"
    assert code == 1


def test_f04_an_integral_float_is_an_integer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output.txt"
    output.write_text('{"city": "Oslo", "age": 42.0}', encoding="utf-8")
    schema = CASES / "F04-types-as-strings" / "schema.json"
    assert validate_output_schema.main(["--schema", str(schema), "--outputs", str(output), "--json"]) == 0
    assert result(json.loads(capsys.readouterr().out))["strict_valid"] is True


def test_f05_two_objects(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = judged("F05-two-objects", capsys)
    seen = result(document)
    assert seen["level"] == "invalid" and seen["code"] == "multiple-json-values"
    assert seen["values_found"] == 2 and seen["extracted"] is None
    assert "multiple-json-values" in codes(document) and code == 1
    assert "2 of them fit the schema" in seen["message"]


def test_f06_cut_by_max_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = judged("F06-cut-by-max-tokens", capsys)
    seen = result(document)
    assert seen["level"] == "invalid" and seen["code"] == "truncated" and seen["strict_valid"] is False
    assert seen["extracted"] is None
    (failed,) = [finding for finding in document["findings"] if finding["level"] == "fail"]
    assert "max_new_tokens" in failed["fix"][0] and "finish_reason" in failed["fix"][0]
    assert code == 1


@pytest.mark.parametrize("provider", ["openai-strict", "openai"])
def test_f07_openai_strict_schema_rejected(provider: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = judged("F07-openai-strict-schema-rejected", capsys, "--provider", provider)
    observed = document["observed"]
    assert observed["json_schema_valid"] is True
    assert result(document)["strict_valid"] is True
    assert observed["provider_errors"] == [
        "root: 'additionalProperties' is required to be supplied and to be false",
        "properties.person: 'additionalProperties' is required to be supplied and to be false",
        "properties.person: 'required' must include every key in properties; missing 'email'",
    ]
    assert observed["outcome"] == "schema-problem"
    assert codes(document) == {"oai-addprops-false", "oai-all-required"}, "the output is not blamed"
    fixes = " ".join(fix for finding in document["findings"] for fix in finding["fix"])
    assert "additionalProperties" in fixes and '["string", "null"]' in fixes
    assert code == 1


def test_every_case_of_the_group_is_tested() -> None:
    ids = {folder.name for folder in CASES.iterdir() if folder.is_dir()}
    text = Path(__file__).read_text(encoding="utf-8")
    assert {case for case in ids if f'"{case}"' not in text} == set()
