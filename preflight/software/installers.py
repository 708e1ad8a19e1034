"""Which installer is here, what it would install, and installing it into a sandbox: uv when present, else pip."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from preflight import processes
from preflight.console import UsageError
from preflight.machine import Machine
from preflight.software.requirements import Requirements, normal_name, packaging
from preflight.software.sandbox import cache_folder

# --- what pip is told on this machine ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipSettings:
    """pip's own settings on this machine (configuration files and PIP_ variables): uv reads none of them."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    no_index: bool = False
    pre: bool = False
    cert: str | None = None
    proxy: str | None = None
    timeout_s: int | None = None
    only_binary: tuple[str, ...] = ()
    no_binary: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report, credentials in addresses masked."""
        return {
            "index_url": mask(self.index_url) if self.index_url else None,
            "extra_index_urls": [mask(url) for url in self.extra_index_urls],
            "find_links": [mask(url) for url in self.find_links],
            "constraints": list(self.constraints),
            "no_index": self.no_index,
        }


def mask(url: str) -> str:
    """An index address without its user name and password."""
    return re.sub(r"(?<=://)[^/@\s]+@", "<credentials>@", url)


def parse_pip_config(text: str) -> PipSettings:
    """The settings in the output of `pip config list` (`section.key='value'`).

    Variables win over files, a section of the `install` command over `global`.
    """
    ranked: dict[str, tuple[int, str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(global|install|download|:env:)\.([\w-]+)=(.*)", line.strip())
        if not match:
            continue
        section, key, raw = match.groups()
        try:
            value = str(ast.literal_eval(raw))
        except (ValueError, SyntaxError):
            value = raw.strip("'\"")
        rank = {"global": 0, "download": -1, "install": 1, ":env:": 2}[section]
        if key not in ranked or rank >= ranked[key][0]:
            ranked[key] = (rank, value)

    def one(key: str) -> str | None:
        return ranked[key][1].strip() or None if key in ranked else None

    def many(key: str) -> tuple[str, ...]:
        return tuple((one(key) or "").split())

    def yes(key: str) -> bool:
        return (one(key) or "").lower() in ("1", "true", "yes", "on", "y", "t")

    timeout = one("timeout") or one("default-timeout")
    return PipSettings(
        index_url=one("index-url"),
        extra_index_urls=many("extra-index-url"),
        find_links=many("find-links"),
        constraints=many("constraint"),
        trusted_hosts=many("trusted-host"),
        no_index=yes("no-index"),
        pre=yes("pre"),
        cert=one("cert"),
        proxy=one("proxy"),
        timeout_s=int(float(timeout)) if timeout and re.fullmatch(r"[\d.]+", timeout) else None,
        only_binary=tuple((one("only-binary") or "").replace(",", " ").split()),
        no_binary=tuple((one("no-binary") or "").replace(",", " ").split()),
    )


def read_pip_settings(machine: Machine, python: str) -> PipSettings:
    """What pip of `python` is told; when it has no pip, what pip beside us is told (the files are the same)."""
    for interpreter in dict.fromkeys([python, sys.executable]):
        answer = machine.run(
            [interpreter, "-m", "pip", "config", "list"], timeout_s=30, env={"PYTHONDONTWRITEBYTECODE": "1"}
        )
        if answer.ok:
            return parse_pip_config(answer.text)
    # Without any pip only the variables are known.
    names = ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "CONSTRAINT", "TRUSTED_HOST", "NO_INDEX", "PRE", "CERT")
    lines = []
    for name in names:
        value = machine.variable(f"PIP_{name}")
        if value:
            lines.append(f":env:.{name.lower().replace('_', '-')}={value!r}")
    return parse_pip_config("\n".join(lines))


# --- the installer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installer:
    """`name` is uv or pip; `path` the uv program ("" for pip, which runs inside the sandbox)."""

    name: str
    path: str
    version: str
    why: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return {"name": self.name, "version": self.version or None, "why": self.why}


def find_installer(wanted: str = "auto") -> Installer:
    """uv beside our interpreter, then on PATH; else pip. Raises UsageError when a wanted uv is not here."""
    if wanted != "pip":
        beside = Path(sys.executable).parent / ("uv.exe" if os.name == "nt" else "uv")
        for path, where in ((str(beside), "beside this program's Python"), (shutil.which("uv") or "", "on PATH")):
            if path and os.path.exists(path):
                ended = processes.run([path, "--version"], 20)
                match = re.search(r"\d+(\.\d+)+", ended.text)
                if ended.exit_code == 0 and match:
                    return Installer("uv", path, match.group(0), f"uv was found {where}")
        if wanted == "uv":
            raise UsageError("--installer uv: no uv was found beside this Python or on PATH; auto and pip are allowed")
    return Installer("pip", "", "", "asked for with --installer pip" if wanted == "pip" else "no uv was found")


@dataclass
class Environment:
    """A virtualenv in a sandbox and how packages get into it."""

    installer: Installer
    settings: PipSettings
    folder: Path  # the sandbox
    base_python: str
    variables: dict[str, str]
    offline: bool = False
    wheelhouse: str | None = None
    timeout_s: float = 1800.0
    seconds_to_create: float | None = None
    overrides: str | None = None  # a file of requirements that override what packages declare (uv only)

    @property
    def python(self) -> str:
        """The virtualenv's interpreter."""
        place = self.folder / "env"
        return str(place / "Scripts" / "python.exe" if os.name == "nt" else place / "bin" / "python")

    def _run(self, command: Sequence[str], timeout_s: float | None = None) -> processes.Ended:
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1", **self.variables, **self._uv_variables()}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # the interpreter that is started may be the user's own
        return processes.run(command, timeout_s or self.timeout_s, env=environment, cwd=self.folder)

    def _uv_variables(self) -> dict[str, str]:
        made = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1", "PIP_USER": "0"}
        if self.settings.cert:
            made["SSL_CERT_FILE"] = self.settings.cert
        if self.settings.proxy:
            made["ALL_PROXY"] = self.settings.proxy
        if self.settings.timeout_s:
            made["UV_HTTP_TIMEOUT"] = str(self.settings.timeout_s)
        if self.installer.name == "uv" and not _writable(uv_cache()):
            made["UV_CACHE_DIR"] = str(self.folder / "uv-cache")  # a read-only home: nothing is kept, all is fetched
        return made

    def create(self) -> None:
        """Make the virtualenv. Raises UsageError with the tool's own words when that fails."""
        began = time.monotonic()
        place = str(self.folder / "env")
        attempts: list[list[str]] = []
        if self.installer.name == "uv":
            attempts.append([self.installer.path, "venv", "-q", "--no-project", "--python", self.base_python, place])
        else:
            attempts.append(
                [sys.executable, "-m", "virtualenv", "-q", "--no-periodic-update", "--python", self.base_python, place]
            )
            attempts.append([self.base_python, "-m", "venv", place])
        trouble = ""
        for command in attempts:
            ended = self._run(command, 180)
            if ended.exit_code == 0:
                self.seconds_to_create = round(time.monotonic() - began, 3)
                return
            trouble = _last_words(ended)
            shutil.rmtree(place, ignore_errors=True)
        raise UsageError(f"no virtualenv could be made for {self.base_python}: {trouble}")

    # --- options ---

    def _sources(self, tool: str) -> list[str]:
        """Where packages come from, as options. pip reads its own configuration; uv must be handed it."""
        options: list[str] = []
        if self.wheelhouse:
            options += ["--find-links", self.wheelhouse]
        if tool == "pip":
            return options + (["--no-index"] if self.offline else [])
        given = self.settings
        if self.offline:
            options += ["--offline"] + (["--no-index"] if self.wheelhouse or given.find_links else [])
        if given.no_index and "--no-index" not in options:
            options += ["--no-index"]
        if given.index_url:
            options += ["--index-url", given.index_url]
        for url in given.extra_index_urls:
            options += ["--extra-index-url", url]
        for place in given.find_links:
            options += ["--find-links", place]
        for host in given.trusted_hosts:
            options += ["--allow-insecure-host", host]
        if given.pre:
            options += ["--prerelease", "allow"]
        for option, names in (("--only-binary", given.only_binary), ("--no-binary", given.no_binary)):
            for name in names:
                options += [option, name]
        # pip takes the best version of all indexes; uv's default would stop at the first index that knows the name.
        return [*options, "--index-strategy", "unsafe-best-match"]

    def _constraints(self, tool: str, more: Sequence[str] = ()) -> list[str]:
        files = [*(self.settings.constraints if tool == "uv" else ()), *more]
        forced = ["--overrides", self.overrides] if self.overrides and tool == "uv" else []
        return [*(word for name in files for word in ("-c", name)), *forced]

    # --- looking before leaping ---

    def resolve(
        self,
        requirements: str,
        constraints: Sequence[str] = (),
        hash_mode: bool = False,
        *,
        for_python: str | None = None,
        for_platform: str | None = None,
    ) -> Resolution:
        """What would be installed for the flat requirements file, without installing it.

        For another Python ("3.12") or system (uv's name for it) only uv can tell; pip answers for this one.
        """
        began = time.monotonic()
        if self.installer.name == "uv" and not hash_mode:
            lock = self.folder / "tmp" / "pylock.toml"
            lock.unlink(missing_ok=True)
            command = [self.installer.path, "pip", "compile", "-q", "--python", self.python, requirements]
            command += ["--format", "pylock.toml", "-o", str(lock), "--no-header"]
            command += ["--python-version", for_python] if for_python else []
            command += ["--python-platform", for_platform] if for_platform else []
            ended = self._run([*command, *self._sources("uv"), *self._constraints("uv", constraints)])
            packages = parse_pylock(lock.read_text(encoding="utf-8")) if ended.exit_code == 0 and lock.exists() else []
        else:
            report = self.folder / "tmp" / "report.json"
            report.unlink(missing_ok=True)
            command = [*self._pip(), "install", "--dry-run", "--ignore-installed", "--report", str(report)]
            command += ["-r", requirements, *self._sources("pip"), *self._constraints("pip", constraints)]
            ended = self._run(command)
            packages = parse_pip_report(report.read_text(encoding="utf-8")) if report.exists() else []
        text = f"{ended.errors}\n{ended.text}".strip()
        ok = ended.exit_code == 0 and not ended.trouble
        return Resolution(ok, packages, text, ended.trouble, round(time.monotonic() - began, 3))

    def _pip(self) -> list[str]:
        """pip for the sandbox: the one inside it, else another interpreter's pointed at it."""
        if (Path(self.python).parent / ("pip.exe" if os.name == "nt" else "pip")).exists():
            return [self.python, "-m", "pip", "--disable-pip-version-check"]
        for interpreter in (self.base_python, sys.executable):
            if self._run([interpreter, "-c", "import pip"], 30).exit_code == 0:
                return [interpreter, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        raise UsageError("no pip was found, and uv cannot judge hashes as pip does; install pip")

    def install(
        self,
        wanted: Sequence[str],
        constraints: Sequence[str] = (),
        *,
        dependencies: bool = True,
        timeout_s: float | None = None,
    ) -> Installed:
        """Install what `wanted` names (requirements, or `-r FILE`)."""
        began = time.monotonic()
        if self.installer.name == "uv":
            command = [self.installer.path, "pip", "install", "--python", self.python]
        else:
            # Compiling all of torch costs 25 s and the stages need a tenth of it: measured, 11 to 14 s instead of 40.
            command = [*self._pip(), "install", "--no-compile"]
        tool = self.installer.name
        command += [*wanted, *self._sources(tool), *self._constraints(tool, constraints)]
        if not dependencies:
            command.append("--no-deps")
        ended = self._run(command, timeout_s)
        text = f"{ended.errors}\n{ended.text}".strip()
        seconds = round(time.monotonic() - began, 3)
        return Installed(ended.exit_code == 0 and not ended.trouble, text, ended.trouble, seconds)

    def check(self) -> processes.Ended:
        """`pip check` of the virtualenv: whether the declared requirements hold."""
        if self.installer.name == "uv":
            return self._run([self.installer.path, "pip", "check", "--python", self.python], 60)
        return self._run([*self._pip(), "check"], 60)


def uv_cache() -> Path:
    """Where uv keeps its downloads on this machine (its own rule: UV_CACHE_DIR, else the user's cache folder)."""
    if os.environ.get("UV_CACHE_DIR"):
        return Path(os.environ["UV_CACHE_DIR"])
    base = cache_folder().parent
    return base / "uv" / "cache" if os.name == "nt" else base / "uv"


def _writable(path: Path) -> bool:
    """Whether uv could keep something there; tried, because permission bits say little (read-only mounts)."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


def _last_words(ended: processes.Ended) -> str:
    if ended.trouble:
        return f"{ended.trouble} {ended.errors}".strip()
    lines = [line.strip() for line in f"{ended.text}\n{ended.errors}".splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or f"exit code {ended.exit_code}"


@dataclass(frozen=True)
class Package:
    """One distribution that would be installed. Sizes are of the file to download; None: not known."""

    name: str
    version: str
    url: str
    size_bytes: int | None
    uploaded: str | None
    from_source: bool

    @property
    def filename(self) -> str:
        """The file's name, or "" for a folder or a repository."""
        name = unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]
        return name if re.search(r"\.(whl|zip|tar(\.\w+)?|tgz)$", name) else ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data for the report."""
        return {
            "name": self.name,
            "version": self.version,
            "file": self.filename or None,
            "download_bytes": self.size_bytes,
            "from_source": self.from_source,
            "uploaded": self.uploaded,
        }


@dataclass(frozen=True)
class Resolution:
    """The outcome of a dry run: packages when `ok`, else the tool's words in `text`."""

    ok: bool
    packages: list[Package]
    text: str
    trouble: str
    seconds: float

    def package(self, name: str) -> Package | None:
        """The package of that name, or None."""
        wanted = normal_name(name)
        return next((package for package in self.packages if normal_name(package.name) == wanted), None)


