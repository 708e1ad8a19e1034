"""Shapes and parameter counts. Expected values are published, or measured on the meta device by transformers itself."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preflight.model_shape import ConfigTrouble, read_dtype, read_shape, shape_from_tree

HERE = Path(__file__).parent
CONFIGS = sorted(path.parent.name for path in HERE.glob("configs/*/config.json"))
MEASURED = {
    row["name"]: row
    for line in (HERE / "measured" / "meta_counts.jsonl").read_text(encoding="utf-8").splitlines()
    if "name" in (row := json.loads(line))
}
# Counts of the published files that leave something out or count something twice, with what is right here.
# T5 has a separate head in its file, and transformers 5 ties it; BERT's file counts a pooler, its class has a head.
# Qwen-VL's and MiMo's were made from formulas without norms and biases.
OTHER_THAN_PUBLISHED = {
    "bigscience__T0_3B": 2_783_959_040,
    "bigscience__mt0-xxl": 11_896_598_528,
    "google-bert__bert-large-uncased": 335_174_458,
    "Qwen__Qwen-VL": 9_656_935_168,
    "Qwen__Qwen-VL-Chat": 9_656_935_168,
    "Qwen__Qwen-VL-Chat-Int4": 9_656_935_168,
    "XiaomiMiMo__MiMo-7B-RL": 7_833_409_536,
}


def config(name):
    return json.loads((HERE / "configs" / name / "config.json").read_text(encoding="utf-8"))


def provenance(name):
    return json.loads((HERE / "configs" / name / "provenance.json").read_text(encoding="utf-8"))


def test_all_published_configurations_are_here():
    assert len(CONFIGS) == 133


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_has_its_published_count(name):
    shape = read_shape(config(name))
    assert shape.parameters == OTHER_THAN_PUBLISHED.get(name, provenance(name)["counted_params"])
    assert shape.hidden_size and shape.layers and shape.vocab_size
    published = provenance(name)["published_params_b"]
    if published and name not in ("bigscience__mt0-xxl", "bigscience__T0_3B"):
        assert shape.parameters / 1e9 == pytest.approx(published, rel=0.007)


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_the_count_is_that_of_the_meta_device(name):
    row, shape = MEASURED[name], read_shape(config(name))
    assert shape.parameters == row["parameters"]
    assert shape.bitsandbytes_weights == row["four_bit"]


def test_all_133_are_read_in_three_seconds():
    loaded = [config(name) for name in CONFIGS]
    began = time.perf_counter()
    for one in loaded:
        read_shape(one)
    assert time.perf_counter() - began < 3


def _cut(values, layers=2):
    """The same configuration with few layers, so that building it is quick."""
    made = dict(values)
    for key in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "depth"):
        if isinstance(made.get(key), int):
            made[key] = layers
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if isinstance(made.get(key), list):
            made[key] = made[key][:layers]
    made.pop("max_window_layers", None)
    for key in ("text_config", "vision_config"):
        if isinstance(made.get(key), dict):
            made[key] = _cut(made[key], layers)
    return made


@pytest.mark.slow
def test_each_type_still_counts_like_the_installed_transformers(tmp_path):
    """Cut to a few layers; catches a transformers release that lays a family out differently."""
    pytest.importorskip("torch")
    by_type, files = {}, []
    for name in sorted(MEASURED):
        by_type.setdefault(config(name)["model_type"], name)
    for kind, name in sorted(by_type.items()):
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(_cut(config(name), 4 if kind in ("gemma3", "deepseek_v3", "qwen3_next") else 2)))
        files.append(str(path))
    answer = subprocess.run(
        [sys.executable, str(HERE / "meta_counts.py"), *files], capture_output=True, text=True, timeout=300, check=False
    )
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(rows) == len(by_type) >= 37, answer.stderr[-2000:]
    wrong = []
    for row in rows:
        from preflight.model.lora import reach

        assert "error" not in row, row
        shape = read_shape(json.loads(Path(row["name"]).read_text()))
        mine = (shape.parameters, shape.bitsandbytes_weights)
        if mine != (row["parameters"], row["four_bit"]):
            wrong.append((Path(row["name"]).stem, mine, row))
        for targets, key in (("all-linear", "lora_all"), (row["two"], "lora_two")):
            expected = row[key] if isinstance(row[key], int) else None
            if reach(shape, targets, 8).trainable != expected:
                wrong.append((Path(row["name"]).stem, targets, reach(shape, targets, 8), row[key]))
    assert not wrong


# --- published figures of architectures that are not among the 133 --------------------------------------------------


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        # counted on the meta device by transformers 5.24.0
        ({"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280}, 129_135_360),
        ({"model_type": "jamba"}, 51_570_323_328),
        ({"model_type": "falcon_h1"}, 8_514_961_408),
        ({"model_type": "recurrent_gemma"}, 2_010_263_040),
        ({"model_type": "rwkv"}, 7_392_649_216),
        ({"model_type": "lfm2"}, 2_705_497_600),
        ({"model_type": "olmoe"}, 13_361_612_800),
        ({"model_type": "phimoe"}, 41_872_793_600),
        ({"model_type": "qwen2_moe"}, 14_315_784_192),
        ({"model_type": "minimax_m2"}, 228_689_748_992),
        ({"model_type": "ernie4_5_moe"}, 21_825_437_888),
        ({"model_type": "llama4_text"}, 107_769_861_120),
        ({"model_type": "deepseek_v32"}, 671_877_929_216),
        ({"model_type": "glm4_moe_lite"}, 29_943_390_976),
        ({"model_type": "minicpm3"}, 4_073_875_968),
        ({"model_type": "qwen3_5_text"}, 8_953_803_264),
        ({"model_type": "qwen2_vl"}, 73_381_962_752),
        ({"model_type": "qwen3_vl"}, 12_616_410_352),
        ({"model_type": "qwen2_audio"}, 12_692_062_208),
        ({"model_type": "llava"}, 7_062_902_784),
        ({"model_type": "internvl"}, 11_765_025_792),
        ({"model_type": "whisper"}, 37_760_640),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, 406_291_456),
        ({"model_type": "umt5"}, 172_122_112),
        ({"model_type": "gemma3"}, 2_723_312_896),
        (
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_hidden_layers": 2},
            535_851_008,
        ),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"], "num_hidden_layers": 2},
            1_297_666_050,
        ),
        ({"model_type": "mistral", "architectures": ["MistralModel"], "num_hidden_layers": 2}, 567_300_096),
        ({"model_type": "mpt", "n_layers": 2}, 203_827_200),
        ({"model_type": "bert", "architectures": ["BertModel"], "num_hidden_layers": 2}, 38_603_520),
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, 124_696_665),
    ],
)
def test_other_families_with_their_default_configuration(values, parameters):
    assert read_shape(values).parameters == parameters


# --- single rules ----------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_small_llama_counted_by_hand():
    # embedding and head 2*100*64; a layer: q 64*64, k and v 2*64*32, o 64*64, MLP 3*64*128, two norms; a last norm
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    shape = read_shape(LLAMA)
    assert shape.parameters == 2 * 100 * 64 + 2 * layer + 64
    assert shape.kv_values_per_token == 2 * 2 * 2 * 16


def test_null_means_derive_and_absent_means_the_class_default():
    assert read_shape({**LLAMA, "num_key_value_heads": None}).kv_heads == 4
    assert read_shape({**LLAMA, "head_dim": None}).head_dim == 16
    assert read_shape({"model_type": "mistral"}).kv_heads == 8  # MistralConfig's default
    assert read_shape({"model_type": "mistral", "num_key_value_heads": None}).kv_heads == 32


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "64"}, {"hidden_size": -1}, {"hidden_size": 0}, {"hidden_size": 1e400}, {"hidden_size": [64]},
        {"num_hidden_layers": 10**9}, {"num_hidden_layers": True}, {"vocab_size": 1 << 60}, {"hidden_size": 6.5},
        {"num_key_value_heads": 8}, {"hidden_size": float("nan")}, {"num_attention_heads": {"a": 1}},
    ],
)  # fmt: skip
def test_values_that_no_model_can_have_are_refused_by_name(change):
    with pytest.raises(ConfigTrouble) as trouble:
        read_shape({**LLAMA, **change})
    key = next(iter(change))
    assert key in str(trouble.value) or "layers" in str(trouble.value) or "key_value" in str(trouble.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model_type": None},
        {"model_type": 5},
        {"model_type": ["llama"]},
        {"model_type": "nobody-knows"},
        {"text_config": {}},
    ],
)
def test_an_unknown_type_has_no_count(values):
    shape = read_shape(values)
    assert shape.parameters is None and shape.structure == "unknown"


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "openelm", "num_kv_heads": [3, 3, 4], "num_query_heads": [12, 12, 16], "model_dim": 1280},
        {"model_type": "gemma3n_text", "intermediate_size": [8192] * 30},
        {"model_type": "llava", "vision_config": {"model_type": "brand-new"}},
        {"model_type": "llava", "text_config": {"model_type": "brand-new"}},
    ],
)
def test_a_layout_that_is_not_known_is_no_fault_of_the_file(values):
    assert read_shape(values).structure == "unknown"


def test_both_spellings_of_the_dtype():
    assert read_dtype({"dtype": "bfloat16"}) == "bfloat16"
    assert read_dtype({"torch_dtype": "torch.float16"}) == "float16"
    assert read_dtype({"text_config": {"torch_dtype": "bfloat16"}}) == "bfloat16"
    assert read_dtype({"bf16": True}) == "bfloat16"
    assert read_dtype({"torch_dtype": None}) is None
    assert read_dtype({"dtype": {"a": 1}}) is None


def test_a_ratio_that_is_none_is_named():
    for value in ([4], "4", -1, 0, float("nan"), float("inf"), 1e300):
        with pytest.raises(ConfigTrouble, match="mlp_ratio"):
            read_shape({**config("Qwen__Qwen-VL"), "visual": {"mlp_ratio": value}})


@pytest.mark.parametrize("step", range(0, 133, 9))
def test_a_config_with_any_value_spoilt_gives_a_shape_or_a_reason(step):
    """Every value of a real configuration replaced by something odd: never another exception than ConfigTrouble."""
    whole = config(CONFIGS[step])
    odd = [None, -1, 0, "x", [], {}, [1, "a", None], {"a": 1}, 1.5, True, 1 << 70, float("inf")]
    for key in whole:
        for value in odd:
            try:
                read_shape({**whole, key: value})
            except ConfigTrouble:
                continue


def test_a_tree_from_transformers_becomes_a_shape():
    module = {
        "path": "model.layers.*.q",
        "kind": "linear",
        "shape": [4, 8],
        "bias": 4,
        "per_layer": 1,
        "subclass": False,
    }
    tree = {
        "class": "NewForCausalLM", "parameters": 36 * 3 + 80, "tied": True, "head": "lm_head",
        "groups": [{"count": 3, "mixer": "attention", "mlp": "dense", "stack": "decoder", "modules": [module]}],
        "rest": [{**module, "path": "model.embed", "kind": "embedding", "shape": [10, 8], "bias": 0}],
    }  # fmt: skip
    shape = shape_from_tree({"model_type": "brand-new", "hidden_size": 8}, tree)
    assert shape.parameters == 36 * 3 + 80
    assert (shape.structure, shape.architecture, shape.tied_embeddings) == ("module tree", "NewForCausalLM", True)


@pytest.mark.parametrize(
    ("values", "linear_weights"),
    [
        # weights of all nn.Linear but the head, counted in transformers 4.57.1
        ({"model_type": "mixtral", "num_hidden_layers": 2}, 2_902_523_904),
        ({"model_type": "olmoe", "num_hidden_layers": 2}, 1_644_429_312),
        ({"model_type": "falcon", "num_hidden_layers": 2}, 414_121_984),
        ({"model_type": "phimoe", "num_hidden_layers": 2}, 2_600_599_552),
    ],
)
def test_transformers_4_had_linear_layers_where_5_has_stacks(values, linear_weights):
    from preflight.model.families.moe import as_transformers_4

    shape = read_shape(values)
    assert shape.bitsandbytes_weights < linear_weights
    assert as_transformers_4(shape).bitsandbytes_weights == linear_weights
    assert as_transformers_4(shape).parameters == shape.parameters
