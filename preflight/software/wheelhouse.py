"""Gathers the wheels of a stack, dependencies included, for a machine that has no network."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preflight import processes
from preflight.console import UsageError
from preflight.findings import Finding, Level, quote, say
from preflight.software.installers import Environment, cuda_packages, flat_constraints, flat_requirements
from preflight.software.requirements import wheel_mismatch
from preflight.software.sandbox import sandbox
from preflight.software.stack import NEEDED_BYTES, Request, trouble_of


def platforms(tag: str) -> list[str]:
    """All platform tags that a machine accepts which accepts `tag`, newest first.

    A system with glibc 2.28 also takes wheels for 2.17: pip must be told each. Raises UsageError for an unknown form.
    """
    linux = re.fullmatch(r"(?:manylinux_2_(\d+)|manylinux2014|linux)_(x86_64|aarch64|ppc64le|s390x|armv7l)", tag)
    if linux:
        minor, machine = int(linux.group(1) or (17 if "2014" in tag else 28)), linux.group(2)
        made = [f"manylinux_2_{number}_{machine}" for number in range(minor, 4, -1)]
        if minor >= 17:
            made.append(f"manylinux2014_{machine}")
        if machine == "x86_64":
            made += ["manylinux2010_x86_64", "manylinux1_x86_64"]
        return [*made, f"linux_{machine}"]
    mac = re.fullmatch(r"macosx_(\d+)_(\d+)_(arm64|x86_64)", tag)
    if mac:
        major, machine = int(mac.group(1)), mac.group(3)
        newer = [f"macosx_{number}_0_{kind}" for number in range(major, 10, -1) for kind in (machine, "universal2")]
        older = [f"macosx_10_{number}_{kind}" for number in range(16, 8, -1) for kind in ("x86_64", "universal2")]
        return newer + (older if machine == "x86_64" else [])
    if re.fullmatch(r"win_amd64|win_arm64|win32|musllinux_1_\d+_\w+", tag):
        return [tag]
    raise UsageError(
        f"--for-platform {tag}: not a platform tag; examples: manylinux_2_28_x86_64, manylinux_2_28_aarch64, "
        "win_amd64, macosx_14_0_arm64"
    )


def collect(
    request: Request, folder: str, for_python: str | None, for_platform: str | None
) -> tuple[dict[str, Any], list[Finding]]:
    """Download the wheels into `folder`. Observed facts and findings.

    `for_python` like "3.11", `for_platform` a wheel's platform tag; None: this interpreter, this machine.
    Raises UsageError for a folder or a flag that cannot be used.
    """
    if for_python is not None and not re.fullmatch(r"3\.\d{1,2}", for_python):
        raise UsageError(f"--for-python {for_python}: a version like 3.11 is allowed")
    accepted = platforms(for_platform) if for_platform else None
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--collect {folder}: cannot be made ({error.strerror})") from error
    foreign = for_python is not None or accepted is not None
    target = f"Python {for_python or 'as here'}, {for_platform or 'this system'}"
    with sandbox(request.sandbox_dir, NEEDED_BYTES) as inside:
        environment = Environment(
            request.installer,
            request.settings,
            inside.folder,
            request.base_python,
            inside.environment,
            wheelhouse=request.wheelhouse,
        )
        environment.create()
        flat = inside.folder / "tmp" / "requirements.txt"
        flat.write_text(flat_requirements(request.requirements), encoding="utf-8")
        fixed = inside.folder / "tmp" / "constraints.txt"
        fixed.write_text(flat_constraints(request.requirements), encoding="utf-8")
        system = _uv_platform(for_platform)
        resolution = environment.resolve(
            str(flat), [str(fixed)], request.requirements.hash_mode, for_python=for_python, for_platform=system
        )
        if not resolution.ok:
            from preflight.software.diagnosis import resolve_finding

            trouble = trouble_of(resolution.text, resolution.trouble)
            return {"folder": os.path.basename(folder), "target": target}, [
                resolve_finding(trouble, os.path.basename(request.requirements.path))
            ]
        cuda = cuda_packages(resolution)
        if cuda and not request.allow_cuda and not request.has_gpu:
            return {"folder": os.path.basename(folder), "target": target}, [_held_back(len(cuda))]
        pins = inside.folder / "tmp" / "pins.txt"
        pins.write_text("".join(f"{p.name}=={p.version}\n" for p in resolution.packages), encoding="utf-8")
        say(f"downloading {len(resolution.packages)} packages (up to {environment.timeout_s:.0f} s)")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-d", str(place.resolve())]
        command += ["--no-deps", "-r", str(pins)]
        if request.wheelhouse:
            command += ["--find-links", request.wheelhouse]
        for url in request.requirements.values("--extra-index-url"):
            command += ["--extra-index-url", url]
        for where in request.requirements.values("--find-links"):
            command += ["--find-links", where]
        if foreign:
            command += ["--only-binary", ":all:"]
            if for_python:
                number = for_python.replace(".", "")
                command += ["--python-version", for_python, "--implementation", "cp"]
                command += ["--abi", f"cp{number}", "--abi", "abi3", "--abi", "none"]
            for tag in accepted or []:
                command += ["--platform", tag]
        variables = {**os.environ, **inside.environment, "LC_ALL": "C.UTF-8", "PIP_USER": "0"}
        ended = processes.run(command, environment.timeout_s, env=variables, cwd=inside.folder)
    files = sorted(path for path in place.iterdir() if path.suffix in (".whl", ".gz", ".zip"))
    size = sum(path.stat().st_size for path in files)
    observed: dict[str, Any] = {
        "folder": os.path.basename(os.path.abspath(folder)),
        "target": target,
        "files": [path.name for path in files],
        "size_bytes": size,
    }
    if ended.exit_code != 0:
        return observed, [_download_failed(f"{ended.errors}\n{ended.text}", ended.trouble, target)]
    (place / "requirements.txt").write_text(
        "".join(f"{p.name}=={p.version}\n" for p in resolution.packages), encoding="utf-8"
    )
    return observed, [check_collected([path.name for path in files], target, size, folder, accepted, for_python)]


def _uv_platform(tag: str | None) -> str | None:
    """uv's name of the system that the tag is for."""
    if tag is None:
        return None
    linux = re.fullmatch(r"(?:manylinux_2_(\d+)|manylinux2014|linux)_(x86_64|aarch64)", tag)
    if linux:
        # uv knows some glibc versions by name; the one at or below is the safe choice.
        known = [17, 28, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]
        wanted = int(linux.group(1) or (17 if "2014" in tag else 28))
        return f"{linux.group(2)}-manylinux_2_{max(n for n in known if n <= max(wanted, 17))}"
    if tag.startswith("macosx"):
        return "aarch64-apple-darwin" if tag.endswith("arm64") else "x86_64-apple-darwin"
    return {"win_amd64": "x86_64-pc-windows-msvc", "win_arm64": "aarch64-pc-windows-msvc"}.get(tag)


