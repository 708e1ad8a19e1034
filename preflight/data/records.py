"""What records does a data file hold? Any container and any encoding, one record at a time.

JSON Lines, a JSON array, pretty-printed or concatenated objects, CSV, Parquet, Arrow, plain text, each also
compressed. A bad record is named by line and reason; it never stops the rest and is never dropped silently.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from preflight.data.encodings import detect_encoding, guess_encoding
from preflight.data.file_kinds import (
    COLUMNS,
    COMPRESSED,
    CONTROLS,
    HEAD_BYTES,
    NUL_DETAIL,
    compression_of,
    container_of,
    damage_below,
    head_of,
    open_bytes,
    refuse_foreign,
    short,
)
from preflight.data.file_kinds import (
    Unreadable as Unreadable,
)
from preflight.outputs.lenient_json import Broken, Cut, parse_lenient

# One record longer than this is a damaged file (a lost line end), and would decide how much memory we use.
RECORD_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Record:
    """One record as it stands in the file. `number` counts all records from 1, bad ones too; `line` is where it begins
    (None in containers without lines). `notes` names what was odd about it (see `Records.notes`)."""

    number: int
    line: int | None
    value: Any
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadRecord:
    """A record that could not be read. `reason` is a slug: truncated, not-json, undecodable, record-too-long,
    nul-bytes, wrong-columns, nested-too-deep, compressed-data-damaged, unreadable."""

    number: int
    line: int | None
    reason: str
    detail: str

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"line {self.line}" if self.line is not None else f"record {self.number}"


class Records:
    """The records of one file, in order. Iterate as often as needed: each time the file is read anew.

    `container`: jsonl, json-array, json-values (objects over several lines), csv, tsv, parquet, arrow, text-lines.
    `span`: (first byte, byte after the last, number of the first line) when only that part is wanted.
    `encoding`: Python's name of it; "utf-8-sig" when a byte order mark is there; None in binary containers.
    `notes`: what is odd about the file, counted while iterating: bom, crlf, cr-line-ends, blank-lines, comment-lines,
    json-array-in-jsonl, jsonl-in-json, trailing-comma, concatenated-objects, python-literals, raw-control-characters,
    non-finite-number, duplicate-keys, array-not-closed, text-after-array, no-newline-at-end, compressed, wrapped-rows,
    columns-to-rows, encoding-guessed, mixed-encodings.
    """

    def __init__(self, path: Path, container: str, encoding: str | None, head: bytes) -> None:
        self.path, self.container, self.encoding = path, container, encoding
        self.notes: Counter[str] = Counter()
        self.size_bytes = path.stat().st_size
        self.read_bytes = 0
        self.span: tuple[int, int, int] | None = None
        self._head = head

    @property
    def can_be_cut(self) -> bool:
        """Any byte behind a line end begins a record, so that parts of the file can be read apart (see `span`)."""
        plain = self.encoding is not None and not self.encoding.startswith(("utf-16", "utf-32"))
        compressed = bool(compression_of(self._head_on_disk()))
        return self.container in ("jsonl", "text-lines") and plain and not compressed and not self._cr_only()

    def __iter__(self) -> Iterator[Record | BadRecord]:
        self.notes.clear()
        self.read_bytes = 0
        self._note_file()
        readers: dict[str, Callable[[], Iterator[Record | BadRecord]]] = {
            "jsonl": self._json_lines,
            "json-array": self._json_values,
            "json-values": self._json_values,
            "csv": self._csv,
            "tsv": self._csv,
            "parquet": self._parquet,
            "arrow": self._arrow,
            "text-lines": self._text_lines,
        }
        return readers[self.container]()

    def _note_file(self) -> None:
        if self.encoding in ("utf-8-sig", "utf-16", "utf-32"):
            self.notes["bom"] = 1
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        if set(suffixes) & set(COMPRESSED) or compression_of(self._head_on_disk()):
            self.notes["compressed"] = 1
        if self.container == "json-array" and {".jsonl", ".ndjson"} & set(suffixes):
            self.notes["json-array-in-jsonl"] = 1
        if self.container == "jsonl" and ".json" in suffixes:
            self.notes["jsonl-in-json"] = 1
        if self.encoding is not None and self.encoding not in ("utf-8", "utf-8-sig", "utf-16", "utf-32", "ascii"):
            self.notes["encoding-guessed"] = 1

    def _head_on_disk(self) -> bytes:
        with open(self.path, "rb") as stream:
            return stream.read(8)

    # -- bytes and lines ----------------------------------------------------------------------------------------------

    def _stream(self) -> IO[bytes]:
        """The file's bytes, uncompressed, without a UTF-8 mark; UTF-16 and UTF-32 are recoded to UTF-8."""
        stream = open_bytes(self.path)
        if self.encoding is not None and self.encoding.startswith(("utf-16", "utf-32")):
            return io.BufferedReader(_Recoded(stream, self.encoding), 1 << 18)
        if self.encoding == "utf-8-sig":
            stream.read(3)
        if self._cr_only():
            self.notes["cr-line-ends"] = 1
            return io.BufferedReader(_Recoded(stream, "latin-1", lambda data: data.replace(b"\r", b"\n"), raw=True))
        return stream

    def _cr_only(self) -> bool:
        return self.container in ("jsonl", "text-lines") and b"\n" not in self._head and b"\r" in self._head.rstrip()

    def lines(self, keep_blank: bool = False) -> Iterator[tuple[int, str | BadRecord]]:
        """(line number, text without its line end), blank lines left out and counted. Only LF and CRLF end a line:
        U+2028 may stand inside a JSON string. A BadRecord stands for a line that is no text (its number is 0)."""
        utf8 = self.encoding is None or self.encoding.startswith("utf") or self.encoding == "ascii"
        encoding = "utf-8" if utf8 else str(self.encoding)
        only_ascii = True
        last = b"\n"
        first_byte, end_byte, first_line = self.span or (0, 1 << 62, 1)
        at = first_byte or (3 if self.encoding == "utf-8-sig" else 0)
        with self._stream() as stream:
            if first_byte:
                stream.seek(first_byte)
            for number in itertools.count(first_line):
                if at >= end_byte:
                    break
                line = stream.readline(RECORD_LIMIT_BYTES)
                at += len(line)
                if len(line) >= RECORD_LIMIT_BYTES and not line.endswith(b"\n"):
                    yield number, self._too_long(stream, number)
                    at = stream.tell()
                    continue
                if not line.endswith(b"\n") and (damage := damage_below(stream)):
                    detail = f"the compressed data ends early or is damaged ({damage})"
                    yield number, BadRecord(0, number, "compressed-data-damaged", detail)
                    return
                if not line:
                    break
                last = line[-1:]
                self.read_bytes += len(line)
                if line.endswith(b"\r\n"):
                    self.notes["crlf"] += 1
                    line = line[:-2]
                elif last == b"\n":
                    line = line[:-1]
                if not keep_blank and (not line or line.isspace()):
                    self.notes["blank-lines"] += 1
                    continue
                try:
                    text = line.decode(encoding)
                except UnicodeDecodeError as error:
                    guess = guess_encoding(line) if encoding == "utf-8" else None
                    if only_ascii and guess is not None:  # nothing before this line contradicts the guess
                        encoding = guess
                        self.encoding = guess
                        self.notes["encoding-guessed"] = 1
                        yield number, line.decode(guess)
                        only_ascii = False
                        continue
                    if line.count(0) > len(line) // 2:
                        yield number, BadRecord(0, number, "nul-bytes", NUL_DETAIL)
                        continue
                    hint = ""
                    if guess is not None:
                        self.notes["mixed-encodings"] += 1
                        hint = f"; it decodes as {guess}, so the file mixes encodings"
                    detail = (
                        f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line is not {encoding}{hint}"
                    )
                    yield number, BadRecord(0, number, "undecodable", detail)
                    continue
                only_ascii = only_ascii and text.isascii()
                yield number, text
        if last != b"\n":
            self.notes["no-newline-at-end"] = 1

    def _too_long(self, stream: IO[bytes], number: int) -> BadRecord:
        size = RECORD_LIMIT_BYTES
        while True:
            more = stream.readline(1 << 20)
            size += len(more)
            if not more or more.endswith(b"\n"):
                break
        self.read_bytes += size
        limit = f"{RECORD_LIMIT_BYTES >> 20} MiB"
        return BadRecord(
            0, number, "record-too-long", f"the line has {size >> 20} MiB; at most {limit} are read as one record"
        )

    # -- containers ---------------------------------------------------------------------------------------------------

    def _json_lines(self) -> Iterator[Record | BadRecord]:
        counter = 0
        lines = self.lines()
        previous_bad: tuple[BadRecord, bool] | None = None
        parse = JsonReader()
        for line_number, text in lines:
            if previous_bad is not None:
                yield previous_bad[0]
                previous_bad = None
            if isinstance(text, BadRecord):
                counter += 1
                yield BadRecord(counter, line_number, text.reason, text.detail)
                continue
            try:
                value, notes = parse(text)
            except (ValueError, RecursionError) as error:
                for item in self._rescued(text, line_number, counter, error):
                    counter = item.number
                    if isinstance(item, BadRecord) and item.reason == "truncated":
                        previous_bad = (item, True)
                    else:
                        yield item
                continue
            if notes:
                self.notes.update(notes)
            for row in self._rows(value):
                counter += 1
                yield Record(counter, line_number, row, notes)
        if previous_bad is not None:
            # The line is the file's last: a download or a writer was cut there.
            bad = previous_bad[0]
            if self.span is not None and self.span[1] < self.size_bytes:
                yield bad
                return
            end = " without a line end" if self.notes["no-newline-at-end"] else ""
            yield BadRecord(bad.number, bad.line, "truncated", f"{bad.detail}; it is the file's last line{end}")

    def _rescued(self, text: str, line: int, counter: int, error: Exception) -> Iterator[Record | BadRecord]:
        """What a line holds that is not one JSON value. Only what can mean one thing is accepted."""
        body = text.strip(" \t\r\x1e\ufeff")
        if isinstance(error, RecursionError):
            yield BadRecord(counter + 1, line, "nested-too-deep", "nested deeper than can be read")
            return
        if body.startswith(("//", "#")):
            self.notes["comment-lines"] += 1
            return
        if body in ("[", "]", "],", ","):
            self.notes["array-brackets"] += 1
            return
        stripped = text.strip("\x00 ")
        if not stripped:
            yield BadRecord(counter + 1, line, "nul-bytes", NUL_DETAIL)
            return
        values: list[tuple[Any, tuple[str, ...]]] = []
        at = 0
        while at < len(body):
            try:
                parsed = parse_lenient(body, at)
            except Cut:
                detail = f"the record ends in the middle of a value, at character {len(text)}"
                yield from self._kept(values, line, counter)
                yield BadRecord(counter + len(values) + 1, line, "truncated", detail)
                return
            except Broken as broken:
                yield from self._kept(values, line, counter)
                if stripped != text.strip(" "):
                    reason, detail = "nul-bytes", NUL_DETAIL
                else:
                    reason, detail = "not-json", f"{broken}, at character {broken.position + 1}"
                yield BadRecord(counter + len(values) + 1, line, reason, detail)
                return
            values.append((parsed.value, parsed.repairs))
            at = parsed.end
            while at < len(body) and body[at] in " \t\r,;\x1e":
                if body[at] in ",;":
                    self.notes["trailing-comma"] += 1
                at += 1
            if at < len(body) and body[at] not in "{[":
                yield from self._kept(values, line, counter)
                detail = f"text behind a complete record, at character {at + 1}"
                yield BadRecord(counter + len(values) + 1, line, "not-json", detail)
                return
        if len(values) > 1:
            self.notes["concatenated-objects"] += 1
        yield from self._kept(values, line, counter)

    def _kept(self, values: list[tuple[Any, tuple[str, ...]]], line: int, counter: int) -> Iterator[Record]:
        for value, repairs in values:
            counter += 1
            self.notes.update(repairs)
            yield Record(counter, line, value, repairs)

    def _rows(self, value: Any) -> list[Any]:
        """The rows that one JSON value stands for: usually itself."""
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            if not {"role", "from"} & value[0].keys():
                self.notes["lists-to-rows"] += 1
                return value
            return [value]
        if not isinstance(value, dict):
            return [value]
        if "row" in value and isinstance(value["row"], dict) and set(value) <= {"row", "row_idx", "truncated_cells"}:
            self.notes["wrapped-rows"] += 1
            return [value["row"]]
        if len(value) > 1 and all(isinstance(row, dict) for row in value.values()):
            rows = list(value.values())  # pandas writes tables so with orient="index"
            if all(key.isdigit() for key in value) and all(row.keys() == rows[0].keys() for row in rows):
                self.notes["columns-to-rows"] += 1
                return rows
        if len(value) > 1 and set(value) <= COLUMNS:
            columns = list(value.values())
            if all(isinstance(column, dict) for column in columns) and all(
                column.keys() == columns[0].keys() for column in columns
            ):
                columns = [list(column.values()) for column in columns]
            if (
                all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns)
                and columns[0]
                and not isinstance(columns[0][0], dict)
            ):
                self.notes["columns-to-rows"] += 1
                return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
        return [value]

    def _json_values(self) -> Iterator[Record | BadRecord]:
        from preflight.data.json_stream import values_of

        counter = 0
        with self._stream() as stream:
            for line, value, notes, bad in values_of(stream, self.container == "json-array", self.notes, self):
                if bad is None and notes:
                    self.notes.update(notes)
                if bad is not None:
                    counter += 1
                    yield BadRecord(counter, line, bad[0], bad[1])
                    continue
                for row in self._rows(value):
                    counter += 1
                    yield Record(counter, line, row, notes)
            if damage := damage_below(stream):
                detail = f"the compressed data ends early or is damaged ({damage})"
                yield BadRecord(counter + 1, None, "compressed-data-damaged", detail)

    def _text_lines(self) -> Iterator[Record | BadRecord]:
        for counter, (line_number, text) in enumerate(self.lines(), 1):
            if isinstance(text, BadRecord):
                yield BadRecord(counter, line_number, text.reason, text.detail)
            else:
                yield Record(counter, line_number, {"text": text.rstrip("\r")})

    def _csv(self) -> Iterator[Record | BadRecord]:
        csv.field_size_limit(RECORD_LIMIT_BYTES)
        delimiter = "\t" if self.container == "tsv" else _delimiter(self._head, self.encoding)
        encoding = self.encoding if self.encoding and not self.encoding.startswith("utf") else "utf-8"
        with self._stream() as stream:
            text = io.TextIOWrapper(stream, encoding=encoding, errors="surrogateescape", newline="")
            counting = _Counting(text, self)
            reader = csv.reader(counting, delimiter=delimiter, strict=False)
            header: list[str] = []
            number, began = 0, 1
            while True:
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    number += 1
                    yield BadRecord(number, began, "not-csv", short(error))
                    began = reader.line_num + 1
                    continue
                line, began = began, reader.line_num + 1
                if not row or row == [""]:
                    self.notes["blank-lines"] += 1
                    continue
                if not header:
                    header = [name.strip().lstrip("\ufeff") for name in row]
                    continue
                number += 1
                if len(row) != len(header):
                    open_quote = len(row) < len(header) and reader.line_num - line > 50
                    hint = "; a quote is probably never closed" if open_quote else ""
                    detail = f"{len(row)} fields where the header has {len(header)}{hint}"
                    yield BadRecord(number, line, "wrong-columns", detail)
                    continue
                if any("\udc80" <= character <= "\udcff" for cell in row for character in cell if not cell.isascii()):
                    yield BadRecord(number, line, "undecodable", f"bytes that are not {encoding}")
                    continue
                yield Record(number, line, {name: _cell(cell) for name, cell in zip(header, row, strict=True)})

    def _parquet(self) -> Iterator[Record | BadRecord]:
        parquet = _pyarrow("pyarrow.parquet", self.path)
        try:
            file = parquet.ParquetFile(str(self.path))
        except Exception as error:
            raise Unreadable(
                "parquet-damaged",
                f"{self.path.name} begins like a Parquet file but cannot be opened: {short(error)}",
                "The table of contents of a Parquet file stands at its end: a cut download has none.",
                "download the file again and compare its size with the source",
            ) from error
        yield from self._batches(file.iter_batches(batch_size=256))

    def _arrow(self) -> Iterator[Record | BadRecord]:
        ipc = _pyarrow("pyarrow.ipc", self.path)
        try:
            if self._head[:6] == b"ARROW1":
                reader = ipc.open_file(str(self.path))
                batches: Iterator[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                batches = iter(ipc.open_stream(open(self.path, "rb")))  # noqa: SIM115 - pyarrow closes it
        except Exception as error:
            raise Unreadable(
                "arrow-damaged",
                f"{self.path.name} looks like an Arrow file but cannot be opened: {short(error)}",
                "A cut or foreign file.",
                "save the data set again, as JSON Lines (`Dataset.to_json`) or Parquet (`Dataset.to_parquet`)",
            ) from error
        yield from self._batches(batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Record | BadRecord]:
        number = 0
        while True:
            try:
                batch = next(batches)
                rows = batch.to_pylist()
            except StopIteration:
                return
            except Exception as error:  # pyarrow raises many kinds; what was read so far is kept
                yield BadRecord(number + 1, None, "unreadable", f"the rest cannot be read: {short(error)}")
                return
            for row in rows:
                number += 1
                yield Record(number, None, {name: _cell(value) for name, value in row.items()})


def read_records(path: str | os.PathLike[str], encoding: str | None = None) -> Records:
    """The records of a file, whatever its container and encoding; nothing but its beginning is read yet.

    `encoding` overrides the detection. Raises Unreadable when the file holds no records of any known kind.
    """
    file = Path(path)
    if file.is_dir():
        raise Unreadable(
            "is-a-folder", f"{file} is a folder, not a file", "One file is read at a time.", "name a file inside it"
        )
    try:
        with open(file, "rb") as stream:
            magic = stream.read(512)
    except FileNotFoundError:
        raise Unreadable(
            "no-such-file", f"{file} does not exist", "There is nothing to read.", "check the path"
        ) from None
    except OSError as error:
        raise Unreadable(
            "cannot-read", f"{file} cannot be read: {error.strerror}", "Nothing can be said of it.", "check its rights"
        ) from error
    if not magic:
        raise Unreadable(
            "empty-file", f"{file.name} is empty (0 bytes)", "There is nothing to train on.", "check the export"
        )
    refuse_foreign(file, magic)
    if magic[:4] == b"PAR1":
        return Records(file, "parquet", None, magic)
    if magic[:6] == b"ARROW1" or (magic[:4] == b"\xff\xff\xff\xff" and b"schema" not in magic[:4] and len(magic) > 16):
        return Records(file, "arrow", None, magic)
    head = head_of(file)
    named = file
    if compression_of(magic) == "zip":
        from preflight.data.zip_files import refuse_inside, zip_member

        refuse_inside(file, head)
        named = Path(zip_member(file).filename)
        refuse_foreign(named, head[:512])
    if encoding is not None:
        try:
            found = codecs.lookup(encoding).name
        except LookupError:
            raise Unreadable(
                "unknown-encoding",
                f"no encoding is called {encoding!r}",
                "Python must know it.",
                "name one, such as gb18030",
            ) from None
    else:
        found = detect_encoding(head, complete=len(head) < HEAD_BYTES)
    text = head.decode(found.replace("utf-8-sig", "utf-8"), errors="replace").lstrip("\ufeff")
    if found.startswith(("utf-16", "utf-32")):
        head = text.encode("utf-8", "replace")
    controls = len(CONTROLS.findall(text[:65536]))
    if controls > len(text[:65536]) // 10 and not text.lstrip("\x00 \r\n").startswith(("{", "[")):
        raise Unreadable(
            "binary-file",
            f"{file.name} is binary data of an unknown kind",
            "JSON, CSV, text, Parquet and Arrow are read.",
            "export the data as JSON Lines",
        )
    if not text.strip("\x00\ufeff \t\r\n"):
        raise Unreadable(
            "empty-file", f"{file.name} holds only white space", "There is nothing to train on.", "check the export"
        )
    return Records(file, container_of(named, text, len(head) < HEAD_BYTES), found, head)


def _delimiter(head: bytes, encoding: str | None) -> str:
    name = encoding if encoding and not encoding.startswith("utf") else "utf-8"
    first = head.decode(name, errors="replace").lstrip("\ufeff\r\n").split("\n", 1)[0]
    return max(",;\t|", key=first.count)


def _cell(value: Any) -> Any:
    """A table cell; a text that is a JSON list or object (a `messages` column in a CSV) is opened."""
    if isinstance(value, str) and value[:1] in "[{" and len(value) > 1:
        try:
            opened = parse_lenient(value)
        except (Cut, Broken):
            return value
        turns = isinstance(opened.value, list) and opened.value and isinstance(opened.value[0], dict)
        if turns and opened.end == len(value.rstrip()):
            return opened.value
    return value


def _pyarrow(module: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unreadable(
            "pyarrow-missing",
            f"{path.name} is a {'Parquet' if 'parquet' in module else 'Arrow'} file, and pyarrow is not installed here",
            "Columnar files are read through pyarrow, which is no part of the light set.",
            "`pip install pyarrow`",
            "or save the data as JSON Lines",
        ) from None


class _Counting:
    """Lines of a text, their sizes added up for the progress."""

    def __init__(self, text: io.TextIOWrapper, records: Records) -> None:
        self._text, self._records = text, records

    def __iter__(self) -> Iterator[str]:
        for line in self._text:
            self._records.read_bytes += len(line)
            yield line.replace("\x00", "") if "\x00" in line else line


class _Recoded(io.RawIOBase):
    """A byte stream read in another encoding and handed on as UTF-8 (or, `raw`, only changed by `change`)."""

    def __init__(
        self, stream: IO[bytes], encoding: str, change: Callable[[bytes], bytes] | None = None, raw: bool = False
    ) -> None:
        self._stream, self._change, self._raw = stream, change, raw
        self.below = stream
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        self._ready = b""
        self._done = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and not self._done:
            data = self._stream.read(1 << 16)
            self._done = not data
            if self._raw:
                self._ready = self._change(data) if self._change else data
            else:
                self._ready = self._decoder.decode(data, final=self._done).encode("utf-8", "replace")
        taken = self._ready[: len(buffer)]
        self._ready = self._ready[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._stream.close()
        super().close()


# ---------------------------------------------------------------------------------------------------------------------
# One line of JSON


class JsonReader:
    """Parses one JSON value a call and notes what the standard parser lets pass: NaN, duplicate keys."""

    def __init__(self) -> None:
        self._notes: dict[str, None] = {}
        self._decoder = json.JSONDecoder(object_pairs_hook=self._pairs, parse_constant=self._constant)

    def __call__(self, text: str) -> tuple[Any, tuple[str, ...]]:
        """The value and its notes. Raises ValueError (also for text behind the value) or RecursionError."""
        self._notes.clear()
        value, end = self._decoder.raw_decode(text, _start(text))
        if end != len(text) and text[end:].strip(" \t\r\n"):
            raise ValueError("text behind the value")
        return value, tuple(self._notes)

    def at(self, text: str, start: int) -> tuple[Any, int, tuple[str, ...]]:
        """The value at `start`, where it ends, and its notes."""
        self._notes.clear()
        value, end = self._decoder.raw_decode(text, start)
        return value, end, tuple(self._notes)

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            self._notes["duplicate-keys"] = None
        return made

    def _constant(self, name: str) -> float:
        self._notes["non-finite-number"] = None
        return float(name.replace("Infinity", "inf"))


def _start(text: str) -> int:
    """Where the value begins: the parser wants no white space before it."""
    if text[:1] in "{[":
        return 0
    return len(text) - len(text.lstrip(" \t\r\n"))
