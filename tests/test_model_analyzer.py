"""What the model stage says about versions, quantised bases, attention, tokenizers, phones and comparisons."""

import ast
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import model_analyzer
from preflight.console import UsageError
from preflight.model.attention import parse_modeling
from preflight.model.model_directory import read_model_directory

HERE = Path(__file__).parent
REPOSITORY = HERE.parent


def analyse(path, capsys, *flags):
    code = model_analyzer.main([str(path), "--json", *flags])
    section = json.loads(capsys.readouterr().out)
    assert code == {"ok": 0, "warn": 0, "unknown": 3, "fail": 1}[section["level"]]
    for one in section["findings"]:
        if one["level"] in ("warn", "fail"):
            assert one["why"] and one["fix"] and one["source"], one
        assert len(one["fix"]) <= 3
    return section, {one["code"]: one for one in section["findings"]}


def published(name):
    return HERE / "configs" / name


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "code", "level"),
    [
        ("Qwen__Qwen3-8B", "4.50.3", "architecture-too-new", "fail"),
        ("Qwen__Qwen3-8B", "4.51.0", "architecture-supported", "ok"),
        ("microsoft__Phi-3-mini-4k-instruct", "4.40.2", "architecture-too-new", "fail"),
        ("microsoft__Phi-3-mini-4k-instruct", "4.41.0", "architecture-supported", "ok"),
        ("openai-community__gpt2", "4.25.1", "architecture-supported", "ok"),
        ("Qwen__Qwen-7B", "5.24.0", "custom-code", "warn"),
        ("internlm__internlm2-7b", "5.24.0", "custom-code", "warn"),
        ("baichuan-inc__Baichuan-7B", "5.24.0", "custom-code", "warn"),
    ],
)
def test_the_first_version_of_an_architecture_counts(capsys, name, version, code, level):
    _, found = analyse(published(name), capsys, "--transformers", version)
    assert found[code]["level"] == level


def test_a_type_that_was_taken_out(tmp_path, capsys):
    path = write(tmp_path / "m", config__json={"model_type": "open_llama", "hidden_size": 64, "num_hidden_layers": 2})
    _, found = analyse(path, capsys)
    assert "4.32" in found["architecture-removed"]["fix"][0]


def test_no_model_type_and_an_unknown_one_are_different_errors(tmp_path, capsys):
    _, found = analyse(write(tmp_path / "a", config__json={"hidden_size": 64}), capsys)
    assert "Unrecognized model" in found["no-model-type"]["why"]
    _, found = analyse(write(tmp_path / "b", config__json={"model_type": "qwen9"}), capsys)
    assert "does not recognize this architecture" in found["architecture-unknown"]["why"]


def test_the_language_model_inside_an_unknown_model_is_read(tmp_path, capsys):
    language = json.loads((published("Qwen__Qwen2-1.5B") / "config.json").read_text())
    config = {
        "model_type": "brand_new_vl", "architectures": ["BrandNewVL"], "llm_config": language, "hidden_size": 1024,
        "vision_config": {"hidden_size": 1024, "num_hidden_layers": 24},
        "auto_map": {"AutoConfig": "configuration_new.C", "AutoModel": "modeling_new.M"},
    }  # fmt: skip
    path = write(tmp_path / "m", config__json=config, configuration_new__py="1/0", modeling_new__py="1/0")
    section, found = analyse(path, capsys)
    seen = section["observed"]
    assert section["level"] == "warn" and "custom-code-vlm" in found and "towers-unknown" in found
    assert (seen["params"], seen["params_language_model"]) == (None, 1_543_714_304)
    assert (seen["hidden_size"], seen["num_hidden_layers"], seen["language_config_key"]) == (1536, 28, "llm_config")
    assert "q_proj" in seen["lora"]["recommended_target_modules"]
    assert "language model alone" in found["memory-needs"]["what"]
    _, found = analyse(path, capsys, "--gpu-vram-gb", "80")
    assert found["memory-of-language-part"]["level"] == "unknown"


