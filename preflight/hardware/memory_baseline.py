"""Free memory and its holders before and after a program is closed: the difference is what fine-tuning gains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preflight.console import UsageError, gib
from preflight.findings import Finding, Level, quote
from preflight.gpus import kind_of_program
from preflight.hardware.gpu_checks import Seen


def snapshot(seen: Seen) -> dict[str, Any]:
    """What is free and who holds the rest now, as plain data."""
    return {
        "schema": 1,
        "kind": "gpu memory",
        "gpus": [
            {"index": g.index, "name": g.name, "total_bytes": g.total_bytes, "free_bytes": g.free_bytes}
            for g in seen.usable
        ],
        "holders": [
            {"gpu": p.gpu, "pid": p.pid, "name": p.name, "memory_bytes": p.memory_bytes}
            for p in seen.accelerators.processes
        ],
        "ram_available_bytes": seen.host.ram_available_bytes,
    }


def save(path: str, now: Mapping[str, Any]) -> None:
    """Write a snapshot. Raises UsageError when the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--baseline {path}: cannot be written ({error.strerror})") from error


def load(path: str) -> dict[str, Any]:
    """Read a snapshot. Raises UsageError when it is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--compare {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"--compare {path}: is no JSON ({error}); give a file that --baseline wrote") from error
    if not isinstance(found, dict) or found.get("kind") != "gpu memory" or not isinstance(found.get("gpus"), list):
        raise UsageError(f"--compare {path}: is not a file that --baseline wrote")
    return found


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Per card the free memory before and now, and which holders went or came. Bytes; None where either is unknown."""
    then = {gpu.get("index"): gpu for gpu in before["gpus"] if isinstance(gpu, dict)}
    cards = []
    for gpu in now["gpus"]:
        old = then.get(gpu["index"], {})
        a, b = old.get("free_bytes"), gpu["free_bytes"]
        known = isinstance(a, int) and isinstance(b, int)
        cards.append(
            {
                "index": gpu["index"],
                "name": gpu["name"],
                "free_before_bytes": a,
                "free_now_bytes": b,
                "gained_bytes": b - a if known and old.get("name") == gpu["name"] else None,
            }
        )

    def keyed(holders: Any) -> dict[tuple[Any, Any], Any]:
        return {(one.get("pid"), one.get("name")): one for one in holders or [] if isinstance(one, dict)}

    old_holders, new_holders = keyed(before.get("holders")), keyed(now["holders"])
    return {
        "gpus": cards,
        "closed": [old_holders[key] for key in old_holders if key not in new_holders],
        "started": [new_holders[key] for key in new_holders if key not in old_holders],
    }


def check_difference(found: Mapping[str, Any]) -> list[Finding]:
    """What was gained, card by card."""
    source = "free memory of the card (not the sum of its processes), before and now"
    closed = ", ".join(_holder(one) for one in found["closed"]) or "none of the listed programs"
    findings = []
    for card in found["gpus"]:
        gained = card["gained_bytes"]
        name = f"GPU {card['index']} ({quote(card['name'])})"
        if gained is None:
            findings.append(
                Finding(
                    "memory-difference-unknown",
                    Level.UNKNOWN,
                    f"{name}: could not tell how the free memory changed.",
                    "It was not known before or is not known now, or it is another card.",
                    ("write a new baseline on this machine: `python gpu_probe.py --baseline FILE`",),
                    source,
                )
            )
            continue
        word = "more" if gained >= 0 else "less"
        findings.append(
            Finding(
                "memory-difference",
                Level.OK,
                f"{name}: {gib(abs(gained))} {word} is free than before ({gib(card['free_before_bytes'])} then, "
                f"{gib(card['free_now_bytes'])} now).",
                f"Closed meanwhile: {closed}."
                + (f" Started: {', '.join(_holder(one) for one in found['started'])}." if found["started"] else ""),
                (),
                source,
            )
        )
    if not findings:
        findings.append(
            Finding(
                "memory-difference-unknown",
                Level.UNKNOWN,
                "There is no usable GPU now whose memory could be compared.",
                "The baseline was of a machine with one, or the driver does not answer.",
                ("run `python gpu_probe.py`",),
                source,
            )
        )
    return findings


def _holder(one: Mapping[str, Any]) -> str:
    name = str(one.get("name") or "unnamed")
    kind = kind_of_program(name)
    memory = one.get("memory_bytes")
    size = f" {gib(memory)}" if isinstance(memory, int) else ""
    return f"{quote(name.replace(chr(92), '/').rpartition('/')[2], 40)}{f' ({kind})' if kind else ''}{size}"
