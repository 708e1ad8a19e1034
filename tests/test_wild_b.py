"""The odd model directories of tests/wild/B-model, each through the command line. Values are worked out by hand."""

from pathlib import Path

import pytest
from sections import finding, section_of, words

import model_analyzer

CASES = Path(__file__).parent / "wild" / "B-model"


def analyse(case, capsys, *flags):
    """The section as `model_analyzer.py CASE --json` prints it."""
    return section_of(model_analyzer.main, [str(CASES / case), *flags], capsys)


def lora(case, capsys, r, *targets):
    """(trainable parameters, error, ignored names) of the target modules that are asked for."""
    section = analyse(case, capsys, "--target-modules", ",".join(targets), "--lora-rank", str(r))
    asked = section["observed"]["lora"]["asked"]
    return asked["trainable_params"], asked["error"], asked["ignored"]


def suggested(section):
    return section["observed"]["lora"]["linear_module_names"]


def test_b01_head_dim_is_read_and_not_divided(capsys):
    section = analyse("B01-qwen3-head-dim", capsys)
    seen = section["observed"]
    assert section["level"] == "ok"
    assert seen["params"] == 4_022_468_096
    assert seen["dtype"] == "bfloat16"
    assert seen["weight_bytes"] == 8_044_936_192
    assert (seen["head_dim"], seen["q_proj_out"], seen["kv_proj_out"]) == (128, 4096, 1024)
    assert seen["kv_bytes_per_token_bf16"] == 147_456
    assert seen["tie_word_embeddings"] is True
    trained, _, _ = lora("B01-qwen3-head-dim", capsys, 8, "q_proj", "k_proj", "v_proj", "o_proj")
    assert trained == 5_898_240


def test_b02_the_language_model_is_under_llm_config(capsys):
    section = analyse("B02-vlm-llm-config", capsys)
    seen = section["observed"]
    assert section["level"] == "warn"
    assert finding(section, "custom-code-vlm")["level"] == "warn"
    assert seen["multimodal"] is True and seen["language_config_key"] == "llm_config"
    assert (seen["hidden_size"], seen["num_hidden_layers"]) == (4096, 32)
    assert (seen["num_attention_heads"], seen["num_key_value_heads"]) == (32, 8)
    assert (seen["vocab_size"], seen["kv_bytes_per_token_bf16"]) == (92_553, 131_072)
    assert seen["needs_trust_remote_code"] is True
    assert sorted(suggested(section)) == ["w1", "w2", "w3", "wo", "wqkv"]
    assert sorted(seen["lora"]["recommended_target_modules"]) == ["w1", "w2", "w3", "wo", "wqkv"]
    assert "q_proj" not in finding(section, "lora-targets")["what"]


def test_b03_chatglm_calls_everything_differently(capsys):
    section = analyse("B03-chatglm-names", capsys)
    seen = section["observed"]
    assert section["level"] == "warn"
    said = finding(section, "custom-code")
    assert "configuration_chatglm.py" in said["what"] and "modeling_chatglm.py" in said["what"]
    assert "4.44" in said["why"]
    assert seen["params"] == 6_243_584_000
    assert (seen["num_hidden_layers"], seen["num_key_value_heads"], seen["head_dim"]) == (28, 2, 128)
    assert (seen["intermediate_size"], seen["vocab_size"], seen["max_position"]) == (13_696, 65_024, 32_768)
    assert seen["kv_bytes_per_token_fp16"] == 28_672
    assert seen["mlp_is_gated"] is True
    assert seen["modeling_file_present"] is False
    assert suggested(section)[0] == "query_key_value"
    assert set(suggested(section)) == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert lora("B03-chatglm-names", capsys, 8, "query_key_value")[0] == 1_949_696


