"""The formulas against numbers worked out by hand and against published measurements."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from preflight.memory.closed_form import COMPONENTS, NoEstimate, estimate, state_bytes
from preflight.model_shape import ModelShape, read_shape
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def shape_of(name: str) -> ModelShape:
    return read_shape(json.loads((ROOT / "tests" / "configs" / name / "config.json").read_text()))


def component(made, name):
    return next(part for part in made.components if part.name == name)


def test_full_fine_tuning_of_mistral_peaks_at_five_times_its_weights():
    """Published: 67.4602 GiB at batch 4 and 67.4606 at batch 8 (fms_acceleration): weights, gradients, two states and
    the foreach temporary, each 7241732096 x 2 bytes = 13.489 GiB."""
    plan = Plan(
        method="full", sequence_tokens=4096, micro_batch=4, autocast=None, optimizer="adamw_torch",
        attention="flash_attention_2", transformers="4.48.1",
    )  # fmt: skip
    made = estimate(shape_of("mistralai__Mistral-7B-v0.1"), plan)
    assert made.moment == "optimizer step"
    assert made.trainable_parameters == 7241732096
    assert component(made, "gradients").bytes == 7241732096 * 2
    assert made.allocated_bytes / 2**30 == pytest.approx(67.4602, abs=0.01)


def test_the_loss_of_a_large_vocabulary_is_counted_by_hand():
    """1024 tokens x 151936 x 4 bytes = 593.5 MiB, four times: log-probabilities, two gradients, held logits.
    Published for this run: 4.0413 GiB (can_i_finetune_this)."""
    plan = Plan(
        method="qlora", sequence_tokens=1024, target_modules=ATTENTION, optimizer="paged_adamw_8bit", autocast=None,
        holds_outputs=True, compute_capability="8.9", attention="sdpa",
    )  # fmt: skip
    made = estimate(shape_of("Qwen__Qwen2.5-1.5B-Instruct"), plan)
    assert component(made, "logits_loss").bytes == 4 * 1024 * 151936 * 4
    assert made.allocated_bytes / 2**30 == pytest.approx(4.0413, rel=0.005)


def test_double_quantisation_is_counted_by_hand():
    """Qwen2.5-1.5B has 28 x 46792704 quantised weights: half a byte each; scales 1/64 byte and 4/16384 byte each."""
    made = estimate(shape_of("Qwen__Qwen2.5-1.5B-Instruct"), Plan())
    weights = 28 * 46792704
    packed = next(i for i in component(made, "static_model").items if i.name == "quantised weights")
    scales = next(i for i in component(made, "quantisation_overhead").items if i.name == "scales")
    assert packed.bytes == weights // 2
    assert scales.bytes == pytest.approx(weights / 64 + 4 * weights / 16384, rel=0.005)


def test_lora_parameters_are_counted_by_hand():
    """r=16 on q, k, v, o of Qwen2.5-1.5B: 16 x ((1536+1536) + 2 x (1536+256) + (1536+1536)) x 28 = 4358144."""
    made = estimate(shape_of("Qwen__Qwen2.5-1.5B-Instruct"), Plan(method="lora", target_modules=ATTENTION))
    assert made.trainable_parameters == 4358144


@pytest.mark.parametrize(
    ("name", "elements", "width", "expected"),
    [
        ("adamw_torch", 1_000_000, 2, 2 * 2_000_384),  # two states in the weights' dtype, each rounded to 512
        ("adamw_8bit", 1_000_000, 4, 2 * (1_000_448 + 15_872)),  # 1 byte each; 3907 scales of 4 bytes, rounded
        ("adamw_8bit", 1000, 4, 2 * 4096),  # below 4096 elements: 32 bit
        ("paged_adamw_32bit", 1_000_000, 4, 0),
        ("paged_adamw_8bit", 50_000, 4, 2 * (50_176 + 1024)),
        ("lion_8bit", 1_000_000, 4, 1_000_448 + 15_872),
        ("sgd", 1_000_000, 4, 0),
    ],
)
def test_states_of_an_optimizer(name, elements, width, expected):
    assert state_bytes(name, elements, width) == expected


def test_all_eight_components_are_always_there_and_sum_to_the_reserved_peak():
    made = estimate(shape_of("meta-llama__Llama-3.2-1B"), Plan())
    assert [part.name for part in made.components] == list(COMPONENTS)
    assert sum(part.bytes for part in made.components) == made.reserved_bytes
    assert all(part.source for part in made.components)


def test_fewer_tokens_checkpoints_and_smaller_ranks_never_take_more():
    shape = shape_of("meta-llama__Llama-3.1-8B")
    base = Plan(method="lora", gradient_checkpointing=False, micro_batch=2)
    peak = estimate(shape, base).allocated_bytes
    for less in (
        replace(base, gradient_checkpointing=True),
        replace(base, micro_batch=1),
        replace(base, sequence_tokens=1024),
        replace(base, lora_rank=8),
        replace(base, loss="fused_linear_ce"),
    ):
        assert estimate(shape, less).allocated_bytes <= peak


def test_the_answer_does_not_depend_on_the_size_of_the_card():
    from preflight.memory.budget import named_card
    from preflight.memory.report import memory

    shape = shape_of("meta-llama__Llama-3.2-1B")
    sizes = {
        memory(shape, Plan(), named_card(size))[0]["estimate"]["allocated_bytes"] for size in (4.0, 16.0, 80.0, 192.0)
    }
    assert len(sizes) == 1


def test_a_model_of_unknown_structure_gets_no_number():
    with pytest.raises(NoEstimate):
        estimate(ModelShape(None, None, "unknown"), Plan())


def test_every_configuration_gets_an_estimate_for_every_method():
    for folder in sorted((ROOT / "tests" / "configs").iterdir()):
        shape = read_shape(json.loads((folder / "config.json").read_text()))
        for method in ("full", "lora", "qlora"):
            made = estimate(shape, Plan(method=method))
            assert made.low_bytes <= made.allocated_bytes <= made.reserved_bytes <= made.high_bytes, folder.name
            assert made.allocated_bytes > 0.4 * (shape.parameters or 0)


def test_it_needs_no_torch_and_little_time():
    code = (
        "import json,sys;from preflight.model_shape import read_shape;from preflight.plan import Plan;"
        "from preflight.memory.closed_form import estimate;"
        "estimate(read_shape(json.load(open('tests/configs/meta-llama__Llama-3.1-8B/config.json'))),Plan());"
        "sys.exit('torch' in sys.modules)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert time.monotonic() - began < 3.0  # about 0.12 s when the machine is idle


LITGPT = Plan(
    method="lora", modelling="litgpt", sequence_tokens=1304, lora_rank=8, lora_dropout=0.05, autocast=None,
    target_modules=("query", "value"), adapter_dtype="bf16", gradient_checkpointing=False, optimizer="adamw_torch",
    gradient_accumulation=128, loss="chunked_lm_head_and_ce",
)  # fmt: skip


def test_litgpt_keeps_its_own_tensors_counted_by_hand():
    """Published: 21.30 and 29.07 GB (1e9) at one and two samples of 1304 tokens (litgpt tutorials/resource-tables.md).

    Kept per token and layer of Llama-2-7B in bytes: two float32 norm inputs 2 x 4 x 4096; QKV 3 x 2 x 4096, rotated Q
    and K 2 x 2 x 4096, attention output 2 x 4096; dropped input 2 x 4096 and mask 4096; what index_copy keeps of the
    LoRA branches 2 x 2 x 4096; three MLP tensors 3 x 2 x 11008; rank 2 x 8 x 2; statistics 2 x 4 + 32 x 4.
    """
    shape = shape_of("meta-llama__Llama-2-7b-hf")
    one, two = (estimate(shape, replace(LITGPT, micro_batch=n)) for n in (1, 2))
    assert one.allocated_bytes / 1e9 == pytest.approx(21.30, rel=0.005)
    assert two.allocated_bytes / 1e9 == pytest.approx(29.07, rel=0.005)
    layer = 4096 * (8 + 6 + 4 + 2 + 2 + 1 + 4) + 3 * 2 * 11008 + 2 * 8 * 2 + 8 + 128
    loss = 32000 * 8 + 4096 * 6 + 4096 * 2  # float32 logits and log-probabilities; norm input, hidden states
    pieces = 2 * 128 * 32000 * 4
    grown = two.allocated_bytes - one.allocated_bytes
    assert grown == pytest.approx(1304 * (32 * layer + loss) + pieces, rel=0.003)


def test_four_bit_products_of_old_bitsandbytes_keep_their_input():
    """2 bytes per input value of each 4-bit layer: autograd/_functions.py MatMul4Bit.forward before 0.43.2."""
    shape = shape_of("meta-llama__Llama-2-7b-hf")
    plan = replace(LITGPT, method="qlora", quantise_head=True, kbit_preparation=False)
    new, old = (estimate(shape, replace(plan, bitsandbytes=version)) for version in ("0.43.2", "0.43.1"))
    inputs = 2 * 4096 + 11008  # of QKV, of gate and up (the same), of down; attention's output is kept anyway
    assert old.allocated_bytes - new.allocated_bytes == pytest.approx(1304 * 32 * 2 * inputs, rel=0.02)


def test_litgpt_has_no_mixtures_of_experts_here():
    with pytest.raises(NoEstimate, match="litgpt"):
        estimate(shape_of("mistralai__Mixtral-8x7B-v0.1"), LITGPT)


def test_trained_elements_are_those_that_peft_would_train_in_every_configuration():
    """trainable_parameters is checked against get_peft_model on the meta device, adapted stacks of experts included."""
    from preflight.model.lora import ALL_LINEAR, trainable_parameters

    stacked = 0
    for folder in sorted((ROOT / "tests" / "configs").iterdir()):
        shape = shape_of(folder.name)
        wanted = trainable_parameters(shape, ALL_LINEAR, 16)
        if wanted is not None:
            made = estimate(shape, Plan(method="lora", lora_rank=16)).trainable_parameters
            assert made == wanted, folder.name
            stacked += any(m.kind == "experts" for m, _, _ in shape.occurrences())
    assert stacked >= 8


def test_a_tied_embedding_has_three_gradients_at_once_counted_by_hand():
    """SGD keeps no states: weights and gradients of Llama-3.2-1B, 1235814400 x 2 bytes each; then the gradient of the
    head, the one of the embedding and their sum (128256 x 2048 x 2 bytes) of which the sum is among the gradients."""
    made = estimate(
        shape_of("meta-llama__Llama-3.2-1B"), Plan(method="full", optimizer="sgd", autocast=None, sequence_tokens=512)
    )
    assert made.moment == "backward of the embedding"
    whole = 2 * 1235814400 * 2 + 2 * 128256 * 2048 * 2
    assert made.allocated_bytes == pytest.approx(whole + 2 * 8519680, rel=1e-4)


def test_saved_modules_and_other_adapters_are_counted_by_hand():
    shape = shape_of("meta-llama__Llama-3.2-1B")  # tied: peft copies head and embedding, each 128256 x 2048
    saved = estimate(shape, Plan(method="lora", modules_to_save=("lm_head", "embed_tokens"), lora_rank=16))
    plain = estimate(shape, Plan(method="lora", lora_rank=16))
    assert saved.trainable_parameters - plain.trainable_parameters == 2 * 128256 * 2048
    # IA3: outputs of k and v (512 each), inputs of down (8192), in 16 layers
    assert estimate(shape, Plan(method="ia3")).trainable_parameters == 16 * (512 + 512 + 8192)
    # prefix tuning: 20 tokens, keys and values of 8 heads of 64, in 16 layers
    assert estimate(shape, Plan(method="prefix_tuning")).trainable_parameters == 16 * 2 * 20 * 8 * 64


def test_towers_rest_while_only_text_runs():
    shape = shape_of("google__gemma-3-4b-it")
    made = estimate(shape, Plan(method="full", optimizer="sgd"))
    gradients = component(made, "gradients").bytes
    assert made.trainable_parameters == shape.parameters
    assert gradients < 2.2 * (shape.parameters - shape.other_tower_parameters + 2 * shape.embedding_parameters)
    assert any("Only text" in note for note in made.notes)


def test_a_step_in_backward_never_holds_all_gradients():
    shape = shape_of("meta-llama__Llama-3.1-8B")
    base = Plan(method="full", optimizer="paged_adamw_8bit", autocast=None)
    waits, steps = (estimate(shape, replace(base, optimizer_in_backward=flag)) for flag in (False, True))
    assert component(waits, "gradients").bytes >= 16e9
    assert component(steps, "gradients").bytes <= 3 * 128256 * 4096 * 2


def test_under_fsdp_mixed_precision_keeps_trained_weights_in_32_bit():
    """accelerate, fsdp2_prepare_model: AdamW's two states of 4 bytes a parameter, over 8 GPUs; without it of 2."""
    shape = shape_of("Qwen__Qwen2.5-7B")
    plan = Plan(method="full", gpus=8, parallel="fsdp_full", autocast="bf16")
    made, plain = estimate(shape, plan), estimate(shape, replace(plan, autocast=None))
    assert component(made, "optimizer").bytes == pytest.approx(7_615_616_512 * 8 / 8, rel=1e-3)
    assert component(plain, "optimizer").bytes == pytest.approx(7_615_616_512 * 4 / 8, rel=1e-3)
    assert any("float32" in note for note in made.notes) and not plain.notes
