"""The software stage from the command line: flags, bad input, recordings, other interpreters, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import env_sandbox
from preflight.console import UsageError
from preflight.findings import Level
from preflight.machine import Answer
from preflight.software import wheelhouse
from preflight.software.diagnosis import check_stages, failures, root_of
from preflight.software.stack import Request, other_imports, printed_by_step, read_stages

ROOT = Path(__file__).resolve().parent.parent


def run(*flags: str, cwd: Path, **env: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "env_sandbox.py"), "--json", *flags],
        capture_output=True, text=True, cwd=cwd, timeout=400, env={**os.environ, **env},
    )  # fmt: skip
    assert "Traceback (most recent call last)" not in done.stderr, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def codes(section: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in section["findings"]]


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--requirements", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--python", "/no/such/python"], "no such program"),
        (["--python", __file__], "no such program"),
        (["--model", "nowhere"], "no config.json there"),
        (["--check", "nowhere.py"], "--check nowhere.py: no such file"),
        (["--wheelhouse", "nowhere"], "--wheelhouse nowhere: no such folder"),
        (["--collect", "x", "--for-python", "311"], "a version like 3.11"),
        (["--collect", "x", "--for-platform", "amiga"], "not a platform tag"),
        (["--mode", "gguf", "--gguf", "nowhere.gguf"], "--gguf nowhere.gguf: no such file"),
        (["--sandbox-dir", "/proc/nowhere"], "no folder can take the sandbox"),
    ],
)
def test_bad_input_is_one_line_that_names_what_is_wrong(flags: list[str], words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "env_sandbox.py"), "--no-report", *flags],
        capture_output=True, text=True, cwd=tmp_path, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_help_is_quick_and_needs_nothing_installed(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "env_sandbox.py"), "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "--prove-fix" in done.stdout
    assert time.monotonic() - began < 3  # 0.12 s when idle


def test_an_interpreter_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match="does not run"):
        env_sandbox.main(["--no-report", "--python", str(broken)])


def test_a_line_that_cannot_be_used_stops_before_anything_is_installed(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("torch=2.1\nnumpy\n")
    began = time.monotonic()
    code, section, _ = run("--requirements", "r.txt", cwd=tmp_path)
    assert code == 1 and codes(section) == ["requirement-line-refused"]
    assert "line 1" in section["findings"][0]["what"] and section["observed"]["install"] is None
    assert time.monotonic() - began < 10


# --- what a child's events mean --------------------------------------------------------------------------------------


def line(**event: Any) -> str:
    return json.dumps(event)


def events(*lines: str, errors: str = "", code: int | None = 0, trouble: str = "") -> Answer:
    return Answer("\n".join(lines), errors, code, trouble)


PACKAGES = line(
    event="packages",
    packages=[
        {"name": "torch", "version": "2.13.0", "top_level": ["torch"], "requires": []},
        {"name": "transformers", "version": "5.24.0", "top_level": ["transformers"], "requires": []},
    ],
)


def test_a_crash_names_the_step_it_died_in_and_the_rest_is_not_reached() -> None:
    answer = events(
        PACKAGES,
        line(event="start", stage="torch", step="import torch"),
        errors="\x1etorch/import torch\nFatal Python error: Segmentation fault\n",
        code=-11,
    )
    stages = {stage["stage"]: stage for stage in read_stages(answer, ["torch", "transformers", "peft"])["stages"]}
    assert stages["torch"]["state"] == "crashed" and stages["transformers"]["state"] == "not-reached"
    assert stages["peft"]["state"] == "absent"  # it is not installed
    step = stages["torch"]["steps"][0]
    assert step["step"] == "import torch" and "SIGSEGV" in step["error"][0]["message"]
    outcome = {"stages": list(stages.values()), "packages": json.loads(PACKAGES)["packages"]}
    finding = check_stages(outcome)[0]
    assert finding.code == "step-crashed" and finding.level is Level.FAIL and "`import torch`" in finding.what
    assert "Not reached after it: transformers" in finding.what


def test_an_illegal_instruction_is_told_from_other_crashes() -> None:
    answer = events(
        PACKAGES,
        line(event="start", stage="torch", step="import torch"),
        errors="\x1etorch/import torch\nFatal Python error: Illegal instruction\n",
        code=-4,
    )
    outcome = {"stages": read_stages(answer, ["torch"])["stages"], "packages": []}
    assert failures(outcome)[0].match.signature.id == "illegal_instruction"  # type: ignore[union-attr]


def test_a_hang_is_unknown_and_not_broken() -> None:
    answer = events(
        PACKAGES,
        line(event="start", stage="torch", step="run a kernel"),
        errors="Timeout (0:05:00)!\nThread 0x1",
        code=1,
    )
    outcome = {"stages": read_stages(answer, ["torch"])["stages"], "packages": []}
    assert outcome["stages"][0]["state"] == "timeout"
    assert check_stages(outcome)[0].code == "step-timeout" and check_stages(outcome)[0].level is Level.UNKNOWN


def test_a_package_that_could_only_be_imported_does_not_count_as_passed() -> None:
    # bitsandbytes 0.41.3 imports on a machine without a GPU, and has no kernels for its CPU.
    answer = events(
        PACKAGES,
        line(event="start", stage="torch", step="import torch"),
        line(event="step", stage="torch", step="import torch", ok=True, seconds=1.0),
        line(event="not-tried", stage="torch", why="this release has no kernels for the CPU"),
        line(event="stage", stage="torch", ok=True, seconds=1.0, peak_rss_bytes=1),
    )
    outcome = {"stages": read_stages(answer, ["torch"])["stages"], "packages": []}
    found = {finding.code: finding.level for finding in check_stages(outcome)}
    assert found == {"torch-not-exercised": Level.WARN}


def test_an_interpreter_that_never_started_is_said() -> None:
    stages = read_stages(events(code=None, trouble="absent"), ["torch"])["stages"]
    assert stages[0]["state"] == "crashed" and "could not be started" in stages[0]["steps"][0]["error"][0]["message"]


def test_the_root_cause_is_found_through_raise_from_and_below_wrappers_only() -> None:
    cause = {"type": "RuntimeError", "message": "operator torchvision::nms does not exist", "link": None}
    chain = [{"type": "ModuleNotFoundError", "message": "Could not import module 'X'.", "link": "cause"}, cause]
    assert root_of(chain) is cause
    handled = {"type": "KeyError", "message": "'x'", "link": None}
    own = {"type": "ValueError", "message": "a clear message of its own", "link": "context"}
    assert root_of([own, handled]) is own
    wrapper = {"type": "RuntimeError", "message": "Failed to import transformers.trainer", "link": "context"}
    assert root_of([wrapper, cause]) is cause


def test_what_a_step_printed_belongs_to_that_step() -> None:
    text = "noise\n\x1etorch/import numpy\n\n\x1etorch/import torch\nA module that was compiled using NumPy 1.x\n"
    assert printed_by_step(text) == {"torch/import torch": "A module that was compiled using NumPy 1.x"}


def test_a_printed_error_of_a_step_that_went_on_is_a_warning() -> None:
    step = {
        "step": "import torch",
        "ok": True,
        "printed": "_ARRAY_API not found",
        "facts": {},
        "error": None,
        "warnings": [],
    }
    outcome = {"stages": [{"stage": "torch", "state": "ok", "steps": [step]}], "packages": []}
    levels = {finding.code: finding.level for finding in check_stages(outcome)}
    assert levels["numpy-abi"] is Level.WARN and Level.FAIL not in levels.values()


def test_what_builds_on_transformers_is_imported_after_it(tmp_path: Path) -> None:
    from preflight.software.installers import Installer, PipSettings
    from preflight.software.requirements import read_requirements

    (tmp_path / "r.txt").write_text("trl\npandas\nPillow\ntorch\nsetuptools\n")
    request = Request(read_requirements(tmp_path / "r.txt"), "python", Installer("uv", "", "", ""), PipSettings())
    packages = [
        {"name": "trl", "top_level": ["trl"], "requires": ["transformers>=4.40", "datasets"]},
        {"name": "pandas", "top_level": ["pandas", "tests"], "requires": ["numpy"]},
        {"name": "pillow", "top_level": ["PIL"], "requires": []},
        {"name": "torch", "top_level": ["torch"], "requires": []},
        {"name": "setuptools", "top_level": ["setuptools"], "requires": []},
        {"name": "not-asked-for", "top_level": ["x"], "requires": []},
    ]
    assert other_imports(request, packages) == ([["pandas", "pandas"], ["pillow", "PIL"]], [["trl", "trl"]])


# --- wheels for another machine --------------------------------------------------------------------------------------


def test_a_machine_with_a_newer_glibc_also_takes_older_wheels() -> None:
    made = wheelhouse.platforms("manylinux_2_28_x86_64")
    assert made[0] == "manylinux_2_28_x86_64" and "manylinux2014_x86_64" in made and "manylinux_2_35_x86_64" not in made
    assert "manylinux2010_x86_64" not in wheelhouse.platforms("manylinux_2_28_aarch64")
    assert wheelhouse.platforms("win_amd64") == ["win_amd64"]
    assert "macosx_11_0_arm64" in wheelhouse.platforms("macosx_14_0_arm64")


def test_what_was_gathered_is_checked_against_the_other_machine() -> None:
    accepted = wheelhouse.platforms("manylinux_2_28_aarch64")
    good = [
        "tqdm-4-py3-none-any.whl",
        "pyyaml-6-cp312-cp312-manylinux2014_aarch64.whl",
        "x-1-cp39-abi3-linux_aarch64.whl",
    ]
    assert wheelhouse.check_collected(good, "it", 1, "w", accepted, "3.12").code == "collected"
    for bad in ("pyyaml-6-cp311-cp311-manylinux2014_aarch64.whl", "a-1-py3-none-win_amd64.whl", "b-1.tar.gz"):
        finding = wheelhouse.check_collected([bad], "it", 1, "w", accepted, "3.12")
        assert finding.code == "collected-not-installable" and finding.fix, bad


@pytest.mark.network
@pytest.mark.slow
def test_wheels_gathered_here_install_without_a_network_and_for_another_machine_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("tqdm==4.66.4\npyyaml\n")
    code, section, _ = run("--requirements", "r.txt", "--collect", "wheels", cwd=tmp_path)
    assert code == 0 and codes(section) == ["collected"]
    dead = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"}
    code, section, _ = run(
        "--requirements", "wheels/requirements.txt", "--offline", "--wheelhouse", "wheels", cwd=tmp_path, **dead
    )  # fmt: skip
    assert code == 0 and section["observed"]["installed"]["tqdm"] == "4.66.4"
    code, section, _ = run(
        "--requirements", "r.txt", "--collect", "other", "--for-python", "3.12", "--for-platform",
        "manylinux_2_28_aarch64", cwd=tmp_path,
    )  # fmt: skip
    names = section["observed"]["collected"]["files"]
    assert code == 0 and any("cp312" in name and "aarch64" in name for name in names), names


@pytest.mark.network
@pytest.mark.slow
def test_an_empty_wheelhouse_offline_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "r.txt").write_text("a-package-nobody-has==1\n")
    code, section, _ = run("--requirements", "r.txt", "--offline", "--wheelhouse", "empty", cwd=tmp_path)
    assert code == 1 and "no-matching-distribution" in codes(section)


# --- recordings, the default run, other ways -------------------------------------------------------------------------


@pytest.mark.network
@pytest.mark.slow
def test_a_recorded_run_replays_to_the_same_findings_without_installing(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("tqdm==4.66.4\n")
    code, live, _ = run("--requirements", "r.txt", "--record", "seen", cwd=tmp_path)
    began = time.monotonic()
    again, replayed, _ = run("--requirements", "r.txt", "--replay", "seen", cwd=tmp_path)
    assert (code, codes(live)) == (again, codes(replayed))
    assert replayed["observed"]["installed"] == live["observed"]["installed"]
    assert time.monotonic() - began < 10
    assert str(Path.home()) not in (tmp_path / "seen" / "case.json").read_text()


@pytest.mark.network
@pytest.mark.slow
def test_the_tested_set_loads_in_full(tmp_path: Path) -> None:
    code, section, _ = run("--mode", "full", cwd=tmp_path)
    assert code == 0 and section["level"] == "ok", section["findings"]
    states = {stage["stage"]: stage["state"] for stage in section["observed"]["stages"]}
    assert states == dict.fromkeys(("torch", "transformers", "peft", "bitsandbytes"), "ok")
    steps = {step["step"]: step for stage in section["observed"]["stages"] for step in stage["steps"]}
    assert steps["8-bit optimizer step"]["facts"]["state_dtype"] == "torch.uint8"
    assert 0.05 < steps["quantise a layer to 4 bits"]["facts"]["mean_relative_error"] < 0.15  # NF4: about 0.09
    assert steps["get_peft_model"]["facts"]["trainable_parameters"] > 0
    for stage in section["observed"]["stages"]:
        assert stage["seconds"] >= 0 and stage["peak_rss_bytes"] > 2**26


@pytest.mark.network
@pytest.mark.slow
def test_the_users_own_config_is_shrunk_and_trained_and_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    python = sys.executable
    pytest.importorskip("torch")
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    code, section, _ = run("--current", "--python", python, "--model", "model", cwd=tmp_path)
    steps = {step["step"]: step for stage in section["observed"]["stages"] for step in stage["steps"]}
    assert code == 0, section["findings"]
    assert steps["build a two-layer model"]["facts"]["class"] == "Qwen2ForCausalLM"
    assert steps["build a two-layer model"]["facts"]["could_not_use_config"] is None
    assert steps["build a two-layer model"]["facts"]["parameters"] < 2_000_000
    (model / "config.json").write_text('{"model_type": "qwen99", "hidden_size": 64}')
    code, section, _ = run("--current", "--python", python, "--model", "model", cwd=tmp_path)
    assert code == 1 and "arch-unknown-new" in codes(section)
    assert section["observed"]["failing_stage"] == "build a two-layer model"


@pytest.mark.parametrize("kind", ["segfault", "hang"])
def test_a_torch_that_dies_or_hangs_on_import_is_named_with_its_step(kind: str, tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "torch"
    fake.mkdir(parents=True)
    deed = "import ctypes; ctypes.string_at(0)" if kind == "segfault" else "import time; time.sleep(60)"
    (fake / "__init__.py").write_text(deed + "\n")
    code, section, _ = run(
        "--current", "--python", sys.executable, "--mode", "quick", "--stage-limit-s", "5", cwd=tmp_path,
        PYTHONPATH=str(tmp_path / "fake"),
    )  # fmt: skip
    assert section["observed"]["failing_stage"] == "import torch"
    assert codes(section)[0] == ("step-crashed" if kind == "segfault" else "step-timeout")
    assert code == (1 if kind == "segfault" else 3)


def test_a_preinstalled_stack_is_tried_as_it_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Colab: the preinstalled interpreter loads, so no sandbox is made."""
    pytest.importorskip("torch")
    from preflight.machine import Interpreter

    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20261101")
    monkeypatch.setattr(env_sandbox, "choose_python", lambda *a: Interpreter(sys.executable, "as on Colab", False))
    monkeypatch.setattr(env_sandbox, "try_stack", lambda *a: pytest.fail("a sandbox was made"))
    monkeypatch.chdir(tmp_path)
    args = env_sandbox.make_parser().parse_args(["--mode", "quick"])
    from preflight.machine import Machine

    section = env_sandbox.look_and_judge(Machine(), args)
    assert section.observed["place"] == "colab" and section.level is Level.OK
    assert section.observed["stages"][0]["state"] == "ok"


