"""Which torch release and build runs on this GPU, driver, Python, C library and system, and what decided it.

Every row of facts/torch_wheels.json is tried against every constraint; the newest release that passes all wins.
Also a command, used by install_pytorch.sh: `python -m preflight.wheels --help`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from preflight.facts import table

SOURCE = "facts/torch_wheels.json and facts/cuda_driver.json (PyTorch wheels read with pip; NVIDIA CUDA release notes)"
INDEX = "https://download.pytorch.org/whl/"


@dataclass(frozen=True)
class Target:
    """The machine that a wheel must run on. None where it is not known; that constraint then rejects nothing.

    `capabilities` are the compute capabilities of all NVIDIA cards that shall be used ("8.6"); `driver` is the NVIDIA
    driver's version; `glibc` is "2.35" or "musl"; `python` is "3.12" or "3.13t"; `accelerator` is one of cuda, rocm,
    xpu, mps, cpu.
    """

    accelerator: str = "cpu"
    capabilities: tuple[str, ...] = ()
    driver: str | None = None
    python: str | None = None
    glibc: str | None = None
    system: str = "Linux"
    machine: str = "x86_64"
    gfx: tuple[str, ...] = ()
    macos: str | None = None


@dataclass(frozen=True)
class Choice:
    """The build to install, or none. `decided_by` says which constraint ruled the newer ones out.

    `variant` is the index name (cu126, rocm7.2, xpu, cpu) or "pypi" on a Mac. `index` is None when PyPI's default build
    is the right one. `change` says what would have to change where nothing fits, or to get a newer one.
    """

    release: str | None = None
    version: str | None = None
    variant: str | None = None
    index: str | None = None
    decided_by: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    note: str = ""

    def arguments(self, installed: str | None = None) -> tuple[str, ...]:
        """What follows `pip install`. `installed` is the torch that is there, as its metadata names it ("2.15.0+cpu").

        pip takes another build of the same version for the wanted one, so that is replaced by force.
        """
        if self.version is None:
            return ()
        index = ("--index-url", self.index) if self.index else ()
        other_build = (installed or "").split("+")[0] == self.version and not self.is_installed(installed)
        return (f"torch=={self.version}", *index, *(("--force-reinstall",) if other_build else ()))

    def is_installed(self, installed: str | None) -> bool:
        """Whether that torch is this build already. Builds from an index carry its name ("+cu126"), PyPI's none."""
        wanted = f"{self.version}+{self.variant}" if self.index else self.version
        return installed is not None and installed == wanted

    def command(self, python: str = "python", installed: str | None = None) -> str | None:
        """The one command to run; None when nothing fits."""
        return f"{python} -m pip install {' '.join(self.arguments(installed))}" if self.version else None


@dataclass(frozen=True)
class Row:
    """One build of one release: a line of the table for this system."""

    release: str
    version: str
    variant: str
    pythons: tuple[str, ...]
    sm: tuple[str, ...]
    ptx: str | None
    glibc: str | None
    default: bool

    @property
    def cuda_major(self) -> int | None:
        """13 for cu130."""
        found = re.fullmatch(r"cu(\d\d)\d", self.variant)
        return int(found.group(1)) if found else None

    @property
    def cuda(self) -> tuple[int, int] | None:
        """(13, 0) for cu130."""
        found = re.fullmatch(r"cu(\d\d)(\d)", self.variant)
        return (int(found.group(1)), int(found.group(2))) if found else None


def numbers(version: str | None) -> tuple[int, ...]:
    """ "570.124.06" as (570, 124, 6), for comparing."""
    return tuple(int(part) for part in re.findall(r"\d+", (version or "").split("+")[0]))


def covers(sm: Sequence[str], ptx: str | None, capability: str) -> bool:
    """Whether a wheel with these cubins runs on this card.

    A cubin serves its own major from its own minor on; PTX serves every card that is at least as new.
    Source: support_rule of facts/torch_wheels.json. PTX marked "?" was not measured and does not count.
    """
    wanted = numbers(capability)
    for name in sm:
        have = numbers(name)
        if have[0] == wanted[0] and have[1] <= wanted[1]:
            return True
    return bool(ptx and "?" not in ptx and numbers(ptx)[:2] <= wanted)