# --- quantised bases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantisation", "code", "level", "lora"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "pre-quantized-awq", "warn", None),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "pre-quantized-bitsandbytes", "warn", True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "pre-quantized-bitsandbytes", "warn", True),
        ({"quant_method": "bitnet"}, "pre-quantized-bitnet", "fail", False),
        ({"quant_method": "fbgemm_fp8"}, "pre-quantized-fbgemm-fp8", "fail", False),
        ({"quant_method": "mxfp4"}, "pre-quantized-mxfp4", "warn", None),
        ({"quant_method": "hqq", "nbits": 4}, "pre-quantized-hqq", "warn", True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "pre-quantized-compressed-tensors", "warn", None,
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "pre-quantized-compressed-tensors", "warn", True,
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "pre-quantized-torchao", "fail", False),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "pre-quantized-torchao", "warn", True),
        ({"quant_method": "brand-new"}, "pre-quantized-unknown", "unknown", None),
    ],
)  # fmt: skip
def test_a_quantised_base(tmp_path, capsys, quantisation, code, level, lora):
    config = json.loads((published("Qwen__Qwen2-1.5B") / "config.json").read_text())
    path = write(tmp_path / "m", config__json={**config, "quantization_config": quantisation})
    section, found = analyse(path, capsys)
    assert found[code]["level"] == level
    allowed = section["observed"]["quantization"]["allowed"]
    assert allowed["lora_on_top"] is lora
    assert allowed["full_fine_tuning"] is False and allowed["bitsandbytes_on_top"] is False
    assert section["observed"]["four_bit"] is None


def test_mixtral_in_four_bit_is_about_85_gib(capsys):
    section, found = analyse(published("mistralai__Mixtral-8x7B-v0.1"), capsys)
    assert 84.5 < section["observed"]["four_bit"]["weight_bytes"] / 2**30 < 85.5
    assert found["moe-experts-not-quantised"]["level"] == "warn"


def test_mixtral_in_four_bit_under_transformers_4_is_about_25_gib(capsys):
    """There every expert has linear layers of its own: 46.44 B of 46.70 B parameters are quantised."""
    section, found = analyse(published("mistralai__Mixtral-8x7B-v0.1"), capsys, "--transformers", "4.57.1")
    seen = section["observed"]
    assert seen["params"] == 46_702_792_704
    # a layer: q and o 4096*4096, k and v 4096*1024, router 8*4096, 8 experts of 3*4096*14336; embedding and head stay
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096 + 8 * 3 * 4096 * 14336
    assert seen["four_bit"]["coverage"]["quantised"] == 32 * layer
    assert 22 < seen["four_bit"]["weight_bytes"] / 2**30 < 26
    assert "moe-experts" in found and "moe-experts-not-quantised" not in found


def test_falcon_is_passed_over_by_four_bit_loading(capsys):
    section, found = analyse(published("tiiuae__falcon-7b"), capsys)
    assert section["observed"]["four_bit"]["coverage"]["quantised"] == 0  # measured with bitsandbytes 0.50.2
    assert found["four-bit-passes-over"]["level"] == "warn"
    _, found = analyse(published("tiiuae__falcon-7b"), capsys, "--transformers", "4.57.1")
    assert "four-bit-passes-over" not in found


def test_mxfp4_weighs_what_its_files_weigh(capsys):
    """gpt-oss-20b's repository lists 13.76 GB of safetensors; its experts hold 19,110,297,600 of the weights."""
    section, _ = analyse(published("openai__gpt-oss-20b"), capsys)
    assert section["observed"]["weight_bytes"] == pytest.approx(13.76e9, rel=0.01)


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "implementation", "backend"),
    [
        # FACTS section 5: Turing has no flash kernel, and the memory-efficient one takes no GQA
        ("Qwen__Qwen2.5-7B", ("--gpu", "T4", "--method", "lora"), "sdpa", "math"),
        ("meta-llama__Llama-2-7b-hf", ("--gpu", "T4", "--method", "lora"), "sdpa", "efficient"),
        # that kernel has no bf16 before compute capability 8.0
        ("meta-llama__Llama-2-7b-hf", ("--gpu", "T4", "--method", "lora", "--autocast", "bf16"), "sdpa", "math"),
        ("Qwen__Qwen2.5-7B", ("--gpu", "RTX 3090", "--method", "lora"), "sdpa", "flash"),
        # k-bit preparation leaves fp32 hidden states: flash refuses fp32, memory-efficient refuses GQA
        ("Qwen__Qwen2.5-7B", ("--gpu", "RTX 3090", "--method", "qlora", "--autocast", "none"), "sdpa", "math"),
        ("Qwen__Qwen2.5-7B", ("--gpu", "RTX 3090", "--method", "qlora", "--autocast", "bf16"), "sdpa", "flash"),
        ("openai__gpt-oss-20b", ("--gpu", "H100"), "eager", None),
        ("google__gemma-2-9b", ("--gpu", "H100", "--method", "lora"), "eager", None),
        ("Qwen__Qwen2.5-7B", ("--gpu", "A100", "--attention", "eager"), "eager", None),
        ("google__gemma-3-1b-it", ("--gpu", "A100", "--method", "lora"), "sdpa", "efficient"),
    ],
)  # fmt: skip
def test_the_attention_that_training_really_takes(capsys, name, flags, implementation, backend):
    section, found = analyse(published(name), capsys, "--seq-len", "4096", *flags)
    seen = section["observed"]["attention"]
    assert (seen["implementation"], seen["sdpa_backend"]) == (implementation, backend)
    square = seen["quadratic_bytes_per_layer"]
    if backend in ("flash", "efficient"):
        assert square == 0 and "attention-fused" in found
    else:
        heads = section["observed"]["num_attention_heads"]
        assert square == heads * 4096 * 4096 * 4  # batch 1, fp32
        assert found["attention-quadratic"]["level"] == "warn"
    assert "falls back to eager" not in json.dumps(section)


