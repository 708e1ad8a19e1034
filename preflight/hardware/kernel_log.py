"""What the kernel log says about GPUs: Xid errors and their meaning, cards off the bus, drivers that did not load."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from preflight.facts import table
from preflight.machine import Machine


@dataclass(frozen=True)
class Xid:
    """One NVIDIA error line. `bus_id` in the kernel's short form ("0000:3b:00"); `count` equal ones were merged."""

    bus_id: str
    code: int
    text: str
    process: str | None = None
    numbered: bool = True
    count: int = 1


@dataclass(frozen=True)
class KernelLog:
    """The GPU lines of a kernel log. `readable` is False when the log could not be read, which is not "no errors"."""

    readable: bool = False
    xids: tuple[Xid, ...] = ()
    init_failed: tuple[str, ...] = ()
    needs_open_module: bool | None = None
    proprietary_module: bool | None = None
    module_version: str | None = None
    mismatch: tuple[str, str] | None = None
    signature_rejected: bool = False
    nouveau: bool = False
    unsupported_card: bool = False
    legacy_branch: str | None = None
    out_of_memory_killed: tuple[str, ...] = ()
    amd_errors: tuple[str, ...] = ()
    bar_too_small: bool = False
    pcie_errors: tuple[str, ...] = ()
    gsp_timeouts: tuple[str, ...] = ()
    nvswitch_errors: tuple[str, ...] = ()


_STAMP = re.compile(
    r"^(?:<\d+>)?(?:\[[^\]]*\d[^\]]*\]\s?"  # dmesg, with or without -T
    r"|[A-Z][a-z]{2}\s+\d+ \d\d:\d\d:\d\d \S+ kernel:\s?(?:\[[^\]]*\]\s?)?"  # journalctl, syslog
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*(?: \S+)? (?:kernel:\s?)?(?:\[[^\]]*\]\s?)?"  # short-iso, short-full
    r"|kern\s*:\w+\s*:\s*(?:\[[^\]]*\]\s?)?)"
)
# Source of the shape: facts/xid.json log_line_regex; pid and name are optional, and so is the "PCI:".
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-9A-Fa-f])?\): (\d+)"
    r"(?:, pid=('?<?[^,]*>?'?))?(?:, name=([^,]*))?,?\s*(.*)"
)
_CARD = r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})"
_LOST = re.compile(rf"(?:NVIDIA )?GPU (?:at )?(?:PCI:)?{_CARD}(?:\.[0-9A-Fa-f])?.{{0,120}}?fallen off the bus", re.S)

# The card's own firmware stopped: newer drivers log this before, or without, an Xid 119. Source: driver 595 logs.
_GSP = re.compile(r"NVRM:.*(?:_kgspLogRpcTimeout|_kgspIsHeartbeatTimedOut|GSP Timeout|NV_ERR_RESET_REQUIRED)")


def messages(text: str) -> list[str]:
    """The log's messages: stamps removed, continuation lines joined to the message they belong to."""
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("{") and '"MESSAGE"' in line:  # journalctl -o json
            try:
                line = str(json.loads(line).get("MESSAGE", ""))
            except ValueError:
                pass
        stamp = _STAMP.match(line)
        body = line[stamp.end() :] if stamp else line
        continues = not stamp and (line[:1].isspace() or line.startswith("NVRM:")) and bool(found)
        if continues:
            found[-1] += " " + body.strip()
        elif body.strip():
            found.append(body.strip())
    return found


def looks_like_kernel_log(text: str) -> bool:
    """Whether a text holds kernel lines about GPUs."""
    return bool(re.search(r"NVRM:|nvidia-modeset|nvidia-nvswitch|amdgpu 0000:|\bkernel: (?:nvidia|nouveau)", text))


def read_kernel_log(machine: Machine) -> KernelLog:
    """The kernel's GPU lines of this boot, from whichever source this user may read; not readable in most containers.

    Reading a log that rotates or is refused is normal: `readable` then says so.
    """
    if machine.replayed:
        texts = [
            answer.text
            for kind, answer in machine.recorded("")
            if looks_like_kernel_log(answer.text) or re.search(r"dmesg|journalctl|kern\.log|/var/log/", kind)
        ]
        return parse_kernel_log("\n".join(texts)) if texts else KernelLog()
    # dmesg is refused to ordinary users on many systems, where the journal may be allowed
    for command in (["dmesg"], ["journalctl", "-k", "-b", "--no-pager", "-o", "short", "-n", "20000"]):
        answer = machine.run(command, timeout_s=5.0)
        if answer.ok and answer.text.strip():
            gpu_lines = [line for line in answer.text.splitlines() if _ABOUT_GPUS.search(line) or line[:1].isspace()]
            return parse_kernel_log("\n".join(gpu_lines), readable=True)
    return KernelLog()


