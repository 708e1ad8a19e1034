"""Set-up on a fresh machine: what is handed on, what is left alone, when it is stale."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bootstrap  # noqa: E402


def test_pip_settings_are_read_from_files_and_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://pypi.example.org/simple\n"
        "extra-index-url = https://a.example.org/simple https://b.example.org/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/somewhere/wheels")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    settings = bootstrap.pip_settings(sys.executable)
    assert settings["index-url"][-1] == "https://pypi.example.org/simple"
    assert settings["extra-index-url"][-2:] == ["https://a.example.org/simple", "https://b.example.org/simple"]
    assert settings["find-links"] == ["/somewhere/wheels"]


def test_no_gpu_on_linux_takes_the_cpu_build_unless_a_wheel_is_at_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: False)
    assert bootstrap.torch_source({}) == ["--extra-index-url", bootstrap.CPU_WHEELS]
    assert "CPU build" in capsys.readouterr().err
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert bootstrap.torch_source({"find-links": [str(tmp_path)]}) == []
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: True)
    assert bootstrap.torch_source({}) == []


def test_an_environment_is_stale_when_what_it_was_made_from_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("pyproject.toml", "constraints.txt", "bootstrap.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(bootstrap, "HERE", tmp_path)
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(bootstrap, "PYTHON", Path(sys.executable))
    assert not bootstrap.is_fresh()
    (tmp_path / "stamp").write_text(bootstrap.wanted_stamp())
    assert bootstrap.is_fresh()
    with (tmp_path / "constraints.txt").open("a") as stream:
        stream.write("\n# changed\n")
    assert not bootstrap.is_fresh()


def test_an_unknown_job_prints_the_usage() -> None:
    asked = subprocess.run([sys.executable, str(ROOT / "bootstrap.py"), "nonsense"], capture_output=True, text=True)
    assert asked.returncode == 2
    assert "bootstrap.py report" in asked.stderr


def test_bootstrap_needs_nothing_but_the_standard_library() -> None:
    asked = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "bootstrap.py")], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 2


@pytest.mark.slow
@pytest.mark.network
def test_the_installed_wheel_has_its_commands_and_its_data(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    wheel = next(tmp_path.glob("finetune_preflight-*.whl"))
    import virtualenv

    environment = virtualenv.cli_run([str(tmp_path / "env"), "--no-periodic-update"])
    python = str(environment.creator.exe)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, cwd=tmp_path)
    commands = [
        "finetune-preflight",
        "gpu-probe",
        "env-sandbox",
        "model-analyzer",
        "task-evaluator",
        "validate-output-schema",
        "data-preprocessor",
    ]
    for name in commands:  # with the standard library alone: the light dependencies are not installed here
        asked = subprocess.run(
            [str(Path(python).parent / name), "--help"], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert asked.returncode == 0, (name, asked.stderr)
        assert re.search(r"^examples?:", asked.stdout, re.M)
    code = (
        "from preflight.facts import shipped, table; assert table('xid')['schema'] == 1; "
        "assert shipped('templates', 'summary.md.j2').exists() and shipped('examples', 'questions.jsonl').exists()"
    )
    subprocess.run([python, "-c", code], check=True, cwd=tmp_path)
