"""Values of config.json that transformers refuses: each one is really tried with it, in a child."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from preflight.model.config_values import check_values
from preflight.model_shape import read_shape

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
# (type, what is changed, a word of the finding; None where it must run)
VALUES = [
    ("llama", {}, None),
    ("qwen2", {"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    ("mistral", {"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5}, "multiple of num_attention_heads"),
    ("qwen2", {"num_attention_heads": 5, "num_key_value_heads": 5}, None),  # 12 wide: odd, but it runs
    ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 7}, "odd head size"),
    ("qwen3", {"head_dim": 32}, None),
    ("llama", {"rope_scaling": {"type": "su"}}, "unknown type"),
    ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "unknown type"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "lacks factor"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None),
    ("llama", {"rope_scaling": {"factor": 2.0}}, None),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, None),
    ("llama", {"hidden_act": "swiglu"}, "no activation"),
    ("llama", {"pad_token_id": 100}, "beyond vocab_size"),
    ("llama", {"pad_token_id": -1}, None),
    ("llama", {"eos_token_id": [1, 2]}, None),
    ("qwen2", {"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
    ("llama", {"dtype": "bfloat"}, "no type of torch"),
    ("llama", {"dtype": "bfloat16"}, None),
]


def test_every_refused_value_is_named_and_no_other() -> None:
    for kind, change, word in VALUES:
        config = {"model_type": kind, **SMALL, **change}
        found = check_values(config, read_shape(config))
        assert bool(found) is (word is not None), (kind, change, found)
        assert word is None or (word in found[0].what and found[0].code == "config-value-refused"), found


def test_no_published_configuration_holds_a_refused_value() -> None:
    tried = 0
    for path in sorted((Path(__file__).parent / "configs").rglob("*.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(config, dict) and config.get("model_type"):
            tried += 1
            assert not check_values(config, read_shape(config)), path
    assert tried > 80


@pytest.mark.slow
def test_transformers_refuses_exactly_these() -> None:
    pytest.importorskip("transformers")
    code = (
        "import json, sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n"
        "for kind, config in json.load(sys.stdin):\n"
        "    try:\n"
        "        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(config))\n"
        "        model(input_ids=torch.ones(1, 8, dtype=torch.long))\n"
        "        print('runs')\n"
        "    except Exception as error:\n"
        "        print('refused', type(error).__name__)\n"
    )
    job = json.dumps([(kind, {**SMALL, **change}) for kind, change, _ in VALUES])
    done = subprocess.run([sys.executable, "-c", code], input=job, capture_output=True, text=True, timeout=200)
    said = [line.split()[0] for line in done.stdout.splitlines()]
    assert said == ["runs" if word is None else "refused" for _, _, word in VALUES], done.stdout + done.stderr[-2000:]