def test_flash_attention_that_cannot_run_is_an_error_and_no_fallback(capsys):
    flags = ("--gpu", "T4", "--attention", "flash_attention_2")
    _, found = analyse(published("Qwen__Qwen2.5-7B"), capsys, *flags)
    assert "compute capability 8.0" in found["attention-not-available"]["what"]
    assert "no silent way back" in found["attention-not-available"]["why"]


CODE = """
from transformers import PreTrainedModel
{import_line}
class M(PreTrainedModel):
    _supports_sdpa = True
    _supports_flash_attn_2 = {flash}
"""


@pytest.mark.parametrize(
    ("import_line", "required"),
    [
        ("from flash_attn import flash_attn_func", True),
        ("try:\n    from flash_attn import flash_attn_func\nexcept ImportError:\n    pass", False),
        ("if True:\n    import flash_attn", False),
        ("", False),
    ],
)
def test_remote_code_is_read_and_not_imported(tmp_path, import_line, required):
    text = CODE.format(import_line=import_line, flash=True)
    ast.parse(text)
    seen = parse_modeling(read_model_directory(write(tmp_path / "m", modeling_x__py=text, config__json={})))
    assert (seen.sdpa, seen.flash, seen.flash_required) == (True, True, required)


def test_remote_code_that_is_no_python_says_nothing(tmp_path):
    for text in ("def (", "x = " + "(" * 5000, "\0"):
        seen = parse_modeling(read_model_directory(write(tmp_path / "m", modeling_x__py=text, config__json={})))
        assert seen.sdpa is None


# --- tokenizers ------------------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(tmp_path, capsys, template=CHATML, extra=None, **config):
    path = write(tmp_path / "m", tokenizer_config__json={"chat_template": template, **config}, **(extra or {}))
    section, found = analyse(path, capsys)
    return section["observed"]["tokenizer"], found


def test_padding_that_is_the_end(tmp_path, capsys):
    _, found = tokenizer(tmp_path, capsys, eos_token="</s>", pad_token={"content": "</s>"})
    assert found["pad-is-eos"]["level"] == "warn"


def test_an_end_of_turn_at_which_generation_does_not_stop(tmp_path, capsys):
    added = {"5": {"content": "<|im_end|>"}, "2": {"content": "</s>"}}
    extra = {"generation_config__json": {"eos_token_id": 2}}
    _, found = tokenizer(tmp_path, capsys, extra=extra, eos_token="</s>", added_tokens_decoder=added)
    assert "5" in found["wrong-eos-for-chat"]["fix"][0]
    extra = {"generation_config__json": {"eos_token_id": [2, 5]}}
    _, found = tokenizer(tmp_path, capsys, extra=extra, eos_token="</s>", added_tokens_decoder=added)
    assert "wrong-eos-for-chat" not in found


def test_a_template_that_drops_the_system_message(tmp_path, capsys):
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    seen, found = tokenizer(tmp_path, capsys, template)
    assert seen["system_role"] == "dropped" and found["system-role-dropped"]["level"] == "warn"


def test_generation_markers_are_seen(tmp_path, capsys):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    seen, _ = tokenizer(tmp_path, capsys, template)
    assert seen["generation_markers"] is True and seen["renders"]["user+assistant"] == "Hi{}"


def test_a_template_with_tools(tmp_path, capsys):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    assert tokenizer(tmp_path, capsys, template)[0]["tools"] == "supported"
    assert tokenizer(tmp_path, capsys, CHATML)[0]["tools"] == "ignored"


