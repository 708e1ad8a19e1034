"""A model by its hub id: only the small files are fetched, through huggingface_hub, in a child with a time limit."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from preflight.findings import Finding, Level, quote, say
from preflight.machine import Machine, has_modules

LIMIT_S = 60.0
_SOURCE = (
    "huggingface_hub documentation, download guide and environment variables (HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN)"
)


@dataclass(frozen=True)
class Fetched:
    """What came of a hub id. `listing` holds names and sizes of all files of the repository.

    `trouble` is "" or one of: offline, unreachable, timeout, gated, missing, no-client, failed.
    """

    folder: str = ""
    listing: Mapping[str, int] = field(default_factory=dict)
    trouble: str = ""
    detail: str = ""


class HubTrouble(Exception):
    """The model could not be fetched; carries the finding that says why."""

    def __init__(self, name: str, fetched: Fetched) -> None:
        super().__init__(name)
        self.finding = hub_finding(name, fetched)


def is_hub_id(name: str) -> bool:
    """Whether this is a hub id rather than a path: owner/name, and no such directory here."""
    return (
        re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name) is not None
        and not name.startswith(".")
        and not Path(name).exists()
    )


def fetch_model(machine: Machine, python: str, name: str) -> Fetched:
    """The folder with the small files of a hub model, in the user's own cache.

    Our own interpreter fetches when it has huggingface_hub, else the one under test.
    """
    import sys

    chosen = (
        sys.executable if machine.replayed or has_modules(machine, sys.executable, ("huggingface_hub",)) else python
    )
    say(f"asking the hub for {quote(name, 100)} (up to {LIMIT_S:.0f} s)")
    with tempfile.TemporaryDirectory(prefix="preflight-hub-") as folder:
        job = os.path.join(folder, "job.json")
        Path(job).write_text(json.dumps({"id": name}), encoding="utf-8")
        answer = machine.ask("fetch_model", chosen, [job], timeout_s=LIMIT_S, kind="child fetch_model", cwd=folder)
    lines = {str(line.get("step")): line for line in answer.lines_of_json()}
    listing = {str(key): int(value) for key, value in (lines.get("listing", {}).get("files") or {}).items()}
    if "end" in lines:
        return Fetched(str(lines["end"]["folder"]), listing)
    if "failed" in lines:
        return Fetched("", listing, str(lines["failed"]["trouble"]), str(lines["failed"]["detail"]))
    if answer.trouble == "timeout":
        return Fetched("", listing, "timeout", f"no answer within {LIMIT_S:.0f} s")
    return Fetched("", listing, "failed", answer.errors[-300:] or f"exit code {answer.exit_code}")


def hub_finding(name: str, fetched: Fetched) -> Finding:
    """Why a hub model could not be looked at, and what to do."""
    shown, detail = quote(name, 120), quote(fetched.detail, 200)
    local = "or name a local directory that holds config.json"
    if fetched.trouble == "gated":
        return Finding(
            "hub-model-gated",
            Level.FAIL,
            f"The hub does not give {shown} to us: it is gated, and this account has no access.",
            f"Its files need a token of an account that has accepted the model's terms. ({detail})",
            ("accept the terms on the model's page, then `hf auth login` (or set HF_TOKEN)", local),
            _SOURCE,
        )
    if fetched.trouble == "missing":
        return Finding(
            "hub-model-missing",
            Level.FAIL,
            f"There is no directory {shown} here and no such model on the hub.",
            f"A private model looks the same without a token. ({detail})",
            ("check the spelling of OWNER/NAME; for a private model `hf auth login`", local),
            _SOURCE,
        )
    words = {
        "offline": "The hub is switched off (HF_HUB_OFFLINE), and the cache has no such model",
        "unreachable": "The hub cannot be reached from here, and the cache has no such model",
        "timeout": "The hub is too slow to answer",
        "no-client": "huggingface_hub is not installed, so a hub id cannot be fetched",
    }
    fixes = {
        "offline": "unset HF_HUB_OFFLINE, or download the model where there is a network",
        "unreachable": "download it where there is a network: `hf download OWNER/NAME --local-dir DIR`, then name DIR",
        "timeout": "try again, or `hf download OWNER/NAME --local-dir DIR`, then name DIR",
        "no-client": "`pip install huggingface_hub`",
    }
    return Finding(
        f"hub-{fetched.trouble}",
        Level.UNKNOWN,
        f"Could not tell anything about {shown}: {words.get(fetched.trouble, 'it could not be fetched')}.",
        f"Nothing of the model was seen. ({detail})",
        (fixes.get(fetched.trouble, "read the error; try again"), local),
        _SOURCE,
    )