def test_b04_gpt2_has_conv1d_layers(capsys):
    section = analyse("B04-gpt2-names", capsys)
    seen = section["observed"]
    assert section["level"] == "ok"
    note = finding(section, "conv1d")
    assert note["level"] == "ok" and "fan_in_fan_out=True" in note["why"]
    assert seen["params"] == 124_439_808
    assert (seen["hidden_size"], seen["intermediate_size"], seen["num_key_value_heads"]) == (768, 3072, 12)
    assert seen["max_position"] == 1024 and seen["dtype_in_config"] is None
    assert seen["tie_word_embeddings"] is True and seen["kv_bytes_per_token_fp16"] == 36_864
    assert suggested(section) == ["c_attn", "c_proj", "c_fc"]
    assert lora("B04-gpt2-names", capsys, 8, "c_attn")[0] == 294_912
    assert seen["memory"]["plan"]["sequence_tokens"] == 1024


def test_b04_longer_sequences_than_positions_are_refused(capsys):
    section = analyse("B04-gpt2-names", capsys, "--seq-len", "2048")
    assert finding(section, "sequence-too-long")["level"] == "fail"


def test_b04_names_of_llama_are_refused(capsys):
    section = analyse("B04-gpt2-names", capsys, "--target-modules", "q_proj,v_proj")
    assert "not found" in finding(section, "lora-targets-refused")["what"]


