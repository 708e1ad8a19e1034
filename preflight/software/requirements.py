"""What a requirements file asks for: every line form pip knows, with the file and line it came from."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from preflight.console import UsageError
from preflight.findings import quote

# Options that may stand on a line of their own, with whether a value follows. Source: pip's documentation,
# "Requirements File Format", read 2026-11-30.
_LINE_OPTIONS: dict[str, bool] = {
    "-i": True,
    "--index-url": True,
    "--pypi-url": True,
    "--extra-index-url": True,
    "--no-index": False,
    "-c": True,
    "--constraint": True,
    "-r": True,
    "--requirement": True,
    "-e": True,
    "--editable": True,
    "-f": True,
    "--find-links": True,
    "--no-binary": True,
    "--only-binary": True,
    "--prefer-binary": False,
    "--require-hashes": False,
    "--pre": False,
    "--trusted-host": True,
    "--use-feature": True,
}
_SAME_OPTION = {
    "-i": "--index-url",
    "--pypi-url": "--index-url",
    "-c": "--constraint",
    "-r": "--requirement",
    "-e": "--editable",
    "-f": "--find-links",
}
# Options that belong to the requirement they stand behind.
_REQUIREMENT_OPTIONS: dict[str, bool] = {
    "--hash": True,
    "--config-settings": True,
    "--config-setting": True,
    "-C": True,
    "--global-option": True,
    "--install-option": True,
}
_ARCHIVES = (".whl", ".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz", ".tar")
_VCS = ("git+", "hg+", "svn+", "bzr+")


@dataclass(frozen=True)
class Requirement:
    """One requirement of a file.

    `kind`: index (a name looked up in an index), url, vcs, wheel, archive or folder (local), editable.
    `active` is None when its marker could not be evaluated. `specifier` is "" for any version.
    """

    file: str
    number: int
    text: str
    kind: str
    name: str | None = None
    extras: tuple[str, ...] = ()
    specifier: str = ""
    marker: str = ""
    active: bool | None = True
    target: str = ""
    hashes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def pinned(self) -> str | None:
        """The exact version asked for (`==` or `===`, no wildcard), or None."""
        match = re.fullmatch(r"\s*={2,3}\s*([^,*\s]+)\s*", self.specifier)
        return match.group(1) if match else None

    def shown(self) -> str:
        """The requirement as a person would write it, without hashes and comments."""
        if self.kind == "index":
            extras = f"[{','.join(self.extras)}]" if self.extras else ""
            return f"{self.name}{extras}{self.specifier}"
        return self.text

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return {
            "requirement": self.shown(),
            "kind": self.kind,
            "name": self.name,
            "extras": list(self.extras),
            "specifier": self.specifier or None,
            "marker": self.marker or None,
            "active": self.active,
            "hashes": len(self.hashes),
            "file": os.path.basename(self.file),
            "line": self.number,
        }


@dataclass(frozen=True)
class LineProblem:
    """A line that could not be understood or used, and why."""

    file: str
    number: int
    text: str
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return {
            "file": os.path.basename(self.file),
            "line": self.number,
            "text": quote(self.text, 160),
            "reason": self.reason,
        }


@dataclass
class Requirements:
    """Everything a requirements file and the files it names ask for."""

    path: str
    items: list[Requirement] = field(default_factory=list)
    constraints: list[Requirement] = field(default_factory=list)
    options: list[tuple[str, int, str, str]] = field(default_factory=list)  # file, line, option, value
    problems: list[LineProblem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def active(self) -> list[Requirement]:
        """The requirements whose marker holds (or could not be evaluated) for the interpreter under test."""
        return [item for item in self.items if item.active is not False]

    @property
    def skipped(self) -> list[Requirement]:
        """The requirements whose marker excludes them here."""
        return [item for item in self.items if item.active is False]

    @property
    def hash_mode(self) -> bool:
        """pip checks hashes for all as soon as one line has one."""
        return any(item.hashes for item in self.items) or any(o == "--require-hashes" for _, _, o, _ in self.options)

    def values(self, option: str) -> list[str]:
        """The values given for a long option, in order."""
        return [value for _, _, name, value in self.options if name == option]

    def named(self, name: str) -> Requirement | None:
        """The active requirement for a distribution, or None."""
        wanted = normal_name(name)
        return next((item for item in self.active if item.name and normal_name(item.name) == wanted), None)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return {
            "file": os.path.basename(self.path),
            "files": [os.path.basename(name) for name in self.files],
            "options": [f"{option} {value}".strip() for _, _, option, value in self.options],
            "requirements": [item.shown() for item in self.items],
            "active": [item.shown() for item in self.active],
            "skipped_by_marker": [f"{item.shown()} ; {item.marker}" for item in self.skipped],
            "constraints": [item.shown() for item in self.constraints],
            "lines": [item.as_json() for item in self.items],
            "problems": [problem.as_json() for problem in self.problems],
            "hash_mode": self.hash_mode,
        }


def normal_name(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packaging(module: str) -> Any:
    """The module of the `packaging` library, or pip's own copy of it. Raises UsageError when neither is there."""
    import importlib

    for parent in ("packaging", "pip._vendor.packaging"):
        try:
            return importlib.import_module(f"{parent}.{module}")
        except ImportError:
            continue
    raise UsageError("the package `packaging` is needed to read requirements; `pip install packaging`")


