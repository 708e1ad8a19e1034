"""Directories as they are found: broken, half, hostile. Nothing of them runs, and each is answered in bounded time."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import model_analyzer
from preflight.console import UsageError
from preflight.model.model_directory import read_model_directory, stored_bytes

REPOSITORY = Path(__file__).parent.parent
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "vocab_size": 100, "num_attention_heads": 4, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def model(folder, config=LLAMA, **files):
    folder.mkdir(exist_ok=True)
    if config is not None:
        text = config if isinstance(config, (str, bytes)) else json.dumps(config)
        (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data if isinstance(data, bytes) else str(data).encode())
    return folder


def safetensors(tensors, metadata=None, cut=0):
    """The bytes of a safetensors file with these tensors (name: (dtype, shape, bytes))."""
    header, position = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    return (struct.pack("<Q", len(text)) + text + b"\0" * position)[: -cut or None]


def analyse(path, capsys, *flags):
    code = model_analyzer.main([str(path), "--json", *flags])
    section = json.loads(capsys.readouterr().out)
    for one in section["findings"]:
        if one["level"] in ("warn", "fail"):
            assert one["why"] and one["fix"] and one["source"], one
    return code, section["observed"], {one["code"]: one for one in section["findings"]}


def test_whole_weights_are_counted_from_their_headers(tmp_path, capsys):
    data = safetensors({"a": ("BF16", [10, 4], 80), "b": ("F32", [5], 20)})
    path = model(tmp_path / "m", model__safetensors=data)
    seen = read_model_directory(path).weights
    assert seen.elements == 45 and seen.bytes_by_dtype == {"BF16": 80, "F32": 20} and seen.complete
    assert stored_bytes(seen) == 100
    assert "weights-complete" in analyse(path, capsys)[2]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (struct.pack("<Q", 8 << 30) + b"{}", "HeaderTooLarge"),
        (struct.pack("<Q", 50) + b"{}", "HeaderTooLarge"),
        (b"abc", "too short"),
        (struct.pack("<Q", 4) + b"nope", "header is damaged"),
        (safetensors({"a": ("BF16", [10, 4], 80)}, cut=40), "cut short"),
        (struct.pack("<Q", 9) + b"[1, 2, 3]", "header is damaged"),
        (safetensors({"a": ("BF16", [-1, 4], 80)}), "header is damaged"),
    ],
)
def test_damaged_weights_are_named(tmp_path, capsys, data, says):
    code, _, found = analyse(model(tmp_path / "m", model__safetensors=data), capsys)
    assert code == 1 and says in found["weights-damaged"]["what"]


def test_a_download_that_did_not_finish(tmp_path, capsys):
    path = model(tmp_path / "m")
    (path / "model.safetensors.incomplete").write_bytes(b"x")
    (path / "model.safetensors").write_bytes(safetensors({"a": ("BF16", [1], 2)}))
    assert "did not finish" in analyse(path, capsys)[2]["weights-damaged"]["what"]


def test_pickles_only(tmp_path, capsys):
    path = model(tmp_path / "m")
    (path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert analyse(path, capsys)[2]["pickle-weights"]["level"] == "warn"


def test_gguf_only(tmp_path, capsys):
    path = model(tmp_path / "m", config=None)
    (path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    code, _, found = analyse(path, capsys)
    assert code == 1 and "safetensors" in found["gguf-only"]["fix"][0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe{\x00}\x00", "UTF-16"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 5\n", "Git LFS pointer"),
        (b"[" * (10 << 20), "nested too deeply"),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "nested too deeply"),
        (b" " * (40 << 20), "too large"),
    ],
)
def test_a_config_that_is_no_config(tmp_path, capsys, text, says):
    began = time.monotonic()
    code, _, found = analyse(model(tmp_path / "m", config=text), capsys)
    assert code == 1 and says in found["config-not-loadable"]["what"]
    assert time.monotonic() - began < 20


def test_values_that_no_model_can_have(tmp_path, capsys):
    code, seen, found = analyse(model(tmp_path / "m", config={**LLAMA, "hidden_size": "a\nb\x1b[31m`c`"}), capsys)
    assert code == 1 and seen["params"] is None
    assert "hidden_size" in found["config-value-invalid"]["what"]
    assert "\x1b" not in found["config-value-invalid"]["what"]


def test_half_a_surrogate_pair_can_be_reported(tmp_path, capsys):
    path = model(tmp_path / "m", config='{"model_type": "\\ud800x", "architectures": ["\\udfff"]}')
    code, seen, _ = analyse(path, capsys)
    assert code == 1
    json.dumps(seen, ensure_ascii=False).encode("utf-8")
    report = tmp_path / "r.md"
    model_analyzer.main([str(path), "--report", str(report)])
    assert "x" in report.read_text(encoding="utf-8")


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_out_of_the_directory_are_not_followed(tmp_path, capsys):
    secret = tmp_path / "secret.txt"
    secret.write_text("{{ 'top secret words' }}")
    path = model(tmp_path / "m", tokenizer_config__json="{}")
    (path / "chat_template.jinja").symlink_to(secret)
    _, seen, found = analyse(path, capsys)
    assert "chat_template.jinja" in found["links-outside"]["what"]
    assert "top secret" not in json.dumps(seen) and "top secret" not in json.dumps(found)
    _, seen, _ = analyse(path, capsys, "--follow-links")
    assert seen["tokenizer"]["renders"]["user"] == "top secret words"


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_the_links_of_a_hub_cache_are_its_own(tmp_path, capsys):
    root = tmp_path / "models--a--b"
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots" / "abc").mkdir(parents=True)
    (root / "blobs" / "1").write_text(json.dumps(LLAMA))
    (root / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/1")
    code, seen, found = analyse(root / "snapshots" / "abc", capsys)
    assert code == 0 and seen["params"] and "links-outside" not in found


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_and_devices_do_not_hang(tmp_path, capsys):
    path = model(tmp_path / "m", config=None)
    os.mkfifo(path / "config.json")
    os.mkfifo(path / "tokenizer_config.json")
    os.mkfifo(path / "model.safetensors")
    began = time.monotonic()
    code, _, found = analyse(path, capsys)
    assert code == 1 and "config-not-loadable" in found
    assert time.monotonic() - began < 20


def test_names_with_newlines_are_named_safely(tmp_path, capsys):
    path = model(tmp_path / "m")
    try:
        (path / "x\n[ok] all is well\u202e.py").write_text("pass")
    except OSError:
        pytest.skip("this file system refuses such names")
    _, _, found = analyse(path, capsys)
    assert "\n" not in found["odd-file-names"]["what"] and "\u202e" not in found["odd-file-names"]["what"]


def test_thousands_of_files(tmp_path, capsys):
    path = model(tmp_path / "m")
    for number in range(5200):
        (path / f"f{number:05d}").touch()
    assert "too-many-files" in analyse(path, capsys)[2]


def test_code_in_the_directory_never_runs(tmp_path, capsys):
    mark = tmp_path / "ran"
    config = {
        **LLAMA, "model_type": "evil", "architectures": ["EvilForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"},
    }  # fmt: skip
    code = f"open({str(mark)!r}, 'w').write('x')\n"
    path = model(tmp_path / "m", config, configuration_evil__py=code, modeling_evil__py=code + "import flash_attn\n")
    (path / "sitecustomize.py").write_text(code)
    (path / "json.py").write_text(code)
    for flags in ((), ("--module-tree", "always")):
        _, _, found = analyse(path, capsys, *flags)
        assert "custom-code" in found
    assert not mark.exists()
    answer = subprocess.run(  # also when the program is started from inside that directory
        [sys.executable, str(REPOSITORY / "model_analyzer.py"), ".", "--json"],
        cwd=path,
        capture_output=True,
        check=False,
    )
    assert answer.returncode in (0, 1, 3) and not mark.exists()


TEMPLATES = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ 'a' * 3000000000 }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "attribute": "{{ messages.__class__.__base__ }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nesting": "{% if 1 %}" * 3000 + "x" + "{% endif %}" * 3000,
    "brackets": "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_hostile_template_is_stopped(tmp_path, capsys, monkeypatch, name):
    from preflight.model import chat_template

    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 4.0)
    config = json.dumps({"chat_template": TEMPLATES[name], "eos_token": "</s>"})
    path = model(tmp_path / "m", tokenizer_config__json=config)
    began = time.monotonic()
    code, _, found = analyse(path, capsys)
    assert time.monotonic() - began < 40
    assert code == 1, found
    assert {"template-does-not-end", "template-unsafe", "template-fails", "template-syntax-error"} & set(found)
    assert not (tmp_path / "ran").exists() and not Path("ran").exists()


def test_a_template_of_the_wrong_type(tmp_path, capsys):
    path = model(tmp_path / "m", tokenizer_config__json='{"chat_template": 5}')
    assert analyse(path, capsys)[2]["template-not-loadable"]["level"] == "fail"


def test_no_such_directory_and_a_file_are_usage_errors(tmp_path):
    for name in (tmp_path / "nothing", __file__):
        with pytest.raises(UsageError):
            read_model_directory(name)


def test_an_empty_directory(tmp_path, capsys):
    code, _, found = analyse(tmp_path, capsys)
    assert code == 1 and "empty" in found["config-missing"]["what"]


def test_without_torch_and_with_nothing_installed_it_answers(tmp_path):
    """A bare interpreter (-S: no site-packages) still reads, judges and prints JSON."""
    path = model(tmp_path / "m")
    answer = subprocess.run(
        [sys.executable, "-S", "-E", str(REPOSITORY / "model_analyzer.py"), str(path), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    section = json.loads(answer.stdout)
    assert section["observed"]["params"] and answer.returncode in (0, 3), answer.stderr
