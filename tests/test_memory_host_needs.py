"""RAM and disk of the host: expected values are worked out by hand from the parameters of Qwen2.5-7B."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from preflight.findings import Level
from preflight.host import Disk, Host
from preflight.memory.host_needs import host_needs, judge_host
from preflight.model_shape import read_shape
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
CONFIG = json.loads((ROOT / "tests" / "configs" / "Qwen__Qwen2.5-7B" / "config.json").read_text(encoding="utf-8"))
SHAPE = read_shape(CONFIG)
WEIGHTS = 7_615_616_512
LORA = 40_370_176  # rank 16 on all linear layers, as peft counts
GIB = 1 << 30
FULL = Plan(method="full")


def sums(plan: Plan, **more: bool) -> tuple[int, int]:
    needs = host_needs(SHAPE, plan, **more)
    assert needs is not None
    return sum(one.bytes for one in needs["ram"]), sum(one.bytes for one in needs["disk"])


@pytest.mark.parametrize(
    ("plan", "ram"),
    [
        (FULL, WEIGHTS * 2),
        (replace(FULL, gpus=4, parallel="ddp"), WEIGHTS * 2 * 4),
        (replace(FULL, gpus=4, parallel="fsdp_full"), WEIGHTS * 2),
        # the largest matrix is an embedding of 152,064 x 3,584
        (Plan(method="qlora"), 152_064 * 3_584 * 2),
        # DeepSpeed: 18 bytes a parameter, half as much again for buffers, divided over 2 machines
        (replace(FULL, gpus=16, parallel="zero3", offload=True), WEIGHTS * 18 // 2 * 3 // 2),
        # weights read by each of 2, and 16 bytes a parameter with buffers
        (replace(FULL, gpus=2, parallel="zero2", offload=True), WEIGHTS * 2 * 2 + WEIGHTS * 16 * 3 // 2),
    ],
)
def test_ram_of_the_host(plan: Plan, ram: int) -> None:
    assert sums(plan)[0] == ram


def test_on_the_cpu_the_weights_are_training_itself() -> None:
    assert sums(FULL, on_cpu=True)[0] == 0


def test_disk_of_checkpoints_and_of_the_result() -> None:
    # two kept and one being written; AdamW keeps two states of the parameter's own type
    blocks = 4096  # small tensors fill whole blocks of 512 bytes
    assert sums(FULL)[1] == pytest.approx(WEIGHTS * (2 + 2 * 2) * 3, rel=1e-4)
    adapters = sums(Plan(method="lora", adapter_dtype="fp32"))[1]
    assert adapters == pytest.approx(LORA * (4 + 2 * 4) * 3 + WEIGHTS * 2, abs=196 * 2 * 3 * blocks)


def test_a_host_that_is_too_small_is_told_with_what_helps() -> None:
    needs = host_needs(SHAPE, FULL)
    assert needs is not None
    host = Host(ram_available_bytes=8 * GIB, disks=(Disk("checkpoints", "/x", 20 * GIB, 99 * GIB),))
    ram, disk = judge_host(needs, host)
    assert (ram.code, ram.level, disk.code, disk.level) == (
        "host-ram-short", Level.WARN, "checkpoint-disk-short", Level.WARN,
    )  # fmt: skip
    assert "14.19 GiB" in ram.what and "8.00 GiB" in ram.what
    assert "20.00 GiB is free" in disk.what


def test_enough_or_another_machine_is_a_note() -> None:
    needs = host_needs(SHAPE, FULL)
    assert needs is not None
    roomy = Host(ram_available_bytes=64 * GIB, disks=(Disk("checkpoints", "/x", 999 * GIB, 999 * GIB),))
    for host in (roomy, None, Host()):
        (only,) = judge_host(needs, host)
        assert (only.code, only.level) == ("host-needs", Level.OK)
        assert "14.19 GiB" in only.what


def test_every_product_gives_its_bytes() -> None:
    for plan in (FULL, Plan(), replace(FULL, gpus=16, parallel="zero3", offload=True), Plan(offload=True, gpus=2)):
        needs = host_needs(SHAPE, plan)
        assert needs is not None
        for one in (*needs["ram"], *needs["disk"]):
            words = one.formula.replace(" B of weights", "").replace(" B of states", "").replace(" B", "")
            assert int(eval(words.replace("x", "*"))) == pytest.approx(one.bytes, abs=1), one
