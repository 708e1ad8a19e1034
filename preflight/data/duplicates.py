"""Which records say the same? Exactly, but for case and spacing, or nearly; memory stays bounded for any file size.

Near: the 8-byte pieces of two records' words overlap by the given share, after pieces that many records have in common
(an instruction that is repeated in every prompt) are left out; and their answers and all their numbers agree. Found by
min-hash bands (Broder 1997; Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3), then compared in full.
"""

from __future__ import annotations

import bisect
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.data.spool import Piece

AT_A_TIME = 500_000  # keys held in memory at once
EXAMPLES = 50

KEEP, EXACT, SAME_WORDS, NEAR = 0, 1, 2, 3


@dataclass
class Duplicates:
    """Which lines repeat an earlier one. `lines[i]`: input line of record i. `state[i]`: KEEP, EXACT, SAME_WORDS, NEAR.

    `pairs`: the first of them as (line, the earlier line, kind). `conflicts`: same prompt, different answers.
    """

    lines: array[int] = field(default_factory=lambda: array("Q"))
    state: bytearray = field(default_factory=bytearray)
    partner: dict[int, int] = field(default_factory=dict)
    pairs: list[tuple[int, int, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"exact": 0, "same_words": 0, "near": 0})
    conflicts: int = 0
    conflict_lines: list[tuple[int, int]] = field(default_factory=list)
    near_looked: str = ""  # "" when looked for, else why not

    def mark(self, index: int, earlier: int, kind: int) -> None:
        """Record `index` repeats record `earlier`."""
        self.state[index] = kind
        name = ("", "exact", "same_words", "near")[kind]
        self.counts[name] += 1
        if len(self.pairs) < EXAMPLES:
            self.pairs.append((self.lines[index], self.lines[earlier], name))


def read_lines(pieces: list[Piece]) -> Duplicates:
    """The record's input lines, nothing marked yet."""
    found = Duplicates()
    for piece in pieces:
        found.lines.extend(key[0] for key in piece.each_key())
    found.state = bytearray(len(found.lines))
    return found