def test_templates_in_every_home(tmp_path, capsys):
    path = write(tmp_path / "m", tokenizer_config__json={"chat_template": "one"}, chat_template__jinja="two")
    folder = path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("three")
    seen = analyse(path, capsys)[0]["observed"]["tokenizer"]
    assert seen["template_names"] == ["default", "tool_use"] and seen["renders"]["user"] == "two"
    assert seen["template_source"] == "chat_template.jinja" and seen["used_with_tools"] == "tool_use"


def test_bos_that_the_template_writes_twice(tmp_path, capsys):
    _, found = tokenizer(
        tmp_path, capsys, "{{ bos_token }}{{ bos_token }}" + CHATML, bos_token="<s>", add_bos_token=True
    )
    assert found["bos-doubled"]["level"] == "warn"


def test_an_id_beyond_the_embedding_from_tokenizer_json(tmp_path, capsys):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 10,
        "num_attention_heads": 4,
    }
    vocabulary = {"added_tokens": [{"id": 11, "content": "<x>"}], "model": {"vocab": {}}}
    path = write(tmp_path / "m", config__json=config, tokenizer__json=vocabulary)
    _, found = analyse(path, capsys)
    assert "11" in found["tokenizer-larger-than-embedding"]["what"]


def test_a_pad_token_of_the_configuration_beyond_the_embedding(tmp_path, capsys):
    config = json.loads((published("Qwen__Qwen2-0.5B") / "config.json").read_text())
    path = write(tmp_path / "m", config__json={**config, "pad_token_id": config["vocab_size"]})
    _, found = analyse(path, capsys)
    assert "pad_token_id" in found["tokenizer-larger-than-embedding"]["what"]


def test_a_template_that_wants_a_system_message(tmp_path, capsys):
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    _, found = tokenizer(tmp_path, capsys, template)
    assert found["system-role-required"]["level"] == "warn"


def test_a_quantised_checkpoint_of_an_older_tool(tmp_path, capsys):
    config = json.loads((published("Qwen__Qwen2-0.5B") / "config.json").read_text())
    path = write(tmp_path / "m", config__json=config, quantize_config__json={"bits": 4, "group_size": 128})
    section, found = analyse(path, capsys)
    assert section["observed"]["quantization"]["quant_method"] == "gptq" and "pre-quantized-gptq" in found


# --- the rest --------------------------------------------------------------------------------------------------------


def test_memory_is_judged_for_a_named_card(capsys):
    for vram, code in (("24", "memory-fit-yes"), ("2", "memory-fit-no")):
        _, found = analyse(published("Qwen__Qwen2.5-7B"), capsys, "--gpu-vram-gb", vram, "--method", "qlora")
        assert code in found


def test_without_a_card_memory_is_told_and_not_judged(capsys):
    section, found = analyse(published("Qwen__Qwen2.5-0.5B"), capsys)
    assert set(section["observed"]["memory"]["by_method"]) == {"full", "lora", "qlora"}
    assert not [code for code in found if code.startswith("memory-fit")]


def test_several_models_are_compared(capsys):
    names = ["Qwen__Qwen2-0.5B", "mistralai__Mixtral-8x7B-v0.1", "Qwen__Qwen2-7B"]
    code = model_analyzer.main([*(str(published(name)) for name in names), "--json"])
    section = json.loads(capsys.readouterr().out)
    rows = section["observed"]["models"]
    assert [row["model_name"] for row in rows] == names
    assert [row["params"] for row in rows] == [494_032_768, 46_702_792_704, 7_615_616_512]
    assert code == 0 and section["level"] == "warn"


