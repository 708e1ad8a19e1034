"""Records of a big file, prepared in pieces and kept on disk, so that memory does not grow with the file.

A piece is some megabytes of input. Each is prepared on its own, in worker processes where the container allows it, and
leaves its files: the lines to write, their keys, their words for comparison with samples, and what was set aside.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.data.conversations import FAMILY
from preflight.data.prepare import Prepared, Preparer, Recipe
from preflight.data.records import BadRecord, Record, Records, read_records
from preflight.findings import quote

PIECE_BYTES = 4 << 20
EXAMPLES = 20  # places kept for each kind of trouble; all are counted

# line (or record) number, identity, prompt, words, bytes of the line, bytes of the words, family, group
KEYS = struct.Struct("<Q16s8s8sIIB8s")
FAMILIES = tuple(dict.fromkeys(FAMILY.values()))
_FAMILY_NUMBERS = {family: number for number, family in enumerate(FAMILIES)}


@dataclass
class Tally:
    """What was seen in one piece, or in all."""

    rows: int = 0  # records that could be read
    kept: int = 0  # records ready to be written
    bad: Counter[str] = field(default_factory=Counter)
    bad_places: list[dict[str, Any]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    roles: dict[str, str] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)
    problem_places: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problem_rows: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    change_lines: dict[str, list[int]] = field(default_factory=dict)
    personal: Counter[str] = field(default_factory=Counter)
    personal_lines: dict[str, list[int]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    arguments: Counter[str] = field(default_factory=Counter)
    tool_rows: int = 0
    weighted_rows: int = 0
    characters: int = 0
    numbers: int = 0
    encoding: str | None = None
    first_turns: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add the tally of the piece that follows."""
        for entry in other.bad_places:
            entry["row"] += self.numbers
        for places in other.problem_places.values():
            for entry in places:
                entry["row"] += self.numbers
        self.bad_places = (self.bad_places + other.bad_places)[:200]
        for code, places in other.problem_places.items():
            self.problem_places[code] = (self.problem_places.get(code, []) + places)[:200]
        for mine, theirs in ((self.change_lines, other.change_lines), (self.personal_lines, other.personal_lines)):
            for key, lines in theirs.items():
                mine[key] = (mine.get(key, []) + lines)[:EXAMPLES]
        for name in ("bad", "notes", "shapes", "families", "problems", "changes", "personal", "left_out", "turns"):
            getattr(self, name).update(getattr(other, name))
        self.arguments.update(other.arguments)
        self.roles.update(other.roles)
        for name in ("rows", "kept", "problem_rows", "tool_rows", "weighted_rows", "characters", "numbers"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if self.encoding is None or self.encoding.startswith("utf"):  # a piece in plain ASCII does not undo a guess
            self.encoding = other.encoding or self.encoding
        self.first_turns = (self.first_turns + other.first_turns)[:EXAMPLES]


@dataclass(frozen=True)
class Piece:
    """The files of one piece: `NAME.lines`, `NAME.keys`, `NAME.words`, `NAME.samples`, `NAME.aside`."""

    stem: str

    def path(self, kind: str) -> Path:
        """The file of one kind."""
        return Path(f"{self.stem}.{kind}")

    @property
    def records(self) -> int:
        """How many records it holds."""
        return self.path("keys").stat().st_size // KEYS.size

    def each_key(self) -> Iterator[tuple[int, bytes, bytes, bytes, int, int, int, bytes]]:
        """The keys of each line, in order."""
        with open(self.path("keys"), "rb") as stream:
            while block := stream.read(KEYS.size * 4096):
                yield from KEYS.iter_unpack(block)


def prepare_piece(
    items: Iterable[Record | BadRecord], records: Records, piece: Piece, preparer: Preparer, source: str
) -> Tally:
    """Prepare the records and write the piece's files."""
    import hashlib

    tally = Tally()
    recipe = preparer.recipe
    with (
        open(piece.path("lines"), "wb") as lines,
        open(piece.path("keys"), "wb") as keys,
        open(piece.path("words"), "wb") as words,
        open(piece.path("aside"), "wb") as aside,
    ):
        for item in items:
            tally.numbers = item.number
            if isinstance(item, BadRecord):
                tally.bad[item.reason] += 1
                if len(tally.bad_places) < 200:
                    tally.bad_places.append(
                        {"row": item.number, "line": item.line, "reason": item.reason, "detail": item.detail}
                    )
                aside.write(_json({**_where(item, source), "reasons": [f"{item.reason}: {item.detail}"]}))
                continue
            tally.rows += 1
            made = preparer(item.value, item.notes)
            _count(tally, made, item)
            if made.problems or not made.line:
                reasons = [f"{problem.code}: {problem.what}" for problem in made.problems]
                aside.write(_json({**_where(item, source), "reasons": reasons, "value": item.value}))
                continue
            tally.kept += 1
            lines.write(made.line + b"\n")
            near = hashlib.blake2b(made.near_text, digest_size=8).digest() if recipe.near_texts else bytes(8)
            family = _FAMILY_NUMBERS[made.family]
            keys.write(
                KEYS.pack(
                    item.line or item.number,
                    made.identity,
                    made.prompt[:8],
                    near,
                    len(made.line) + 1,
                    len(made.near_text),
                    family,
                    made.group[:8],
                )
            )
            words.write(made.near_text)
    if recipe.near_texts:
        from preflight.data.duplicates import write_samples

        write_samples(piece)
    tally.notes = Counter(records.notes)
    tally.encoding = records.encoding
    return tally


def _where(item: Record | BadRecord, source: str) -> dict[str, Any]:
    return {"file": source, "line" if item.line is not None else "record": item.line or item.number}


def _count(tally: Tally, made: Prepared, item: Record) -> None:
    line = item.line or item.number
    tally.shapes[made.shape] += 1
    if made.roles:
        tally.roles.update(made.roles)
    if made.problems:
        tally.problem_rows += 1
        for problem in made.problems:
            tally.problems[problem.code] += 1
            places = tally.problem_places.setdefault(problem.code, [])
            if len(places) < 200:
                places.append({"row": item.number, "line": item.line, "what": quote(problem.what, 200)})
    else:
        tally.families[made.family] += 1
        tally.turns[len(made.turns)] += 1
    for change in set(made.changes) if made.changes else ():
        tally.changes[change] += 1
        example = tally.change_lines.setdefault(change, [])
        if len(example) < EXAMPLES:
            example.append(line)
    for kind in made.personal:
        tally.personal[kind] += 1
        example = tally.personal_lines.setdefault(kind, [])
        if len(example) < EXAMPLES:
            example.append(line)
    if made.left_out:
        tally.left_out.update(made.left_out)
    if made.arguments:
        tally.arguments.update(made.arguments)
    tally.tool_rows += made.tools
    tally.weighted_rows += made.weighted
    tally.characters += made.characters
    if len(tally.first_turns) < EXAMPLES:
        tally.first_turns.append((item.number, made.turns))


def _json(value: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = json.dumps({key: item for key, item in value.items() if key != "value"}, ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"


# ---------------------------------------------------------------------------------------------------------------------
# Pieces of a file


def spans(records: Records) -> list[tuple[int, int, int]] | None:
    """(first byte, byte after the last, number of the first line) of pieces that can be prepared apart; None when the
    container does not allow it."""
    if not records.can_be_cut or records.size_bytes < 2 * PIECE_BYTES:
        return None
    found, start, line = [], 0, 1
    with open(records.path, "rb") as stream:
        while start < records.size_bytes:
            stream.seek(start)
            count, read = 0, 0
            while read < PIECE_BYTES:
                block = stream.read(min(1 << 20, PIECE_BYTES - read))
                if not block:
                    break
                read += len(block)
                count += block.count(b"\n")
            rest = stream.readline()
            end = start + read + len(rest)
            count += rest.endswith(b"\n")
            found.append((start, end, line))
            line += count
            start = end
    return found


_worker_preparer: Preparer | None = None


def _start_worker(recipe: Recipe) -> None:
    """In a worker process: leave Ctrl-C to the parent, and end with it."""
    from preflight.processes import _die_with_parent

    global _worker_preparer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent blocked them while it started us
        _die_with_parent()
    _worker_preparer = Preparer(recipe)


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """While worker processes start: none is interrupted half-way, and they leave Ctrl-C to the parent from the first
    moment. A signal that comes meanwhile is taken up afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(path: str, encoding: str | None, span: tuple[int, int, int], stem: str) -> Tally:
    assert _worker_preparer is not None
    records = read_records(path, encoding)
    records.span = span
    return prepare_piece(records, records, Piece(stem), _worker_preparer, Path(path).name)


def prepare_file(
    records: Records, folder: Path, prefix: str, recipe: Recipe, workers: int, progress: Callable[[int], None]
) -> tuple[list[Piece], Tally]:
    """All pieces of a file in order, and what was seen. `progress` is told how many bytes have been read."""
    cut = spans(records) if workers > 1 else None
    whole = Tally()
    pieces: list[Piece] = []
    if cut is not None:
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        context = get_context("spawn")
        pool = ProcessPoolExecutor(min(workers, len(cut)), context, _start_worker, (recipe,))
        try:
            waiting = []
            with _deaf_to_interrupts():
                for index, span in enumerate(cut):
                    piece = Piece(str(folder / f"{prefix}{index:06d}"))
                    pieces.append(piece)
                    waiting.append(pool.submit(_work, str(records.path), records.encoding, span, piece.stem))
            for future, span in zip(waiting, cut, strict=True):
                whole.add(future.result())
                progress(span[1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        records.notes.update(whole.notes)
        _mend_notes(whole)
        return pieces, whole
    preparer = Preparer(recipe)
    stream = iter(records)
    first = next(stream, None)
    index = 0
    while first is not None:
        piece = Piece(str(folder / f"{prefix}{index:06d}"))
        pieces.append(piece)
        batch = _Batch(stream, first, records)
        tally = prepare_piece(batch, records, piece, preparer, records.path.name)
        # Here the numbers run on through all pieces.
        tally_numbers, tally.numbers = tally.numbers, 0
        before, whole.numbers = whole.numbers, 0
        tally.notes = Counter()
        whole.add(tally)
        whole.numbers = max(before, tally_numbers)
        first = batch.following
        index += 1
        progress(records.read_bytes)
    whole.notes = Counter(records.notes)
    whole.encoding = records.encoding
    return pieces, whole


def _mend_notes(tally: Tally) -> None:
    """Notes about the file as a whole, which every piece made."""
    for name in ("bom", "json-array-in-jsonl", "jsonl-in-json", "encoding-guessed", "no-newline-at-end", "compressed"):
        if name in tally.notes:
            tally.notes[name] = 1


class _Batch:
    """About PIECE_BYTES of records from a stream; `following` is the record after them."""

    def __init__(self, stream: Iterator[Record | BadRecord], first: Record | BadRecord, records: Records) -> None:
        self.stream, self.first, self.records = stream, first, records
        self.following: Record | BadRecord | None = None

    def __iter__(self) -> Iterator[Record | BadRecord]:
        began = self.records.read_bytes
        yield self.first
        for count, item in enumerate(self.stream, 1):
            if self.records.read_bytes - began > PIECE_BYTES or count >= 100_000:
                self.following = item
                return
            yield item