def _in_parts(pieces: list[Piece], count: int, column: int) -> Iterator[Iterator[tuple[int, bytes]]]:
    """The records' keys of one column as (record, key), in as many passes as memory asks for; equal keys meet in the
    same pass, in the order of the file."""
    passes = max(1, -(-count // AT_A_TIME))

    def one(wanted: int) -> Iterator[tuple[int, bytes]]:
        index = 0
        for piece in pieces:
            for key in piece.each_key():
                value = key[column]
                assert isinstance(value, bytes)
                if passes == 1 or int.from_bytes(value[:4], "little") % passes == wanted:
                    yield index, value
                index += 1

    for wanted in range(passes):
        yield one(wanted)


def find_exact(pieces: list[Piece], found: Duplicates) -> None:
    """Mark records whose conversation equals an earlier one's, whatever other columns hold."""
    for part in _in_parts(pieces, len(found.lines), 1):
        first: dict[bytes, int] = {}
        for index, key in part:
            earlier = first.setdefault(key, index)
            if earlier != index:
                found.mark(index, earlier, EXACT)
    found.pairs.sort()


def find_same_words(pieces: list[Piece], found: Duplicates) -> None:
    """Mark records that differ from an earlier one in case, spacing and full stops only."""
    for part in _in_parts(pieces, len(found.lines), 3):
        first: dict[bytes, int] = {}
        for index, key in part:
            if found.state[index]:
                continue
            earlier = first.setdefault(key, index)
            if earlier != index:
                found.mark(index, earlier, SAME_WORDS)


def find_conflicts(pieces: list[Piece], found: Duplicates) -> None:
    """Count records that ask the same as an earlier one and answer differently."""
    for part in _in_parts(pieces, len(found.lines), 2):
        first: dict[bytes, int] = {}
        for index, key in part:
            if found.state[index]:
                continue
            earlier = first.setdefault(key, index)
            if earlier != index:
                found.conflicts += 1
                if len(found.conflict_lines) < EXAMPLES:
                    found.conflict_lines.append((found.lines[index], found.lines[earlier]))


# ---------------------------------------------------------------------------------------------------------------------
# Near duplicates

_WIDTH = 8  # bytes of a piece of text: one to two words of English, two to three Chinese characters
_BINS, _BANDS = 32, 8
_SAMPLE = 128  # pieces of a long text that are looked at in the search; all are compared afterwards
_TABLE_BITS = 22
_SHORT_ANSWER = 64
_ROUNDS = 5
_BLOCK_BYTES = 1 << 17


class _Texts:
    """Random access to the words of each record."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._paths = [piece.path("words") for piece in pieces]
        self._bases = [0]
        self._offsets: array[int] = array("Q")
        for piece in pieces:
            at = 0
            for key in piece.each_key():
                self._offsets.append(at)
                at += key[5]
            self._bases.append(len(self._offsets))
        self._lengths = array("I", (key[5] for piece in pieces for key in piece.each_key()))
        self._open: tuple[int, Any] | None = None

    def __getitem__(self, index: int) -> bytes:
        piece = bisect.bisect_right(self._bases, index) - 1
        if self._open is None or self._open[0] != piece:
            self.close()
            self._open = (piece, open(self._paths[piece], "rb"))  # noqa: SIM115 - closed by close()
        stream = self._open[1]
        stream.seek(self._offsets[index])
        data: bytes = stream.read(self._lengths[index])
        return data

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _hashes(data: bytes, np: Any) -> Any:
    """A 32-bit hash of the 8 bytes that begin at each place of `data`."""
    count = len(data) - _WIDTH + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint32)
    mixed = np.empty(count, dtype=np.uint64)
    for offset in range(_WIDTH):
        places = len(range(offset, count, _WIDTH))
        mixed[offset::_WIDTH] = np.frombuffer(data, dtype="<u8", count=places, offset=offset)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def write_samples(piece: Piece) -> None:
    """Hash the looked-at pieces of a piece's words once and keep them: how many each record has, then the hashes.

    None reaches over the end of a record. Nothing is written without numpy.
    """
    try:
        import numpy as np
    except ImportError:
        return
    lengths = np.fromiter((key[5] for key in piece.each_key()), dtype=np.int64)
    ends = np.cumsum(lengths)
    found, counts = [], []
    with open(piece.path("words"), "rb") as words:
        start, base = 0, 0
        while start < len(lengths):
            # Some hundred records at a time: arrays that fit the processor's cache are hashed three times faster.
            stop = max(start + 1, int(np.searchsorted(ends, base + _BLOCK_BYTES)))
            taken, count = _sample(words.read(int(ends[stop - 1]) - base), lengths[start:stop], np)
            found.append(taken)
            counts.append(count)
            start, base = stop, int(ends[stop - 1])
    with open(piece.path("samples"), "wb") as stream:
        for arrays in (counts, found):
            for array_ in arrays:
                stream.write(array_.tobytes())


def _sample(data: bytes, lengths: Any, np: Any) -> tuple[Any, Any]:
    """(the looked-at hashes of some records' words, how many each record has)"""
    hashes = _hashes(data, np)
    # Of long texts those hashes whose low bits are zero: the same ones in every text that holds them.
    shift = np.maximum(0, np.ceil(np.log2(np.maximum(lengths, 1) / _SAMPLE))).astype(np.uint32)
    masks = (np.uint32(1) << shift) - np.uint32(1)
    usable = (hashes & np.repeat(masks, lengths)[: len(hashes)]) == 0
    ends = np.cumsum(lengths)
    for back in range(1, _WIDTH):
        places = ends - back
        usable[places[(places >= 0) & (places < len(usable))]] = False
    where = np.nonzero(usable)[0]
    counts = np.bincount(np.searchsorted(ends, where, side="right"), minlength=len(lengths)).astype(np.uint32)
    return hashes[where], counts


def _sampled(piece: Piece, records: int, np: Any) -> tuple[Any, Any]:
    """(hash, record within the piece) that `write_samples` kept."""
    data = np.fromfile(piece.path("samples"), dtype=np.uint32)
    return data[records:], np.repeat(np.arange(records, dtype=np.int64), data[:records])


def find_near(pieces: list[Piece], found: Duplicates, folder: Path, similarity: float) -> None:
    """Mark records that nearly repeat an earlier one. Needs numpy; without it `near_looked` says so."""
    try:
        import numpy as np
    except ImportError:
        found.near_looked = "numpy is not installed"
        return
    count = len(found.lines)
    if count < 2:
        return
    texts = _Texts(pieces)
    # What many records share depends on which records stay: repeated until nothing changes, so that a second run over
    # the result finds nothing more.
    for _ in range(_ROUNDS):
        common = _common_table(pieces, found, np)
        judge = _Judge(texts, common, similarity, np)
        pairs = array("Q")
        for path in _band_files(pieces, found, folder, common, np):
            pairs.extend(index << 32 | earlier for earlier, index in _candidates(path, count, np))
        before = found.counts["near"]
        for pair in np.unique(np.frombuffer(pairs, dtype=np.uint64)).tolist() if pairs else ():
            index, earlier = pair >> 32, pair & 0xFFFFFFFF
            if found.state[index]:
                continue
            while found.state[earlier] and earlier in found.partner:
                earlier = found.partner[earlier]
            if found.state[earlier] == KEEP and earlier != index and judge.near(earlier, index):
                found.partner[index] = earlier
                found.mark(index, earlier, NEAR)
        if found.counts["near"] == before:
            break
    texts.close()


def _common_table(pieces: list[Piece], found: Duplicates, np: Any) -> Any:
    """For each slot of hashes: does it stand in so many of the kept records that it belongs to a template?"""
    counts = np.zeros(1 << _TABLE_BITS, dtype=np.uint32)
    base = 0
    for piece in pieces:
        records = piece.records
        hashes, record = _sampled(piece, records, np)
        state = np.frombuffer(bytes(found.state[base : base + records]), dtype=np.uint8)
        base += records
        hashes = hashes[state[record] == KEEP]
        counts += np.bincount(hashes >> (32 - _TABLE_BITS), minlength=1 << _TABLE_BITS).astype(np.uint32)
    kept = found.state.count(KEEP)
    # A group of copies is small, in number or in share; what stands in more records is taken for a template, because
    # leaving out records that only share their instruction would be the greater harm.
    return counts > max(5, int(min(20, 0.3 * kept)), int(0.02 * kept))


def _band_files(pieces: list[Piece], found: Duplicates, folder: Path, common: Any, np: Any) -> list[Path]:
    """For each band a file with one 64-bit key a record; 0 for records that take no part."""
    paths = [folder / f"band{number}" for number in range(_BANDS)]
    streams = [open(path, "wb") for path in paths]  # noqa: SIM115 - closed below
    rows = _BINS // _BANDS
    base = 0
    try:
        for piece in pieces:
            records = piece.records
            hashes, record = _sampled(piece, records, np)
            rare = ~common[hashes >> (32 - _TABLE_BITS)]
            hashes, record = hashes[rare], record[rare]
            least = np.full(records * _BINS, 0xFFFFFFFF, dtype=np.uint32)
            np.minimum.at(least, record * _BINS + (hashes >> np.uint32(27)), hashes)
            least = least.reshape(records, _BANDS, rows).astype(np.uint64)
            empty = (least == 0xFFFFFFFF).all(axis=2)
            key = np.zeros((records, _BANDS), dtype=np.uint64)
            for row in range(rows):
                key = (key ^ least[:, :, row]) * np.uint64(0x9E3779B97F4A7C15)
                key ^= key >> np.uint64(31)
            state = np.frombuffer(bytes(found.state[base : base + records]), dtype=np.uint8)
            key[empty] = 0
            key[state != 0] = 0
            for number, stream in enumerate(streams):
                stream.write(key[:, number].tobytes())
            base += records
    finally:
        for stream in streams:
            stream.close()
    return paths


def _candidates(path: Path, count: int, np: Any) -> Iterator[tuple[int, int]]:
    """(earlier record, later record) that share the band's key: each with the first and with the one before it."""
    passes = max(1, -(-count // (4 * AT_A_TIME)))
    for wanted in range(passes):
        keys, indexes = [], []
        with open(path, "rb") as stream:
            base = 0
            while len(block := np.fromfile(stream, dtype=np.uint64, count=1 << 20)):
                take = block != 0
                if passes > 1:
                    take &= (block >> np.uint64(40)) % np.uint64(passes) == wanted
                places = np.nonzero(take)[0]
                keys.append(block[places])
                indexes.append((places + base).astype(np.int64))
                base += len(block)
        if not keys:
            continue
        key, index = np.concatenate(keys), np.concatenate(indexes)
        order = np.argsort(key, kind="stable")
        key, index = key[order], index[order]
        same = np.nonzero(key[1:] == key[:-1])[0] + 1
        start = (
            np.maximum.accumulate(np.where(np.r_[True, key[1:] != key[:-1]], np.arange(len(key)), 0))
            if len(key)
            else key
        )
        for place in same.tolist():
            first = int(index[start[place]])
            previous = int(index[place - 1])
            yield first, int(index[place])
            if previous != first:
                yield previous, int(index[place])


class _Judge:
    """Compares two records in full."""

    def __init__(self, texts: _Texts, common: Any, similarity: float, np: Any) -> None:
        self.texts, self.common, self.similarity, self.np = texts, common, similarity, np

    def near(self, first: int, second: int) -> bool:
        """They say nearly the same: numbers and short answers equal, the rest overlapping enough."""
        one, other = self.texts[first], self.texts[second]
        if re.findall(rb"\d+", one) != re.findall(rb"\d+", other):
            return False
        _, _, answer = one.partition(b"\x1e")
        _, _, other_answer = other.partition(b"\x1e")
        if answer != other_answer and (
            min(len(answer), len(other_answer)) < _SHORT_ANSWER
            or self._overlap(answer, other_answer, False) < self.similarity
        ):
            return False
        return self._overlap(one, other, True) >= self.similarity

    def _overlap(self, one: bytes, other: bytes, rare_only: bool) -> float:
        """Jaccard similarity of the two sets of pieces."""
        np = self.np
        sets = []
        for text in (one, other):
            hashes = _hashes(text, np)
            if rare_only:
                hashes = hashes[~self.common[hashes >> (32 - _TABLE_BITS)]]
            sets.append(np.unique(hashes))
        shared = len(np.intersect1d(*sets, assume_unique=True))
        total = len(sets[0]) + len(sets[1]) - shared
        return shared / total if total else 0.0