@dataclass(frozen=True)
class Installed:
    """The outcome of one installation step."""

    ok: bool
    text: str
    trouble: str
    seconds: float


def parse_pylock(text: str) -> list[Package]:
    """The packages of a pylock.toml (PEP 751)."""
    found = []
    for entry in _toml(text).get("packages", []):
        wheels = entry.get("wheels") or []
        source = entry.get("sdist") or entry.get("archive") or entry.get("vcs") or entry.get("directory") or {}
        chosen = wheels[0] if wheels else source
        url = str(chosen.get("url") or chosen.get("path") or "")
        size = chosen.get("size")
        if size is None and url.startswith("file:"):
            try:
                size = os.stat(unquote(urlsplit(url).path)).st_size
            except OSError:
                size = None
        found.append(
            Package(
                str(entry["name"]),
                str(entry.get("version", "")),
                url,
                size if isinstance(size, int) else None,
                str(chosen["upload-time"])[:10] if "upload-time" in chosen else None,
                not wheels and not url.lower().endswith(".whl"),
            )
        )
    return found


def _toml(text: str) -> dict[str, Any]:
    import importlib

    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        loaded: dict[str, Any] = module.loads(text)
        return loaded
    raise UsageError("Python 3.10 needs the package `tomli` to read uv's answer; `pip install tomli`")


