"""Windows' own record of GPU trouble: TDR settings and events; reset, lost link and driver crash told apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

from preflight.findings import Finding, Level, quote
from preflight.machine import Machine

SOURCE = "facts/FACTS.md section 1 (Microsoft Learn, TDR registry keys; NVIDIA Xid catalog)"
KEY = r"HKLM\SYSTEM\CurrentControlSet\Control\GraphicsDrivers"
# What Windows uses when the value is not set. Source: Microsoft Learn, "TDR registry keys".
DEFAULTS = {"TdrDelay": 2, "TdrDdiDelay": 5, "TdrLevel": 3, "TdrLimitTime": 60, "TdrLimitCount": 5}


@dataclass(frozen=True)
class WindowsGraphics:
    """The TDR values (None: not set, so the default holds) and the events of the system log, newest first."""

    tdr: dict[str, int | None]
    events: tuple[tuple[str, str], ...] = ()
    invented: tuple[str, ...] = ()

    @property
    def tdr_delay_s(self) -> int:
        """Seconds that one kernel may take before Windows resets the driver."""
        value = self.tdr.get("TdrDelay")
        return DEFAULTS["TdrDelay"] if value is None else value


def read_windows_graphics(machine: Machine) -> WindowsGraphics:
    """TDR values and GPU events of this Windows machine."""
    registry = machine.run(["reg", "query", KEY])
    query = (
        "*[System[(Provider[@Name='Display'] and EventID=4101) or (Provider[@Name='nvlddmkm']) or "
        "(Provider[@Name='Microsoft-Windows-WHEA-Logger'])]]"
    )
    log = machine.run(["wevtutil", "qe", "System", f"/q:{query}", "/c:40", "/rd:true", "/f:text"], timeout_s=20.0)
    extra = "\n".join(answer.text for _, answer in machine.recorded(r"(?i)wevtutil|WinEvent|event|reliability"))
    settings = registry.text + "\n".join(answer.text for _, answer in machine.recorded(r"(?i)^reg\b|registry"))
    return WindowsGraphics(parse_tdr(settings), tuple(parse_events(log.text or extra)), invented_values(settings))


def parse_tdr(text: str) -> dict[str, int | None]:
    """`reg query …\\GraphicsDrivers`: the TDR values that are set."""
    found: dict[str, int | None] = dict.fromkeys(DEFAULTS)
    for name, value in re.findall(r"^\s*(Tdr\w+)\s+REG_DWORD\s+(0x[0-9a-fA-F]+|\d+)", text, re.MULTILINE):
        if name in found:
            found[name] = int(value, 0)
    return found


def invented_values(text: str) -> tuple[str, ...]:
    """Values in that key that nothing reads, which advice on the web tells people to set."""
    return tuple(re.findall(r"^\s*(Tcc\w+)\s+REG_DWORD", text, re.MULTILINE))


def parse_events(text: str) -> list[tuple[str, str]]:
    """(kind, message) of the system log's GPU events. Kinds: tdr, link-lost, driver-error, hardware-error."""
    found = []
    for block in re.split(r"(?m)^Event\[\d+\]:?|^-{5,}\s*$", text):
        source = re.search(r"(?:Source|ProviderName)\s*:\s*(\S+)", block)
        number = re.search(r"(?:Event ID|Id)\s*:\s*(\d+)", block)
        if not (source and number):
            continue
        name, code = source.group(1).lower(), int(number.group(1))
        message = " ".join(block.split("Description:")[-1].split("Message")[-1].split())[:200]
        if name == "display" and code == 4101:
            found.append(("tdr", message))
        elif name == "nvlddmkm":
            lost = re.search(r"fallen off|bus|removed|79\b", message, re.IGNORECASE)
            found.append(("link-lost" if lost else "driver-error", message))
        elif "whea" in name and code in (17, 18, 19):
            found.append(("hardware-error", message))
    return found or [(kind, line.strip()[:200]) for line in text.splitlines() if (kind := _kind_of_line(line))]


# Lists with one event a line (Get-WinEvent, exports, copied text); first match wins.
_LINES = (
    ("link-lost", r"(?i)fallen off the bus|physically removed|0x887A0005|DEVICE_REMOVED|\bXid\b.*\b79\b"),
    (
        "tdr",
        r"(?i)stopped responding and has (?:successfully )?recovered|\b4101\b.*display|LiveKernelEvent.*\b1(?:17"
        r"|41)\b"
        r"|VIDEO_TDR_FAILURE|0x0*116\b|0x887A0006|DEVICE_HUNG|launch timed out",
    ),
    ("hardware-error", r"(?i)WHEA.*(?:\b1[789]\b|PCI Express)|corrected hardware error"),
    ("driver-error", r"(?i)nvlddmkm"),
)