def read_requirements(path: str | os.PathLike[str], environment: Mapping[str, str] | None = None) -> Requirements:
    """What the file asks for, for an interpreter with this marker `environment` (PEP 508; None: our own).

    Relative paths are looked up beside the current folder as pip does, then beside the file that names them.
    Raises UsageError when the file itself cannot be read; a line that cannot is a problem in the result.
    """
    found = Requirements(str(path))
    _read_file(str(path), found, environment, constraint=False, came_from=())
    return found


TESTED_SET = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "numpy")


def tested_set(constraints: str | os.PathLike[str], environment: Mapping[str, str] | None = None) -> Requirements:
    """The packages that are tested together, at the versions that the constraints file pins."""
    found = Requirements("the tested set")
    _read_file(str(constraints), found, environment, constraint=True, came_from=("",))
    pins = {normal_name(item.name): item for item in found.constraints if item.name and item.active is not False}
    for number, name in enumerate(TESTED_SET, 1):
        text = f"{name}{pins[name].specifier}" if name in pins else name
        found.items.append(parse_requirement(text, "the tested set", number, environment))
    return found


def _text_of(path: str) -> str:
    raw = Path(path).read_bytes()
    for mark, encoding in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if raw.startswith(mark):
            return raw.decode(encoding)
    declared = re.search(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", b"\n".join(raw.split(b"\n")[:2]), re.M)
    try:
        return raw.decode(declared.group(1).decode() if declared else "utf-8")
    except (UnicodeDecodeError, LookupError):
        return raw.decode("latin-1")


def logical_lines(text: str) -> list[tuple[int, str]]:
    """The lines with their number, continuations joined, comments and blank lines left out, as pip joins them."""
    joined: list[tuple[int, str]] = []
    pending: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.match(r"\s*#", line) is not None
        if line.endswith("\\") and not comment:
            if not pending:
                start = number
            pending.append(line[:-1])
            continue
        if comment:
            line = " " + line  # a comment after a continued line ends it and must stay a comment
        if pending:
            joined.append((start, "".join([*pending, line])))
            pending = []
        else:
            joined.append((number, line))
    if pending:
        joined.append((start, "".join(pending)))
    stripped = ((number, re.sub(r"(^|\s+)#.*$", "", line).strip()) for number, line in joined)
    return [(number, line) for number, line in stripped if line]


def _read_file(
    path: str,
    found: Requirements,
    environment: Mapping[str, str] | None,
    *,
    constraint: bool,
    came_from: tuple[str, ...],
) -> None:
    try:
        text = _text_of(path)
    except OSError as error:
        if not came_from:
            raise UsageError(f"--requirements {path}: cannot be read ({error.strerror or error})") from error
        raise
    if "\0" in text:
        raise UsageError(f"{path}: is not a text file; a requirements file is allowed")
    found.files.append(path)
    for number, line in logical_lines(text):
        line = re.sub(r"\$\{([A-Z0-9_]+)\}", lambda m: os.environ.get(m.group(1), m.group(0)), line)
        try:
            _read_line(path, number, line, found, environment, constraint, (*came_from, os.path.abspath(path)))
        except _Refused as refused:
            found.problems.append(LineProblem(path, number, line, str(refused)))


class _Refused(Exception):
    """Why a line cannot be used."""


def _split_options(line: str) -> tuple[str, list[str]]:
    """The requirement part and the option words of a line, as pip splits them."""
    words = line.split(" ")
    first = next((index for index, word in enumerate(words) if word.startswith("-") and len(word) > 1), len(words))
    try:
        return " ".join(words[:first]).strip(), shlex.split(" ".join(words[first:]))
    except ValueError as error:
        raise _Refused(f"quotes do not match ({error})") from None


def _options(words: list[str]) -> list[tuple[str, str]]:
    known = {**_LINE_OPTIONS, **_REQUIREMENT_OPTIONS}
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        meant_long = f"-{word.partition('=')[0]}" in known  # "-extra-index-url" would be read as -e with a value
        if name not in known and re.match(r"-[a-zA-Z].", word) and known.get(word[:2]) and not meant_long:
            name, equals, value = word[:2], "=", word[2:]  # "-cconstraints.txt"
        if name not in known:
            meant = " (two dashes?)" if meant_long else ""
            raise _Refused(f"{quote(word, 60)} is not an option that pip allows in a requirements file{meant}")
        if known[name] and not equals:
            if not rest:
                raise _Refused(f"{name} needs a value")
            value = rest.pop(0)
        found.append((_SAME_OPTION.get(name, name), value))
    return found


def _read_line(
    path: str,
    number: int,
    line: str,
    found: Requirements,
    environment: Mapping[str, str] | None,
    constraint: bool,
    came_from: tuple[str, ...],
) -> None:
    part, words = _split_options(line)
    options = _options(words)
    if not part:
        editables = [value for name, value in options if name == "--editable"]
        for value in editables:
            found.items.append(_located(value, path, number, f"-e {value}", environment, editable=True))
        for name, value in options:
            if name == "--editable":
                continue
            if name in _REQUIREMENT_OPTIONS:
                raise _Refused(f"{name} stands behind a requirement; there is none on this line (a lost backslash?)")
            if name in ("--requirement", "--constraint"):
                found.options.append((path, number, name, value))
                _nested(value, path, found, environment, name == "--constraint" or constraint, came_from)
            else:
                found.options.append((path, number, name, value))
        return
    misplaced = [name for name, _ in options if name not in _REQUIREMENT_OPTIONS]
    if misplaced:
        raise _Refused(f"{misplaced[0]} must stand on a line of its own, not behind a requirement")
    item = parse_requirement(part, path, number, environment)
    hashes = tuple(value for name, value in options if name == "--hash")
    wrong = next((h for h in hashes if not re.fullmatch(r"(sha256|sha384|sha512):[0-9a-fA-F]{64,128}", h)), None)
    if wrong is not None:
        raise _Refused(f"--hash={quote(wrong, 40)} is not sha256, sha384 or sha512 with its hexadecimal digits")
    others = tuple(f"{name}={value}" for name, value in options if name != "--hash")
    item = replace(item, hashes=hashes, options=others)
    if constraint:
        if item.extras:
            raise _Refused("a constraint may not have extras")
        if item.kind not in ("index", "url", "wheel", "vcs") or item.name is None:
            raise _Refused("a constraint must name its package")
        found.constraints.append(item)
    else:
        found.items.append(item)


def _nested(
    value: str,
    path: str,
    found: Requirements,
    environment: Mapping[str, str] | None,
    constraint: bool,
    came_from: tuple[str, ...],
) -> None:
    if re.match(r"https?:", value):
        raise _Refused("names a file on the network, which is not read here; download it and name the local copy")
    nested = _file_path(value)
    # pip resolves these relative to the file that names them.
    target = nested if os.path.isabs(nested) else os.path.join(os.path.dirname(path), nested)
    if os.path.abspath(target) in came_from:
        raise _Refused(f"{quote(value, 80)} includes itself")
    try:
        _read_file(target, found, environment, constraint=constraint, came_from=came_from)
    except OSError as error:
        raise _Refused(f"{quote(value, 80)} cannot be read ({error.strerror or error})") from None


def _file_path(value: str) -> str:
    if not value.startswith("file:"):
        return value
    path = unquote(urlsplit(value).path)
    return path[1:] if os.name == "nt" and re.match(r"/[A-Za-z]:", path) else path


def parse_requirement(
    text: str, path: str = "", number: int = 0, environment: Mapping[str, str] | None = None
) -> Requirement:
    """One requirement (without line options). Raises an error with the reason when it is none."""
    body, marker = _split_marker(text)
    if body.lower().startswith(_VCS) or re.match(r"[a-zA-Z][\w+.-]*:(//|/)", body) or body.startswith("file:"):
        return _located(body, path, number, text, environment, marker=marker)
    looks_local = body.startswith((".", "/", "~")) or re.match(r"[A-Za-z]:[\\/]", body) or "\\" in body
    bare = re.sub(r"\[[\w ,.-]*\]$", "", body)
    if "@" not in body and (looks_local or bare.lower().endswith(_ARCHIVES) or (os.sep in bare and "://" not in bare)):
        return _located(body, path, number, text, environment, marker=marker)
    try:
        parsed = packaging("requirements").Requirement(text)
    except Exception as error:  # InvalidRequirement of whichever copy of the library
        raise _Refused(_why_invalid(text, error)) from None
    kind, target = "index", ""
    if parsed.url:
        target = parsed.url
        kind = "vcs" if target.lower().startswith(_VCS) else "url"
    return Requirement(
        path,
        number,
        text,
        kind,
        name=parsed.name,
        extras=tuple(sorted(parsed.extras)),
        specifier=",".join(sorted((str(one) for one in parsed.specifier), key=_specifier_order)),
        marker=str(parsed.marker or ""),
        active=_holds(parsed.marker, environment),
        target=target,
    )


def _specifier_order(one: str) -> tuple[int, str]:
    order = ("===", "==", "~=", ">=", ">", "!=", "<=", "<")
    return next((index for index, operator in enumerate(order) if one.startswith(operator)), 9), one


def _why_invalid(text: str, error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if re.match(r"^[\w.-]+=\d[\w.]*=\w+", text):
        return "name=version=build is conda's form, not pip's"
    if text.startswith(("- ", "dependencies:", "name:", "channels:", "[")):
        return "this is not a requirements file of pip (a conda or TOML file?)"
    if text.startswith(("<<<<<<<", "=======", ">>>>>>>")):
        return "a merge conflict was left in the file"
    if re.match(r"^[!%]?\s*(?:python3? -m )?(?:uv )?pip3? install ", text):
        return "this is a shell command; only what follows `pip install` belongs here"
    odd = next((letter for letter in text if ord(letter) > 126), None)
    if odd is not None:
        return f"it holds the character U+{ord(odd):04X}, as text processors and web pages write it"
    if re.search(r"[=<>~!]=?\s*[\"']?\^|=\s*[\"']\^", text):
        return "^ is Poetry's sign; pip writes such a range with >= and <"
    if re.match(r"^[\w.-]+\s*=\s*[\d\"']", text):
        return "one = sign: a version is pinned with =="
    if re.search(r"~=\s*\d+\s*(?:$|[;,#])", text):
        return "~= needs a version of two parts or more (~=2.0)"
    if re.search(r"==\s*(?:latest|stable|newest|master|main)\b", text, re.IGNORECASE):
        return "a word is no version; leave the version out for the newest"
    if re.search(r"(?:python|implementation)\w*_?version\s*[<>=!~]=?\s*\d", text):
        return "the version in a marker must stand in quotes"
    if re.match(r"^[\w.-]+\s+\d+(?:\.\d+)*\S*$", text):
        return "name and version stand apart, as `pip list` shows them; pip wants name==version"
    if re.match(r"^[\w.-]+\s*[=<>~!]=\s*\S+\s+[A-Za-z]", text):
        return "two requirements stand on one line"
    return quote(first, 160)


def _split_marker(text: str) -> tuple[str, str]:
    """The requirement and its marker. In a URL a marker needs " ;" with the blank before it (PEP 508)."""
    separator = " ;" if "://" in text or text.startswith("file:") else ";"
    body, _, marker = text.partition(separator)
    return body.strip(), marker.strip()


def _holds(marker: Any, environment: Mapping[str, str] | None) -> bool | None:
    if marker is None:
        return True
    try:
        return bool(marker.evaluate({**(environment or {}), "extra": ""}))
    except Exception:  # an undefined name or a comparison the library refuses
        return None


def _located(
    value: str,
    path: str,
    number: int,
    text: str,
    environment: Mapping[str, str] | None,
    *,
    marker: str = "",
    editable: bool = False,
) -> Requirement:
    """A requirement given by where it lies."""
    if editable:
        value, marker = _split_marker(value)
    active: bool | None = True
    if marker:
        try:
            active = _holds(packaging("markers").Marker(marker), environment)
        except Exception as error:
            raise _Refused(
                f"the marker {quote(marker, 60)} is not valid ({quote(str(error).splitlines()[0], 80)})"
            ) from None
    lowered = value.lower()
    egg = re.search(r"[#&]egg=([\w.-]+)", value)
    name = egg.group(1) if egg else None
    extras_match = re.search(r"\[([\w ,.-]*)\]$", value)
    extras = tuple(sorted(e.strip() for e in extras_match.group(1).split(",") if e.strip())) if extras_match else ()
    plain = re.sub(r"\[[\w ,.-]*\]$", "", value) if extras_match else value
    if lowered.startswith(_VCS):
        kind = "vcs"
        if name is None:
            name = re.sub(r"(\.git)?(@[^/@#]*)?(#.*)?$", "", plain.rstrip("/")).rsplit("/", 1)[-1] or None
    elif re.match(r"https?:|ftp:", lowered):
        kind = "url"
        name = name or _name_of_archive(unquote(urlsplit(plain).path))
    else:
        plain = _file_path(plain)
        kind = (
            "wheel" if plain.lower().endswith(".whl") else "archive" if plain.lower().endswith(_ARCHIVES) else "folder"
        )
        name = name or _name_of_archive(plain)
        plain = _find_local(plain, path)
    return Requirement(
        path,
        number,
        text,
        "editable" if editable else kind,
        name=name,
        extras=extras,
        marker=marker,
        active=active,
        target=plain,
    )


def _name_of_archive(path: str) -> str | None:
    base = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    if base.endswith(".whl"):
        return base.split("-")[0].replace("_", "-")
    match = re.fullmatch(r"(.+)-\d[^-]*?(?:\.tar\.gz|\.zip|\.tar\.bz2|\.tgz|\.tar\.xz|\.tar)", base)
    return match.group(1) if match else None


def _find_local(value: str, path: str) -> str:
    value = os.path.expanduser(value)
    if os.path.isabs(value):
        return value
    here = os.path.abspath(value)
    beside = os.path.join(os.path.dirname(os.path.abspath(path)), value)
    return here if os.path.exists(here) or not os.path.exists(beside) else os.path.normpath(beside)


# --- files of other tools


def foreign_kind(path: str) -> tuple[str, str] | None:
    """Whose file this is, when it is not one of pip, and the command that makes one of it; None for pip's own.

    Told by the name and by what only that tool writes.
    """
    try:
        text = _text_of(path)[:20_000]
    except OSError:
        return None
    name = os.path.basename(path).lower()
    pip_list = "in that environment run `python -m pip list --format=freeze > requirements.txt`"
    looks: tuple[tuple[bool, str, str], ...] = (
        (name == "poetry.lock", "a lock file of Poetry", "`poetry export -f requirements.txt -o requirements.txt`"),
        (
            re.fullmatch(r"pylock(\..+)?\.toml", name) is not None,
            "a lock file (PEP 751)",
            "install it (`uv pip sync FILE`) and judge the environment with `--current --python PATH`",
        ),
        (name == "uv.lock", "a lock file of uv", "`uv export --format requirements-txt -o requirements.txt`"),
        (name in ("pipfile", "pipfile.lock"), "a file of Pipenv", "`pipenv requirements > requirements.txt`"),
        (name == "pixi.lock", "a lock file of pixi", pip_list),
        (
            name == "pyproject.toml" or re.search(r"^\[(?:project|tool\.\w+|build-system)\b", text, re.M) is not None,
            "a project file (pyproject)",
            f"`uv pip compile {os.path.basename(path)} -o requirements.txt` (or pip-compile of pip-tools)",
        ),
        (name in ("setup.py", "setup.cfg"), "a setup script", f"`uv pip compile {name} -o requirements.txt`"),
        (
            re.search(r"^(?:channels|dependencies):\s*$", text, re.M) is not None,
            "an environment file of conda",
            "create it with conda and judge it with `--current --python PATH`, or keep only its pip lines",
        ),
        (re.search(r"^@EXPLICIT\s*$", text, re.M) is not None, "an explicit list of conda", pip_list),
        (
            len(re.findall(r"^[\w.-]+=\d[\w.]*=[\w.]+\s*$", text, re.M)) > 1,
            "a package list of conda",
            pip_list,
        ),
        (re.search(r"^Package\s+Version\b.*\n-{3,}", text) is not None, "the table of `pip list`", pip_list),
        (text.lstrip()[:1] == "{", "a JSON file", "write the packages one a line, as name==version"),
        (
            re.match(r"\s*<(?:!doctype|html)", text, re.IGNORECASE) is not None,
            "a web page",
            "download the raw file (on GitHub: the button Raw)",
        ),
    )
    return next(((what, how) for holds, what, how in looks if holds), None)


# What people write for names that pip knows otherwise, or not at all, with what belongs there.
_OTHER_NAMES = {
    "pytorch": "the package is called torch",
    "python": "pip cannot install Python itself; take another interpreter with `--python`",
    "cudatoolkit": "torch's wheels bring CUDA's libraries; leave it out",
    "pytorch-cuda": "it is conda's; torch's wheels bring CUDA's libraries; leave it out",
    "cudnn": "torch's wheels bring cuDNN; leave it out",
    "sklearn": "the package is called scikit-learn",
    "cv2": "the package is called opencv-python",
    "pil": "the package is called pillow",
    "flash-attention": "the package is called flash-attn",
    "llama-cpp": "the package is called llama-cpp-python",
}


def misnamed(found: Requirements) -> list[tuple[Requirement, str]]:
    """The active requirements whose name is another one in pip's index."""
    named = [(item, _OTHER_NAMES.get(normal_name(item.name or ""))) for item in found.active if item.kind == "index"]
    return [(item, why) for item, why in named if why]


# --- judged without installing -------------------------------------------------------------------------------------


def unusable_here(found: Requirements, tags: frozenset[str] | None, python: str) -> list[tuple[Requirement, str]]:
    """The active local requirements that cannot be installed by this interpreter, and why.

    `tags` are the wheel tags it accepts ("cp311-cp311-manylinux_2_28_x86_64"; None: not known); `python` its name for
    the reader ("cp311").
    """
    bad = []
    for item in found.active:
        if item.kind in ("wheel", "archive", "folder", "editable") and not re.match(r"[a-z+]+://", item.target):
            if item.target.lower().endswith(".whl"):
                reason = wheel_mismatch(os.path.basename(item.target), tags, python)
                if reason:
                    bad.append((item, reason))
                    continue
            if item.kind == "editable" and item.target.lower().startswith(_VCS):
                continue
            if not os.path.exists(item.target):
                bad.append((item, "does not exist here"))
            elif os.path.isdir(item.target) and not any(
                os.path.exists(os.path.join(item.target, name)) for name in ("pyproject.toml", "setup.py")
            ):
                bad.append((item, "is a folder without pyproject.toml or setup.py"))
        elif item.kind == "url" and item.target.startswith("file:"):
            if not os.path.exists(_file_path(item.target)):
                bad.append((item, "points to the disk of the machine that wrote the list"))
        elif item.kind == "url" and unquote(urlsplit(item.target).path).lower().endswith(".whl"):
            reason = wheel_mismatch(unquote(urlsplit(item.target).path).rsplit("/", 1)[-1], tags, python)
            if reason:
                bad.append((item, reason))
    return bad


def wheel_tags(filename: str) -> frozenset[str] | None:
    """The tags in a wheel's file name, one per combination; None when the name is not a wheel's."""
    match = re.fullmatch(r".+?-.+?(?:-\d[^-]*)?-([^-]+)-([^-]+)-([^-]+)\.whl", filename)
    if not match:
        return None
    pythons, abis, platforms = (part.split(".") for part in match.groups())
    return frozenset(f"{p}-{a}-{o}" for p in pythons for a in abis for o in platforms)


def wheel_mismatch(filename: str, tags: frozenset[str] | None, python: str) -> str | None:
    """Why a wheel cannot be installed by an interpreter that accepts `tags`, or None when it can (or unknown)."""
    own = wheel_tags(filename)
    if own is None:
        return "is not named like a wheel (name-version-python-abi-platform.whl)"
    if tags is None or own & tags:
        return None
    accepted = [tag.split("-") for tag in tags]
    for index, word in ((0, "interpreter"), (1, "ABI"), (2, "platform")):
        wanted = {tag.split("-")[index] for tag in own}
        if not wanted & {tag[index] for tag in accepted}:
            shown = "/".join(sorted(wanted))
            if index < 2:
                return f"is built for {shown}, but the interpreter is {python}"
            return f"is built for the {word} {shown}, which this system is not"
    if any(tag.startswith("cp") for tag in own):
        return f"is tagged {'/'.join(sorted(own))}, but the interpreter is {python}"
    return f"is tagged {'/'.join(sorted(own))}, which this interpreter does not accept"


def hash_mode_offenders(found: Requirements) -> list[tuple[Requirement, str]]:
    """With hashes on any line pip wants all lines pinned with == and hashed: the active ones that are not."""
    if not found.hash_mode:
        return []
    bad = []
    for item in found.active:
        if item.kind == "index" and item.pinned is None:
            bad.append((item, "is not pinned with =="))
        elif item.kind in ("vcs", "editable", "folder"):
            bad.append((item, "cannot be hashed: it is not a single file"))
        elif not item.hashes:
            bad.append((item, "has no --hash"))
    return bad
