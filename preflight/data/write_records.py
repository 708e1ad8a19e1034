"""Writes prepared records: the training file or files, what was set aside, and the summary, all at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight.data.publish import MARK, publish_file, publish_folder
from preflight.data.records import Records
from preflight.data.spool import Piece
from preflight.redact import redacted

OTHER_SHAPE, TOO_LONG, NOT_RENDERED = 4, 5, 6
REASONS = {
    1: "exact-duplicate: the same conversation stands earlier in the file",
    2: "same-words: an earlier record differs only in case, spacing or full stops",
    3: "near-duplicate: an earlier record says nearly the same",
    OTHER_SHAPE: "other-shape: most records of this file are of another kind, and one file holds one kind",
    TOO_LONG: "too-long: it has more tokens than --max-tokens",
    NOT_RENDERED: "not-rendered: the chat template refuses this conversation",
}


@dataclass
class Output:
    """What is written where. `state[i]`: 0 for records that are kept, else a key of REASONS."""

    args: argparse.Namespace
    records: Records
    pieces: list[Piece]
    state: bytearray
    side: bytearray | None
    counts: Any
    folder: Path
    target: Path | None
    family: str | None

    @property
    def kept(self) -> int:
        """Records that are kept."""
        return self.state.count(0)

    @property
    def test(self) -> int:
        """Records on the test side."""
        return sum(self.side) if self.side is not None else 0

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(record, input line, the line to write) of all prepared records, in the order of the file."""
        index = 0
        for piece in self.pieces:
            with open(piece.path("lines"), "rb") as stream:
                for key, line in zip(piece.each_key(), stream, strict=True):
                    yield index, key[0], line
                    index += 1


def write(output: Output, observed: dict[str, Any]) -> dict[str, Any]:
    """Write everything and put it in place; which files hold how many records."""
    assert output.target is not None
    made = output.folder / "made"
    made.mkdir()
    numbers = _write_records(output, made)
    numbers["set-aside.jsonl"] = _write_aside(output, made)
    target = output.target
    if target.suffix == ".jsonl":
        aside = target.with_suffix(".set-aside.jsonl")
        if numbers["set-aside.jsonl"]:
            publish_file(made / "set-aside.jsonl", aside)
        elif aside.exists():
            aside.unlink()  # it belonged to the file that is replaced now
        publish_file(made / "train.jsonl", target)
        named = {target.name: numbers["train.jsonl"]}
        return named | ({aside.name: numbers["set-aside.jsonl"]} if numbers["set-aside.jsonl"] else {})
    summary = redacted({"schema": 1, "observed": observed, "records": numbers})
    text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
    (made / MARK).write_text(text + "\n", encoding="utf-8", newline="\n")
    publish_folder(made, target)
    return numbers


def _write_records(output: Output, made: Path) -> dict[str, int]:
    numbers = {"train.jsonl": 0}
    test = output.side is not None
    if test:
        numbers["test.jsonl"] = 0
    streams = {name: open(made / name, "wb") for name in numbers}  # noqa: SIM115 - closed below
    first = output.counts.first if output.counts is not None else None
    cutting = output.args.over_long == "truncate"
    try:
        for index, _, line in output.lines():
            if output.state[index]:
                continue
            if cutting and first is not None and first[index] > 0:
                line = shortened(line, first[index])
            name = "test.jsonl" if output.side is not None and output.side[index] else "train.jsonl"
            streams[name].write(line)
            numbers[name] += 1
    finally:
        for stream in streams.values():
            stream.close()
    return numbers


def shortened(line: bytes, first: int) -> bytes:
    """The record without the exchanges before message `first`; the system turn stays."""
    record = json.loads(line)
    key = "messages" if "messages" in record else "prompt"
    messages = record[key]
    lead = 1 if messages and messages[0]["role"] == "system" else 0
    record[key] = messages[:lead] + messages[first:]
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _write_aside(output: Output, made: Path) -> int:
    count = 0
    with open(made / "set-aside.jsonl", "wb") as aside:
        for piece in output.pieces:
            with open(piece.path("aside"), "rb") as stream:
                for line in stream:
                    aside.write(line)
                    count += 1
        for index, number, line in output.lines():
            reason = output.state[index]
            if not reason:
                continue
            key = "line" if output.records.container not in ("parquet", "arrow") else "record"
            entry: dict[str, Any] = {"file": output.records.path.name, key: number, "reasons": [REASONS[reason]]}
            if reason > 3:
                entry["value"] = json.loads(line)
            aside.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count