def parse_pip_report(text: str) -> list[Package]:
    """The packages of `pip install --report` (format version 1)."""
    try:
        report = json.loads(text)
    except ValueError:
        return []
    found = []
    for entry in report.get("install", []):
        about, url = entry.get("metadata", {}), str(entry.get("download_info", {}).get("url", ""))
        size = None
        if url.startswith("file:"):
            try:
                size = os.stat(unquote(urlsplit(url).path)).st_size
            except OSError:
                size = None
        found.append(
            Package(
                str(about.get("name", "")),
                str(about.get("version", "")),
                url,
                size,
                None,
                not unquote(urlsplit(url).path).lower().endswith(".whl"),
            )
        )
    return found


# --- why a resolution failed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """Who wants which version: `by` is "the requirements" or a distribution with its version."""

    by: str
    wants: str

    @property
    def package(self) -> str:
        """The name of the package that is wanted."""
        match = re.match(r"[A-Za-z0-9][\w.-]*", self.wants)
        return normal_name(match.group(0)) if match else ""

    def as_json(self) -> dict[str, str]:
        """Plain JSON data for the report."""
        return {"by": self.by, "wants": self.wants}


ASKED = "the requirements"


def parse_wishes(text: str) -> list[Wish]:
    """The statements "A depends on B" and "you require B" in pip's or uv's account of a conflict, in order."""
    found: list[Wish] = []
    flat = re.sub(r"\s+", " ", text)
    if "The conflict is caused by:" in text:
        for line in text.split("The conflict is caused by:", 1)[1].splitlines():
            asked = re.match(r"\s+The user requested (?:\(constraint\) )?(.+)", line)
            needs = re.match(r"\s+(\S+) (\S+) depends on (.+)", line)
            if asked:
                found.append(Wish(ASKED, asked.group(1).strip()))
            elif needs:
                found.append(Wish(f"{needs.group(1)} {needs.group(2)}", needs.group(3).strip()))
        return list(dict.fromkeys(found))
    name = r"[A-Za-z0-9][\w.-]*(?:\[[\w,.-]+\])?"
    version = r"(?:[=<>!~]=?=?[^\s,]+(?:,\s?[=<>!~]=?[^\s,]+)*)"
    for match in re.finditer(
        rf"(?:all versions of )?({name}{version}?) depends? on ({name}{version}?)"
        rf"|(conclude that )?you require ({name}{version}?)",
        flat,
    ):
        if match.group(1):
            by = re.sub(r"==", " ", match.group(1), count=1)
            found.append(Wish(by, match.group(2).rstrip(".,")))
        elif not match.group(3):
            found.append(Wish(ASKED, match.group(4).rstrip(".,")))
    return list(dict.fromkeys(found))