def test_b05_mla_with_experts(capsys):
    section = analyse("B05-mla-moe-deepseek-v2-lite", capsys)
    seen = section["observed"]
    assert section["level"] == "warn"
    said = finding(section, "mla-moe")
    assert seen["params"] == 15_706_484_224 and seen["weight_bytes_bf16"] == 31_412_968_448
    assert (seen["moe_layers"], seen["dense_layers"], seen["experts"], seen["experts_per_token"]) == (26, 1, 64, 6)
    assert seen["attention_kind"] == "mla" and seen["q_lora_rank"] is None
    assert seen["latent_cache_values_per_token_per_layer"] == 576
    assert seen["head_dim"] == 192 and seen["v_head_dim"] == 128
    names = set(suggested(section))
    assert {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= names
    assert not names & {"k_proj", "v_proj", "q_a_proj", "q_b_proj"}
    assert "all of them in memory" in said["what"]
    trained, _, _ = lora(
        "B05-mla-moe-deepseek-v2-lite", capsys, 8, "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
    )
    assert trained == 3_552_768


MIXTRAL = "B06-mixtral-null-head-dim"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def test_b06_mixtral_with_a_null_head_dim(capsys):
    section = analyse(MIXTRAL, capsys)
    seen = section["observed"]
    assert section["level"] == "warn"
    finding(section, "moe-fused-experts")
    assert seen["params"] == 46_702_792_704
    assert (seen["head_dim"], seen["experts"], seen["kv_bytes_per_token_bf16"]) == (128, 8, 131_072)
    assert not {"gate_proj", "up_proj", "down_proj"} & set(seen["lora"]["recommended_target_modules"])
    assert 85.0 < seen["four_bit"]["weight_bytes"] / 2**30 < 86.0


def test_b06_names_of_the_mlp_are_silently_ignored(capsys):
    assert lora(MIXTRAL, capsys, 8, *ATTENTION) == (6_815_744, None, [])
    trained, error, ignored = lora(MIXTRAL, capsys, 8, *ATTENTION, "gate_proj", "up_proj", "down_proj")
    assert (trained, error, ignored) == (6_815_744, None, ["gate_proj", "up_proj", "down_proj"])
    section = analyse(MIXTRAL, capsys, "--target-modules", "q_proj,gate_proj")
    assert finding(section, "lora-targets-ignored")["level"] == "warn"


def test_b06_old_expert_names_become_fused_parameters(capsys):
    assert lora(MIXTRAL, capsys, 8, "w1", "w2", "w3")[0] == 171_966_464
    trained, error, _ = lora(MIXTRAL, capsys, 8, "q_proj", "w1")
    assert trained is None
    assert error == (
        "ValueError: Cannot convert PEFT target(s) w1 without also targeting w3 because they are fused into "
        "gate_up_proj."
    )


def test_b07_a_gptq_base_takes_lora_only(capsys):
    section = analyse("B07-gptq-int4-base", capsys)
    seen = section["observed"]
    assert section["level"] == "warn"
    said = finding(section, "pre-quantized-gptq")
    quantised = seen["quantization"]
    assert seen["params"] == 7_615_616_512
    assert (quantised["quant_method"], quantised["bits"], quantised["group_size"]) == ("gptq", 4, 128)
    assert quantised["unquantized_params_embeddings_and_head"] == 1_089_994_752
    assert 5.0 < seen["weight_bytes"] / 2**30 < 6.0
    assert quantised["allowed"] == {"full_fine_tuning": False, "lora_on_top": True, "bitsandbytes_on_top": False}
    assert "gptqmodel" in said["fix"][0]
    assert "cannot be merged" in said["why"]
    assert list(seen["memory"]["by_method"]) == ["lora_gptq"]
    assert lora("B07-gptq-int4-base", capsys, 8, *ATTENTION)[0] == 5_046_272
    all_seven = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
    assert lora("B07-gptq-int4-base", capsys, 8, *all_seven)[0] == 20_185_088


def test_b08_fp8_depends_on_version_and_card(capsys):
    case = "B08-fp8-checkpoint"
    section = analyse(case, capsys)
    quantised = section["observed"]["quantization"]
    assert section["level"] == "warn"
    finding(section, "pre-quantized-fp8")
    assert (quantised["quant_method"], quantised["linear_bytes_per_param"]) == ("fp8", 1)
    assert quantised["dequantizes_to_bf16_when"] == "no GPU, or compute capability below 8.9"
    assert quantised["bf16_weight_bytes_if_dequantized"] == 8_044_936_192

    def allowed(*flags):
        seen = analyse(case, capsys, *flags)["observed"]["quantization"]
        return seen["allowed"]["lora_on_top"], seen["dequantizes_to_bf16_here"]

    assert allowed("--transformers", "5.9.0", "--gpu", "RTX 4090") == (False, False)
    assert allowed("--transformers", "5.24.0", "--gpu", "RTX 3090") == (True, True)
    assert allowed("--transformers", "5.24.0", "--gpu", "H100") == (True, False)
    said = finding(analyse(case, capsys, "--transformers", "5.9.0"), "pre-quantized-fp8")
    assert "do not support training" in said["why"]


def test_b09_a_mamba_hybrid_with_infinity_in_its_config(capsys):
    case = "B09-nemotron-h-hybrid"
    section = analyse(case, capsys)
    seen = section["observed"]
    assert finding(section, "hybrid-mamba")["level"] == "warn"
    assert "fail" not in {one["level"] for one in section["findings"]}
    assert seen["params"] == 8_888_227_328
    assert seen["layers"] == {"mamba2": 27, "mlp": 25, "attention": 4}
    assert seen["kv_bytes_per_token_bf16"] == 16_384
    assert seen["mlp_is_gated"] is False
    recommended = seen["lora"]["recommended_target_modules"]
    assert sorted(recommended) == sorted([*ATTENTION, "in_proj", "up_proj", "down_proj"])
    default = next(one for one in seen["lora"]["choices"] if one["name"] == "peft-default")
    assert (default["trainable_params_by_rank"]["8"], default["layers"]) == (966_656, 4)
    assert lora(case, capsys, 8, *ATTENTION, "in_proj", "up_proj", "down_proj")[0] == 14_892_032
    for targets in (("in_proj", "out_proj"), ("all-linear",)):
        trained, error, _ = lora(case, capsys, 8, *targets)
        assert trained is None and "Module 'out_proj' is incompatible with Mamba-based models" in error
    assert "not found in the base model" in lora(case, capsys, 8, "gate_proj")[1]


def test_b10_a_byte_order_mark_stops_transformers(capsys):
    section = analyse("B10-config-with-bom", capsys)
    seen = section["observed"]
    assert section["level"] == "fail"
    said = finding(section, "config-not-loadable")
    assert "byte-order mark" in said["what"] and "without" in said["fix"][0]
    assert seen["config_bom"] is True and seen["params"] == 1_235_814_400


def test_b11_the_code_that_auto_map_names_is_not_there(capsys):
    section = analyse("B11-auto-map-code-missing", capsys)
    seen = section["observed"]
    assert section["level"] == "fail"
    said = finding(section, "custom-code-missing")
    assert seen["needs_trust_remote_code"] is True
    assert seen["missing_files"] == ["configuration_zeta9.py", "modeling_zeta9.py"]
    assert seen["weight_bytes"] == 3_221_225_472
    assert seen["params"] is None
    assert "review" in said["fix"][0] and "download" in said["fix"][0]
    assert "q_proj" not in words(section)


def test_b12_an_adapter_is_no_model(capsys):
    section = analyse("B12-adapter-dir-as-model", capsys)
    seen = section["observed"]["adapter"]
    assert section["level"] == "fail"
    finding(section, "adapter-not-model")
    assert (seen["peft_type"], seen["r"], seen["lora_alpha"]) == ("LORA", 16, 32)
    assert seen["target_modules"] == ["q_proj", "v_proj"]
    assert (seen["base_model"], seen["base_path_exists"]) == ("Qwen2.5-7B-Instruct", False)
    assert section["observed"]["memory"] is None


def test_b13_kv_heads_that_are_null(capsys):
    section = analyse("B13-kv-heads-null-phi2", capsys)
    seen = section["observed"]
    assert section["level"] == "ok"
    assert seen["params"] == 2_779_683_840
    assert (seen["num_key_value_heads"], seen["head_dim"], seen["max_position"]) == (32, 80, 2048)
    assert seen["kv_bytes_per_token_fp16"] == 327_680
    default = next(one for one in seen["lora"]["choices"] if one["name"] == "peft-default")
    assert default["target_modules"] == ["q_proj", "v_proj", "fc1", "fc2"]
    assert not {"gate_proj", "o_proj"} & set(suggested(section))
    assert lora("B13-kv-heads-null-phi2", capsys, 8, "q_proj", "v_proj")[0] == 2_621_440


def test_b14_a_pointer_and_a_missing_shard(capsys):
    section = analyse("B14-lfs-pointer-and-missing-shard", capsys)
    seen = section["observed"]
    assert section["level"] == "fail"
    said = finding(section, "weights-incomplete")
    assert seen["weights"]["lfs_pointers"] == ["model-00001-of-00002.safetensors"]
    assert seen["weights"]["missing"] == ["model-00002-of-00002.safetensors"]
    assert seen["weights"]["index_total_size"] == 5_559_367_680
    assert seen["params"] == 2_779_683_840
    assert "Git LFS" in said["what"] and "git lfs pull" in said["fix"][0] and "5.56 GB" in said["why"]


def test_b15_a_token_beyond_the_embedding(capsys):
    section = analyse("B15-added-token-beyond-embeddings", capsys)
    seen = section["observed"]
    assert section["level"] == "warn"
    said = finding(section, "tokenizer-larger-than-embedding")
    assert seen["params"] == 6_738_415_616
    assert (seen["num_key_value_heads"], seen["max_position"]) == (32, 4096)
    assert (seen["tokenizer"]["embedding_rows"], seen["tokenizer"]["max_token_id"]) == (32_000, 32_000)
    assert "resize_token_embeddings" in said["fix"][1]


@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir()))
def test_every_obstacle_has_a_reason_a_way_out_and_a_source(case, capsys):
    for one in analyse(case, capsys)["findings"]:
        if one["level"] in ("warn", "fail"):
            assert one["why"] and one["fix"] and one["source"], one
        if one["level"] == "unknown":
            assert one["why"], one
