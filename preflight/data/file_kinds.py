"""What kind of file is it: which container, compressed how, or no data at all?"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import IO, Any

HEAD_BYTES = 1 << 20


class Unreadable(Exception):
    """The file as a whole holds no records that can be read. Says what was seen, why that is so and what to do."""

    def __init__(self, code: str, what: str, why: str, *fix: str) -> None:
        super().__init__(what)
        self.code, self.what, self.why, self.fix = code, what, why, fix


CONTROLS = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
NUL_DETAIL = "NUL bytes: the file has a hole, as after a crash or a full disk while it was written"
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "zstd", ".zip": "zip"}
ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
COLUMNS = {
    "instruction", "input", "output", "prompt", "completion", "response", "question", "answer", "text", "system",
    "chosen", "rejected", "label", "context", "query", "id",
}  # fmt: skip


class _NoZlibError(Exception):
    pass


try:
    import zlib

    _ZLIB_ERROR: type[Exception] = zlib.error
except ImportError:  # a Python built without zlib
    _ZLIB_ERROR = _NoZlibError
try:
    import lzma

    _LZMA_ERROR: type[Exception] = lzma.LZMAError
except ImportError:
    _LZMA_ERROR = _NoZlibError

DAMAGED = (EOFError, OSError, ValueError, _ZLIB_ERROR, _LZMA_ERROR)
STEP_BYTES = 1 << 16  # so that damage takes no more than this with it


def compression_of(magic: bytes) -> str:
    if magic.startswith(ZIP_MAGIC):
        return "zip"
    for start, name in ((b"\x1f\x8b", "gzip"), (b"BZh", "bz2"), (b"\xfd7zXZ", "lzma"), (b"\x28\xb5\x2f\xfd", "zstd")):
        if magic.startswith(start):
            return name
    return ""


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, uncompressed. Raises Unreadable for a compression that this Python does not know."""
    stream = open(path, "rb", buffering=1 << 18)  # noqa: SIM115 - the caller closes it
    kind = compression_of(stream.read(8))
    stream.seek(0)
    if not kind:
        return stream
    if kind == "zip":
        from preflight.data.zip_files import BadZipFile, open_member

        stream.close()
        return io.BufferedReader(_Uncompressed(open_member(path), (*DAMAGED, BadZipFile)), 1 << 18)
    import importlib

    try:
        module = importlib.import_module("compression.zstd" if kind == "zstd" else kind)
    except ImportError:
        stream.close()
        raise Unreadable(
            "compression-unknown",
            f"{path.name} is compressed with {kind}, which this Python cannot open",
            "The standard library reads gzip, bzip2 and xz; zstd only from Python 3.14 on.",
            f"`zstd -d {path.name}`" if kind == "zstd" else "uncompress it first",
        ) from None
    return io.BufferedReader(_Uncompressed(module.open(stream, "rb")), 1 << 18)


def damage_below(stream: IO[bytes]) -> str:
    """Why the compressed data below a stream ended early; "" when it did not."""
    below: Any = stream
    while below is not None and not isinstance(below, _Uncompressed):
        below = getattr(below, "raw", None) or getattr(below, "below", None)
    return below.damage if isinstance(below, _Uncompressed) else ""


def head_of(path: Path) -> bytes:
    with open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES)
        if not head and damage_below(stream):
            raise Unreadable(
                "compressed-data-damaged",
                f"{path.name} cannot be uncompressed: {damage_below(stream)}",
                "The compressed data is damaged from its beginning.",
                "download the file again",
            )
    return head


def refuse_foreign(path: Path, magic: bytes) -> None:
    name = path.name
    if magic.startswith(b"version https://git-lfs.github.com/spec/"):
        raise Unreadable(
            "git-lfs-pointer",
            f"{name} is a Git LFS pointer, not the data",
            "The repository was cloned without its large files; this file only says where the data is.",
            "`git lfs install && git lfs pull`, or download the file itself",
        )
    start = magic.lstrip(b"\xef\xbb\xbf \t\r\n")[:200].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        raise Unreadable(
            "html-page",
            f"{name} is a web page, not data",
            "A page was saved instead of the file behind it (a login page, or the viewer of a hub).",
            "download the raw file (on the hub: the `resolve` link, not `blob`)",
        )
    if magic.startswith(ZIP_MAGIC):
        from preflight.data.zip_files import EXCEL_SUFFIXES, excel, zip_member

        if path.suffix.lower() in EXCEL_SUFFIXES:
            raise excel(name)
        zip_member(path)
    for signature, kind in (
        (b"SQLite format 3", "an SQLite database"),
        (b"%PDF", "a PDF"),
        (b"\x89HDF", "an HDF5 file"),
    ):
        if magic.startswith(signature):
            why = "JSON, CSV, text, Parquet and Arrow are read."
            raise Unreadable("foreign-file", f"{name} is {kind}", why, "export the records as JSON Lines or CSV")
    if path.suffix.lower() in (".yaml", ".yml", ".toml", ".xml", ".py") and start[:1] not in (b"{", b"["):
        raise Unreadable(
            "foreign-file",
            f"{name} is no data file that is read here ({path.suffix.lower()})",
            "JSON, CSV, text, Parquet and Arrow are read; its lines are not records.",
            "export the records as JSON Lines or CSV",
        )
    if magic[:2] == b"\x80\x04" or magic[:2] == b"\x80\x05":
        raise Unreadable(
            "pickle", f"{name} is a Python pickle", "Opening a pickle runs code from it.", "save it as JSON Lines"
        )