def conflicting(wishes: Sequence[Wish]) -> tuple[str, list[Wish]] | None:
    """The package on which the wishes cannot all be met, and those wishes; None when none is wanted twice."""
    by_package: dict[str, list[Wish]] = {}
    for wish in wishes:
        by_package.setdefault(wish.package, []).append(wish)
    several = {name: group for name, group in by_package.items() if len(group) > 1 and name != "python"}
    for name, group in several.items():
        if _exclude_each_other(group):
            return name, group
    return next(iter(several.items())) if several and not _one_pin_agrees(several) else None


def _specifiers(wish: Wish) -> Any:
    match = re.match(r"[A-Za-z0-9][\w.-]*(?:\[[^\]]*\])?\s*(.*)", wish.wants)
    text = (match.group(1) if match else "").replace(" and ", ",").split(";")[0].strip()
    return packaging("specifiers").SpecifierSet(text, prereleases=True)


def _exclude_each_other(group: Sequence[Wish]) -> bool:
    """Whether a version that one wish pins is excluded by another."""
    for wish in group:
        pin = re.search(r"={2,3}\s*([^,*\s]+)", wish.wants)
        for other in group:
            if other is wish:
                continue
            try:
                if pin and not _specifiers(other).contains(pin.group(1)):
                    return True
            except Exception:  # a specifier in a form the library does not read
                continue
    return False