@pytest.mark.network
@pytest.mark.slow
def test_a_failure_that_no_table_knows_is_searched_newest_first_and_proven(tmp_path: Path) -> None:
    """pyarrow 26 refuses NumPy 1 at import and declares nothing: which pin has to give way is found by trying."""
    (tmp_path / "r.txt").write_text("numpy==1.26.4\npyarrow==26.0.1\n")
    code, section, errors = run("--requirements", "r.txt", "--prove-fix", cwd=tmp_path)
    seen = section["observed"]
    assert code == 1 and codes(section)[-1] == "fix-proven", section["findings"]
    assert seen["failing_stage"] == "import pyarrow" and "step-failed" in codes(section)
    assert seen["failures"][0]["signature"] is None
    lines = (tmp_path / "requirements.fixed.txt").read_text().splitlines()
    # Unpinning pyarrow brings the same release again; unpinning numpy brings NumPy 2, which it wants.
    assert lines[0].startswith("numpy==2.") and lines[1] == "pyarrow==26.0.1"
    assert "trying pyarrow unpinned" in errors


@pytest.mark.network
@pytest.mark.slow
def test_pip_does_the_same_when_uv_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("numpy==2.4.6\npandas==1.5.3\n")
    code, section, _ = run("--requirements", "r.txt", "--installer", "pip", cwd=tmp_path)
    assert section["observed"]["installer"]["name"] == "pip"
    assert code == 1 and "numpy-abi" in codes(section) and section["observed"]["failing_stage"] == "import pandas"
    (tmp_path / "r.txt").write_text("transformers==4.57.6\ntokenizers==0.23.3\n")
    code, section, _ = run("--requirements", "r.txt", "--installer", "pip", cwd=tmp_path)
    assert codes(section)[-1] == "resolution-impossible"
    wishes = {wish["by"]: wish["wants"] for wish in section["observed"]["conflict"]["wishes"]}
    assert wishes["transformers 4.57.6"] == "tokenizers<=0.23.0 and >=0.22.0"