def container_of(path: Path, text: str, complete: bool) -> str:
    """What kind of container a text is, from its first characters (at most HEAD_BYTES of them)."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    suffix = suffixes[-1] if suffixes else ""
    body = text.lstrip("\x00\ufeff \t\r\n\x1e")
    while body.startswith(("//", "/*")) or (body.startswith("#") and suffix in (".json", ".jsonl", ".ndjson")):
        end = body.find("*/") + 2 if body.startswith("/*") else body.find("\n") + 1
        if end <= 1:
            break
        body = body[end:].lstrip()
    first = body[:1]
    if suffix in (".csv", ".tsv") and first not in ("{", "["):
        return suffix[1:]
    first_line, _, rest = body.replace("\r\n", "\n").partition("\n")
    if first == "[":
        return _list_container(first_line, rest)
    if first == "{":
        return _object_container(body, first_line, rest, complete)
    if suffix in (".jsonl", ".ndjson", ".json") or (first in ("'", '"') and suffix != ".txt"):
        return "jsonl" if suffix != ".json" or rest.strip() else "json-values"
    if suffix in (".txt", ".text", ".md"):
        return "text-lines"
    columns = [name.strip().strip('"').lower() for name in re.split(r"[,;\t|]", first_line)]
    if len(set(columns) & (COLUMNS | {"messages", "conversations"})) >= 2:
        return "tsv" if "\t" in first_line else "csv"
    return "text-lines"


def _list_container(first_line: str, rest: str) -> str:
    """A line that begins with `[`: one array over the whole file, or one list of turns a line."""
    try:
        value = json.loads(first_line.rstrip(" \t\r,"))
    except RecursionError:
        return "jsonl"
    except ValueError:
        return "json-array"
    following = rest.lstrip()
    if following.startswith("["):
        return "jsonl"
    if following or not value:
        return "json-array"
    turns = isinstance(value[0], dict) and bool({"role", "from"} & value[0].keys())
    return "jsonl" if turns else "json-array"


_WRAPPERS = {
    "data", "train", "rows", "examples", "records", "items", "samples", "instances", "dataset", "entries", "validation",
    "test",
}  # fmt: skip


def _object_container(body: str, first_line: str, rest: str, complete: bool) -> str:
    try:
        value = json.loads(first_line)
        whole = True
    except (ValueError, RecursionError):
        value, whole = None, False
    start = wrapped_array_start(body)
    if start is not None and not (whole and rest.strip()) and not _is_turn(body, start):
        return "json-array"
    if whole or isinstance(value, dict):
        return "jsonl"
    opening = first_line.strip()
    if opening == "{" or (rest and re.search(r"[{\[,:]\s*\Z", opening)):
        # A pretty-printed object goes on with a key on the next line; a broken line is followed by another record.
        following = rest.lstrip()
        if not following.startswith("{") or opening.endswith("["):
            return "json-values"
    if not rest and not complete:
        return "json-values"
    return "jsonl"


def _is_turn(body: str, at: int) -> bool:
    return bool(re.compile(r'\{\s*"(?:role|from|content|value)"\s*:').match(body, at))


def wrapped_array_start(text: str) -> int | None:
    """Where the list of rows begins in `{"data": [ …`; None when the text is no such wrapper."""
    decoder = json.JSONDecoder()
    space = re.compile(r"[\s\ufeff]*")

    def after_space(at: int) -> int:
        match = space.match(text, at)
        return match.end() if match else at

    at = after_space(0)
    if text[at : at + 1] != "{":
        return None
    at += 1
    try:
        while True:
            key, at = decoder.raw_decode(text, after_space(at))
            at = after_space(at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                return None
            at = after_space(at + 1)
            if key.lower() in _WRAPPERS and text[at : at + 1] == "[" and text[after_space(at + 1) :][:1] in ("{", "["):
                return after_space(at + 1)
            _, at = decoder.raw_decode(text, at)
            at = after_space(at)
            if text[at : at + 1] != ",":
                return None
            at += 1
    except (ValueError, RecursionError):
        return None


def short(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error) or type(error).__name__)[:160]


class _Uncompressed(io.RawIOBase):
    """An uncompressed stream that ends where the compressed data is cut or damaged, and then says why."""

    def __init__(self, opened: Any, damaged: tuple[type[Exception], ...] = DAMAGED) -> None:
        self._opened, self._damaged, self.damage = opened, damaged, ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.damage:
            return 0
        try:
            data = self._opened.read1(
                min(len(buffer), STEP_BYTES)
            )  # one step at a time: what came before the damage is kept
        except self._damaged as error:
            self.damage = short(error)
            return 0
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._opened.close()
        super().close()
