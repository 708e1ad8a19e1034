"""The one door to the machine: answers, absence, time-outs, recording and replay."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from preflight import machine as machines
from preflight.console import UsageError
from preflight.machine import (
    Answer,
    Machine,
    RecordedMachine,
    RecordingMachine,
    best_match,
    choose_python,
    open_machine,
)


def test_a_program_that_is_not_there_is_an_answer() -> None:
    answer = Machine().run(["no-such-program-anywhere"])
    assert answer.absent
    assert answer.exit_code is None
    assert not answer.ok


def test_a_program_that_fails_keeps_its_code_and_both_streams() -> None:
    answer = Machine().run(
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"]
    )
    assert (answer.text, answer.errors, answer.exit_code, answer.trouble) == ("out\n", "err\n", 7, "")


def test_a_hanging_program_is_given_up_with_what_it_said_and_its_children_are_gone(tmp_path: Path) -> None:
    marker = tmp_path / "grandchild.pid"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(marker)!r}, 'w').write(str(child.pid))\n"
        "print('so far', flush=True)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    answer = Machine().run([sys.executable, "-c", code], timeout_s=3)
    assert answer.trouble == "timeout"
    assert answer.text == "so far\n"
    assert time.monotonic() - began < 30
    if os.name == "posix":
        with pytest.raises(ProcessLookupError):
            _still_there(int(marker.read_text()))


def _still_there(pid: int) -> None:
    for _ in range(50):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.1)


def test_endless_output_is_cut_in_the_middle() -> None:
    from preflight import processes

    ended = processes.run([sys.executable, "-c", "print('a' * 3_000_000 + 'z')"], 30, limit_bytes=1000)
    assert len(ended.text) < 1100
    assert ended.text.startswith("aaa")
    assert ended.text.rstrip().endswith("z")


def test_reading_what_is_not_there_or_not_readable_is_an_answer(tmp_path: Path) -> None:
    assert Machine().read(tmp_path / "no").trouble == "absent"
    assert Machine().read(tmp_path).trouble == "unreadable"
    (tmp_path / "utf16.txt").write_bytes("Größe\r\n".encode("utf-16"))
    assert Machine().read(tmp_path / "utf16.txt").text == "Größe\n"


def test_a_child_hands_over_each_finished_step_even_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies.py").write_text(
        "import json, os, signal, sys\n"
        "out = open(sys.argv[1], 'a')\n"
        "for step in ('one', 'two'):\n"
        "    out.write(json.dumps({'step': step}) + '\\n'); out.flush()\n"
        'out.write(\'{"step": "thr\'); out.flush()\n'
        "os.abort()\n"
    )
    monkeypatch.setattr(machines, "CHILDREN", tmp_path)
    seen: list[dict[str, object]] = []
    answer = Machine().ask("dies", sys.executable, on_line=seen.append)
    assert answer.lines_of_json() == [{"step": "one"}, {"step": "two"}] == seen
    assert not answer.ok


def test_a_recording_answers_like_the_machine_it_was_made_on(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("hello /home/alice\n")
    live = RecordingMachine(tmp_path / "rec", "a_tool")
    command = [sys.executable, "-c", "import sys; print('x'); print('warned', file=sys.stderr); sys.exit(3)"]
    first = live.run(command)
    live.run(["no-such-program-anywhere", "--flag"])
    live.read(tmp_path / "file.txt")
    assert live.see("platform", lambda: {"system": "Linux"}) == {"system": "Linux"}
    assert live.see("nothing", lambda: 1 / 0) is None
    os.environ["PREFLIGHT_TEST_TOKEN"] = "secret-value"
    try:
        live.variable("PREFLIGHT_TEST_TOKEN")
    finally:
        del os.environ["PREFLIGHT_TEST_TOKEN"]
    replayed = RecordedMachine(tmp_path / "rec")
    again = replayed.run(command)
    assert (again.text, again.errors.strip(), again.exit_code) == (first.text, first.errors.strip(), 3)
    assert replayed.run(["no-such-program-anywhere", "--flag"]).absent
    assert replayed.run(["never-asked"]).trouble == "not-recorded"
    assert replayed.read(tmp_path / "file.txt").text == "hello /home/<user>\n"
    assert replayed.see("platform", lambda: {"system": "other"}) == {"system": "Linux"}
    assert replayed.variable("PREFLIGHT_TEST_TOKEN") == "<token>"
    assert replayed.variable("PATH") is None


def test_a_recording_is_never_written_over_another(tmp_path: Path) -> None:
    RecordingMachine(tmp_path / "rec", "a")
    with pytest.raises(UsageError, match="holds a recording already"):
        RecordingMachine(tmp_path / "rec", "a")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"inputs": [1]}', '{"inputs": {"a": 1}}'])
def test_a_folder_that_is_no_recording_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "case.json").write_text(content)
    with pytest.raises(UsageError, match="--replay"):
        RecordedMachine(tmp_path)


def test_a_recording_cannot_reach_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(json.dumps({"inputs": [{"file": "../../etc/passwd", "kind": "dmesg"}]}))
    with pytest.raises(UsageError, match="outside the recorded folder"):
        RecordedMachine(tmp_path).run(["dmesg"])


def names(*kinds: str) -> list[tuple[str, dict[str, object]]]:
    return [(kind, {"file": f"{number}.txt", "kind": kind}) for number, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("asked", "recorded", "answer"),
    [
        ("nvidia-smi", ("nvidia-smi -q", "nvidia-smi"), "nvidia-smi"),
        ("nvidia-smi -q", ("nvidia-smi -q -x", "nvidia-smi"), None),
        ("nvidia-smi --query-gpu=index,name --format=csv", ("nvidia-smi --query-gpu --format=csv",), 0),
        ("nvidia-smi --query-gpu=name --format=csv", ("nvidia-smi --query-gpu csv,noheader,nounits",), 0),
        ("nvidia-smi --query-gpu=name", ("nvidia-smi --query-compute-apps=pid",), None),
        ("dmesg", ("dmesg -T",), 0),
        ("lspci -nn", ("lspci -nn -d 10de:",), 0),
        ("rocm-smi --showmeminfo vram --json", ("rocm-smi --showproductname --showmeminfo vram --csv",), 0),
        ("npu-smi info", ("npu-smi info -t board",), None),
        ("/proc/meminfo", ("/proc/version", "/proc/meminfo"), 1),
        ("child ask_torch", ("torch probe", "torch probe stderr"), 0),
        ("nvidia-smi.exe", ("nvidia-smi",), 0),
    ],
)
def test_a_question_finds_the_recorded_answer_of_the_same_kind(
    asked: str, recorded: tuple[str, ...], answer: int | str | None
) -> None:
    found = best_match(asked, names(*recorded))
    if answer is None:
        assert found is None
    else:
        assert found is not None
        assert found["kind"] == (recorded[answer] if isinstance(answer, int) else answer)


def test_record_and_replay_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="cannot be used together"):
        open_machine("a", "b", "t")


def test_the_interpreter_under_test_is_explicit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    live = Machine()
    assert choose_python(live, sys.executable).ours
    with pytest.raises(UsageError, match="no such program"):
        choose_python(live, str(tmp_path / "python"))
    bare = tmp_path / "env"
    (bare / "bin").mkdir(parents=True)
    (bare / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("CONDA_PREFIX", str(bare))
    chosen = choose_python(live)
    assert chosen.path == str(bare / "bin" / "python")
    assert "CONDA_PREFIX" in chosen.why
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "gone"))
    assert choose_python(live).path == str(bare / "bin" / "python")


def test_an_interpreter_without_what_is_needed_is_passed_over_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    fake = tmp_path / "bin"
    fake.mkdir()
    # An interpreter that has no module at all.
    (fake / "python3").write_text("#!/bin/sh\nexit 1\n")
    (fake / "python3").chmod(0o755)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    chosen = choose_python(Machine(), needs=("json",))
    assert chosen.path != str(fake / "python3")
    assert "json not in the active environment" in chosen.why
    assert choose_python(Machine(), needs=("no_module_of_this_name",)).path == str(fake / "python3")


def test_one_object_over_many_lines_is_read_as_one() -> None:
    assert Answer('{\n "a": 1\n}').lines_of_json() == [{"a": 1}]
    assert Answer("no json").lines_of_json() == []