@pytest.mark.network
@pytest.mark.slow
def test_a_sandbox_that_is_kept_can_be_entered_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("tqdm==4.66.4\n")
    boxes = tmp_path / "boxes"
    boxes.mkdir()
    _, section, _ = run("--requirements", "r.txt", "--keep", "--sandbox-dir", "boxes", cwd=tmp_path)
    (box,) = boxes.iterdir()
    finding = next(one for one in section["findings"] if one["code"] == "sandbox-kept")
    assert f"{box}/env/bin/activate" in finding["what"] or os.name == "nt"
    python = box / ("env/Scripts/python.exe" if os.name == "nt" else "env/bin/python")
    done = subprocess.run([str(python), "-c", "import tqdm; print(tqdm.__version__)"], capture_output=True, text=True)
    assert done.stdout.strip() == "4.66.4"


def test_the_report_of_every_kind_of_run_is_rendered_by_its_template(tmp_path: Path) -> None:
    from preflight import report

    environment = report._environment()
    template = environment.get_template("env_sandbox.md.j2")
    (tmp_path / "r.txt").write_text("./nowhere\n")
    for flags in (["--disable-tcc"], ["--mode", "gguf", "--python", sys.executable], ["--requirements", "r.txt"]):
        _, section, _ = run(*flags, cwd=tmp_path)
        text = template.render(
            section=section, observed=section["observed"], findings=section["findings"],
            render_findings=report.render_findings,
        )  # fmt: skip
        assert text.startswith("## Software") and text.count("\n") < 60