def test_a_phone(capsys):
    flags = ("--target-platform", "android-vulkan", "--ram-gb", "4")
    section, found = analyse(published("google__gemma-3-1b-it"), capsys, *flags)
    seen = section["observed"]["phone"]
    assert seen["gguf_architecture"] == "gemma3" and seen["training_on_phone"] is False
    assert seen["gguf_bytes"] == 999_885_952 * 45 // 80  # Q4_0: 4.5 bits a weight
    assert found["phone-memory-fits"] and "gelu" in found["phone-operators"]["what"]
    assert "SiLU" not in json.dumps(section)
    _, found = analyse(published("Qwen__Qwen2-7B"), capsys, *flags)
    assert found["phone-memory-too-small"]["level"] == "fail"
    _, found = analyse(published("Qwen__Qwen2-0.5B"), capsys, *flags, "--vulkan-version", "1.1")
    assert found["phone-vulkan-version"]["level"] == "warn"
    _, found = analyse(published("Qwen__Qwen2-0.5B"), capsys, *flags, "--vulkan-version", "1.0")
    assert found["phone-vulkan-version"]["level"] == "fail"


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpu", "no such card"), ("--gpu-vram-gb", "-1"), ("--tokens", "0"), ("--data", "/nowhere/x.jsonl"),
        ("--target-platform", "android-vulkan", "--gguf-type", "Q99"),
    ],
)  # fmt: skip
def test_bad_flags_are_one_line(capsys, flags):
    with pytest.raises(UsageError) as error:
        model_analyzer.main([str(published("Qwen__Qwen2-0.5B")), "--json", *flags])
    assert ("\n" not in str(error.value) and flags[-2] in str(error.value)) or flags[-1] in str(error.value)


def test_the_data_file_sets_the_rank(tmp_path, capsys):
    data = tmp_path / "train.jsonl"
    data.write_text("x" * 4_000)
    section, _ = analyse(published("Qwen__Qwen2-0.5B"), capsys, "--data", str(data))
    assert "1,000 trained tokens" in section["observed"]["lora"]["rank_reason"]


def test_all_133_in_one_process_within_three_seconds(capsys):
    names = [str(path) for path in sorted((HERE / "configs").iterdir())]
    began = time.perf_counter()
    model_analyzer.main([*names, "--json"])
    took = time.perf_counter() - began
    assert len(json.loads(capsys.readouterr().out)["observed"]["models"]) == 133
    assert took < 15  # 3 s on an idle machine; five times that for a busy one


def test_help_and_one_model_start_without_torch():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['model_analyzer.py', sys.argv[1], '--json', '--module-tree', 'never']\n"
        "try:\n    runpy.run_path('model_analyzer.py', run_name='__main__')\nexcept SystemExit:\n    pass\n"
        "loaded = {'torch', 'transformers', 'peft', 'numpy', 'jinja2', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(9 if loaded else 0)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(published("Qwen__Qwen2-7B"))], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert answer.returncode == 0, answer.stderr[-500:]


@pytest.mark.slow
def test_the_module_tree_of_the_interpreter_under_test(capsys):
    pytest.importorskip("torch")
    flags = ("--module-tree", "always", "--python", sys.executable)
    section, found = analyse(published("Qwen__Qwen2-0.5B"), capsys, *flags)
    assert found["module-tree-agrees"]["level"] == "ok"
    assert section["observed"]["module_tree"]["parameters"] == 494_032_768


@pytest.mark.slow
def test_a_type_that_only_transformers_knows_is_read_from_its_modules(tmp_path, capsys):
    pytest.importorskip("torch")
    path = write(tmp_path / "m", config__json={"model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"]})
    section, found = analyse(path, capsys, "--python", sys.executable)
    assert section["observed"]["structure"] == "module tree"
    assert section["observed"]["params"] == 2_481_848_336  # transformers 5.24.0, default configuration
    assert found["lora-targets"]["level"] == "ok"


def test_a_model_without_vocabulary_is_no_language_model():
    from preflight.model.model_look import Card, read_memory
    from preflight.model_shape import shape_from_tree
    from preflight.plan import Plan

    module = {"path": "layers.*.q_proj", "kind": "linear", "shape": [8, 8], "bias": 0, "per_layer": 1}
    module["subclass"] = False
    group = {"count": 2, "mixer": "attention", "mlp": "none", "stack": "decoder", "modules": [module]}
    tree = {"class": "ViTModel", "tied": False, "head": None, "groups": [group], "rest": []}
    shape = shape_from_tree({"model_type": "vit", "hidden_size": 8}, tree)
    assert shape.parameters == 128 and shape.vocab_size is None
    assert read_memory(shape, Plan(), False, Card(None, None, None, None), None, False) == ({}, [])


