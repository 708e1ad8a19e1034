# ruff: noqa: E501 (commands and runs, one a line)
"""The stress test: really run on the CPU, interrupted, killed, spoiled; and judged on runs written by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpu_probe
from preflight.findings import Level
from preflight.hardware.stress_test import (
    DEFAULT_SHAPE,
    StressResult,
    check_stress,
    curve,
    measured,
    sag,
    shape_of,
    telemetry_summary,
    theoretical_gb_per_s,
    theoretical_tflops,
)

ROOT = Path(__file__).resolve().parent.parent


def finding(section, code):
    found = [one for one in section["findings"] if one["code"] == code]
    assert len(found) == 1, [(one["level"], one["code"], one["what"]) for one in section["findings"]]
    return found[0]


@pytest.fixture
def tiny(tmp_path):
    """A model whose minimal forward takes no time."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
def test_ten_seconds_on_the_cpu_measure_something_and_find_nothing_wrong(tiny, capsys):
    code = gpu_probe.main(
        ["--stress-test", "--device", "cpu", "--duration", "10", "--json", "--python", sys.executable, "--model", tiny]
    )
    section = json.loads(capsys.readouterr().out)
    stress = section["observed"]["stress"]
    assert code == 0 and stress["ended"] == "complete" and stress["wrong_results"] == 0
    assert 9 <= stress["seconds"] < 60 and stress["products"] > 1
    assert stress["tflops"] > 0 and stress["copy_gb_per_s"] > 0 and stress["longest_kernel_s"] > 0
    assert stress["telemetry"]["hertz"] >= 5 or stress["telemetry"]["samples"] >= 25  # a busy machine samples late
    curve = stress["curve"]
    points = len(curve["at_s"])
    assert 2 <= points <= 120 and {len(values) for values in curve.values()} == {points}
    assert curve["at_s"][-1] == pytest.approx(stress["seconds"], abs=0.1)
    speeds = [value for value in curve["tflops"] if value is not None]
    assert min(speeds) <= stress["tflops"] * 1.001 and max(speeds) >= stress["tflops"] * 0.999
    assert finding(section, "stress-passed")["level"] == "ok"
    forward = section["observed"]["minimal_forward"]
    assert forward["median_s"] > 0 and forward["finite"] is True and forward["peak_bytes"] > forward["weight_bytes"]
    assert finding(section, "forward-ran")["level"] == "ok"


@pytest.mark.slow
def test_one_flipped_bit_is_found(tiny, capsys):
    arguments = ["--stress-test", "--device", "cpu", "--duration", "1", "--flip-a-bit", "0", "--json"]
    assert gpu_probe.main([*arguments, "--python", sys.executable, "--model", tiny]) == 1
    wrong = finding(json.loads(capsys.readouterr().out), "stress-wrong-result")
    assert wrong["level"] == "fail" and "1 values differ, in matrix products" in wrong["what"]