def _one_pin_agrees(several: dict[str, list[Wish]]) -> bool:
    """All wishes pin and agree: then nothing excludes anything, and the version is simply not there."""
    return all(
        any("==" in wish.wants for wish in group) and not _exclude_each_other(group) for group in several.values()
    )


# First match wins. (code, pattern); matched on the tool's words with blanks collapsed.
_RESOLVE_FAILURES: tuple[tuple[str, str], ...] = (
    ("disk-full", r"No space left on device|os error 28\b|\[Errno 28\]"),
    ("hash-mode", r"In --require-hashes mode|requirement.{0,80}hash(?:es)? (?:are|is) missing"),
    ("hash-mismatch", r"THESE PACKAGES DO NOT MATCH THE HASHES|[Hh]ash mismatch for"),
    ("index-refused", r"\b(?:401|403) (?:Client Error|Unauthorized|Forbidden)|HTTP status client error \((?:401|403)"),
    (
        "repository-unreachable",
        r"Git operation failed|Git executable not found|Cannot find command 'git'|Failed to (?:clone|fetch)(?!:)|"
        r"git (?:fetch|clone).{0,200}(?:failed|did not run)",
    ),
    (
        "index-unreachable",
        r"dns error|error sending request|NewConnectionError|NameResolutionError|Name or service not known|Max retries "
        r"exceeded|Temporary failure in name resolution|[Cc]onnection refused|operation timed out|tcp connect error|"
        r"Failed to fetch|ReadTimeoutError|ConnectTimeoutError|SSLError|CERTIFICATE_VERIFY_FAILED|"
        r"invalid peer certificate",
    ),
    ("build-isolation", r"No module named '(?:torch|numpy|packaging|wheel|psutil|Cython|pkg_resources)'"),
    (
        "build-failed",
        r"Failed to build|Failed building wheel|subprocess-exited-with-error|The build backend returned an error|"
        r"metadata-generation-failed|Failed to download and build",
    ),
    (
        "python-version-conflict",
        r"current Python version \([\d.]+\) does not satisfy|requires a different Python|Requires-Python|"
        r"no wheels with a matching Python (?:version|ABI|implementation)|Python version tag",
    ),
    (
        "wheel-not-supported",
        r"is not a supported wheel on this platform|not compatible with the current|incompatible with the current "
        r"platform|no wheels with a matching platform tag",
    ),
    (
        "no-matching-distribution",
        r"there (?:is|are) no versions? of|was not found in the package registry|was not found in the provided package "
        r"locations|No matching distribution found|Could not find a version that satisfies|network was disabled|"
        r"not found in the cache|only the following versions? of .{0,300}available|Because only .{0,200} is available",
    ),
)


