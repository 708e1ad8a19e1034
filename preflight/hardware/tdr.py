"""The Windows GPU timeout (TDR): current values, and a pair of .reg files that raise and restore them.

"TCC" in the name of the flag `--disable-tcc` is a mix-up, kept for old instructions: TDR is the timeout, TCC is a
driver model without it. Nothing here writes to the registry.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.findings import Finding, Level, quote
from preflight.machine import Machine

KEY = r"HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\GraphicsDrivers"
DEFAULTS_S = {"TdrDelay": 2, "TdrDdiDelay": 5}
RAISED_S = {"TdrDelay": 60, "TdrDdiDelay": 60}
_SOURCE = "Microsoft Learn, Testing and debugging TDR during driver development; TDR registry keys"


def read_timeouts(machine: Machine) -> dict[str, Any]:
    """The system, the driver models and the timeout values (None: not set, Windows then uses its default)."""
    system = machine.see("platform system", _system)
    found: dict[str, Any] = {"system": system, "values": None, "driver_models": None}
    if system != "Windows":
        return found
    answer = machine.run(["reg", "query", KEY.replace("HKEY_LOCAL_MACHINE", "HKLM")], timeout_s=10)
    found["values"] = parse_reg_query(answer.text)
    models = machine.run(
        ["nvidia-smi", "--query-gpu=index,name,driver_model.current,driver_model.pending", "--format=csv,noheader"], 15
    )
    if models.ok:
        found["driver_models"] = [
            dict(zip(("index", "name", "current", "pending"), (part.strip() for part in line.split(",")), strict=False))
            for line in models.text.splitlines()
            if line.strip()
        ]
    return found


def _system() -> str:
    import platform

    return platform.system()


def parse_reg_query(text: str) -> dict[str, int | None]:
    """The Tdr values of `reg query`, as numbers; None for those that are not set."""
    values: dict[str, int | None] = dict.fromkeys((*DEFAULTS_S, "TdrLevel"))
    for name, raw in re.findall(r"^\s*(Tdr\w+)\s+REG_DWORD\s+(0x[0-9a-fA-F]+)", text, re.M):
        values[name] = int(raw, 16)
    return values


def reg_file(values: dict[str, int | None]) -> str:
    """A .reg file that sets the values; None removes one, so that Windows uses its default."""
    lines = ["Windows Registry Editor Version 5.00", "", f"[{KEY}]"]
    for name, value in values.items():
        lines.append(f'"{name}"=dword:{value:08x}' if value is not None else f'"{name}"=-')
    return "\r\n".join([*lines, "", ""])


def write_pair(folder: Path, found: dict[str, Any]) -> list[str]:
    """Write tdr_raise.reg and tdr_undo.reg (the values as they are now) and return their names.

    Raises UsageError when the folder cannot be written.
    """
    now = found["values"] or {}
    pair: dict[str, dict[str, int | None]] = {
        "tdr_raise.reg": {**RAISED_S},
        "tdr_undo.reg": {name: now.get(name) for name in RAISED_S},
    }
    for name, values in pair.items():
        try:
            # The form that regedit itself writes: UTF-16, little-endian, with its mark.
            (folder / name).write_bytes(b"\xff\xfe" + reg_file(values).encode("utf-16-le"))
        except OSError as error:
            raise UsageError(f"{folder / name}: cannot be written ({error.strerror})") from error
    return list(pair)


def check_timeouts(found: dict[str, Any], written: list[str]) -> Finding:
    """What the timeout is here, and whether the files would do any good."""
    if found["system"] is None:
        return Finding(
            "tdr-unknown",
            Level.UNKNOWN,
            "Could not tell which system this is, so nothing about the GPU timeout either.",
            "The timeout (TDR) exists on Windows only.",
            ("run this on the machine that trains",),
            _SOURCE,
        )
    if found["system"] != "Windows":
        return Finding(
            "tdr-not-here",
            Level.OK,
            f"--disable-tcc does nothing here: {quote(found['system'])} has no GPU timeout of this kind.",
            "TDR is Windows' watchdog for display GPUs; TCC is a driver model that has none. On Linux only a GPU that "
            "drives an X display has a similar limit. No file was written.",
            source=_SOURCE,
        )
    values = found["values"] or {}
    now = ", ".join(
        f"{name} {value if value is not None else f'not set (default {DEFAULTS_S[name]})'} s"
        for name, value in ((name, values.get(name)) for name in DEFAULTS_S)
    )
    models = found["driver_models"]
    shown = "; ".join(f"GPU {m['index']} {m['name']}: {m['current']}" for m in models) if models else "could not tell"
    free_of_it = bool(models) and all(str(m["current"]).upper() == "TCC" for m in models)
    note = (
        "All GPUs run under TCC, which has no timeout: leaving TCC for WDDM would bring it in. Nothing needs raising."
        if free_of_it
        else "A kernel that runs longer is ended and its process loses the GPU. Ordinary training kernels take "
        "milliseconds: raise the limit only when the System log shows Display event 4101."
    )
    return Finding(
        "tdr-values",
        Level.OK if free_of_it else Level.WARN,
        f"Windows' GPU timeout: {now}. Driver models: {quote(shown, 200)}. Written: {' and '.join(written)}; not "
        f"applied.",
        f"{note} Microsoft means these values for driver development and testing only; a restart is needed. "
        "They do not cure a GPU that has fallen off the bus.",
        (
            f"to raise the limit to {RAISED_S['TdrDelay']} s: open `tdr_raise.reg` as administrator, then restart",
            "to go back: open `tdr_undo.reg` as administrator, then restart",
        ),
        _SOURCE,
    )
