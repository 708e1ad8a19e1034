"""The E-data cases of the preprocessor: each run through the command line, with facts written by hand from the case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import data_preprocessor

CASES = Path(__file__).parent / "wild" / "E-data"


def looked(
    case: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, *more: str
) -> tuple[int, dict[str, Any], list[Any]]:
    """(exit code, document, the records that were written)"""
    source = CASES / case / name
    before = source.read_bytes()
    out = tmp_path / "out.jsonl"
    code = data_preprocessor.main([str(source), "--json", "--out", str(out), *more])
    document = json.loads(capsys.readouterr().out)
    assert source.read_bytes() == before, "the input is never touched"
    raw = out.read_bytes()
    assert not raw.startswith(b"\xef\xbb\xbf")
    return code, document, [json.loads(line) for line in raw.decode("utf-8").split("\n") if line]


def codes(document: dict[str, Any], *levels: str) -> set[str]:
    return {finding["code"] for finding in document["findings"] if finding["level"] in levels}


def roles(record: dict[str, Any]) -> list[str]:
    return [message["role"] for message in record["messages"]]


def test_e01_alpaca_json_array(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document, written = looked("E01-alpaca-json-array", "train.json", capsys, tmp_path)
    observed = document["observed"]
    assert code == 0 and document["level"] == "ok" and "converted" in codes(document, "ok")
    assert observed["format"] == "alpaca" and observed["container"] == "json-array"
    assert observed["rows"] == 3 and observed["messages_rows"] == 3
    assert [roles(record) for record in written] == [
        ["user", "assistant"],
        ["user", "assistant"],
        ["user", "assistant", "user", "assistant"],
    ]
    assert written[1]["messages"][0]["content"] == "Say OK", "an empty input adds nothing"
    assert written[0]["messages"][0]["content"] == "Extract the city.\n\nI live in Lyon."
    assert written[2]["messages"][:2] == [
        {"role": "user", "content": "Translate salut"},
        {"role": "assistant", "content": "hi"},
    ]


def test_e02_sharegpt_roles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document, written = looked("E02-sharegpt-roles", "train.jsonl", capsys, tmp_path)
    observed = document["observed"]
    assert code == 0 and document["level"] == "warn" and "needs-review" in codes(document, "warn")
    assert observed["format"] == "sharegpt" and observed["rows"] == 5
    known = {"human": "user", "gpt": "assistant", "system": "system"}
    assert {name: observed["role_map"][name] for name in known} == known
    assert "bing" not in observed["role_map"]
    assert observed["problems"] == {
        "2": "starts with assistant",
        "3": "two user turns in a row",
        "4": "no assistant turn (nothing to train on)",
        "5": "unknown role 'bing'",
    }
    assert observed["usable_without_change"] == [1]
    assert [roles(record) for record in written] == [["system", "user", "assistant"]]
    aside = [json.loads(line) for line in (tmp_path / "out.set-aside.jsonl").read_text("utf-8").splitlines()]
    assert [entry["line"] for entry in aside] == [2, 3, 4, 5], "nothing is dropped silently"
    assert aside[3]["value"]["conversations"][1]["from"] == "bing"


def test_e02_an_unknown_role_can_be_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, document, written = looked("E02-sharegpt-roles", "train.jsonl", capsys, tmp_path, "--role-map", "bing=assistant")
    assert "5" not in document["observed"]["problems"]
    assert written[-1]["messages"] == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


def test_e03_openai_tools_null_content(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document, written = looked("E03-openai-tools-null-content", "train.jsonl", capsys, tmp_path)
    observed = document["observed"]
    assert code == 0 and document["level"] == "warn" and "tool-data" in codes(document, "warn")
    assert observed["format"] == "openai-messages" and observed["rows"] == 2
    assert observed["usable_without_change"] == [1]
    assert observed["problems"]["2"].split("; ") == [
        "arguments are not valid JSON",
        "tool_call_id call_X has no matching call",
    ]
    (record,) = written
    assert record["messages"][1]["content"] is None and len(record["messages"][1]["tool_calls"]) == 1
    assert record["messages"][3]["weight"] == 1
    assert json.loads(record["tools"])[0]["function"]["name"] == "get_weather"
    assert "None" not in json.dumps(record)


def test_e03_the_strict_instruction_leaves_tool_messages_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}', encoding="utf-8")
    _, _, written = looked(
        "E03-openai-tools-null-content", "train.jsonl", capsys, tmp_path, "--schema", str(schema), "--targets", "none"
    )
    (record,) = written
    (tool,) = [message for message in record["messages"] if message["role"] == "tool"]
    assert tool["content"] == '{"t": 18}'
    assert record["messages"][0]["role"] == "system" and "JSON Schema" in record["messages"][0]["content"]


def test_e04_bom_crlf_blank_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document, written = looked("E04-bom-crlf-blank-lines", "train.jsonl", capsys, tmp_path)
    observed = document["observed"]
    assert code == 0 and document["level"] == "ok"
    (bom,) = [finding for finding in document["findings"] if finding["code"] == "bom"]
    assert bom["level"] == "ok" and bom["why"]
    assert observed["rows"] == 2 and observed["bad_lines"] == [] and observed["bad_count"] == 0
    assert observed["encoding"] == "utf-8-sig"
    assert written[0]["messages"] == [
        {"role": "user", "content": "\u989c\u8272?"},
        {"role": "assistant", "content": "\u7ea2"},
    ]


def test_e05_truncated_last_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document, written = looked("E05-truncated-last-line", "train.jsonl", capsys, tmp_path)
    observed = document["observed"]
    assert code == 0 and document["level"] == "warn" and "truncated" in codes(document, "warn")
    assert observed["rows"] == 2 and observed["bad_lines"] == [3]
    assert [record["messages"][0]["content"] for record in written] == ["a", "c"]
    (finding,) = [finding for finding in document["findings"] if finding["code"] == "truncated"]
    assert "2 records are readable" in finding["why"] and "size" in finding["fix"][0]


def test_e07_json_array_named_jsonl(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document, written = looked("E07-json-array-named-jsonl", "train.jsonl", capsys, tmp_path)
    observed = document["observed"]
    assert code == 0 and document["level"] == "ok"
    (finding,) = [finding for finding in document["findings"] if finding["code"] == "json-array-in-jsonl"]
    assert finding["level"] == "ok" and finding["why"]
    assert observed["rows"] == 2 and observed["bad_count"] == 0 and len(written) == 2


def test_every_case_of_the_preprocessor_is_tested() -> None:
    ids = {
        folder.name
        for folder in CASES.iterdir()
        if (folder / "case.json").exists()
        and json.loads((folder / "case.json").read_text("utf-8"))["tool"] == "data_preprocessor.py"
    }
    text = Path(__file__).read_text(encoding="utf-8")
    assert {case for case in ids if f'"{case}"' not in text} == set()
