"""The GGUF file made on the fly is valid; what llama.cpp says is read; a real binding is used where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preflight.findings import Level
from preflight.machine import Answer
from preflight.software.gguf_runtime import check_gguf, commands, read_answer, write_tiny_gguf

ROOT = Path(__file__).resolve().parent.parent


def test_the_tiny_file_is_read_by_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["token_embd.weight"] == [32, 295] and shapes["blk.0.ffn_down.weight"] == [64, 32]
    assert len(shapes) == 12
    assert all(abs(tensor.data).max() > 0 for tensor in reader.tensors)
    write_tiny_gguf(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "tiny.gguf").read_bytes()


def event(step: str, ok: bool = True, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": step, "ok": ok, "seconds": 0.1, **more}


def answer(*events: dict[str, Any], errors: str = "", code: int = 0) -> Answer:
    started = [{"event": "start", "step": one["step"]} for one in events]
    lines = [json.dumps(one) for pair in zip(started, events, strict=True) for one in pair]
    return Answer("\n".join(lines), errors, code)


# Events in the child's form: the CPU ones of llama-cpp-python 0.3.36, the CUDA ones after llama.cpp's source.
CPU = (
    event("import llama_cpp", facts={"version": "0.3.36"}),
    event(
        "read what is compiled in", facts={"gpu_offload_compiled_in": False, "system_info": "CPU : SSE3 = 1 | AVX2 = 1"}
    ),
    event(
        "list backends and devices",
        facts={
            "backends": ["CPU"],
            "devices": [{"name": "CPU", "description": "Xeon", "kind": "cpu", "free_bytes": 1, "total_bytes": 2}],
        },
    ),
    event("load the GGUF file", facts={"architecture": "llama"}),
    event("generate a token", facts={"token": 7}),
)
CUDA = (
    event("import llama_cpp", facts={"version": "0.3.36"}),
    event("read what is compiled in", facts={"gpu_offload_compiled_in": True, "system_info": "CUDA : ARCHS = 860"}),
    event(
        "list backends and devices",
        facts={
            "backends": ["CUDA", "CPU"],
            "devices": [{"name": "CUDA0", "description": "RTX 3060", "kind": "gpu", "free_bytes": 1, "total_bytes": 2}],
        },
    ),
    event("load the GGUF file", facts={"architecture": "llama"}),
    event("generate a token", facts={"token": 7}),
)
OFFLOADED = "load_tensors: offloading 1 repeating layers to GPU\nload_tensors: offloaded 2/2 layers to GPU\n"


def codes(found: dict[str, Any], vendor: str | None) -> list[str]:
    return [finding.code for finding in check_gguf(found, vendor)]


def test_a_cpu_build_is_fine_where_no_gpu_is_and_a_warning_where_one_is() -> None:
    found = read_answer(answer(*CPU), "tiny")
    assert found["backends"] == ["CPU"] and found["layers_offloaded"] is None
    assert codes(found, None) == ["gguf-runtime-loads", "gguf-cpu-only"]
    findings = check_gguf(found, "nvidia")
    assert findings[1].code == "gguf-no-gpu-backend" and findings[1].level is Level.WARN
    assert "-DGGML_CUDA=on" in findings[1].fix[0] and "-DGGML_VULKAN=on" in findings[1].fix[1]
    assert "Android has no CUDA" in findings[0].why


def test_offload_counts_only_when_layers_were_really_offloaded() -> None:
    assert codes(read_answer(answer(*CUDA, errors=OFFLOADED), "tiny"), "nvidia") == [
        "gguf-runtime-loads",
        "gguf-offload",
    ]
    none = read_answer(answer(*CUDA, errors="load_tensors: offloaded 0/2 layers to GPU\n"), "tiny")
    assert codes(none, "nvidia") == ["gguf-runtime-loads", "gguf-offload-not-used"]


def test_a_binding_that_is_not_installed_is_unknown_and_not_failed() -> None:
    error = [{"type": "ModuleNotFoundError", "message": "No module named 'llama_cpp'"}]
    (finding,) = check_gguf(read_answer(answer(event("import llama_cpp", False, error=error)), "tiny"), "amd")
    assert finding.code == "gguf-runtime-missing" and finding.level is Level.UNKNOWN
    assert "-DGGML_HIP=on" in finding.fix[0]


def test_a_wheel_that_installs_and_cannot_run_is_named_by_its_glibc() -> None:
    # As llama-cpp-py-sync 0.11739 says on Debian 12: its manylinux2014 tag promises more than it holds.
    message = "/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by libllama.so)"
    error = [{"type": "OSError", "message": message}]
    (finding,) = check_gguf(read_answer(answer(event("import llama_cpp", False, error=error)), "tiny"), None)
    assert finding.code == "glibc-missing" and finding.level is Level.FAIL


def test_a_file_that_cannot_be_loaded_is_not_blamed_on_the_binding() -> None:
    error = [{"type": "ValueError", "message": "Failed to load model from file: x.gguf"}]
    steps = (*CPU[:3], event("load the GGUF file", False, error=error))
    for words in ("unknown model architecture: 'llama9'", "invalid magic characters: 'garb', expected 'GGUF'"):
        (finding,) = check_gguf(read_answer(answer(*steps, errors=f"llama_model_load: error: {words}\n"), "x"), None)
        assert finding.code == "gguf-file-not-loaded" and words.replace("`", "'") in finding.what


def test_a_crash_names_the_step_it_died_in() -> None:
    text = "\n".join([json.dumps({"event": "start", "step": "load the GGUF file"})])
    found = read_answer(Answer(text, "Fatal Python error: Illegal instruction", -4), "tiny")
    (finding,) = check_gguf(found, None)
    assert finding.code == "gguf-runtime-crashed" and "load the GGUF file" in finding.what
    assert "GGML_NATIVE=OFF" in finding.fix[0]


def test_each_vendor_has_a_command_and_anything_has_vulkan() -> None:
    assert "-DGGML_HIP=on" in commands("amd")[0] and "-DGGML_METAL=on" in commands("apple")[0]
    assert "-DGGML_CANN=on" in commands("ascend")[0] and "-DGGML_VULKAN=on" in commands("nobody")[0]


def with_llama() -> str | None:
    """An interpreter that has llama_cpp: PREFLIGHT_LLAMA_PYTHON, or ours."""
    given = os.environ.get("PREFLIGHT_LLAMA_PYTHON")
    if given and Path(given).exists():
        return given
    return sys.executable if importlib.util.find_spec("llama_cpp") else None


@pytest.mark.slow
def test_a_real_binding_loads_the_tiny_file_and_generates(tmp_path: Path) -> None:
    python = with_llama()
    if python is None:
        pytest.skip("llama-cpp-python is not installed (5 minutes to build); set PREFLIGHT_LLAMA_PYTHON to use one")
    done = subprocess.run(
        [sys.executable, str(ROOT / "env_sandbox.py"), "--json", "--mode", "gguf", "--python", python],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    section = json.loads(done.stdout)
    seen = section["observed"]["gguf"]
    assert section["findings"][0]["code"] == "gguf-runtime-loads", section["findings"]
    assert "CPU" in seen["backends"] and seen["devices"] and 0 <= seen["token"] < 295
    assert seen["gpu_offload_compiled_in"] in (True, False)
    assert [step["step"] for step in seen["steps"]] == [
        "import llama_cpp",
        "read what is compiled in",
        "list backends and devices",
        "load the GGUF file",
        "generate a token",
    ]