# aarch64 builds hold other cubins. Source: torch_wheels.json confidence "aarch64 sm lists" (RELEASE.md).
_AARCH64_SM = {
    "cu126": ("8.0", "9.0"),
    "cu128": ("8.0", "9.0", "10.0", "12.0"),
    "cu129": ("8.0", "9.0", "10.0", "12.0"),
    "cu130": ("8.0", "9.0", "10.0", "11.0", "12.0"),
    "cu132": ("8.0", "9.0", "10.0", "11.0", "12.0"),
}


def rows(target: Target) -> Iterator[Row]:
    """The builds that exist for the target's system and accelerator, newest release first."""
    for entry in reversed(table("torch_wheels")["releases"]):
        for variant in _variants(entry, target):
            cuda = entry["cuda_linux_x86_64"].get(variant, {})
            arm = target.machine == "aarch64"
            yield Row(
                release=entry["release"],
                version=entry["patches"][-1],
                variant=variant,
                pythons=tuple(_pythons(entry, target)),
                sm=_AARCH64_SM.get(variant, ()) if arm else tuple(cuda.get("sm", ())),
                ptx=None if arm else cuda.get("ptx"),
                glibc=_glibc(entry, target.machine, variant) if target.system == "Linux" else None,
                default=variant == _default(entry, target),
            )


def _variants(entry: dict[str, Any], target: Target) -> list[str]:
    linux, windows = target.system == "Linux", target.system == "Windows"
    if target.accelerator == "cuda":
        if linux and target.machine == "x86_64":
            return sorted(entry["cuda_linux_x86_64"], reverse=True)
        if linux and target.machine == "aarch64":
            return sorted(entry["cuda_linux_aarch64"], reverse=True)
        return sorted(entry["cuda_windows"], reverse=True) if windows and target.machine == "x86_64" else []
    if target.accelerator == "rocm":
        found = list(entry["rocm_linux"] or []) if linux and target.machine == "x86_64" else []
        return sorted(found, key=numbers, reverse=True)
    if target.accelerator == "xpu":
        wanted = target.machine == "x86_64" and (linux or windows) and "index xpu" in (entry["xpu"] or "")
        return ["xpu"] if wanted else []
    if target.accelerator == "mps" and not (target.system == "Darwin" and target.machine == "arm64"):
        return []
    return ["cpu"]


def _pythons(entry: dict[str, Any], target: Target) -> list[str]:
    by_tag = entry["wheels_on_pypi_of_last_patch"]
    wanted = {
        ("Linux", "x86_64"): ("manylinux", "x86_64"),
        ("Linux", "aarch64"): ("manylinux", "aarch64"),
        ("Windows", "x86_64"): ("win_amd64", ""),
        ("Darwin", "arm64"): ("macosx", "arm64"),
        ("Darwin", "x86_64"): ("macosx", "x86_64"),
    }.get((target.system, target.machine))
    if wanted is None:
        return []
    found: list[str] = []
    for tag, pythons in by_tag.items():
        if tag.startswith(wanted[0]) and tag.endswith(wanted[1]):
            least = re.match(r"macosx_(\d+)_", tag)
            if least and target.macos and numbers(target.macos)[:1] < (int(least.group(1)),):
                continue
            found += pythons
    if target.system == "Linux" and target.machine == "x86_64":
        found += entry["python_linux_x86_64"]
    return list(dict.fromkeys(found))


def _glibc(entry: dict[str, Any], machine: str, variant: str) -> str | None:
    # "2.17 for cpu/cu118/cu124; 2.28 for cu126, rocm6.2.4 and xpu"
    parts = str(entry["glibc_min"].get(machine, "")).split(";")
    for part in parts:
        _, _, names = part.partition(" for ")
        if names and variant in re.split(r"[/,\s]+", names):
            return _first_version(part)
    return _first_version(parts[0])


def _first_version(text: str) -> str | None:
    found = re.search(r"\d+\.\d+", text)
    return found.group() if found else None


def _default(entry: dict[str, Any], target: Target) -> str | None:
    """What `pip install torch` alone brings on that system."""
    if target.system == "Linux":
        found = entry.get(f"pypi_default_linux_{target.machine}")
        return str(found) if found else None
    return "cpu"


# Each constraint: what it is called, and why a row does not pass it (None when it does).


def _by_gpu(row: Row, target: Target) -> str | None:
    if row.cuda_major is None:
        return None
    bad = [capability for capability in target.capabilities if not covers(row.sm, row.ptx, capability)]
    return f"torch {row.release} {row.variant} has no kernels for compute capability {', '.join(bad)}" if bad else None


