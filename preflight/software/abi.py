"""Do the compiled parts of this stack fit each other, the interpreter, the system and the driver?

Judged from metadata alone: wheel tags, declared versions, the driver's version. What a stage really loaded is not
called broken here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflight import facts
from preflight.findings import Finding, Level, quote
from preflight.software.requirements import normal_name, packaging

_PEP425 = "PEP 425, PEP 600 and PEP 656 (wheel tags)"


@dataclass(frozen=True)
class Stack:
    """What is installed, or would be, and where. None: not known.

    `packages`: name, version, tags, requires, native_files. `imported`: names that a stage imported or failed to.
    `driver`: the NVIDIA driver's version, not the CUDA version that nvidia-smi prints.
    """

    packages: Sequence[Mapping[str, Any]]
    python: Mapping[str, Any]
    tags: frozenset[str] | None
    driver: str | None
    imported: frozenset[str] = frozenset()
    cuda: str | None = None
    system: str = "Linux"

    def version(self, name: str) -> str | None:
        """The version of a distribution, or None."""
        wanted = normal_name(name)
        return next((str(p["version"]) for p in self.packages if normal_name(p["name"]) == wanted), None)


def stack_of(
    outcome: Mapping[str, Any], python: Mapping[str, Any], tags: frozenset[str] | None, driver: str | None
) -> Stack:
    """The stack of a trial: what was installed, else what the resolver chose."""
    packages = outcome.get("packages") or []
    if not packages:
        resolved = (outcome.get("resolve") or {}).get("packages", [])
        packages = [{**package, "tags": _tags_of_file(package.get("file")), "requires": []} for package in resolved]
    steps = [step for stage in outcome.get("stages") or [] for step in stage["steps"]]
    # A failed import has a finding of its own, with the real cause.
    modules = {str(step["step"]).removeprefix("import ") for step in steps}
    imported = {normal_name(p["name"]) for p in packages if modules & set(p.get("top_level", ()))}
    cuda = next((step["facts"].get("cuda") for step in steps if step["step"] == "import torch" and step["ok"]), None)
    return Stack(packages, python, tags, driver, frozenset(imported), cuda, str(python.get("system") or "Linux"))


def _tags_of_file(name: str | None) -> list[str]:
    from preflight.software.requirements import wheel_tags

    return sorted(wheel_tags(name) or ()) if name else []


def check_abi(stack: Stack) -> list[Finding]:
    """All findings about compiled parts; one OK finding when there is none to make."""
    found: list[Finding] = []
    checks = (check_bits, check_tags, check_driver, check_companions, check_numpy, check_free_threaded, check_conda)
    for check in checks:
        found += check(stack)
    found += check_twice(stack)
    if not found and stack.packages:
        native = sum(1 for package in stack.packages if package.get("native_files"))
        found.append(
            Finding(
                "abi-fits",
                Level.OK,
                f"Compiled parts fit by their tags and versions ({native or len(stack.packages)} packages looked at).",
                source=_PEP425,
            )
        )
    return found


def check_bits(stack: Stack) -> list[Finding]:
    """A 32-bit interpreter on a 64-bit system finds no wheels."""
    if stack.python.get("bits") != 32:
        return []
    return [
        Finding(
            "python-32-bit",
            Level.FAIL,
            "The interpreter is a 32-bit program.",
            "torch has no 32-bit wheels; pip then says that no version exists.",
            ("install the 64-bit Python and make the environment anew",),
            "facts/torch_wheels.json",
        )
    ]


def check_tags(stack: Stack) -> list[Finding]:
    """Wheels whose tags this interpreter does not accept: another Python, ABI, libc or machine."""
    if stack.tags is None:
        return []
    bad = []
    for package in stack.packages:
        tags = {one for tag in package.get("tags") or [] for one in _expand(tag)}
        if tags and not tags & stack.tags:
            bad.append((package, sorted(tags)))
    if not bad:
        return []
    said = "; ".join(f"{p['name']} {p['version']} ({', '.join(t[:2])}: {why_not(t, stack)})" for p, t in bad[:4])
    return [
        Finding(
            "wheel-tag-mismatch",
            Level.FAIL,
            f"{len(bad)} package(s) are built for another interpreter or system: {quote(said, 400)}.",
            "Such a file was not chosen by an installer for this interpreter: the environment was copied, shared "
            "between "
            "machines, or Python was replaced under it.",
            ("make the environment anew on this machine from its requirements",),
            _PEP425,
        )
    ]


def _expand(tag: str) -> list[str]:
    parts = tag.split("-")
    if len(parts) != 3:
        return []
    return [f"{p}-{a}-{o}" for p in parts[0].split(".") for a in parts[1].split(".") for o in parts[2].split(".")]


def why_not(tags: Iterable[str], stack: Stack) -> str:
    """In words, which part of the tags does not fit."""
    accepted = [tag.split("-") for tag in stack.tags or ()]
    platforms = {tag.split("-")[2] for tag in tags}
    here = {tag[2] for tag in accepted}
    if not platforms & here:
        libc = str(stack.python.get("libc") or "")
        newest = max((_glibc(platform) for platform in platforms), default=None, key=lambda v: v or (0, 0))
        have = re.search(r"glibc (\d+)\.(\d+)", libc)
        if any("musllinux" in platform for platform in platforms) and "glibc" in libc:
            return "for musl (Alpine), this system has glibc"
        if newest and have and newest > (int(have.group(1)), int(have.group(2))):
            return f"needs glibc {newest[0]}.{newest[1]}, here is {have.group(1)}.{have.group(2)}"
        if newest and "glibc" not in libc and stack.system == "Linux":
            return "for glibc, this system has musl"
        return "for another operating system or machine"
    if not {tag.split("-")[1] for tag in tags} & {tag[1] for tag in accepted}:
        return "for another Python ABI"
    return "for another Python version"


def _glibc(platform: str) -> tuple[int, int] | None:
    match = re.match(r"manylinux_(\d+)_(\d+)_", platform)
    if match:
        return int(match.group(1)), int(match.group(2))
    old = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
    return next((version for name, version in old.items() if platform.startswith(name + "_")), None)


def cuda_of(stack: Stack) -> str | None:
    """The CUDA version of the torch build ("12.8", or "13" when only the major is known); None for a CPU build."""
    if stack.cuda:
        return stack.cuda
    version = stack.version("torch") or ""
    local = re.search(r"\+cu(\d{2})(\d+)", version)
    if local:
        return f"{local.group(1)}.{local.group(2)}"
    if "+" in version:
        return None
    for package in stack.packages:
        name = normal_name(package["name"])
        major = re.fullmatch(r"nvidia-cuda-runtime-cu(\d+)", name)
        if major:
            return major.group(1)
        if name == "nvidia-cuda-runtime":
            return str(package["version"]).split(".")[0]
    return None


def check_driver(stack: Stack) -> list[Finding]:
    """The driver must be at least the floor of the build's CUDA major; nothing else has to match."""
    cuda = cuda_of(stack)
    if cuda is None or stack.driver is None:
        return []
    major = int(cuda.split(".")[0])
    rows = facts.table("cuda_driver")["minor_version_compat"]
    row = next((row for row in rows if row["cuda_major"] == major), None)
    if row is None:
        return []
    floor = str(row["min_windows"] if stack.system == "Windows" else row["min_linux"])
    if _numbers(stack.driver) >= _numbers(floor):
        return []
    runs = [r["cuda_major"] for r in rows if _numbers(stack.driver) >= _numbers(str(r["min_linux"]))]
    older = f"a torch build for CUDA {max(runs)}" if runs else "no CUDA build of torch runs with it"
    return [
        Finding(
            "driver-too-old-for-build",
            Level.FAIL,
            f"torch {stack.version('torch')} is built for CUDA {cuda}, and driver {stack.driver} is too old for it.",
            f"CUDA {major} needs driver {floor} or newer. nvcc and the toolkit need not match.",
            (f"install driver {floor} or newer", f"or {older}: `python gpu_probe.py` names the command"),
            "facts/cuda_driver.json: CUDA Toolkit release notes, minor-version compatibility",
        )
    ]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def check_companions(stack: Stack) -> list[Finding]:
    """torchvision, torchaudio and triton must be made for this torch, and be of the same CPU or CUDA variant."""
    torch = stack.version("torch")
    if torch is None:
        return []
    found = []
    specifiers = packaging("specifiers")
    for name in ("torchvision", "torchaudio", "torchtext", "xformers"):
        package = next((p for p in stack.packages if normal_name(p["name"]) == name), None)
        if package is None:
            continue
        wants = _wanted(package, "torch")
        if wants and not specifiers.SpecifierSet(wants, prereleases=True).contains(torch.split("+")[0]):
            found.append(
                Finding(
                    f"{name}-mismatch",
                    Level.FAIL,
                    f"{name} {package['version']} is made for torch{wants}, and torch {torch} is installed.",
                    f"Each {name} release is compiled against one torch release; with another its operators are "
                    f"missing "
                    "(`operator torchvision::nms does not exist`) or symbols are undefined.",
                    (
                        f"install the {name} release for this torch, from the same index as torch",
                        f"or uninstall {name}: training on text does not need it",
                    ),
                    f"metadata of {name}: Requires-Dist",
                )
            )
            continue
        ours, theirs = _variant(torch), _variant(str(package["version"]))
        if theirs and ours and theirs != ours and name not in stack.imported:
            found.append(
                Finding(
                    f"{name}-variant",
                    Level.WARN,
                    f"{name} {package['version']} and torch {torch} are of different variants ({theirs}, {ours}).",
                    "Both must come from the same index: a CUDA build beside a CPU build looks for libraries that "
                    "are absent.",
                    (f"reinstall {name} from the index that torch came from",),
                    "https://pytorch.org/get-started/locally/",
                )
            )
    wants = next((_wanted(p, "triton") for p in stack.packages if normal_name(p["name"]) == "torch"), None)
    triton = stack.version("triton")
    if wants and triton and not specifiers.SpecifierSet(wants, prereleases=True).contains(triton.split("+")[0]):
        found.append(
            Finding(
                "triton-mismatch",
                Level.WARN,
                f"torch {torch} wants triton{wants}, and triton {triton} is installed.",
                "torch.compile generates code for the triton it was released with; with another it fails or is slow.",
                (f"`pip install 'triton{wants}'`",),
                "metadata of torch: Requires-Dist",
            )
        )
    return found