def failure_code(text: str) -> str:
    """What kind of trouble the installer's words tell: a code above, resolution-impossible or installer-failed."""
    flat = re.sub(r"\s+", " ", text)
    found = next((code for code, pattern in _RESOLVE_FAILURES if re.search(pattern, flat)), None)
    wishes = parse_wishes(text)
    if found in (None, "no-matching-distribution", "python-version-conflict"):
        clash = conflicting(wishes)
        if clash is not None and _exclude_each_other(clash[1]):
            return "resolution-impossible"
    if found is None and "ResolutionImpossible" in flat and conflicting(wishes) is None:
        return "no-matching-distribution"  # one wish only, and no version meets it
    if found is None and not re.search(r"ResolutionImpossible|No solution found|conflicting dependencies", flat):
        return "installer-failed"
    return found or "resolution-impossible"


def missing_requirement(text: str) -> str | None:
    """The requirement for which no distribution was found, as the tool names it."""
    flat = re.sub(r"\s+", " ", text)
    for pattern in (
        r"No matching distribution found for ([^\s;]+)",
        r"there (?:is|are) no versions? of ([^\s,]+)",
        r"Because ([^\s,]+) was not found in the (?:package registry|provided package locations|cache)",
        r"Cannot install ([^\s,]+) because these package versions",
        r"satisfies the requirement ([^\s;]+)",
        r"Because only ([^\s]+?)(?:,[^\s]+)? is available",
    ):
        match = re.search(pattern, flat)
        if match:
            return match.group(1).rstrip(".,")
    return None


def failing_build(text: str) -> str | None:
    """The package whose build failed, as the tool names it (`flash-attn==2.7.4.post1`)."""
    for pattern in (
        r"Failed to (?:download and )?build `([^`]+)`",
        r"Failed to build '([^']+)'",
        r"Failed building wheel for (\S+)",
        r"Failed to build (?!installable)(?!wheel)([A-Za-z0-9][\w.-]*(?:==\S+)?)\b",
    ):
        match = re.search(pattern, text)
        if match:
            return match.group(1).replace("@", "==") if "==" not in match.group(1) else match.group(1)
    return None


# --- the flat file both tools read ---------------------------------------------------------------------------------


def flat_requirements(found: Requirements, change: Callable[[str, str], str | None] | None = None) -> str:
    """The active requirements as one file without -r, with absolute paths, readable by pip and uv alike.

    `change(name, line)` may give another line for a requirement (None: leave it out).
    """
    lines = []
    for file, _, option, value in found.options:
        if option in ("--requirement", "--constraint", "--use-feature", "--prefer-binary"):
            continue
        if option == "--find-links" and not re.match(r"\w+://", value):
            beside = os.path.join(os.path.dirname(os.path.abspath(file)), value)
            value = beside if os.path.exists(beside) else os.path.abspath(value)
        lines.append(f"{option} {value}".strip())
    for item in found.active:
        if item.kind == "index":
            line = item.shown()
        elif item.kind in ("wheel", "archive", "folder"):
            extras = f"[{','.join(item.extras)}]" if item.extras else ""
            line = f"{item.target}{extras}"
        elif item.kind == "editable":
            line = f"-e {item.target}"
        else:
            line = item.text.split(" ;")[0].strip()
        if change is not None and item.name:
            changed = change(normal_name(item.name), line)
            if changed is None:
                continue
            line = changed
        lines.append(line + "".join(f" --hash={value}" for value in item.hashes))
    return "\n".join(lines) + "\n"


def flat_constraints(found: Requirements) -> str:
    """The constraints of all -c files as one file."""
    return "".join(f"{item.shown()}\n" for item in found.constraints if item.active is not False)


def cuda_packages(resolution: Resolution) -> list[Package]:
    """The packages that only a CUDA build of torch pulls in."""
    return [
        package
        for package in resolution.packages
        if re.match(r"nvidia-|triton$|cuda-(?:toolkit|bindings|pathfinder)", normal_name(package.name))
    ]


def cpu_builds_of_torch(places: Sequence[str]) -> list[str]:
    """Versions of torch's CPU wheels in local folders of wheels ("2.13.0+cpu"), newest last."""
    found = []
    for place in places:
        folder = place.removeprefix("file://")
        if re.match(r"\w+://", folder) or not os.path.isdir(folder):
            continue
        for name in os.listdir(folder):
            match = re.match(r"torch-([\d.]+\+cpu)-", unquote(name))
            if match:
                found.append(match.group(1))
    return sorted(set(found), key=lambda text: [int(n) for n in re.findall(r"\d+", text)])
