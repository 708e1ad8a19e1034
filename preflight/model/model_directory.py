"""What lies in a model directory? Files, configuration, weights and code, read in bounded time and memory.

Nothing in the directory is run or imported. Links out of it are not followed, except those of a hub cache.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preflight.console import UsageError

MOST_FILES = 5000
MOST_TEXT_BYTES = 32 << 20
MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MOST_HEADERS_BYTES = 400 << 20  # of all shards together
POINTER = b"version https://git-lfs.github.com/spec/v1"

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I64": 64, "I32": 32,
    "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class JsonFile:
    """A JSON file. `value` is None when it could not be read; `trouble` says why.

    `bom`: starts with a byte-order mark. `constants`: holds NaN or Infinity, which JSON lacks and Python reads.
    `trouble` is "" or one of: absent, unreadable, too-large, not-utf8, not-json, too-nested, not-an-object,
    link-outside, lfs-pointer, empty.
    """

    name: str
    value: Any = None
    trouble: str = "absent"
    detail: str = ""
    bom: bool = False
    constants: bool = False
    encoding: str = "utf-8"

    @property
    def object(self) -> Mapping[str, Any]:
        """The value when it is an object, else an empty one."""
        return self.value if isinstance(self.value, dict) else {}


@dataclass(frozen=True)
class Weights:
    """What the weight files say. Counts come from safetensors headers; None when no header could be read.

    `bytes_by_dtype` is the size of all tensors by their stored dtype; `elements` counts stored elements, which for
    packed 4-bit weights is not the number of parameters.
    """

    safetensors: tuple[str, ...] = ()
    pickles: tuple[str, ...] = ()
    ggufs: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    index: str | None = None
    index_total_bytes: int | None = None
    index_total_parameters: int | None = None
    missing: tuple[str, ...] = ()
    pointers: tuple[str, ...] = ()
    pointer_bytes: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    elements: int | None = None
    bytes_by_dtype: Mapping[str, int] = field(default_factory=dict)
    file_bytes: int = 0
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """There are weights, and nothing known is missing or damaged."""
        return bool(self.safetensors or self.pickles) and not (self.missing or self.pointers or self.damaged)

    @property
    def present(self) -> bool:
        """Whether any weight file or index is there at all."""
        return bool(self.safetensors or self.pickles or self.ggufs or self.index or self.others or self.pointers)


@dataclass(frozen=True)
class ModelDirectory:
    """A directory as it was found."""

    path: Path
    files: Mapping[str, int]
    config: JsonFile
    generation_config: JsonFile
    adapter_config: JsonFile
    weights: Weights
    code_files: tuple[str, ...] = ()
    auto_map: Mapping[str, str] = field(default_factory=dict)
    links_outside: tuple[str, ...] = ()
    odd_names: tuple[str, ...] = ()
    truncated: bool = False
    on_hub: tuple[str, ...] = ()

    @property
    def missing_code(self) -> tuple[str, ...]:
        """Python files that `auto_map` names and that are not here; those of another repository are left out."""
        wanted = {f"{name.split('.')[0]}.py" for name in self.auto_map.values() if "--" not in name}
        return tuple(sorted(name for name in wanted if name not in self.files))

    @property
    def code_repositories(self) -> tuple[str, ...]:
        """Other repositories that `auto_map` takes code from ("owner/name--module.Class")."""
        return tuple(sorted({name.split("--")[0] for name in self.auto_map.values() if "--" in name}))

    def has(self, name: str) -> bool:
        """Whether a file of this name is here."""
        return name in self.files


class Reader:
    """Reads files of one directory; refuses to leave it."""

    def __init__(self, root: Path, follow_links: bool) -> None:
        self.root, self.follow_links = root, follow_links
        self.real = root.resolve()
        # A hub cache keeps the files in ../../blobs of the snapshot: links that stay in that folder are its own.
        repository = self.real.parent.parent
        self.cache = repository if self.real.parent.name == "snapshots" and (repository / "blobs").is_dir() else None
        self.links_outside: list[str] = []

    def inside(self, path: Path) -> bool:
        """Whether the path, links followed, stays in the directory (or in the cache that it belongs to)."""
        if self.follow_links:
            return True
        try:
            real = path.resolve()
        except (OSError, RuntimeError):
            return False
        return any(home == real or home in real.parents for home in (self.real, self.cache) if home is not None)

    def open_regular(self, path: Path) -> Any:
        """The file opened for reading. Raises OSError when it is none (a pipe or a device would block)."""
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(0, "not a regular file")
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def head(self, name: str, size: int) -> bytes:
        """The first bytes of a file, b"" when it cannot be read."""
        path = self.root / name
        if not self.inside(path):
            return b""
        try:
            with self.open_regular(path) as stream:
                data: bytes = stream.read(size)
                return data
        except OSError:
            return b""

    def json(self, name: str, limit_bytes: int = MOST_TEXT_BYTES) -> JsonFile:
        """A JSON file, whatever is wrong with it."""
        path = self.root / name
        if not os.path.lexists(path):
            return JsonFile(name)
        if not self.inside(path):
            return JsonFile(name, trouble="link-outside")
        try:
            with self.open_regular(path) as stream:
                data = stream.read(limit_bytes + 1)
        except OSError as error:
            return JsonFile(name, trouble="unreadable", detail=error.strerror or str(error))
        return parse_json(name, data, limit_bytes)


def parse_json(name: str, data: bytes, limit_bytes: int = MOST_TEXT_BYTES) -> JsonFile:
    """The JSON in `data`, with what is unusual about it."""
    if len(data) > limit_bytes:
        return JsonFile(name, trouble="too-large", detail=f"over {limit_bytes >> 20} MiB")
    if not data.strip():
        return JsonFile(name, trouble="empty")
    if data.startswith(POINTER):
        return JsonFile(name, trouble="lfs-pointer")
    bom, encoding = data.startswith(b"\xef\xbb\xbf"), "utf-8"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        bom, encoding = True, "utf-16"
    try:
        text = data.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        return JsonFile(name, trouble="not-utf8", detail=f"byte {error.start}", bom=bom)
    constants: list[str] = []

    def constant(word: str) -> float:
        constants.append(word)
        return float(word.replace("Infinity", "inf"))

    try:
        value = json.loads(text, parse_constant=constant)
    except RecursionError:
        return JsonFile(name, trouble="too-nested", bom=bom, encoding=encoding)
    except ValueError as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)[:120]
        return JsonFile(name, trouble="not-json", detail=line, bom=bom, encoding=encoding)
    trouble = "" if isinstance(value, dict) else "not-an-object"
    return JsonFile(name, value, trouble, "", bom, bool(constants), encoding)


def read_model_directory(
    path: str | os.PathLike[str], follow_links: bool = False, elsewhere: Mapping[str, int] | None = None
) -> ModelDirectory:
    """What lies in the directory. Raises UsageError when there is no such directory.

    `elsewhere`: names and sizes of files that belong to it and were left on the hub.
    """
    root = Path(path).expanduser()
    if root.is_file():
        raise UsageError(f"MODEL {path}: is a file; name the directory that holds config.json")
    if not root.is_dir():
        raise UsageError(f"MODEL {path}: no such directory")
    reader = Reader(root, follow_links)
    files: dict[str, int] = {}
    odd: list[str] = []
    truncated = False
    for name, size in _listing(reader):
        if len(files) >= MOST_FILES:
            truncated = True
            break
        if re.search(r"[\x00-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", name):
            odd.append(name)
        files[name] = size
    remote = {name: size for name, size in (elsewhere or {}).items() if name not in files}
    files = {**remote, **files}
    config = reader.json("config.json")
    auto_map = _auto_map(config.object)
    return ModelDirectory(
        path=root,
        files=files,
        config=config,
        generation_config=reader.json("generation_config.json"),
        adapter_config=reader.json("adapter_config.json"),
        weights=read_weights(reader, files, frozenset(remote)),
        on_hub=tuple(sorted(remote)),
        code_files=tuple(sorted(name for name in files if name.endswith(".py"))),
        auto_map=auto_map,
        links_outside=tuple(sorted(reader.links_outside)),
        odd_names=tuple(odd),
        truncated=truncated,
    )


def _listing(reader: Reader) -> Iterator[tuple[str, int]]:
    """The files of the directory itself and their sizes; a size of 0 for what cannot be looked at."""
    try:
        entries = sorted(os.scandir(reader.root), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"MODEL {reader.root}: cannot be read ({error.strerror})") from error
    for entry in entries:
        try:
            if entry.is_symlink() and not reader.inside(Path(entry.path)):
                reader.links_outside.append(entry.name)
                if not entry.name.endswith((".safetensors", ".bin", ".gguf")):
                    continue
            if entry.is_dir():
                continue
            yield entry.name, entry.stat().st_size
        except OSError:
            yield entry.name, 0


def _auto_map(config: Mapping[str, Any]) -> dict[str, str]:
    """The classes that `auto_map` names, by their Auto class; a pair (slow and fast tokenizer) gives its first."""
    found: dict[str, str] = {}
    mapped = config.get("auto_map")
    for key, value in mapped.items() if isinstance(mapped, dict) else ():
        if isinstance(value, (list, tuple)):
            value = next((item for item in value if isinstance(item, str)), None)
        if isinstance(value, str) and value:
            found[str(key)] = value
    return found


# ---------------------------------------------------------------------------------------------------------------------
# weights


def read_weights(reader: Reader, files: Mapping[str, int], remote: frozenset[str] = frozenset()) -> Weights:
    """What the weight files and their index say, from headers alone. `remote` files are known by name and size only."""
    tensors = sorted(name for name in files if name.endswith(".safetensors"))
    adapters = {name for name in tensors if name.startswith("adapter_model")}
    shards = [name for name in tensors if name not in adapters]
    pickles = sorted(
        name
        for name in files
        if re.fullmatch(r"(pytorch_model|model|consolidated).*\.(bin|pt|pth|ckpt)|tf_model\.h5|flax_model.*", name)
    )
    index_name = next(
        (name for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json") if name in files), None
    )
    index = reader.json(index_name) if index_name else JsonFile("")
    named = _named_shards(index.object)
    metadata = index.object.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    pointers, pointer_bytes, damaged = [], 0, []
    if index_name and index.trouble:
        damaged.append((index_name, f"the index cannot be read ({index.trouble} {index.detail})".strip()))
    elements: int | None = None
    by_dtype: dict[str, int] = {}
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    budget = MOST_HEADERS_BYTES
    for name in [*shards, *pickles]:
        if name in remote:
            continue
        if files[name] < 1024 and (size := _pointer_size(reader.head(name, 1024))) is not None:
            pointers.append(name)
            pointer_bytes += size
        elif name in pickles:
            if files[name] == 0:
                damaged.append((name, "the file is empty"))
        elif budget > 0:
            header, trouble, used = read_header(reader, name, files[name])
            budget -= used
            if trouble:
                damaged.append((name, trouble))
                continue
            for key, (dtype, shape, size) in header.items():
                seen[key] = (dtype, shape)
                count = 1
                for each in shape:
                    count *= each
                elements = (elements or 0) + count
                by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    partial = [name for name in files if name.endswith((".incomplete", ".part", ".crdownload", ".aria2", ".tmp"))]
    damaged += [(name, "a download that did not finish") for name in sorted(partial)]
    return Weights(
        safetensors=tuple(name for name in shards if name not in pointers),
        pickles=tuple(name for name in pickles if name not in pointers),
        ggufs=tuple(sorted(name for name in files if name.lower().endswith(".gguf"))),
        others=tuple(sorted(name for name in files if re.fullmatch(r".*\.(onnx|msgpack|ot|mlpackage|tflite)", name))),
        index=index_name,
        index_total_bytes=_whole(metadata.get("total_size")),
        index_total_parameters=_whole(metadata.get("total_parameters")),
        missing=tuple(sorted(set(named) - set(files))),
        pointers=tuple(pointers),
        pointer_bytes=pointer_bytes,
        damaged=tuple(damaged),
        elements=elements,
        bytes_by_dtype=by_dtype,
        file_bytes=sum(files[name] for name in [*shards, *pickles] if name not in pointers),
        tensors=seen,
    )


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60 else None


def _named_shards(index: Mapping[str, Any]) -> list[str]:
    """The files that an index names; names that would leave the directory are kept out and come back as missing."""
    mapped = index.get("weight_map")
    if not isinstance(mapped, dict):
        return []
    return sorted({str(name) for name in mapped.values() if isinstance(name, str)})


def _pointer_size(data: bytes) -> int | None:
    """The size that a Git LFS pointer stands for; None when it is no pointer."""
    if not data.startswith(POINTER):
        return None
    match = re.search(rb"^size (\d{1,18})\s*$", data, re.MULTILINE)
    return int(match.group(1)) if match else 0


def read_header(
    reader: Reader, name: str, file_bytes: int
) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], str, int]:
    """Tensors of a safetensors file by name (dtype, shape, bytes), what is wrong with it, and the bytes read.

    Source: the format's description, https://github.com/huggingface/safetensors#format
    """
    path = reader.root / name
    if not reader.inside(path):
        return {}, "", 0  # a link out of the directory is named elsewhere, and not read
    try:
        with reader.open_regular(path) as stream:
            first = stream.read(8)
            if len(first) < 8:
                return {}, "the file is too short to be a safetensors file", len(first)
            (size,) = struct.unpack("<Q", first)
            if size > MOST_HEADER_BYTES or size + 8 > file_bytes:
                return (
                    {},
                    (
                        f"its header claims {size} bytes in a file of {file_bytes} (HeaderTooLarge): "
                        "no safetensors file, or cut short"
                    ),
                    8,
                )
            data = stream.read(size)
    except OSError as error:
        return {}, f"cannot be read ({error.strerror or error})", 0
    try:
        header = json.loads(data)
        if not isinstance(header, dict):
            raise ValueError("no JSON object")
        found: dict[str, tuple[str, tuple[int, ...], int]] = {}
        last = 0
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            shape = tuple(int(each) for each in entry["shape"])
            start, end = (int(each) for each in entry["data_offsets"])
            if min((*shape, start, end - start), default=0) < 0:
                raise ValueError("negative sizes")
            found[str(key)] = (str(entry["dtype"]), shape, end - start)
            last = max(last, end)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return {}, f"its header is damaged ({type(error).__name__})", len(data) + 8
    if last + 8 + size > file_bytes:
        return {}, f"cut short: {file_bytes} bytes are here, {last + 8 + size} are needed", len(data) + 8
    return found, "", len(data) + 8


def stored_bytes(weights: Weights) -> int | None:
    """Bytes of all tensors: from the headers, else from the index, else the size of the files, else None."""
    if weights.bytes_by_dtype and weights.complete:
        return sum(weights.bytes_by_dtype.values())
    if weights.index_total_bytes is not None:
        return weights.index_total_bytes
    if weights.pointers and not weights.missing and not weights.safetensors:
        return weights.pointer_bytes
    return weights.file_bytes if weights.complete and weights.file_bytes else None