def _variant(version: str) -> str | None:
    local = version.partition("+")[2]
    return local or None


def _wanted(package: Mapping[str, Any], name: str) -> str | None:
    """The specifier with which `package` requires `name`, without an extra; None when it does not."""
    for text in package.get("requires") or []:
        match = re.match(r"([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;\s*(.*))?$", text)
        if match and normal_name(match.group(1)) == name and "extra" not in (match.group(3) or ""):
            return re.sub(r"\s+", "", match.group(2)) or None
    return None


def check_numpy(stack: Stack) -> list[Finding]:
    """Packages built for NumPy 1 beside NumPy 2, as far as no stage has imported them."""
    numpy = stack.version("numpy")
    if numpy is None or _numbers(numpy)[0] < 2:
        return []
    rows = facts.table("error_signatures")["signatures"]
    ready: dict[str, str] = next((row["numpy2_ready"] for row in rows if row["id"] == "numpy2_abi"), {})
    old = []
    for package in stack.packages:
        name = normal_name(package["name"])
        if name in ready and name not in stack.imported and _numbers(str(package["version"])) < _numbers(ready[name]):
            old.append(f"{package['name']} {package['version']} (from {ready[name]} on)")
    if not old:
        return []
    return [
        Finding(
            "numpy-abi-suspect",
            Level.WARN,
            f"NumPy {numpy} is installed beside packages that were built for NumPy 1: {', '.join(old)}.",
            "Old releases declare no upper bound, so pip lets them in. They fail when they are imported.",
            ("raise them to the versions given in brackets", "or `numpy<2`"),
            "facts/error_signatures.json, numpy2_abi",
        )
    ]