_ABOUT_GPUS = re.compile(
    r"(?i)nvrm|nvidia|nouveau|sxid|amdgpu|\bxid\b|aer:|pcie bus error|out of memory: killed|oom-kill"
    r"|module.*(?:reject|key)"
)


def parse_kernel_log(text: str, readable: bool | None = None) -> KernelLog:
    """The GPU lines of dmesg, journalctl -k or kern.log, in any of their time formats."""
    log = messages(text)
    whole = "\n".join(log)
    xids = _xids(log)
    init = re.findall(rf"NVRM: GPU {_CARD}\.\d: (?:RmInitAdapter|rm_init_adapter) failed", whole)
    loaded = re.search(r"NVRM: loading NVIDIA UNIX (Open )?(?:\S+ )?Kernel Module(?: for \S+)?\s+(\d+\.[\d.]+)", whole)
    mismatch = re.search(
        r"API mismatch: the client[^.]*?has the version (\d[\d.]*\d).*?kernel module has the version (\d[\d.]*\d)",
        whole,
        re.S,
    )
    needs_open = bool(re.search(r"requires use of the NVIDIA open kernel modules", whole))
    legacy = re.search(r"supported through the NVIDIA (\d+\.\S*?)xx Legacy", whole, re.IGNORECASE)
    killed = re.findall(r"Out of memory: Killed process \d+ \(([^)]*)\)|oom-kill:.*?task=([^,]+)", whole)
    unsigned = (
        r"(?i)loading of (?:unsigned )?module .*rejected|module with unavailable key is rejected"
        r"|key was rejected by service"
    )
    amd = r"amdgpu.*(?:ring .* timeout|GPU reset|hang|VM_L2_PROTECTION|ras.*unc)"
    small_bar = r"BAR\d? is \d+M @ 0x0|PCI I/O region assigned to your NVIDIA device is invalid"
    return KernelLog(
        readable=bool(log) if readable is None else readable,
        xids=tuple(xids),
        init_failed=tuple(dict.fromkeys(card.lower() for card in init)),
        needs_open_module=True if needs_open else None,
        proprietary_module=(not loaded.group(1)) if loaded else (True if needs_open else None),
        module_version=loaded.group(2) if loaded else None,
        mismatch=(mismatch.group(1), mismatch.group(2)) if mismatch else None,
        signature_rejected=bool(re.search(unsigned, whole)),
        nouveau=bool(re.search(r"^nouveau 0000:", whole, re.MULTILINE)),
        unsupported_card=bool(re.search(r"NVRM: .*(?:not supported by|ignoring the legacy)", whole)),
        legacy_branch=legacy.group(1) + "xx" if legacy else None,
        out_of_memory_killed=tuple(dict.fromkeys(one or two for one, two in killed)),
        amd_errors=tuple(line for line in log if re.search(amd, line))[:10],
        bar_too_small=bool(re.search(small_bar, whole)),
        nvswitch_errors=tuple(line for line in log if re.search(r"nvidia-nvswitch\d*: SXid", line))[:10],
        gsp_timeouts=tuple(line for line in log if _GSP.search(line))[:5],
        pcie_errors=tuple(line for line in log if re.search(r"pcieport.*AER:|PCIe Bus Error", line))[:5],
    )


def _xids(log: list[str]) -> list[Xid]:
    found: dict[tuple[str, int], Xid] = {}
    numbered_lost = set()
    for line in log:
        for bus, code, _pid, name, text in _XID.findall(line):
            key = (_bus(bus), int(code))
            process = (name or "").strip("'<> ") or None
            if process in (None, "unknown"):
                process = None
            old = found.get(key)
            found[key] = Xid(key[0], key[1], text.strip(), process, True, (old.count if old else 0) + 1)
            if key[1] == 79:
                numbered_lost.add(key[0])
    for line in log:
        if _XID.search(line):
            continue
        lost = _LOST.search(line)
        if lost and _bus(lost.group(1)) not in numbered_lost:
            key = (_bus(lost.group(1)), 79)
            found.setdefault(key, Xid(key[0], 79, line, None, False))
    return list(found.values())


def _bus(text: str) -> str:
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def meaning(code: int) -> dict[str, Any]:
    """The published row for an Xid; an unknown code gives class "unknown"."""
    for row in table("xid")["xids"]:
        if row["code"] == code:
            return dict(row)
    return {
        "code": code,
        "mnemonic": None,
        "summary": "not in the table",
        "cls": "unknown",
        "severity": "unknown",
        "immediate_action": None,
        "advice": "Look the code up in NVIDIA's Xid catalog.",
    }
