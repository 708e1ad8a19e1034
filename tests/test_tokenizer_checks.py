"""Tokenizer folders that are valid JSON and still do not load, or whose template loses what it is given."""

import json

import pytest

import model_analyzer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BASE = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "tokenizer_class": "TokenizersBackend"}
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
VOCABULARY = {"added_tokens": [{"id": 1, "content": "<s>"}], "model": {"type": "BPE", "vocab": {"<s>": 1, "a": 0}}}
WITH_MARKERS = {
    **VOCABULARY,
    "added_tokens": [{"id": 2, "content": "<|im_start|>"}, {"id": 3, "content": "<|im_end|>"}],
}


def analyse(folder, capsys, config, files=None, *flags):
    folder.mkdir(exist_ok=True)
    for name, content in {"tokenizer_config.json": config, **(files or {})}.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    model_analyzer.main([str(folder), "--json", *flags])
    section = json.loads(capsys.readouterr().out)
    return {one["code"]: one for one in section["findings"]}


@pytest.mark.parametrize(
    ("code", "level", "config", "files"),
    [
        ("template-drops-messages", "fail", {**BASE, "chat_template": ""}, None),
        ("template-drops-messages", "fail", {**BASE, "chat_template": "chatml"}, None),
        ("template-drops-answers", "warn", {**BASE, "chat_template": "{{ messages[0]['content'] }}"}, None),
        ("template-needs-content-parts", "warn", {**BASE, "chat_template": PARTS}, None),
        ("no-generation-prompt", "ok", {**BASE, "chat_template": CHATML.split("{% if add")[0]}, None),
        ("bos-doubled", "warn", {**BASE, "add_bos_token": True, "chat_template": "{{ bos_token * 2 }}" + CHATML}, None),
        ("no-pad-token", "ok", {**{k: v for k, v in BASE.items() if k != "pad_token"}, "chat_template": CHATML}, None),
        (
            "no-eos-token",
            "warn",
            {**{k: v for k, v in BASE.items() if k != "eos_token"}, "chat_template": CHATML},
            None,
        ),
        ("tokenizer-config-refused", "fail", {**BASE, "eos_token": ["</s>"], "chat_template": CHATML}, None),
        ("tokenizer-config-refused", "fail", {**BASE, "added_tokens_decoder": {"7": "<y>"}}, None),
        ("template-tokens-unknown", "warn", {**BASE, "chat_template": CHATML}, {"tokenizer.json": VOCABULARY}),
        (
            "tokenizer-code-missing",
            "fail",
            {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}},
            {"qwen.tiktoken": "x"},
        ),
    ],
)
def test_what_is_lost_or_refused_is_named(code, level, config, files, tmp_path, capsys):
    found = analyse(tmp_path / "m", capsys, config, files)
    assert found[code]["level"] == level, sorted(found)
    assert "template-fails" not in found and ("system-role-dropped" not in found or "drops" not in code)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({**BASE, "chat_template": CHATML}, {"tokenizer.json": WITH_MARKERS}),
        ({**BASE, "chat_template": CHATML, "extra_special_tokens": ["<|im_start|>"]}, {"tokenizer.json": VOCABULARY}),
        ({**BASE, "chat_template": "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"}, None),
        (
            {**BASE, "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}, "chat_template": CHATML},
            {"tokenizer.json": WITH_MARKERS},
        ),
    ],
)
def test_healthy_tokenizers_get_no_warning(config, files, tmp_path, capsys):
    found = analyse(tmp_path / "m", capsys, config, files)
    assert {one["level"] for one in found.values()} == {"ok"}, found


@pytest.mark.parametrize(("version", "told"), [("4.57.1", True), ("5.0.0", False)])
def test_a_tokenizer_saved_by_transformers_5_is_not_for_4(version, told, tmp_path, capsys):
    config = {**BASE, "chat_template": CHATML}
    found = analyse(tmp_path / "m", capsys, config, {"tokenizer.json": WITH_MARKERS}, "--transformers", version)
    assert ("tokenizer-class-too-new" in found) is told


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 7031645\n", "Git LFS"),
        ("", "empty"),
        ("<!DOCTYPE html><html></html>", "web page"),
        (json.dumps(VOCABULARY)[:-30], "cut"),
        (json.dumps(VOCABULARY) + "\n", None),
    ],
)
def test_a_vocabulary_that_is_not_one_is_named(text, word, tmp_path, capsys):
    found = analyse(tmp_path / "m", capsys, BASE, {"tokenizer.json": text})
    told = found.get("tokenizer-file-damaged")
    assert (told is None) is (word is None), found
    assert told is None or (told["level"] == "fail" and word in told["what"])
