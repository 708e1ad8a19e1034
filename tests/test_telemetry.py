"""NVML through pynvml and nvidia-smi's own loop, each in its child, with stand-ins for the driver."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpu_probe
from preflight.hardware import accelerators
from preflight.hardware.nvidia import parse_nvml
from preflight.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
NVML = ROOT / "tests" / "fake_nvml"
CHILD = ROOT / "preflight" / "children" / "telemetry.py"


def watched(tmp_path, device, bus, seconds, env):
    """The lines that telemetry.py wrote while it watched us for some seconds."""
    results = tmp_path / "results.jsonl"
    results.touch()
    command = [sys.executable, str(CHILD), device, bus, "10", str(results), str(os.getpid())]
    with subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE) as child:
        time.sleep(seconds)
        results.rename(tmp_path / "ended.jsonl")  # the file is gone: it ends by itself
        try:
            assert child.wait(timeout=20) == 0, child.stderr.read()
        finally:
            child.kill()
    return [json.loads(line) for line in (tmp_path / "ended.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("card", ["00000000:01:00.0", "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", ""])
def test_nvml_is_sampled(card, tmp_path):
    lines = watched(tmp_path, "cuda:0", card, 1.5, {"PYTHONPATH": str(NVML)})
    assert lines[0]["telemetry_source"] == "NVML" and 0 < lines[0]["clock_s"] <= time.monotonic()
    samples = [line["telemetry"] for line in lines[1:] if "telemetry" in line]
    assert len(samples) >= 3
    assert samples[0]["utilization_pct"] == 97 and samples[0]["power_w"] == 301.5
    assert samples[0]["sm_clock_mhz"] == 2520 and samples[0]["memory_clock_mhz"] == 10501
    assert samples[0]["memory_used_bytes"] == 4 << 30 and 60 <= samples[0]["temperature_c"] <= 62
    assert samples[0]["throttle"] == ["sw power cap", "hw thermal slowdown"]


def test_without_pynvml_nvidia_smi_is_read_in_its_loop(tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('no pynvml')\n")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nwhile :; do echo '88, 1024, 1980, 5001, 71, [N/A]'; sleep 0.1; done\n")
    smi.chmod(0o755)
    env = {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    lines = watched(tmp_path, "cuda:0", "", 1.5, env)
    assert lines[0]["telemetry_source"] == "nvidia-smi" and "ImportError" in lines[0]["because"]
    sample = next(line["telemetry"] for line in lines if "telemetry" in line)
    assert sample["utilization_pct"] == 88 and sample["memory_used_bytes"] == 1024 << 20
    assert "power_w" not in sample


def test_nvml_tells_what_nvidia_smi_does_not(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NVML))
    lines = Machine().ask("ask_nvml", sys.executable).lines_of_json()
    assert lines[0] == {"driver": "580.95.05", "cuda": "13.0", "count": 2}
    assert lines[1]["encoder_capacity"] == {"H.264": 100, "HEVC": 100, "AV1": 100} and lines[1]["driver_model"] is None
    assert "error" in lines[2]
    seen = parse_nvml(lines)
    assert (seen.driver.version, seen.driver.cuda) == ("580.95.05", "13.0")
    assert [gpu.lost for gpu in seen.gpus] == [False, True] and seen.gpus[0].compute_capability == "8.9"


def test_without_nvidia_smi_the_drivers_library_is_asked(monkeypatch, capsys):
    """A container with the driver's devices and library but without its tools."""

    class Container(Machine):
        def list(self, pattern):
            return ["/dev/nvidia0"] if pattern.startswith("/dev/nvidia") else []

    monkeypatch.setenv("PYTHONPATH", str(NVML))
    monkeypatch.setenv("PATH", "/nonexistent")
    seen = accelerators.read(Container())
    assert [gpu.name for gpu in seen.gpus] == ["NVIDIA GeForce RTX 4090", None] and dict(seen.asked)[
        "NVML"
    ] == "answered"
    assert seen.gpus[0].free_bytes == 20 << 30 and seen.driver.version == "580.95.05"


def test_the_library_without_a_driver_is_no_crash():
    lines = Machine().ask("ask_nvml", sys.executable).lines_of_json()
    assert len(lines) >= 1 and ("error" in lines[0] or "driver" in lines[0])
    assert gpu_probe.STAGE == "gpu_probe"
