"""yes, marginal or no, and what would fit."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import model_analyzer
from preflight.console import UsageError, run_main
from preflight.findings import Level
from preflight.machine import Machine
from preflight.memory.budget import Budget, judge, named_card, verdict
from preflight.memory.closed_form import estimate
from preflight.memory.evidence import append, check_file, compared, comparison, row, wanted
from preflight.memory.report import memory
from preflight.memory.schedule import read_lengths, schedule
from preflight.memory.speed import card_named, seconds, work
from preflight.memory.would_fit import would_fit
from preflight.model_shape import read_shape
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
LLAMA = read_shape(json.loads((ROOT / "tests/configs/meta-llama__Llama-3.1-8B/config.json").read_text()))
GIB = 2**30


def fixed(low: float, high: float):
    made = estimate(LLAMA, Plan())
    return replace(made, low_bytes=int(low * GIB), high_bytes=int(high * GIB), context_bytes=GIB // 2)


@pytest.mark.parametrize(
    ("free", "expected"), [(20.0, "yes"), (12.5, "yes"), (12.4, "marginal"), (8.5, "marginal"), (8.4, "no")]
)
def test_the_interval_decides(free, expected):
    assert verdict(fixed(8.0, 12.0), Budget(int(free * GIB))) == expected


def test_unknown_free_memory_gives_no_verdict():
    finding = judge(fixed(8, 12), Budget(None))
    assert (finding.code, finding.level) == ("memory-fit-unknown", Level.UNKNOWN)
    assert finding.why
    assert finding.fix


def test_a_card_shows_less_than_it_is_sold_with():
    assert named_card(16.0).free_bytes < 16 * GIB


def test_full_fine_tuning_of_eight_billion_does_not_fit_in_24_and_the_way_out_is_named():
    observed, findings = memory(LLAMA, Plan(method="full"), named_card(24.0))
    assert observed["verdict"] == "no"
    assert findings[0].code == "memory-fit-no"
    best = observed["would_fit"]["combination"]
    assert best["allocated_bytes"] < 24 * GIB
    assert best["flags"] in findings[0].fix[0]


def test_the_strongest_method_that_fits_is_chosen():
    assert memory(LLAMA, Plan(), named_card(192.0), choose_method=True)[0]["plan"]["method"] == "full"
    assert memory(LLAMA, Plan(), named_card(16.0), choose_method=True)[0]["plan"]["method"] == "qlora"


def test_what_is_said_to_fit_fits_and_a_little_more_does_not():
    budget = named_card(24.0)
    plan = Plan(method="qlora")
    found = would_fit(LLAMA, plan, budget)
    longest = found["longest_sequence_tokens"]
    assert verdict(estimate(LLAMA, replace(plan, sequence_tokens=longest)), budget) == "yes"
    assert verdict(estimate(LLAMA, replace(plan, sequence_tokens=int(longest * 1.2))), budget) != "yes"
    most = found["largest_micro_batch"]
    assert verdict(estimate(LLAMA, replace(plan, micro_batch=most)), budget) == "yes"
    assert verdict(estimate(LLAMA, replace(plan, micro_batch=most + 1)), budget) != "yes"


def test_several_gpus_divide_what_one_cannot_hold():
    plan = Plan(method="full", optimizer="adamw_torch", sequence_tokens=512, autocast=None)
    one = estimate(LLAMA, plan).allocated_bytes
    four = estimate(LLAMA, replace(plan, gpus=4, parallel="fsdp_full")).allocated_bytes
    assert four < one / 3
    ddp = estimate(LLAMA, replace(plan, gpus=4, parallel="ddp")).allocated_bytes
    assert ddp > one


# --- what would fit ------------------------------------------------------------------------------------------------


def asked_again(capsys, *arguments: str) -> dict:
    """What the model stage says of these flags."""
    run_main(model_analyzer.main, [*arguments, "--json", "--no-report"])
    return json.loads(capsys.readouterr().out)["observed"]["memory"]


@pytest.mark.parametrize(
    ("model", "gib", "flags"),
    [
        ("Qwen__Qwen2.5-7B", 16, ("--method", "qlora")),
        ("Qwen__Qwen2.5-7B", 24, ("--method", "full")),
        ("Qwen__Qwen2.5-7B", 16, ("--method", "lora", "--micro-batch", "4", "--seq-len", "4096")),
        ("meta-llama__Llama-3.2-1B", 12, ("--method", "full", "--micro-batch", "8")),
        (
            "meta-llama__Llama-3.1-70B",
            80,
            (
                "--method",
                "lora",
            ),
        ),
        ("Qwen__Qwen2.5-7B", 16, ("--method", "qlora", "--micro-batch", "6", "--global-batch", "18")),
        ("Qwen__Qwen3-30B-A3B", 80, ("--method", "full", "--no-gradient-checkpointing")),
        ("bigscience__T0_3B", 12, ("--method", "full", "--attention", "eager")),
        ("openai-community__gpt2", 4, ("--method", "full", "--optimizer", "adamw_torch")),
    ],
)
def test_every_recommended_plan_fits_when_it_is_asked_again_with_the_printed_flags(capsys, model, gib, flags):
    given = (str(ROOT / "tests/configs" / model), "--gpu-vram-gb", str(gib), *flags)
    found = asked_again(capsys, *given, "--recommend")["would_fit"]
    assert found["best"]
    for best in found["best"]:
        again = asked_again(capsys, *given, *best["flags"].split())
        assert again["verdict"] == "yes", best
        assert again["estimate"]["allocated_bytes"] == best["allocated_bytes"]
        asked = asked_again(capsys, *given)["plan"]
        batch = asked["micro_batch"] * asked["gradient_accumulation"]
        assert best["plan"]["micro_batch"] * best["plan"]["gradient_accumulation"] == batch
    weights = [len(best["gives_up"]) for best in found["best"]]
    assert weights == sorted(weights)  # what keeps the quality comes first
    for one in found["single"]:
        assert asked_again(capsys, *given, *one["flags"].split())["estimate"]["allocated_bytes"] == pytest.approx(
            one["allocated_bytes"], rel=1e-9
        )
    several = found["gpus"]
    if several and several["count"] > 1:
        assert asked_again(capsys, *given, *several["flags"].split())["verdict"] == "yes"


def test_seven_billion_by_qlora_find_their_way_on_16_gib():
    shape = read_shape(json.loads((ROOT / "tests/configs/Qwen__Qwen2.5-7B/config.json").read_text()))
    found = would_fit(shape, Plan(method="qlora"), named_card(16.0), card_named("NVIDIA GeForce RTX 4080"))
    best = found["best"][0]
    assert best["gives_up"] == [] and best["plan"]["method"] == "qlora" and best["plan"]["sequence_tokens"] == 2048
    low, high = best["seconds_per_update"]
    assert 0 < low < high
    assert found["gpus_needed"] == 2
    assert found["cards"] and all(card_named(name).memory_gib > 16 for name in found["cards"])


def test_sequences_are_cut_only_where_nothing_else_helps_and_never_below_what_the_data_need():
    small = would_fit(LLAMA, Plan(method="qlora", sequence_tokens=8192), named_card(12.0))
    assert all("cut" not in word for best in small["best"] for word in best["gives_up"]) or all(
        any("cut" in word for word in best["gives_up"]) for best in small["best"]
    )
    known = would_fit(LLAMA, Plan(method="qlora", sequence_tokens=8192), named_card(12.0), None, 700)
    assert known["best"][0]["plan"]["sequence_tokens"] in (704, 8192)
    assert all("cut" not in word for best in known["best"] for word in best["gives_up"])


def test_the_search_takes_less_than_a_second_also_for_a_large_mixture_of_experts():
    shape = read_shape(json.loads((ROOT / "tests/configs/deepseek-ai__DeepSeek-V3/config.json").read_text()))
    began = time.monotonic()
    would_fit(shape, Plan(method="full", micro_batch=8), named_card(80.0))
    assert time.monotonic() - began < 5.0  # about 0.3 s when the machine is idle


def test_the_work_of_a_step_is_counted_by_hand():
    """Llama-3.1-8B: 32 x 218,103,808 weights in matrices and a head of 525,336,576; attention: 32 layers x 32 heads x
    128, half of the square. Full, no checkpointing: 6 operations per token and weight, 3 passes over attention."""
    made = work(LLAMA, Plan(method="full", sequence_tokens=2048, gradient_checkpointing=False, autocast=None))
    matrices = 6 * 2048 * (32 * 218_103_808 + 525_336_576)
    attention = 3 * 2 * 2048 * 2048 * 32 * 128 * 32
    assert made.flops == pytest.approx(matrices + attention, rel=1e-6)
    with_it = work(LLAMA, Plan(method="full", sequence_tokens=2048, autocast=None))
    again = 2 * 2048 * 32 * 218_103_808 + 2 * 2048 * 2048 * 32 * 128 * 32
    assert with_it.flops - made.flops == pytest.approx(again, rel=1e-6)


def test_how_long_it_takes_is_told_only_where_it_can_be():
    plan = Plan(method="lora")
    made = work(LLAMA, plan)
    assert seconds(made, plan, None) is None
    assert seconds(made, plan, card_named("Tesla T4")) is None  # bfloat16 on a card without it
    assert card_named("some unknown card") is None
    slow, fast = seconds(made, plan, card_named("NVIDIA L4")), seconds(made, plan, card_named("NVIDIA H100 80GB HBM3"))
    assert slow[0] > fast[0] and slow[1] > fast[1] and fast[0] < fast[1]
    # 8.03e9 weights x 2048 tokens x about 6 operations = 99 TFLOP; an H100 at 20 to 60 % of 989 TFLOP/s: 0.17 to 0.5 s
    assert fast[0] == pytest.approx(0.17, rel=0.15) and 0.45 < fast[1] < 0.65


def test_updates_and_hours_follow_from_the_data(tmp_path):
    lines = [{"messages": [{"role": "user", "content": "u" * 384}, {"role": "assistant", "content": "a" * 384}]}] * 100
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_lengths(Machine(), None, "none", str(data))
    assert (found.samples, found.longest, found.counted_by) == (100, 200, "bytes")  # (384 + 16) x 2 bytes / 4
    plan = Plan(method="lora", micro_batch=2, gradient_accumulation=4, sequence_tokens=400)
    made = schedule(LLAMA, plan, found, 2.0, card_named("NVIDIA A100-SXM4-80GB"))
    assert (made["updates"], made["tokens_per_epoch"], made["cut_samples"]) == (26, 20_000, 0)  # 13 an epoch
    once = seconds(work(LLAMA, plan), plan, card_named("A100"))
    assert made["hours"][0] == pytest.approx(once[0] * 26 * 0.5 / 3600, abs=0.001)
    packed = schedule(LLAMA, replace(plan, packing=True), found, 1.0, None)
    assert (packed["updates"], packed["hours"]) == (7, None)  # 50 sequences of 400 in batches of 8


# --- what stands around a card -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("A02-gb10-unified-memory", "CPU and GPU share this memory"),
        ("A04-mig-table-slices", "The card is split (MIG): only the slice counts."),
        ("A07-wsl2-two-versions", "Under WSL2 the Windows desktop holds a part of the card"),
        ("A08-windows-wddm", "the driver may move memory to the host instead of failing"),
        ("A08-windows-wddm", "1.70 GiB is held by other processes and was taken off."),  # 1745 MiB in its table
    ],
)
def test_what_stands_around_a_recorded_card_is_said_with_the_budget(capsys, machine, words):
    folder = ROOT / "tests" / "wild" / "A-gpu" / machine
    model = str(ROOT / "tests/configs/meta-llama__Llama-3.2-1B")
    run_main(model_analyzer.main, [model, "--method", "lora", "--replay", str(folder), "--json", "--no-report"])
    section = json.loads(capsys.readouterr().out)
    [fit] = [finding for finding in section["findings"] if finding["code"].startswith("memory-fit-")]
    assert words in fit["why"]
    assert "of CUDA context" in fit["what"]


# --- evidence ------------------------------------------------------------------------------------------------------


def test_auto_rehearses_only_where_the_packages_are_and_are_those_that_are_judged():
    there = {"torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.2"}
    assert wanted("auto", there, (), needs_code=False)
    assert not wanted("auto", {**there, "peft": ""}, (), needs_code=False)
    assert not wanted("auto", None, (), needs_code=False)
    assert not wanted("auto", there, ("transformers",), needs_code=False)
    assert not wanted("auto", there, (), needs_code=True)
    assert wanted("rehearsed", None, (), needs_code=True)
    assert not wanted("closed", there, (), needs_code=False)


def test_a_recorded_machine_that_was_never_asked_keeps_its_closed_form(capsys):
    folder = ROOT / "tests" / "wild" / "A-gpu" / "A08-windows-wddm"
    model = str(ROOT / "tests/configs/meta-llama__Llama-3.2-1B")
    run_main(model_analyzer.main, [model, "--evidence", "auto", "--replay", str(folder), "--json", "--no-report"])
    section = json.loads(capsys.readouterr().out)
    assert not [finding for finding in section["findings"] if finding["code"] == "rehearsal-failed"]
    assert any(finding["code"].startswith("memory-fit-") for finding in section["findings"])


def test_three_kinds_of_evidence_are_put_side_by_side_and_kept_as_a_row(tmp_path):
    def kind(name, allocated, reserved):
        part = {"bytes": allocated}
        return {
            "estimate": {
                "evidence": name,
                "allocated_bytes": allocated,
                "reserved_bytes": reserved,
                "context_bytes": 1,
                "moments_bytes": {"step": allocated},
                "components": {"activations": part},
                "versions": {"torch": "2"},
            }
        }

    observed = {**kind("closed form", 110, 220), "rehearsal": kind("rehearsed", 99, 201), "plan": {"method": "lora"}}
    observed["measured"] = kind("measured on the GPU", 100, 200)
    found = comparison(observed)
    assert found["kinds"] == ["closed form", "rehearsed", "measured on the GPU"]
    assert found["off_pct"]["closed form"] == {"allocated_bytes": 10.0, "reserved_bytes": 10.0}
    assert found["off_pct"]["rehearsed"]["allocated_bytes"] == -1.0
    assert found["components"]["activations"] == {"closed form": 110, "rehearsed": 99, "measured on the GPU": 100}
    assert compared({"comparison": found}).level is Level.OK
    kept = row("mine", observed, "NVIDIA L4")
    assert (kept["device"], kept["allocated_bytes"], kept["rehearsed_bytes"], kept["closed_form_bytes"]) == (
        "NVIDIA L4", 100, 99, 110,
    )  # fmt: skip
    file = tmp_path / "rows.jsonl"
    append(str(file), kept)
    append(str(file), kept)
    assert [json.loads(line)["config"] for line in file.read_text().splitlines()] == ["mine", "mine"]
    without = comparison({**observed, "measured": {"estimate": None}})
    assert compared({"comparison": without}).level is Level.UNKNOWN


@pytest.mark.parametrize("target", ["", "missing/rows.jsonl"])
def test_a_file_that_cannot_be_appended_to_is_refused_before_anything_is_run(tmp_path, target):
    with pytest.raises(UsageError, match="cannot be written"):
        check_file(str(tmp_path / target))


@pytest.mark.slow
def test_the_same_step_rehearsed_and_measured_on_this_cpu_agree_and_are_kept(tmp_path, capsys):
    for needed in ("torch", "transformers", "peft"):
        pytest.importorskip(needed)
    file = tmp_path / "rows.jsonl"
    model = str(ROOT / "examples" / "smollm2-135m-instruct")
    flags = ["--here", "--method", "lora", "--seq-len", "64", "--compare-to", str(file), "--python", sys.executable]
    run_main(model_analyzer.main, [model, *flags, "--json", "--no-report"])
    memory_seen = json.loads(capsys.readouterr().out)["observed"]["memory"]
    kept = json.loads(file.read_text())
    assert kept["device"] == "CPU" and kept["out_of_memory"] is False
    assert kept["rehearsed_bytes"] == pytest.approx(kept["allocated_bytes"], rel=0.02)
    assert kept["closed_form_bytes"] == pytest.approx(kept["allocated_bytes"], rel=0.15)  # it counts CUDA's kernels
    assert memory_seen["comparison"]["kinds"] == ["closed form", "rehearsed", "measured on the CPU"]


def test_a_plan_for_several_gpus_is_not_judged_by_the_rehearsal_of_one(capsys):
    model = str(ROOT / "tests/configs/meta-llama__Llama-3.2-1B")
    flags = [model, "--gpus", "4", "--parallel", "zero3", "--method", "full", "--gpu-vram-gb", "80"]
    for evidence, told in (("rehearsed", True), ("auto", False)):
        run_main(model_analyzer.main, [*flags, "--evidence", evidence, "--json", "--no-report"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert any(finding["code"] == "rehearsal-failed" for finding in findings) is told
        assert any("(closed form;" in f["what"] for f in findings if f["code"].startswith("memory-fit-"))
