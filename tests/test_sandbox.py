"""Nothing stays behind: whatever ends a run, the sandbox is gone at once or after the next start."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preflight.console import UsageError
from preflight.software import sandbox as module
from preflight.software.sandbox import LOCK, OWNER_VARIABLE, PREFIX, choose_root, remove, sandbox, sweep

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob(f"{PREFIX}*"))


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sweeping looks into the user's own folders too; tests stay in theirs."""
    own = tmp_path_factory.mktemp("roots")
    monkeypatch.setattr(module, "roots", lambda explicit=None: [Path(explicit)] if explicit else [own])


def test_a_sandbox_is_there_inside_and_gone_afterwards(tmp_path: Path) -> None:
    with sandbox(str(tmp_path)) as place:
        assert place.folder.is_dir() and len(left(tmp_path)) == 1
        (place.folder / "env").mkdir()
        (place.folder / "env" / "read-only").write_text("x")
        (place.folder / "env" / "read-only").chmod(0o400)
        (place.folder / "env").chmod(0o500)
    assert left(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(143)])
def test_an_exception_removes_it_and_goes_on(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), sandbox(str(tmp_path)):
        raise error
    assert left(tmp_path) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the disk is full"), sandbox(str(tmp_path)):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert left(tmp_path) == []


def test_too_little_free_space_is_said_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"GiB free, 1048576\.0 GiB needed"):
        choose_root(str(tmp_path), 2**50)
    assert left(tmp_path) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        choose_root(str(tmp_path), 0)


def test_a_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="no folder can take the sandbox"):
        choose_root(str(tmp_path / "file"), 0)


def test_a_sandbox_in_use_is_not_swept(tmp_path: Path) -> None:
    with sandbox(str(tmp_path)):
        assert sweep(str(tmp_path)) == 0
        assert len(left(tmp_path)) == 1


def test_a_sandbox_whose_owner_is_gone_is_swept_and_one_that_was_kept_is_not(tmp_path: Path) -> None:
    for name, text in (("dead", '{"process": 1}'), ("kept", '{"process": 1, "keep": true}')):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / LOCK).write_text(text)
    assert sweep(str(tmp_path)) == 1
    assert left(tmp_path) == [f"{PREFIX}kept"]


def test_links_files_and_other_folders_are_never_swept(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "data").write_text("mine")
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").write_text("")
    assert sweep(str(tmp_path)) == 0
    assert (target / "data").read_text() == "mine"


def test_a_folder_without_a_lock_is_given_time_to_get_one(tmp_path: Path) -> None:
    fresh = tmp_path / f"{PREFIX}fresh"
    fresh.mkdir()
    assert sweep(str(tmp_path)) == 0
    os.utime(fresh, (time.time() - 60, time.time() - 60))
    assert sweep(str(tmp_path)) == 1


@posix
def test_a_process_that_still_runs_inside_is_ended_by_the_sweep(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}busy"
    folder.mkdir()
    (folder / LOCK).write_text('{"process": 1}')
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc")
    straggler = subprocess.Popen(["sleep", "60"], env={**os.environ, OWNER_VARIABLE: str(folder)})
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        assert sweep(str(tmp_path)) == 1
        assert straggler.wait(10) == -signal.SIGKILL
        assert bystander.poll() is None
    finally:
        straggler.kill()
        bystander.kill()


def test_children_write_inside_and_ask_no_hub(tmp_path: Path) -> None:
    with sandbox(str(tmp_path)) as place:
        variables = place.environment
        for name in ("TMPDIR", "HF_HOME", "HF_MODULES_CACHE", "TRITON_CACHE_DIR", "TORCH_HOME"):
            assert Path(variables[name]).is_relative_to(place.folder)
        assert variables["HF_HUB_OFFLINE"] == "1"
        assert variables["PYTHONDONTWRITEBYTECODE"] == "" and variables["PYTHONPATH"] == ""


def test_removing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    assert remove(tmp_path / "nothing") is True


def digest(folder: Path) -> str:
    """A digest of every file's name, mode and bytes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(f"{path.relative_to(folder)} {path.lstat().st_mode}".encode())
        if path.is_file() and not path.is_symlink():
            total.update(path.read_bytes())
    return total.hexdigest()


@posix
@pytest.mark.slow
@pytest.mark.network
def test_twenty_kills_at_random_moments_leave_nothing_after_the_next_start(tmp_path: Path) -> None:
    """Killed while it resolves, installs, loads and cleans up; the environment of the user is unchanged."""
    mine = tmp_path / "mine"  # the user's environment
    subprocess.run([sys.executable, "-m", "virtualenv", "-q", "--no-periodic-update", str(mine)], check=True)
    before = digest(mine)
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("numpy==2.4.6\npyyaml\ntqdm\npackaging\n")
    command = [
        sys.executable, str(ROOT / "env_sandbox.py"), "--no-report", "--sandbox-dir", str(boxes),
        "--python", str(mine / "bin" / "python"), "--requirements", str(wanted),
    ]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
    began = time.monotonic()
    subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, timeout=300)
    whole_s = time.monotonic() - began
    assert left(boxes) == []
    chance = random.Random(20261130)
    seen = 0
    for number in range(20):
        kind = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[number % 4]
        before_it = set(left(boxes))  # of earlier kill -9s; the process may end before it sweeps
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd=tmp_path,
            start_new_session=True,
        )  # fmt: skip
        if number % 5:  # most kills at a random moment of the sandbox's life, some before it begins
            deadline = time.monotonic() + 60
            while not set(left(boxes)) - before_it and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, whole_s / 2))
        else:
            time.sleep(chance.uniform(0.05, whole_s / 2))
        seen += bool(set(left(boxes)) - before_it)
        process.send_signal(kind)
        process.wait(60)
        if kind != signal.SIGKILL:
            assert set(left(boxes)) <= before_it, f"kill {number} with {kind.name} left {left(boxes)}"
    assert seen >= 5  # the kills did hit sandboxes
    if left(boxes):
        # A folder killed in the instant before its lock was written is young: it is given five seconds.
        time.sleep(5.5)
    done = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, timeout=300, text=True)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert left(boxes) == []
    assert digest(mine) == before
    assert not [name for name in running() if str(boxes) in name]


def running() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_judging_an_interpreter_as_it_is_changes_nothing_of_it(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    subprocess.run([sys.executable, "-m", "virtualenv", "-q", "--no-periodic-update", str(mine)], check=True)
    before = digest(mine)
    python = str(mine / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "env_sandbox.py"), "--json", "--current", "--python", python],
        capture_output=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr[-2000:]
    assert digest(mine) == before
