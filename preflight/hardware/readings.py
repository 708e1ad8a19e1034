"""Numbers out of what vendor tools print. What a tool cannot give is None, never 0."""

from __future__ import annotations

import csv
import re

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_UNITS = {
    "": 1 << 20,  # nvidia-smi's nounits output is in MiB
    "b": 1,
    "kib": 1 << 10,
    "kb": 1 << 10,
    "mib": 1 << 20,
    "mb": 1 << 20,
    "gib": 1 << 30,
    "gb": 1 << 30,
    "tib": 1 << 40,
}
_ABSENT = re.compile(
    r"^(?:|-|n/?a|none|null|unknown|\[.*\]|not (?:supported|available|applicable|found)|no data|err!|error"
    r"|unknown error|gpu is lost|insufficient permissions?|requested functionality has been deprecated)$",
    re.IGNORECASE,
)


def missing(text: object) -> bool:
    """Whether a tool wrote, in one of its many spellings, that it has no value here."""
    return text is None or bool(_ABSENT.match(str(text).strip()))


def number(text: object) -> float | None:
    """The first number in `text` ("139W" -> 139.0); None when the tool gives none."""
    if isinstance(text, bool):
        return None
    if isinstance(text, (int, float)):
        return float(text) if text == text else None
    if missing(text):
        return None
    found = _NUMBER.search(str(text).replace(",", "") if re.search(r"\d,\d{3}\b", str(text)) else str(text))
    return float(found.group()) if found else None


def whole(text: object) -> int | None:
    """As `number`, for counts."""
    value = number(text)
    return None if value is None or value != value or abs(value) == float("inf") else int(value)


def size_bytes(text: object, unit: str = "") -> int | None:
    """Bytes of "183359MiB", "65720 MiB", "15.9 GB" or a bare number in `unit` (MiB when not given).

    Vendor tools write MB and GB where they mean MiB and GiB; both are read as powers of two.
    """
    value = number(text)
    if value is None:
        return None
    found = re.search(r"\d\s*([KMGT]i?B|B)\b", str(text), re.IGNORECASE)
    factor = _UNITS.get((found.group(1) if found else unit).lower())
    return None if factor is None or value < 0 else int(value * factor)


def csv_rows(text: str) -> list[list[str]]:
    """The rows of comma-separated text, cells stripped, without empty ones. A row that is no CSV is split at commas."""
    found = []
    for line in text.replace("\x00", "").splitlines():
        try:
            row = next(csv.reader([line], skipinitialspace=True), [])
        except csv.Error:
            row = line.split(",")
        if any(cell.strip() for cell in row):
            found.append([cell.strip() for cell in row])
    return found
