"""Sets up everything on a machine that has only Python, then runs the main job or the tests.

    python bootstrap.py report [MODEL=dir] [DATA=file.jsonl] [flags of `python -m preflight` …]
    python bootstrap.py test   [flags of pytest …]
    python bootstrap.py setup

Makes `.venv` beside this file when it is missing or stale (with uv when that is there, else venv + pip) and changes
nothing else on the machine. Standard library only; the same words work on Windows (`py bootstrap.py report`).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = HERE / ".venv"
STAMP = VENV / ".preflight-stamp"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
EXTRAS = "model,train,quantised,example,uv,data,recipe"
LOWEST = (3, 10)
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


def say(message: str) -> None:
    print(f"bootstrap: {message}", file=sys.stderr, flush=True)


def wanted_stamp() -> str:
    """What the environment was made from; it is stale when this changes."""
    digest = hashlib.sha256(repr((sys.version_info[:3], EXTRAS)).encode())
    for name in ("pyproject.toml", "constraints.txt", "bootstrap.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def is_fresh() -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted_stamp()


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One set-up at a time; the lock goes with its holder."""
    VENV.mkdir(exist_ok=True)
    with (HERE / ".venv" / ".preflight-lock").open("a") as handle:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, cwd=HERE, env=environment, stdout=sys.stderr)


def pip_settings(python: str) -> dict[str, list[str]]:
    """What pip is configured to use (files and PIP_* variables), because uv reads neither."""
    asked = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings: dict[str, list[str]] = {}
    for line in asked.stdout.splitlines():
        match = re.match(
            r"(?:global|install|:env:)\.(index-url|extra-index-url|find-links|constraint)='(.*)'$", line.strip()
        )
        if match:
            known = settings.setdefault(match[1], [])
            known.extend(word for word in match[2].replace("\\n", " ").split() if word not in known)
    return settings


def has_nvidia_gpu() -> bool:
    return bool(shutil.which("nvidia-smi") or glob.glob("/dev/nvidia[0-9]*") or glob.glob("/usr/lib/wsl/lib/libcuda*"))


def torch_wheel_at_hand(settings: dict[str, list[str]]) -> bool:
    """Whether a configured folder of wheels already holds a torch wheel."""
    return any(glob.glob(os.path.join(folder, "torch-*.whl")) for folder in settings.get("find-links", []))


def torch_source(settings: dict[str, list[str]]) -> list[str]:
    """Extra arguments that keep gigabytes of CUDA libraries off a Linux machine that has no NVIDIA GPU."""
    if sys.platform != "linux" or has_nvidia_gpu() or torch_wheel_at_hand(settings):
        return []
    say("no NVIDIA GPU found: taking the CPU build of torch")
    return ["--extra-index-url", CPU_WHEELS]


def set_up() -> None:
    """Make `.venv` from nothing: uv when it is there, else venv + pip."""
    if sys.version_info < LOWEST:
        raise SystemExit(f"bootstrap: needs Python {LOWEST[0]}.{LOWEST[1]} or newer; this is {sys.version.split()[0]}")
    say(f"making {VENV} (about 1.6 GB of disk; 1 to 3 minutes)")
    for entry in VENV.iterdir():  # the lock lies inside: keep the folder, remove what an older set-up left
        if entry.name != ".preflight-lock":
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()
    settings = pip_settings(sys.executable)
    requirement = f".[{EXTRAS}]"
    uv = shutil.which("uv")
    if uv:
        say(f"using {uv}")
        command = [uv, "pip", "install", "--quiet", "--python", str(PYTHON), "-c", "constraints.txt"]
        command += ["--index-strategy", "unsafe-best-match"]  # what pip does: the best version of all indexes
        for name in ("index-url", "extra-index-url", "find-links", "constraint"):
            for value in settings.get(name, []):
                command += [f"--{name}", value]
        run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(VENV)])
        run([*command, *torch_source(settings), "-e", requirement, "--group", "test"])
        return
    import venv

    venv.EnvBuilder(with_pip=True).create(VENV)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    run([*pip, "pip>=25.1"])  # older ones know no --group
    run([*pip, "-c", "constraints.txt", *torch_source(settings), "-e", requirement, "--group", "test"])


def ensure() -> None:
    if is_fresh():
        return
    with locked():
        if is_fresh():
            return
        try:
            set_up()
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"bootstrap: set-up failed (exit code {error.returncode}): {' '.join(map(str, error.cmd))}"
            ) from None
        # Ours only: it saves 0.2 s at every start, also where PYTHONDONTWRITEBYTECODE is set.
        run([str(PYTHON), "-m", "compileall", "-q", "preflight"])
        STAMP.write_text(wanted_stamp(), encoding="utf-8")


def child_environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.pop("PYTHONHOME", None)
    # Without .pyc files every import of peft costs twice as long.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("report", "test", "setup"):
        print(__doc__, file=sys.stderr)
        return 2
    job, rest = arguments[0], arguments[1:]
    ensure()
    if job == "setup":
        return 0
    command = [str(PYTHON)]
    if job == "test":
        command += ["-m", "pytest", *rest]
        where = HERE
    else:
        command += ["-m", "preflight"]
        where = Path.cwd()
        words = dict(word.split("=", 1) for word in rest if re.match(r"(MODEL|DATA)=", word))
        if words.get("MODEL"):
            command.append(words["MODEL"])
        if words.get("DATA"):
            command += ["--data", words["DATA"]]
        command += [word for word in rest if not re.match(r"(MODEL|DATA)=", word)]
    try:
        return subprocess.call(command, cwd=where, env=child_environment())
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