def _by_driver(row: Row, target: Target) -> str | None:
    if row.cuda_major is None or target.driver is None:
        return None
    floor = driver_floor(row.cuda_major, target.system)
    if floor and numbers(target.driver) < numbers(floor):
        return f"CUDA {row.cuda_major} builds need driver {floor} or newer, this one is {target.driver}"
    return None


def _by_python(row: Row, target: Target) -> str | None:
    if target.python is None or target.python in row.pythons:
        return None
    known = [name for name in row.pythons if not name.endswith("t")]
    span = f"{known[0]} to {known[-1]}" if known else "no Python on this system"
    return f"torch {row.release} has wheels for {span}, not for Python {target.python}"


def _by_glibc(row: Row, target: Target) -> str | None:
    if row.glibc is None or target.glibc is None:
        return None
    if target.glibc == "musl":
        return "PyTorch's wheels need glibc; this system has musl"
    if numbers(target.glibc) < numbers(row.glibc):
        return f"torch {row.release} {row.variant} needs glibc {row.glibc}, this system has {target.glibc}"
    return None


def _by_gfx(row: Row, target: Target) -> str | None:
    if not row.variant.startswith("rocm") or not target.gfx:
        return None
    built = rocm_architectures(row.variant)
    bad = [name for name in target.gfx if name not in built] if built else []
    return f"torch {row.release} {row.variant} has no kernels for {', '.join(bad)}" if bad else None


def _by_card_and_driver(row: Row, target: Target) -> str | None:
    if row.cuda_major is None or target.driver is None:
        return None
    return next((why for cc in target.capabilities if (why := driver_drives(target.driver, cc))), None)


CONSTRAINTS = (
    ("driver", _by_card_and_driver),
    ("GPU", _by_gpu),
    ("GPU", _by_gfx),
    ("driver", _by_driver),
    ("Python", _by_python),
    ("glibc", _by_glibc),
)


def refusals(row: Row, target: Target) -> list[tuple[str, str]]:
    """Why a build does not run on the target: (constraint, reason) for each that it fails; empty when it runs."""
    return [(name, reason) for name, check in CONSTRAINTS if (reason := check(row, target))]


def rocm_architectures(variant: str) -> tuple[str, ...]:
    """The gfx names that a ROCm build was compiled for; empty when the table does not say."""
    known: dict[str, list[str]] = table("rocm_architectures")["variants"]
    return tuple(known.get(variant, ()))


def driver_floor(cuda_major: int, system: str) -> str | None:
    """The oldest driver that runs builds of this CUDA major version."""
    for entry in table("cuda_driver")["minor_version_compat"]:
        if entry["cuda_major"] == cuda_major:
            return str(entry["min_windows" if system == "Windows" else "min_linux"])
    return None


def cuda_majors(driver: str, system: str = "Linux") -> tuple[int, ...]:
    """The CUDA major versions whose builds this driver runs, oldest first."""
    floors = [(entry["cuda_major"], driver_floor(entry["cuda_major"], system)) for entry in _floors()]
    return tuple(major for major, floor in floors if floor and numbers(driver) >= numbers(floor))


def _floors() -> list[dict[str, Any]]:
    return list(table("cuda_driver")["minor_version_compat"])


def native_cuda(driver: str) -> str | None:
    """The CUDA version that the driver's branch knows by itself."""
    branch = numbers(driver)[:1]
    known: dict[str, str] = table("cuda_driver")["driver_branch_native_cuda"]
    older = [int(name) for name in known if branch and int(name) <= branch[0]]
    return known[str(max(older))] if older else None


def driver_for(capability: str) -> tuple[int | None, int | None]:
    """(first, last) driver branch that drives a card of this compute capability; None for no such limit known."""
    cc = numbers(capability)[:2]
    needs = table("cuda_driver")["gpu_needs_driver_branch"]
    first: int | None = None
    for least, key in (
        ((12, 1), "GB10 sm_121, Thor sm_110"),
        ((12, 0), "Blackwell sm_100/sm_120"),
        ((11, 0), "GB10 sm_121, Thor sm_110"),
        ((10, 0), "Blackwell sm_100/sm_120"),
        ((9, 0), "Hopper sm_90"),
        ((8, 9), "Ada sm_89"),
        ((8, 6), "Ampere sm_86"),
        ((8, 0), "Ampere sm_80"),
        ((7, 5), "Turing"),
    ):
        if cc >= least:
            first = int(needs[key])
            break
    last = None
    if cc < (5, 0):
        last = int(needs["last branch for Kepler"])
    elif cc < (7, 5):
        last = int(needs["last branch for Maxwell/Pascal/Volta"])
    return first, last


