"""Which one data file does a ZIP archive hold? Read from the archive as a stream; nothing is ever unpacked."""

from __future__ import annotations

import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, Any
from zipfile import BadZipFile as BadZipFile

from preflight.data.file_kinds import Unreadable, short

DATA_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".tsv"})
EXCEL_SUFFIXES = frozenset({".xlsx", ".xlsm"})
# Deflate packs at most 1032 to 1, text of real records some 30 to 1: what is both larger and tighter was made to fill
# a disk or a memory.
BOMB_BYTES, BOMB_RATIO = 256 << 20, 200
NAMED = 5


def zip_member(path: Path) -> zipfile.ZipInfo:
    """The only data file of an archive. Raises Unreadable for several or none, an encrypted one, a bomb, damage."""
    name = path.name
    try:
        with zipfile.ZipFile(path) as archive:
            members = [item for item in archive.infolist() if not item.is_dir() and not _is_clutter(item.filename)]
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Unreadable(
            "zip-damaged",
            f"{name} is a ZIP archive that cannot be opened: {short(error)}",
            "Its list of files, at its end, is missing or damaged, as after a download that broke off.",
            "download the archive again",
        ) from error
    if path.suffix.lower() in EXCEL_SUFFIXES or any(item.filename.startswith("xl/") for item in members):
        raise excel(name)
    data = [item for item in members if PurePosixPath(item.filename).suffix.lower() in DATA_SUFFIXES]
    chosen = members if len(members) == 1 else data
    if len(chosen) != 1:
        listed = data or members
        inside = ", ".join(item.filename for item in listed[:NAMED])
        what = f"{name} is a ZIP archive with {len(data)} data files"
        if len(listed) > NAMED:
            what = f"{name} is a ZIP archive with {len(data)} data files: {inside} and {len(listed) - NAMED} more"
        elif inside:
            what = f"{name} is a ZIP archive with {len(data)} data files: {inside}"
        raise Unreadable(
            "zip-archive",
            what,
            "An archive is read when exactly one JSON or CSV file is in it.",
            f"`unzip {name}` and name one file",
        )
    (member,) = chosen
    if member.flag_bits & 1:
        raise Unreadable(
            "zip-encrypted",
            f"{member.filename} in {name} is encrypted",
            "Its content cannot be read without the password.",
            f"`unzip {name}` with the password, and name the file",
        )
    if member.file_size > BOMB_BYTES and member.file_size > BOMB_RATIO * max(1, member.compress_size):
        raise Unreadable(
            "zip-bomb",
            f"{member.filename} in {name} would grow from {member.compress_size:,} to {member.file_size:,} bytes",
            "Records of text shrink some 30 times; an archive that grows so much was made to fill a disk.",
            f"look at it with `unzip -l {name}`, and unpack it by hand if it is what you expect",
        )
    return member


def excel(name: str) -> Unreadable:
    """The refusal of an Excel workbook, which is a ZIP archive inside."""
    return Unreadable(
        "zip-archive",
        f"{name} is an Excel workbook",
        "One table or one JSON file is read, not a workbook.",
        "save the sheet as CSV (UTF-8)",
    )


def open_member(path: Path) -> IO[bytes]:
    """The bytes of the archive's only data file; they end at the size that the archive states. Raises Unreadable."""
    member = zip_member(path)
    archive = zipfile.ZipFile(path)
    try:
        stream: Any = archive.open(member)
    except (NotImplementedError, RuntimeError, BadZipFile, OSError) as error:
        raise Unreadable(
            "compression-unknown",
            f"{member.filename} in {path.name} cannot be uncompressed here: {short(error)}",
            "Python's standard library reads deflate, bzip2 and LZMA in ZIP archives.",
            f"`unzip {path.name}` and name the file",
        ) from error
    finally:
        archive.close()  # the stream keeps the file open until it is closed itself
    return stream  # type: ignore[no-any-return]


def refuse_inside(path: Path, head: bytes) -> None:
    """Raises Unreadable for what cannot be read out of an archive."""
    if head.startswith((b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        kind = "another archive"
    elif head.startswith((b"PAR1", b"ARROW1")):
        kind = "a Parquet or Arrow file"
    else:
        return
    raise Unreadable(
        "zip-archive",
        f"{path.name} is a ZIP archive with {kind} in it",
        "Records are read out of an archive as a stream of text.",
        f"`unzip {path.name}` and name the file inside",
    )


def _is_clutter(name: str) -> bool:
    """What macOS adds to every archive."""
    parts = PurePosixPath(name).parts
    return not parts or parts[0] == "__MACOSX" or parts[-1] == ".DS_Store" or parts[-1].startswith("._")
