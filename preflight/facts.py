"""Published facts as data: reads the tables in `facts/`, each with schema, as_of and sources."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


def shipped(*parts: str) -> Path:
    """The path of a file or folder that ships with the program (`facts`, `templates`, `examples`, …).

    In a checkout these lie beside the package; in an installed wheel they lie in `preflight/_data`.
    """
    package = Path(__file__).resolve().parent
    beside = package.parent.joinpath(*parts)
    return beside if beside.exists() else package.joinpath("_data", *parts)


@cache
def table(name: str) -> dict[str, Any]:
    """The table `facts/NAME.json`. Treat it as read-only: it is shared by all callers."""
    text = shipped("facts", f"{name}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