@pytest.mark.slow
def test_templates_render_as_transformers_renders_them(tmp_path, capsys):
    """The same chats through transformers' own function, for the odd templates and a few usual ones."""
    pytest.importorskip("transformers")
    templates = {"chatml": CHATML, "tools": "{{ tools | tojson(indent=2) }}" + CHATML}
    for path in sorted((HERE / "wild" / "C-template").iterdir()):
        value = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        if isinstance(value, str) and "strftime_now" not in value:
            templates[path.name] = value
    job = tmp_path / "job.json"
    job.write_text(json.dumps(templates), encoding="utf-8")
    code = (
        "import importlib.util, json, sys\n"
        "from transformers.utils.chat_template_utils import render_jinja_template as render\n"
        "spec = importlib.util.spec_from_file_location('child', sys.argv[1])\n"
        "child = importlib.util.module_from_spec(spec); spec.loader.exec_module(child)\n"
        "tokens = {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}\n"
        "out = {}\n"
        "for name, text in json.load(open(sys.argv[2], encoding='utf-8')).items():\n"
        "    for key, messages, prompt, tools in child.CONVERSATIONS:\n"
        "        both = []\n"
        "        for how in (\n"
        "            lambda: render([messages], tools=tools, chat_template=text, add_generation_prompt=prompt,\n"
        "                           **tokens)[0][0],\n"
        "            lambda: child.render(child.environment().from_string(text), messages, prompt, tools, tokens),\n"
        "        ):\n"
        "            try: both.append(how())\n"
        "            except Exception as error: both.append(type(error).__name__ + ': ' + str(error))\n"
        "        out[name + '/' + key] = both\n"
        "print(json.dumps(out))\n"
    )
    child = REPOSITORY / "preflight" / "children" / "render_template.py"
    answer = subprocess.run(
        [sys.executable, "-c", code, str(child), str(job)], capture_output=True, text=True, check=False, timeout=120
    )
    both = json.loads(answer.stdout.splitlines()[-1])
    assert len(both) >= 40
    assert {key: pair for key, pair in both.items() if pair[0] != pair[1]} == {}


def test_the_section_renders_strictly(tmp_path, capsys):
    from preflight.report import render

    paths = [published("Qwen__Qwen2-7B"), published("mistralai__Mixtral-8x7B-v0.1"), HERE / "wild" / "B-model" /
             "B12-adapter-dir-as-model", HERE / "wild" / "C-template" / "C01-template-list", tmp_path]  # fmt: skip
    for path in [*paths, *(HERE / "wild" / "B-model").iterdir()]:
        section, _ = analyse(path, capsys)
        text = render({"schema": 1, "sections": {"model_analyzer": section}}, strict=True)["model_analyzer"]
        assert text.count("\n|---") >= 1 or path == tmp_path
    model_analyzer.main([str(paths[0]), str(paths[2]), "--json"])
    section = json.loads(capsys.readouterr().out)
    assert "B12" in render({"schema": 1, "sections": {"model_analyzer": section}}, strict=True)["model_analyzer"]


REMOTE_CONFIG = """
from transformers import PretrainedConfig
class TinyConfig(PretrainedConfig):
    model_type = "tiny_remote"
    def __init__(self, hidden_size=8, vocab_size=16, num_hidden_layers=3, **rest):
        self.hidden_size, self.vocab_size, self.num_hidden_layers = hidden_size, vocab_size, num_hidden_layers
        super().__init__(**rest)
"""
REMOTE_MODEL = """
import os
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from .configuration_tiny import TinyConfig
open(os.environ["TINY_MARK"], "w").write("ran")
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.q_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.out = nn.Linear(c.hidden_size, c.hidden_size)
class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
    def get_input_embeddings(self): return self.embed
    def get_output_embeddings(self): return self.lm_head
"""


@pytest.mark.slow
def test_remote_code_runs_only_when_it_is_trusted_and_only_in_a_child(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    mark = tmp_path / "ran"
    monkeypatch.setenv("TINY_MARK", str(mark))
    config = {
        "model_type": "tiny_remote", "architectures": ["TinyForCausalLM"], "hidden_size": 8, "vocab_size": 16,
        "num_hidden_layers": 3, "tie_word_embeddings": False,
        "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig",
                     "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"},
    }  # fmt: skip
    path = write(
        tmp_path / "m", config__json=config, configuration_tiny__py=REMOTE_CONFIG, modeling_tiny__py=REMOTE_MODEL
    )
    section, _ = analyse(path, capsys, "--python", sys.executable)
    assert section["observed"]["params"] is None and not mark.exists()
    section, found = analyse(path, capsys, "--python", sys.executable, "--trust-remote-code")
    # embedding and head 2 * 16*8; three layers of 8*8 and 8*8 + 8
    assert section["observed"]["params"] == 2 * 128 + 3 * (64 + 72), found
    assert mark.exists() and "modeling_tiny" not in sys.modules
    assert section["observed"]["lora"]["linear_module_names"] == ["q_proj", "out"]