def check_free_threaded(stack: Stack) -> list[Finding]:
    """A free-threaded interpreter needs wheels of its own ("cp313t"); abi3 wheels do not serve it."""
    if not stack.python.get("free_threaded"):
        return []
    without = [
        f"{p['name']} {p['version']}"
        for p in stack.packages
        if p.get("native_files") and not any(re.search(r"-cp3\d+t-", tag) for tag in p.get("tags") or [])
    ]
    if not without:
        return []
    return [
        Finding(
            "free-threaded-python",
            Level.WARN,
            f"This Python runs without the GIL, and these packages have no build for it: {', '.join(without[:6])}.",
            "Importing one of them turns the GIL on again, or fails.",
            ("use the ordinary build of Python for training",),
            "Python documentation, free-threaded CPython",
        )
    ]


def check_conda(stack: Stack) -> list[Finding]:
    """The same library from conda and from pip in one environment."""
    names = {}
    for entry in stack.python.get("conda_packages") or []:
        match = re.fullmatch(r"(.+)-([^-]+)-([^-]+)", entry)
        if match:
            names[normal_name(match.group(1))] = match.group(2)
    if not names:
        return []
    both = []
    for package in stack.packages:
        name = normal_name(package["name"])
        other = "pytorch" if name == "torch" else name
        if package.get("installer") in ("pip", "uv") and other in names and package.get("native_files"):
            both.append(f"{name} ({names[other]} from conda, {package['version']} from {package['installer']})")
    if not both:
        return []
    return [
        Finding(
            "conda-and-pip-mixed",
            Level.WARN,
            f"Installed by conda and again by pip: {', '.join(both[:6])}.",
            "The later one overwrites files of the earlier; two copies of a runtime (OpenMP, MKL, CUDA) then meet in "
            "a process.",
            ("make a new environment and install each package with one tool only",),
            "conda documentation, using pip in a conda environment",
        )
    ]


def check_twice(stack: Stack) -> list[Finding]:
    """One distribution present in two versions: an upgrade that broke off, or two folders on the path."""
    seen: dict[str, set[tuple[str, str]]] = {}
    for package in stack.packages:
        seen.setdefault(normal_name(package["name"]), set()).add(
            (str(package["version"]), str(package.get("where", "")))
        )
    twice = {name: sorted(v for v, _ in found) for name, found in seen.items() if len(found) > 1}
    if not twice:
        return []
    said = ", ".join(f"{name} ({', '.join(versions)})" for name, versions in sorted(twice.items())[:6])
    return [
        Finding(
            "installed-twice",
            Level.WARN,
            f"Present more than once: {said}.",
            "Python takes the first on its path; pip may speak of the other.",
            ("`pip uninstall` it until it is gone, then install it once",),
            "importlib.metadata of the interpreter",
        )
    ]
