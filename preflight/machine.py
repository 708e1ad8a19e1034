"""The one door to the machine: run a command, read a file, ask a child. Every answer can be recorded and replayed.

A recorded folder *is* a machine: it holds the raw answers and one `case.json` with
`inputs: [{"file", "kind", "exit_code"}]`, where `kind` says which question the file answers.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preflight import processes
from preflight.console import UsageError
from preflight.redact import redact

CHILDREN = Path(__file__).resolve().parent / "children"


@dataclass(frozen=True)
class Answer:
    """What the machine said. Absence and time-outs are answers too.

    `exit_code` is None when nothing ran. `trouble` is "" or one of: absent, not-executable, timeout, unreadable,
    not-recorded.
    """

    text: str = ""
    errors: str = ""
    exit_code: int | None = 0
    trouble: str = ""
    seconds: float | None = None

    @property
    def ok(self) -> bool:
        """It ran to its end with exit code 0."""
        return self.exit_code == 0 and not self.trouble

    @property
    def absent(self) -> bool:
        """The program or file does not exist (or was not recorded)."""
        return self.trouble in ("absent", "not-recorded")

    def lines_of_json(self) -> list[dict[str, Any]]:
        """The JSON objects among the lines, in order; a torn last line is left out.

        A text that is one JSON object (a probe recorded by hand) comes back as a list of that one object.
        """
        found = []
        for line in self.text.splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
        if not found:
            try:
                whole = json.loads(self.text)
            except ValueError:
                return []
            found = [whole] if isinstance(whole, dict) else []
        return found


# Inside the classes below `list` is a method.
list_of_answers = list[tuple[str, Answer]]


class Machine:
    """This machine, live."""

    replayed = False

    def run(self, command: Sequence[str], timeout_s: float = 10.0, env: Mapping[str, str] | None = None) -> Answer:
        """Run a short command. `env` is added to our environment; messages are asked for in English."""
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "LANGUAGE": "C", **(env or {})}
        return _answer(processes.run(command, timeout_s, env=environment))

    def read(self, path: str | os.PathLike[str], limit_bytes: int = 4 << 20) -> Answer:
        """The first `limit_bytes` of a file as text."""
        try:
            with open(path, "rb") as stream:
                return Answer(processes.decode(stream.read(limit_bytes)))
        except FileNotFoundError:
            return Answer(exit_code=None, trouble="absent")
        except OSError as error:
            return Answer(errors=error.strerror or str(error), exit_code=None, trouble="unreadable")

    def list(self, pattern: str) -> list[str]:
        """The paths that match a glob pattern, sorted."""
        return sorted(glob.glob(pattern))

    def variable(self, name: str) -> str | None:
        """An environment variable; None when it is not set."""
        return os.environ.get(name)

    def see(self, kind: str, look: Callable[[], Any]) -> Any:
        """What `look()` returns (plain JSON data), kept under the name `kind`; None when it raises or was not recorded.

        For what Python itself can tell (platform, free disk space), so that it is recorded like everything else.
        """
        try:
            return look()
        except Exception:  # "could not tell" is an answer, whatever the reason
            return None

    def recorded(self, pattern: str) -> list_of_answers:
        """What was recorded under kinds that match a pattern, in order; nothing on a live machine."""
        return []

    def ask(
        self,
        child: str,
        python: str,
        arguments: Sequence[str] = (),
        timeout_s: float = 60.0,
        *,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[dict[str, Any]], None] | None = None,
        kind: str = "",
        cwd: str | None = None,
    ) -> Answer:
        """Run `preflight/children/CHILD.py` in the interpreter `python`.

        The child gets the path of a results file as its first argument and appends one JSON line per finished step:
        those lines are `Answer.text`, and what was finished before a crash, a hang or a kill is in it. `on_line` sees
        each line as it appears (for progress). `Answer.errors` is what the child wrote on stderr and stdout.
        """
        with tempfile.TemporaryDirectory(prefix="preflight-ask-") as folder:
            results = os.path.join(folder, "results.jsonl")
            Path(results).touch()
            seen = _Follower(results, on_line)
            command = [python, str(CHILDREN / f"{child}.py"), results, *arguments]
            # OpenMP threads that spin while they wait made torch 2 to 4 times slower beside another busy program
            # (SmolLM2-135M, 2 cores, 2026-11-30: 206 and 274 ms per token against 96 and 60).
            environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **(env or {})}
            ended = processes.run(
                command, timeout_s, env=environment, cwd=cwd, while_running=seen.catch_up if on_line else None
            )
            text = Path(results).read_bytes().decode("utf-8", errors="replace")
        errors = ended.errors + (("\n" + ended.text) if ended.text.strip() else "")
        return Answer(text, errors, ended.exit_code, ended.trouble, round(ended.seconds, 3))


class _Follower:
    """Hands out the complete new lines of a growing results file."""

    def __init__(self, path: str, on_line: Callable[[dict[str, Any]], None] | None) -> None:
        self.path, self.on_line, self.position = path, on_line, 0

    def catch_up(self) -> None:
        if self.on_line is None:
            return
        with open(self.path, "rb") as stream:
            stream.seek(self.position)
            data = stream.read()
        end = data.rfind(b"\n") + 1
        self.position += end
        for line in data[:end].splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                self.on_line(value)


def _answer(ended: processes.Ended) -> Answer:
    return Answer(ended.text, ended.errors, ended.exit_code, ended.trouble, round(ended.seconds, 3))


class RecordingMachine(Machine):
    """This machine, live; every answer is also written to a folder, redacted."""

    def __init__(self, folder: str | os.PathLike[str], tool: str) -> None:
        self.folder, self.tool = Path(folder), tool
        self.inputs: list[dict[str, Any]] = []
        self.variables: dict[str, str] = {}
        if (self.folder / "case.json").exists():
            raise UsageError(f"--record {folder}: holds a recording already; name a new or an empty folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_case()
        except OSError as error:
            raise UsageError(f"--record {folder}: cannot be written ({error.strerror})") from error

    def run(self, command: Sequence[str], timeout_s: float = 10.0, env: Mapping[str, str] | None = None) -> Answer:
        return self._keep(shlex.join(command), super().run(command, timeout_s, env))

    def read(self, path: str | os.PathLike[str], limit_bytes: int = 4 << 20) -> Answer:
        return self._keep(str(path), super().read(path, limit_bytes))

    def list(self, pattern: str) -> list[str]:
        found = super().list(pattern)
        self._keep(f"glob {pattern}", Answer("".join(f"{path}\n" for path in found)))
        return found

    def variable(self, name: str) -> str | None:
        value = super().variable(name)
        if value is not None:
            self.variables[name] = redact(f"{name}={value}").partition("=")[2]
            self._write_case()
        return value

    def see(self, kind: str, look: Callable[[], Any]) -> Any:
        value = super().see(kind, look)
        self._keep(kind, Answer(json.dumps(value)), suffix="json")
        return value

    def ask(
        self, child: str, python: str, arguments: Sequence[str] = (), timeout_s: float = 60.0, **options: Any
    ) -> Answer:
        answer = super().ask(child, python, arguments, timeout_s, **options)
        return self._keep(options.get("kind") or f"child {child}", answer, suffix="jsonl")

    def _keep(self, kind: str, answer: Answer, suffix: str = "txt") -> Answer:
        stem = f"{len(self.inputs):02d}-" + re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")[:60]
        entry: dict[str, Any] = {"file": f"{stem}.{suffix}", "kind": redact(kind), "exit_code": answer.exit_code}
        if answer.trouble:
            entry["trouble"] = answer.trouble
        if answer.seconds is not None:
            entry["seconds"] = answer.seconds
        try:
            (self.folder / entry["file"]).write_text(redact(answer.text), encoding="utf-8")
            self.inputs.append(entry)
            if answer.errors.strip():
                (self.folder / f"{stem}.stderr.txt").write_text(redact(answer.errors), encoding="utf-8")
                self.inputs.append({"file": f"{stem}.stderr.txt", "kind": f"{redact(kind)} stderr", "exit_code": 0})
            self._write_case()
        except OSError as error:
            raise UsageError(f"--record {self.folder}: cannot be written ({error.strerror})") from error
        return answer

    def _write_case(self) -> None:
        case = {
            "schema": 1,
            "title": "recorded machine",
            "tool": self.tool,
            "inputs": self.inputs,
            "variables": self.variables,
        }
        temporary = self.folder / "case.json.part"
        temporary.write_text(json.dumps(case, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, self.folder / "case.json")


class RecordedMachine(Machine):
    """A machine that answers from a recorded folder; what was not recorded is absent."""

    replayed = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            case = json.loads((self.folder / "case.json").read_text(encoding="utf-8-sig"))
            if not isinstance(case.get("inputs", []), list):
                raise TypeError("inputs is not a list")
            self.inputs = [
                (str(item.get("kind", item["file"])), dict(item)) for item in case.get("inputs", []) if "file" in item
            ]
            self.variables: dict[str, str] = dict(case.get("variables", {}))
        except OSError as error:
            raise UsageError(
                f"--replay {folder}: case.json cannot be read ({error.strerror}); "
                "the folder must be one that --record wrote"
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"--replay {folder}: case.json is not a recording ({error})") from error

    def run(self, command: Sequence[str], timeout_s: float = 10.0, env: Mapping[str, str] | None = None) -> Answer:
        return self._find(shlex.join(command))

    def read(self, path: str | os.PathLike[str], limit_bytes: int = 4 << 20) -> Answer:
        return self._find(str(path))

    def list(self, pattern: str) -> list[str]:
        return self._find(f"glob {pattern}").text.splitlines()

    def variable(self, name: str) -> str | None:
        return self.variables.get(name)

    def see(self, kind: str, look: Callable[[], Any]) -> Any:
        try:
            return json.loads(self._find(kind).text)
        except ValueError:
            return None

    def ask(
        self, child: str, python: str, arguments: Sequence[str] = (), timeout_s: float = 60.0, **options: Any
    ) -> Answer:
        answer = self._find(options.get("kind") or f"child {child}")
        on_line = options.get("on_line")
        if on_line is not None:
            for line in answer.lines_of_json():
                on_line(line)
        return answer

    def recorded(self, pattern: str) -> list_of_answers:
        """(kind, answer) of every input whose kind matches, for recordings made by hand under names of their own."""
        return [
            (kind, Answer(self._text(entry), "", entry.get("exit_code", 0), str(entry.get("trouble", ""))))
            for kind, entry in self.inputs
            if re.search(pattern, kind)
        ]

    def _find(self, kind: str) -> Answer:
        entry = best_match(kind, self.inputs)
        if entry is None:
            return Answer(exit_code=None, trouble="not-recorded")
        errors = next((self._text(other) for name, other in self.inputs if name == f"{entry.get('kind')} stderr"), "")
        seconds = entry.get("seconds")
        return Answer(
            self._text(entry),
            errors,
            entry.get("exit_code", 0),
            str(entry.get("trouble", "")),
            float(seconds) if isinstance(seconds, (int, float)) else None,
        )

    def _text(self, entry: Mapping[str, Any]) -> str:
        path = (self.folder / str(entry["file"])).resolve()
        if self.folder.resolve() not in path.parents:
            raise UsageError(f"--replay {self.folder}: {entry['file']!r} lies outside the recorded folder")
        try:
            return processes.decode(path.read_bytes())
        except OSError as error:
            raise UsageError(f"--replay {self.folder}: {entry['file']} cannot be read ({error.strerror})") from error


# How recordings made by hand name the questions that the program asks.
_OTHER_NAMES = {"torch probe": "child ask_torch", "journalctl": "journalctl -k"}


def best_match(kind: str, inputs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any] | None:
    """The recorded input that answers the question `kind`, or None.

    An equal name wins. Else a recorded command answers when it is the same program in the same mode: which fields
    were asked for and in which order may differ ("nvidia-smi --query-gpu --format=csv" answers any --query-gpu).
    """
    named = [(_OTHER_NAMES.get(name, name), entry) for name, entry in inputs if not name.endswith(" stderr")]
    for name, entry in named:
        if name == kind:
            return entry
    if kind.startswith(("/", "glob ", "child ")):
        return None
    mode, words = _mode(kind), set(kind.split())
    same = [(len(words & set(name.split())), index) for index, (name, _) in enumerate(named) if _mode(name) == mode]
    return named[max(same, key=lambda pair: (pair[0], -pair[1]))[1]][1] if same else None


def _mode(kind: str) -> tuple[str, ...]:
    """The program and what decides the form of its answer."""
    words = kind.split()
    if not words or kind.startswith(("/", "glob ", "child ")):
        return (kind,)
    program = re.split(r"[\\/]", words[0])[-1].lower().removesuffix(".exe")
    options = [word.partition("=")[0] for word in words[1:]]
    if program == "nvidia-smi":
        for option in options:
            if option.startswith("--query") or option in ("pmon", "dmon", "mig", "topo", "nvlink", "vgpu"):
                return (program, option)
        if "-L" in options or "--list-gpus" in options:
            return (program, "-L")
        if "-q" in options or "--query" in options:
            about = [words[index + 2] for index, word in enumerate(words[1:-1]) if word == "-d"]
            return (program, "-q", "-x" if "-x" in options or "--xml-format" in options else "", *about)
        return (program,)
    if program in ("lspci", "dmesg", "rocm-smi", "uname", "ldconfig", "rocminfo", "nvcc"):
        return (program,)
    return (program, *[word for word in words[1:] if not word.startswith("-")][:2])


def open_machine(record: str | None, replay: str | None, tool: str) -> Machine:
    """The machine that `--record` and `--replay` ask for. Raises UsageError when a folder cannot be used."""
    if record and replay:
        raise UsageError("--record and --replay cannot be used together")
    if replay:
        return RecordedMachine(replay)
    return RecordingMachine(record, tool) if record else Machine()


@dataclass(frozen=True)
class Interpreter:
    """The Python whose packages are judged, and why it was chosen. `ours` when it is the one that runs this program."""

    path: str
    why: str
    ours: bool


def choose_python(machine: Machine, explicit: str | None = None, needs: Sequence[str] = ()) -> Interpreter:
    """The interpreter under test: `--python`, else VIRTUAL_ENV, CONDA_PREFIX, `python3` on PATH, else our own.

    With `needs` (module names) the first of these that has them all is taken, our own as the last; when none has
    them, the first one. An explicit choice is never overridden. Raises UsageError when an explicit one is not there.
    """
    import shutil

    if machine.replayed:
        return Interpreter(explicit or "recorded", "the machine is a recording", False)
    if explicit:
        found = shutil.which(explicit)
        if found is None:
            raise UsageError(f"--python {explicit}: no such program; name a Python interpreter")
        return Interpreter(found, "given with --python", _is_ours(found))
    candidates: list[tuple[str, str]] = []
    inside = ("python.exe",) if os.name == "nt" else ("bin/python3", "bin/python")
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix = machine.variable(variable)
        if prefix:
            scripts = ("Scripts/python.exe", *inside) if os.name == "nt" else inside
            path = next((str(Path(prefix, name)) for name in scripts if Path(prefix, name).exists()), None)
            if path:
                candidates.append((path, f"the active environment ({variable})"))
    on_path = shutil.which("python3") or shutil.which("python")
    if on_path:
        candidates.append((on_path, "python3 on PATH; no environment is active"))
    candidates.append((sys.executable, "the interpreter that runs this program"))
    if needs:
        for path, why in candidates:
            if _is_ours(path) and path != sys.executable:
                path = sys.executable
            if has_modules(machine, path, needs):
                skipped = "" if path == candidates[0][0] else f"; {', '.join(needs)} not in {candidates[0][1]}"
                return Interpreter(path, why + skipped, _is_ours(path))
    path, why = candidates[0]
    return Interpreter(path, why, _is_ours(path))


def has_modules(machine: Machine, python: str, names: Sequence[str]) -> bool:
    """Whether that interpreter can find all the modules (they are looked up, not imported)."""
    if python == sys.executable:
        return all(importlib.util.find_spec(name) is not None for name in names)
    code = "import importlib.util as u,sys; sys.exit(any(u.find_spec(n) is None for n in sys.argv[1:]))"
    return machine.run([python, "-c", code, *names], timeout_s=20, env={"PYTHONDONTWRITEBYTECODE": "1"}).ok


def _is_ours(path: str) -> bool:
    # Compared without resolving links: a virtual environment's python is a link to the base interpreter.
    return os.path.normcase(os.path.abspath(path)) == os.path.normcase(os.path.abspath(sys.executable))
