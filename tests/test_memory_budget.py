"""yes, marginal or no, and what would fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from preflight.findings import Level
from preflight.memory.budget import Budget, judge, named_card, verdict
from preflight.memory.closed_form import estimate
from preflight.memory.report import memory
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
    plan = Plan(method="full", optimizer="adamw_torch", sequence_tokens=512)
    one = estimate(LLAMA, plan).allocated_bytes
    four = estimate(LLAMA, replace(plan, gpus=4, parallel="fsdp_full")).allocated_bytes
    assert four < one / 3
    ddp = estimate(LLAMA, replace(plan, gpus=4, parallel="ddp")).allocated_bytes
    assert ddp > one
