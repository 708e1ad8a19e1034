"""The one pip command that brings the right torch for this machine, or for another one that is described by flags.

Used by install_pytorch.sh; needs the standard library alone (Python 3.9 or newer). Exit codes: 0 a build fits,
1 none does, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from preflight import wheels
from preflight.console import UsageError, run_main
from preflight.hardware.capability import capability_from_name

SYSTEMS = {"linux": "Linux", "windows": "Windows", "macos": "Darwin", "darwin": "Darwin"}
MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "x64": "x86_64", "aarch64": "aarch64", "arm64": "arm64"}
ACCELERATORS = ("cuda", "rocm", "xpu", "mps", "cpu")


def target_from(args: argparse.Namespace) -> wheels.Target:
    """The machine that the flags describe; what they leave open is read from this one.

    Raises UsageError for a value that cannot be understood.
    """
    described = any((args.gpu, args.driver, args.os, args.arch, args.accelerator))
    target = wheels.Target(system="Linux", machine="x86_64") if described else _this_machine()
    if args.os:
        if args.os.lower() not in SYSTEMS:
            raise UsageError(f"--os {args.os}: allowed are linux, windows, macos")
        target = replace(target, system=SYSTEMS[args.os.lower()])
    if args.arch:
        if args.arch.lower() not in MACHINES:
            raise UsageError(f"--arch {args.arch}: allowed are x86_64, aarch64, arm64")
        target = replace(target, machine=MACHINES[args.arch.lower()])
    if target.system == "Darwin" and described and not args.arch:
        target = replace(target, machine="arm64")
    if target.system == "Linux" and target.machine == "arm64":
        target = replace(target, machine="aarch64")
    target = _with_cards(target, args.gpu or [])
    if args.driver:
        if not re.fullmatch(r"\d{3}(?:\.\d+){0,3}", args.driver):
            raise UsageError(f"--driver {args.driver}: must be an NVIDIA driver version such as 570.124.06")
        target = replace(target, driver=args.driver, accelerator="cuda" if not args.gpu else target.accelerator)
    if args.accelerator:
        if args.accelerator not in ACCELERATORS:
            raise UsageError(f"--accelerator {args.accelerator}: allowed are {', '.join(ACCELERATORS)}")
        target = replace(target, accelerator=args.accelerator)
    elif target.system == "Darwin" and described:
        target = replace(target, accelerator="mps" if target.machine == "arm64" else "cpu")
    if args.glibc:
        if not re.fullmatch(r"\d\.\d+|musl", args.glibc):
            raise UsageError(f"--glibc {args.glibc}: must be a version such as 2.35, or musl")
        target = replace(target, glibc=args.glibc)
    if args.python:
        found = re.fullmatch(r"(3\.\d+)(?:\.\d+)?(t?)", args.python)
        if not found:
            raise UsageError(f"--python {args.python}: must be a version such as 3.12 or 3.13t")
        target = replace(target, python=found.group(1) + found.group(2))
    if target.system != "Linux":
        target = replace(target, glibc=None)
    return target


def _with_cards(target: wheels.Target, names: Sequence[str]) -> wheels.Target:
    capabilities: list[str] = []
    gfx: list[str] = []
    kind = ""
    for name in names:
        if name.lower() in ("cpu", "none"):
            return replace(target, accelerator="cpu", capabilities=(), gfx=())
        capability = capability_from_name(name)
        if re.fullmatch(r"(?i)gfx\w+", name):
            kind, gfx = "rocm", [*gfx, name.lower()]
        elif capability:
            kind, capabilities = "cuda", [*capabilities, capability]
        elif re.search(r"(?i)radeon|instinct|\bmi\d{2,3}|\brx ?\d{4}", name):
            kind = "rocm"
        elif re.search(r"(?i)\barc\b|intel|data center gpu", name):
            kind = "xpu"
        elif re.search(r"(?i)apple|\bm[1-9]\b", name):
            kind = "mps"
            target = replace(target, system="Darwin", machine="arm64")
        else:
            raise UsageError(
                f"--gpu {name}: not a card of the table; give its name as nvidia-smi prints it, its compute "
                f"capability "
                "(8.6), a gfx name (gfx1100), or cpu"
            )
    if not names:
        return target
    return replace(target, accelerator=kind, capabilities=tuple(dict.fromkeys(capabilities)), gfx=tuple(gfx))


def _this_machine() -> wheels.Target:
    from preflight.hardware.accelerators import read
    from preflight.hardware.gpu_checks import Seen
    from preflight.hardware.looking import target_of
    from preflight.host import read_host
    from preflight.machine import Machine

    machine = Machine()
    target = target_of(Seen(accelerators=read(machine), host=read_host(machine)))
    return replace(target, glibc="musl") if _is_musl(target) else target


def _is_musl(target: wheels.Target) -> bool:
    import glob

    return target.system == "Linux" and target.glibc is None and bool(glob.glob("/lib/ld-musl-*"))


def described(target: wheels.Target) -> str:
    """The machine in one line."""
    parts = [f"{target.system} {target.machine}", target.accelerator]
    parts += [f"compute capability {', '.join(target.capabilities)}"] if target.capabilities else []
    parts += [", ".join(target.gfx)] if target.gfx else []
    parts += [f"driver {target.driver}"] if target.driver else []
    parts += [f"Python {target.python}"] if target.python else []
    parts += [f"glibc {target.glibc}"] if target.glibc else []
    return ", ".join(parts)


def explain(target: wheels.Target, choice: wheels.Choice, python: str, installed: str | None = None) -> str:
    """What fits and which constraint decided, for people."""
    lines = [f"machine: {described(target)}"]
    if choice.version is None:
        lines += ["no published torch build runs there:"]
        lines += [f"  because of the {reason}" for reason in choice.decided_by]
        lines += [f"  to change: {change}" for change in choice.change]
    else:
        lines += [f"build: torch {choice.version}, {choice.variant}"]
        lines += [f"  because of the {reason}" for reason in choice.decided_by] or ["  the newest release fits"]
        lines += [f"  note: {choice.note}"] if choice.note else []
        if target.accelerator == "cuda" and not target.driver:
            lines += ["  note: the driver's version is not known; CUDA 13 builds need 580 or newer (--driver)"]
        if target.accelerator == "cuda" and not target.capabilities:
            lines += ["  note: the card is not known; Maxwell, Pascal and Volta need a cu126 build (--gpu)"]
        if choice.is_installed(installed):
            lines += [f"torch {installed} is installed already: nothing to do"]
        lines += [f"command: {choice.command(python, installed)}"]
    lines += [f"table of {_as_of()}: facts/torch_wheels.json"]
    return "\n".join(lines)


def _as_of() -> str:
    from preflight.facts import table

    return str(table("torch_wheels")["as_of"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the command, or its arguments alone."""
    made = argparse.ArgumentParser(
        prog="install_pytorch.sh",
        description="Prints the one command that installs the right torch, and why; without --dry-run also runs it.",
        epilog="example: sh install_pytorch.sh --dry-run --gpu 'RTX 5090' --driver 550.54 --python 3.12 --glibc 2.35",
        allow_abbrev=False,
    )
    made.add_argument("--dry-run", action="store_true", help="print only")
    made.add_argument(
        "--gpu", action="append", metavar="NAME", help="a card by name, capability or gfx; may be repeated"
    )
    made.add_argument("--driver", metavar="VERSION", help="NVIDIA driver, such as 570.124.06")
    made.add_argument(
        "--python", metavar="VERSION", help="such as 3.12; a path chooses the interpreter to install into"
    )
    made.add_argument("--glibc", metavar="VERSION", help="such as 2.35, or musl")
    made.add_argument("--os", metavar="NAME", help="linux, windows or macos")
    made.add_argument("--arch", metavar="NAME", help="x86_64, aarch64 or arm64")
    made.add_argument("--accelerator", metavar="KIND", help="cuda, rocm, xpu, mps or cpu")
    made.add_argument("--json", action="store_true", help="print one JSON document")
    made.add_argument("--interpreter", default="python", help=argparse.SUPPRESS)
    made.add_argument("--arguments", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--installed", help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    target = target_from(args)
    choice = wheels.choose(target)
    if args.arguments:
        print("" if choice.is_installed(args.installed) else "\n".join(choice.arguments(args.installed)))
    elif args.json:
        print(json.dumps(as_json(target, choice, args.interpreter), indent=1))
    else:
        print(explain(target, choice, args.interpreter, args.installed))
    return 0 if choice.version else 1


def as_json(target: wheels.Target, choice: wheels.Choice, python: str) -> dict[str, object]:
    """The answer as plain data."""
    return {
        "schema": 1,
        "machine": {key: list(value) if isinstance(value, tuple) else value for key, value in vars(target).items()},
        "release": choice.version,
        "variant": choice.variant,
        "index": choice.index,
        "command": choice.command(python),
        "decided_by": list(choice.decided_by),
        "change": list(choice.change),
    }


if __name__ == "__main__":
    sys.exit(run_main(main))