def _held_back(count: int) -> Finding:
    return Finding(
        "cuda-download-held-back",
        Level.UNKNOWN,
        f"Not collected: the stack for that machine holds {count} CUDA packages, gigabytes to download.",
        "Whether that machine has a GPU cannot be told from here.",
        ("run again with `--allow-cuda` when it has", "or name a CPU wheel of torch: `--wheelhouse FOLDER`"),
        "the resolver's own list",
    )


def _download_failed(text: str, trouble: str, target: str) -> Finding:
    from preflight.software.diagnosis import resolve_finding

    about = trouble_of(text, trouble)
    if about["code"] == "no-matching-distribution":
        return Finding(
            "no-wheel-for-target",
            Level.FAIL,
            f"{quote(about['missing_requirement'] or 'A package', 80)} has no wheel for {target}.",
            "Only ready-made wheels can be collected for another machine; a source package would have to be built "
            "there.",
            ("name another version in the requirements, or collect on a machine like the target",),
            "pip download",
        )
    return resolve_finding(about, "the requirements")


def check_collected(
    names: Sequence[str], target: str, size: int, folder: str, accepted: Sequence[str] | None, for_python: str | None
) -> Finding:
    """Whether all that was gathered can be installed over there."""
    bad = []
    for name in names:
        if not name.endswith(".whl"):
            bad.append(f"{name} is a source package")
        elif accepted is not None and for_python is not None:
            number = for_python.replace(".", "")
            tags = frozenset(
                f"{python}-{abi}-{platform}" for platform in (*accepted, "any") for python, abi in _python_abis(number)
            )
            reason = wheel_mismatch(name, tags, f"cp{number}")
            if reason:
                bad.append(f"{name} {reason}")
    if bad:
        return Finding(
            "collected-not-installable",
            Level.WARN,
            f"Gathered, but not all of it is ready to install on {target}: {quote('; '.join(bad[:4]), 300)}.",
            "A source package must be compiled over there, with a compiler and its build requirements.",
            ("take versions that have a wheel, or build these there",),
            "PEP 425 wheel tags",
        )
    shown = os.path.basename(os.path.abspath(folder))
    return Finding(
        "collected",
        Level.OK,
        f"{len(names)} wheels for {target} are in {shown} ({size / 2**20:.0f} MiB).",
        f"On the other machine: `python env_sandbox.py --offline --wheelhouse {shown} --requirements "
        f"{shown}/requirements.txt`.",
        source="pip download; PEP 425 wheel tags",
    )


def _python_abis(number: str) -> list[tuple[str, str]]:
    major, minor = number[0], int(number[1:])
    own = [(f"cp{number}", f"cp{number}"), (f"cp{number}", "abi3"), (f"cp{number}", "none")]
    older = [(f"cp{major}{lower}", "abi3") for lower in range(2, minor)]
    pure = [(f"py{major}", "none"), (f"py{number}", "none"), ("py2", "none")]
    return [*own, *older, *pure, *[(f"py{major}{lower}", "none") for lower in range(0, minor)]]