def driver_drives(driver: str, capability: str) -> str | None:
    """Why this driver cannot drive this card at all; None when it can."""
    first, last = driver_for(capability)
    branch = (*numbers(driver), 0)[0]
    if first is not None and branch < first:
        return f"compute capability {capability} needs driver branch {first} or newer, this driver is {driver}"
    if last is not None and branch > last:
        return f"driver branch {last} is the last one for compute capability {capability}, this driver is {driver}"
    return None


def choose(target: Target) -> Choice:
    """The newest build that fits the target, or why none does and what to change."""
    if target.accelerator == "cuda" and target.driver:
        unfit = [reason for cc in target.capabilities if (reason := driver_drives(target.driver, cc))]
        if unfit:
            return Choice(decided_by=("driver: " + unfit[0],), change=_driver_changes(target))
    candidates = list(rows(target))
    refused: dict[str, list[tuple[Row, str, str]]] = {}
    fitting: list[Row] = []
    for row in candidates:
        reasons = refusals(row, target)
        if not reasons:
            fitting.append(row)
        for name, reason in reasons:
            refused.setdefault(row.release, []).append((row, name, reason))
    if not fitting:
        return Choice(
            decided_by=tuple(_why_nothing(candidates, refused, target)), change=tuple(_changes(target, candidates))
        )
    newest = fitting[0].release
    same = [row for row in fitting if row.release == newest]
    row = _preferred(same, target)
    index = None if row.default else INDEX + row.variant
    if target.accelerator == "cpu" and target.system == "Linux" and _default_is_cuda(row, target):
        index = INDEX + "cpu"  # PyPI's default would bring gigabytes of CUDA libraries that nothing here can use
    return Choice(
        release=row.release,
        version=row.version,
        variant="pypi" if target.system == "Darwin" else row.variant,
        index=index,
        decided_by=tuple(_why_not_newer(row, candidates, refused, target)),
        change=(),
        note=_note(row, target),
    )


def _default_is_cuda(row: Row, target: Target) -> bool:
    entry = next(e for e in table("torch_wheels")["releases"] if e["release"] == row.release)
    return str(_default(entry, target) or "").startswith("cu")


def _preferred(same: list[Row], target: Target) -> Row:
    """Among builds of one release: PyPI's default, else the newest CUDA that the driver knows by itself, else any."""
    default = next((row for row in same if row.default), None)
    if default:
        return default
    listed = next((row for row in same if row.variant.startswith("rocm") and rocm_architectures(row.variant)), None)
    if listed:
        return listed
    native = numbers(native_cuda(target.driver)) if target.driver else ()
    known = [row for row in same if row.cuda and native and row.cuda <= native]
    return known[0] if known else (same[-1] if native else same[0])


def _why_not_newer(
    row: Row, candidates: list[Row], refused: dict[str, list[tuple[Row, str, str]]], target: Target
) -> list[str]:
    found = []
    latest = str(table("torch_wheels")["releases"][-1]["release"])
    if row.release != latest:
        newer = [other for other in candidates if numbers(other.release) > numbers(row.release)]
        if not newer:
            found.append(_told("system", f"torch {row.release} is the newest with a build for {_system(target)}"))
        seen = set()
        for other in newer:
            for one, name, reason in refused.get(other.release, []):
                # The build nearest to fitting tells most: one that fails a single constraint.
                alone = sum(entry[0] is one for entry in refused[other.release]) == 1
                # A driver can be too old for CUDA 13 and for CUDA 12: both are told.
                key = reason if name == "driver" else name
                if alone and key not in seen:
                    seen.add(key)
                    found.append(_told(name, reason))
        if newer and not seen:
            name, reason = refused[newer[0].release][0][1:]
            found.append(_told(name, reason))
    if not row.default and target.system == "Linux" and row.cuda_major is not None:
        entry = next(e for e in table("torch_wheels")["releases"] if e["release"] == latest)
        default = _default(entry, target)
        if default and default.startswith("cu"):
            plain = f"plain `pip install torch` brings torch {latest} {default}, which does not fit here"
            found.append(_told("index", plain))
    if target.system == "Windows" and row.cuda_major is not None:
        found.append(_told("index", "on Windows plain `pip install torch` brings a CPU build"))
    return found


def _told(name: str, reason: str) -> str:
    """The constraint's name and what it says."""
    return f"{name}: {reason}"