def running(name):
    """Process ids of our children that run preflight/children/NAME.py and descend from this test."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    children: dict[int, list] = {}
    for pid, parent, args in rows:
        children.setdefault(int(parent), []).append((int(pid), args))
    found, todo = [], [os.getpid()]
    while todo:
        for pid, args in children.get(todo.pop(), []):
            todo.append(pid)
            if f"children/{name}.py " in args:
                found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", ["ctrl-c", "SIGTERM", "kill -9 of the child"])
def test_an_ended_run_gives_what_it_measured_and_leaves_no_process(how):
    command = [
        sys.executable,
        str(ROOT / "gpu_probe.py"),
        "--stress-test",
        "--device",
        "cpu",
        "--duration",
        "120",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as probe:
        try:
            until = time.monotonic() + 60
            while not running("telemetry") and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(1)
            if how != "kill -9 of the child":
                probe.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
            else:
                os.kill(running("stress")[0], signal.SIGKILL)
            out, _ = probe.communicate(timeout=60)
        finally:
            probe.kill()
    section = json.loads(out)
    if how != "kill -9 of the child":
        wanted = (130, "interrupted") if how == "ctrl-c" else (143, "terminated")
        assert (probe.returncode, section["observed"]["stress"]["ended"]) == wanted
        assert finding(section, "stress-interrupted")["level"] == "unknown"
    else:
        assert probe.returncode == 3
        died = finding(section, "stress-died")
        assert "SIGKILL" in died["what"] and "in the step" in died["what"]
    assert section["observed"]["stress"]["telemetry"]["samples"] > 0
    until = time.monotonic() + 10
    while running("stress") + running("telemetry") and time.monotonic() < until:
        time.sleep(0.1)
    assert running("stress") == [] and running("telemetry") == []


@pytest.mark.skipif(os.name != "posix", reason="a pseudo terminal")
@pytest.mark.slow
def test_a_terminal_sees_a_progress_bar(tiny):
    import pty

    master, slave = pty.openpty()
    command = [
        sys.executable,
        str(ROOT / "gpu_probe.py"),
        "--stress-test",
        "--device",
        "cpu",
        "--duration",
        "2",
        "--json",
        "--model",
        tiny,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=slave, cwd=ROOT) as probe:
        os.close(slave)
        seen = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
        probe.wait(timeout=60)
    os.close(master)
    assert b"stress test on cpu" in seen and b"%|" in seen


def test_without_an_accelerator_the_test_is_not_run_unasked(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "fake_torch" / "cpu_build"))
    assert gpu_probe.main(["--stress-test", "--json", "--python", sys.executable]) == 3
    assert "--device cpu" in finding(json.loads(capsys.readouterr().out), "stress-not-run")["fix"][0]


def test_bad_values_are_refused_before_anything_runs(tmp_path, capsys):
    from preflight.console import run_main

    for bad, says in (
        (["--device", "tpu"], "--device tpu"),
        (["--model", str(tmp_path)], "config.json"),
        (["--compare", str(tmp_path / "no")], "--compare"),
    ):
        assert run_main(gpu_probe.main, ["--no-torch", "--json", *bad]) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        gpu_probe.main(["--stress-test", "--duration", "-3"])
    assert ended.value.code == 2


# --- judging


def test_a_run_that_sags_stalls_and_is_slow_is_said_so():
    result = StressResult(
        "cuda:0", name="NVIDIA GeForce RTX 3090", seconds=60, dtype="bfloat16", size=8192, products=1000, tflops=20.0,
        tflops_theoretical=142.0, copy_gb_per_s=300.0, copy_gb_per_s_theoretical=936.0, longest_kernel_s=0.02, sag_pct=22.0,
        stalls=(3.2,), telemetry={"throttle_share": {"hw thermal slowdown": 0.4}},
    )  # fmt: skip
    found = {one.code: one for one in check_stress(result)}
    assert set(found) == {"stress-sag", "stress-stalls", "stress-slow", "stress-passed"}
    assert "22 %" in found["stress-sag"].what and "thermal" in found["stress-sag"].why
    assert "300 of 936 GB/s" in found["stress-slow"].what
    assert all(one.why and one.fix and one.source for one in found.values() if one.level is not Level.OK)


def test_the_longest_kernel_is_the_timeout_risk_and_not_idle_use():
    def codes(longest, idle):
        telemetry = {"utilization_pct": {"min": idle, "median": idle, "max": idle}, "throttle_share": {}}
        result = StressResult("cuda:0", seconds=10, products=9, longest_kernel_s=longest, telemetry=telemetry)
        return {one.code for one in check_stress(result, tdr_delay_s=2.0)}

    assert "tdr-risk" not in codes(0.02, 0.0)
    assert "tdr-risk" in codes(1.4, 100.0)


def test_xids_that_appear_meanwhile_are_a_failure():
    result = StressResult("cuda:0", seconds=10, products=9)
    (xid,) = [one for one in check_stress(result, new_xids=(79,)) if one.code == "stress-xid"]
    assert xid.level is Level.FAIL and "79" in xid.what


def test_wrong_values_of_every_kind_are_counted():
    lines = [
        {"step": "prepare", "dtype": "float16"},
        {"step": "copy", "gb_per_s": 700.0, "bytes": 1 << 30, "right": False},
        {"step": "warm-up", "size": 4096, "flop": 2 * 4096**3, "wrong": 2, "held_bytes": 4},
        {"batch": 0, "at_s": 0.2, "work_s": 0.2, "count": 10, "longest_s": 0.03, "gap_s": 0.2, "wrong": 3},
        {"step": "memory", "wrong": 5, "bytes": 4},
        {"step": "end", "seconds": 1.0},
    ]
    result = measured(lines, "cuda:0", None)
    assert result.wrong_results == 2 + 3 + 5 + 1 and len(result.wrong_where) == 4
    # 10 products of 2 * 4096^3 operations in 0.2 s
    assert result.tflops == pytest.approx(10 * 2 * 4096**3 / 0.2 / 1e12)


def test_sag_compares_quarters_by_their_median_batch():
    def batches(works):
        return [{"count": 10, "work_s": work} for work in works]

    assert sag(batches([1.0] * 7)) is None
    assert sag(batches([1.0] * 8)) == 0.0
    assert sag(batches([1.0, 1.0, 1.0, 1.0] * 2 + [1.25] * 4 + [1.25] * 4)) == 20.0
    assert sag(batches([1.0, 9.0, 1.0, 1.0] + [1.0] * 12)) == 0.0


def test_theoretical_figures_of_known_cards():
    """A100: 108 x 2048 x 1.41 GHz = 312 TFLOP/s, 1215 MHz x 5120 bit x 2 = 1555 GB/s (NVIDIA A100 white paper)."""
    a100 = {"dtype": "bfloat16", "capability": "8.0", "multi_processor_count": 108, "clock_rate": 1410000,
            "memory_clock_rate": 1215000, "memory_bus_width": 5120}  # fmt: skip
    assert theoretical_tflops(a100) == pytest.approx(312, rel=0.01)
    assert theoretical_gb_per_s(a100) == pytest.approx(1555, rel=0.01)
    h100 = {"dtype": "bfloat16", "capability": "9.0", "multi_processor_count": 132, "clock_rate": 1830000}
    assert theoretical_tflops(h100) == pytest.approx(989, rel=0.01)
    assert theoretical_gb_per_s(h100) is None and theoretical_tflops({"capability": "8.0"}) is None


def test_telemetry_is_summed_up():
    lines = [{"telemetry_source": "NVML"}] + [
        {"telemetry": {"at_s": i * 0.2, "temperature_c": 60 + i, "throttle": ["sw power cap"] if i > 2 else []}}
        for i in range(6)
    ]
    found = telemetry_summary(lines)
    assert (found["source"], found["samples"], found["hertz"]) == ("NVML", 6, 5.0)
    assert found["temperature_c"] == {"min": 60, "median": 62.5, "max": 65}
    assert found["throttle_share"] == {"sw power cap": 0.5}


def course(batches, samples, clocks=(100.0, 97.0), work_s=0.5):
    """The lines of a run whose load began at `clocks[0]` and whose telemetry at `clocks[1]`."""
    return [
        {"telemetry_source": "NVML", "clock_s": clocks[1]},
        {"clock_s": clocks[0]},
        *({"telemetry": sample} for sample in samples),
        *({"batch": n, "at_s": at_s, "work_s": work_s, "count": count} for n, (at_s, count) in enumerate(batches)),
    ]


def test_the_course_lays_telemetry_over_the_load_by_the_common_clock():
    # The telemetry began 3 s before the load: its samples at 2 s (before the load), 3.5, 4.6 and 4.8 s.
    samples = [{"at_s": 2.0, "temperature_c": 30}, {"at_s": 3.5, "temperature_c": 50}]
    samples += [{"at_s": 4.6, "temperature_c": 61}, {"at_s": 4.8, "temperature_c": 63, "power_w": 300.0}]
    found = curve(course([(1.0, 10), (2.0, 8)], samples), 1e12)
    # 10 and 8 products of 10^12 operations in 0.5 s each
    assert found == {
        "at_s": [1.0, 2.0],
        "tflops": [20.0, 16.0],
        "temperature_c": [50.0, 62.0],
        "power_w": [None, 300.0],
    }


def test_a_long_course_keeps_a_hundred_and_twenty_stretches_and_a_dip():
    batches = [(round(0.2 * (n + 1), 1), 4 if 900 <= n < 925 else 10) for n in range(3000)]
    samples = [{"at_s": n / 8, "sm_clock_mhz": 1980 if n < 2400 else 1200} for n in range(4800)]
    found = curve(course(batches, samples, (50.0, 50.0), work_s=0.2), 0.4e12)
    assert len(found["at_s"]) == 120 and found["at_s"][-1] == 600.0
    # 25 batches make one stretch of 5 s; 900 to 924 are the 37th
    assert [index for index, value in enumerate(found["tflops"]) if value != 20.0] == [36]
    assert found["tflops"][36] == 8.0
    assert set(found["sm_clock_mhz"]) == {1980.0, 1200.0} and found["sm_clock_mhz"].index(1200.0) == 60
    assert len(json.dumps(found)) < 4000


def test_a_batch_longer_than_a_stretch_leaves_no_hole_and_a_standstill_does():
    # batches end at 1, 2, 3 and 8 s; each worked 1 s, the last after 4 s of standing still
    found = curve(course([(1.0, 10), (2.0, 10), (3.0, 5), (8.0, 10)], [], work_s=1.0), 1e12)
    assert found["at_s"] == [2.0, 4.0, 6.0, 8.0] and found["tflops"] == [10.0, 5.0, None, 10.0]


def test_a_run_that_hardly_began_has_no_course():
    assert curve([], 1e12) == {} and curve(course([(0.2, 1)], []), 1e12) == {}
    assert set(curve(course([(0.2, 1), (0.4, 1)], []), None)) == {"at_s"}


def test_the_shape_comes_from_the_users_model(tmp_path):
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_attention_heads": 28,
              "num_key_value_heads": 4, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, source = shape_of(str(tmp_path))
    assert shape == {
        "hidden": 3584,
        "heads": 28,
        "kv_heads": 4,
        "head_dim": 128,
        "intermediate": 18944,
        "vocabulary": 152064,
    }
    assert tmp_path.name in source
    assert shape_of(None)[0] == DEFAULT_SHAPE