def _kind_of_line(line: str) -> str | None:
    return next((kind for kind, pattern in _LINES if re.search(pattern, line)), None)


def check_windows(seen: WindowsGraphics | None) -> list[Finding]:
    """TDR settings and what the event log tells; each kind of trouble has its own advice."""
    if seen is None:
        return []
    found = [_settings(seen)]
    kinds = {kind: [message for one, message in seen.events if one == kind] for kind, _ in seen.events}
    if "link-lost" in kinds:
        found.append(
            Finding(
                "gpu-removed",
                Level.FAIL,
                f"Windows logged that the GPU left the bus: {quote(kinds['link-lost'][0], 160)}",
                "'GPU physically removed' is a broken link (power, riser, heat, overclock, PCIe power saving), "
                "not a timeout: TDR values "
                "do not change it.",
                (
                    "check power cables, riser, slot and temperature; remove overclocking",
                    "switch PCIe link state power management off in the power plan",
                ),
                SOURCE,
            )
        )
    if "tdr" in kinds:
        found.append(
            Finding(
                "tdr-reset",
                Level.WARN,
                f"Windows reset the display driver ({len(kinds['tdr'])} in the event log, 4101).",
                f"A single kernel took longer than TdrDelay ({seen.tdr_delay_s} s) or hung. CUDA programs end "
                f"with 'launch timed out' or "
                "'unspecified launch failure'.",
                (
                    "use smaller batches or shorter sequences, so that each kernel stays short",
                    "train on a card without a display, or under WSL 2",
                ),
                SOURCE,
            )
        )
    if "driver-error" in kinds:
        found.append(
            Finding(
                "driver-crash",
                Level.WARN,
                f"The NVIDIA driver logged {len(kinds['driver-error'])} errors: {quote(kinds['driver-error'][0], 160)}",
                "An error inside the driver or of a program on the card; it is neither a timeout nor a lost link.",
                (
                    "install the driver cleanly (option 'Perform a clean installation')",
                    "run `python gpu_probe.py --stress-test`",
                ),
                SOURCE,
            )
        )
    if "hardware-error" in kinds:
        found.append(
            Finding(
                "pcie-hardware-error",
                Level.WARN,
                f"Windows logged hardware errors (WHEA): {quote(kinds['hardware-error'][0], 160)}",
                "Corrected PCIe errors come before a lost link: slot, riser, overclock or power.",
                ("reseat the card without a riser and remove overclocking",),
                SOURCE,
            )
        )
    return found


def _settings(seen: WindowsGraphics) -> Finding:
    level, delay = seen.tdr.get("TdrLevel"), seen.tdr.get("TdrDelay")
    ddi = seen.tdr.get("TdrDdiDelay")
    if seen.invented:
        return Finding(
            "tcc-timeout-value",
            Level.WARN,
            f"The registry holds {', '.join(map(quote, seen.invented))}, which nothing in Windows reads.",
            "TCC is a driver model without a timeout; the values that exist are TdrDelay, TdrDdiDelay and TdrLevel.",
            (f'remove it: `reg delete "{KEY}" /v {seen.invented[0]}` (as administrator)',),
            SOURCE,
        )
    if level == 0:
        return Finding(
            "tdr-off",
            Level.WARN,
            "TDR is switched off (TdrLevel 0): a kernel that hangs freezes the desktop for good.",
            "Microsoft keeps this for driver tests.",
            (f'restore the default: `reg delete "{KEY}" /v TdrLevel` (as administrator), then restart Windows',),
            SOURCE,
        )
    if delay is not None and ddi is not None and ddi < delay:
        return Finding(
            "tdr-values-inconsistent",
            Level.WARN,
            f"TdrDdiDelay ({ddi} s) is shorter than TdrDelay ({delay} s).",
            "The driver call would be cut off before the kernel may be.",
            (f"set TdrDdiDelay to at least {delay}, or remove both values to get the defaults",),
            SOURCE,
        )
    return Finding(
        "tdr-settings",
        Level.OK,
        f"One kernel may take {seen.tdr_delay_s} s before Windows resets the driver"
        + (" (the default)." if delay is None else f" (TdrDelay is set; the default is {DEFAULTS['TdrDelay']})."),
        "Ordinary kernels of language models take milliseconds. Microsoft asks users not to change these values.",
        (),
        SOURCE,
    )