def _system(target: Target) -> str:
    return f"{target.system} {target.machine} with {target.accelerator}"


def _why_nothing(candidates: list[Row], refused: dict[str, list[tuple[Row, str, str]]], target: Target) -> list[str]:
    if not candidates:
        return [_told("system", f"no torch release has a build for {_system(target)}")]
    everywhere = []
    for name, check in CONSTRAINTS:
        reasons = [check(row, target) for row in candidates]
        if all(reasons):
            everywhere.append(f"{name}: {reasons[0] if name != 'Python' else _python_span(candidates, target)}")
    if everywhere:
        return list(dict.fromkeys(everywhere))
    nearest = min((refused[row.release] for row in candidates), key=len)
    return list(dict.fromkeys(f"{name}: {reason}" for _, name, reason in nearest))


def _python_span(candidates: list[Row], target: Target) -> str:
    known = sorted({name for row in candidates for name in row.pythons if not name.endswith("t")}, key=numbers)
    if not known:
        return f"no wheels for {_system(target)}"
    return f"wheels exist for Python {known[0]} to {known[-1]}, not for {target.python}"


def _driver_changes(target: Target) -> tuple[str, ...]:
    spans = [driver_for(capability) for capability in target.capabilities]
    first = max((low for low, _ in spans if low is not None), default=None)
    last = min((high for _, high in spans if high is not None), default=None)
    if first is not None and last is not None and first > last:
        return ("no driver drives all of these cards at once: hide one of them with CUDA_VISIBLE_DEVICES",)
    if last is not None and target.driver and numbers(target.driver)[0] > last:
        return (f"install an NVIDIA driver of branch {last}, the last one that drives this card",)
    fit = _fits(replace(target, driver=str(first)))
    then = f": torch {fit.version} {fit.variant} would then run" if fit else ""
    return (f"install NVIDIA driver branch {first} or newer{then}",)


def _changes(target: Target, candidates: list[Row]) -> list[str]:
    """What would have to change, smallest change first: each is tried alone against the table."""
    found = []
    if target.driver is not None:
        for major in sorted(entry["cuda_major"] for entry in _floors()):
            floor = driver_floor(major, target.system)
            better = replace(target, driver=floor)
            limit = min((high for cc in target.capabilities if (high := driver_for(cc)[1])), default=None)
            if floor and numbers(floor) > numbers(target.driver) and (limit is None or numbers(floor)[0] <= limit):
                fit = _fits(better)
                if fit:
                    found.append(f"driver {floor} or newer: torch {fit.version} {fit.variant} would then run")
                    break
    if target.python is not None:
        known = sorted({name for row in candidates for name in row.pythons if not name.endswith("t")}, key=numbers)
        fits = [(name, fit) for name in known if (fit := _fits(replace(target, python=name)))]
        if fits:
            name, fit = max(fits, key=lambda pair: (numbers(pair[1].release), numbers(pair[0])))
            found.append(f"Python {name}: torch {fit.version} {fit.variant} would then run")
    if target.glibc is not None:
        for least in ("2.28", "2.17") if target.glibc == "musl" else ("2.17", "2.28"):
            fit = _fits(replace(target, glibc=least))
            if fit and (target.glibc == "musl" or numbers(least) > numbers(target.glibc)):
                found.append(
                    f"a system with glibc {least} or newer (or a container of one): torch {fit.version} would run"
                )
                break
    if target.capabilities and len(target.capabilities) > 1:
        for capability in dict.fromkeys(target.capabilities):
            fit = _fits(replace(target, capabilities=(capability,)))
            if fit:
                found.append(
                    f"only the compute capability {capability} card (CUDA_VISIBLE_DEVICES): torch {fit.version} "
                    f"{fit.variant}"
                )
    if target.accelerator == "cuda" and not found:
        found.append("train on the CPU build, or on another card: no published wheel holds kernels for this one")
    if target.accelerator == "rocm" and not found:
        found.append("run it in Linux on x86_64 with a card that the ROCm wheels were built for")
    return found


def _fits(target: Target) -> Choice | None:
    for row in rows(target):
        if not refusals(row, target):
            return Choice(row.release, row.version, row.variant)
    return None


def _note(row: Row, target: Target) -> str:
    if row.variant == "cu126" and target.capabilities and min(numbers(cc) for cc in target.capabilities) < (7, 5):
        return "cu126 of torch 2.14 is the last build with kernels for Maxwell, Pascal and Volta cards."
    return ""
