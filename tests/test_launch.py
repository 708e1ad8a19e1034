"""The files for several GPUs, read by the engines themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import model_analyzer
from preflight.console import UsageError, run_main
from preflight.launch import commands, deepspeed_config, launch_files, machines_of, write_launch
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
PLANS = {
    "ddp": Plan(method="lora", gpus=2, parallel="ddp"),
    "fsdp": Plan(method="lora", gpus=4, parallel="fsdp_full"),
    "fsdp-offload": Plan(method="full", gpus=4, parallel="fsdp_full", offload=True),
    "hybrid": Plan(method="full", gpus=16, parallel="fsdp_hybrid"),
    "zero1": Plan(method="full", gpus=2, parallel="zero1", autocast="fp16"),
    "zero3": Plan(method="full", gpus=8, parallel="zero3", offload=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_accelerate_reads_its_file(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    write_launch(tmp_path / "launch", plan)
    code = (
        "import sys, json; from accelerate.commands.config.config_args import load_config_from_file as load\n"
        "made = load(sys.argv[1]); print(json.dumps([made.distributed_type.value, made.num_processes, "
        "made.num_machines, made.fsdp_config or {}, made.deepspeed_config or {}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "launch/accelerate.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kind, processes, machines, fsdp, deepspeed = json.loads(done.stdout.splitlines()[-1])
    kinds = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "fsdp-offload": "FSDP", "hybrid": "FSDP"}
    assert (kind, processes) == (kinds.get(name, "DEEPSPEED"), plan.gpus)
    assert machines == (2 if name == "hybrid" else 1)
    if kind == "FSDP":
        assert fsdp["fsdp_version"] == 2 and fsdp["fsdp_offload_params"] is plan.offload
    if kind == "DEEPSPEED":
        assert deepspeed["deepspeed_config_file"] == "deepspeed.json"
        assert (tmp_path / "launch" / "deepspeed.json").is_file()


def test_two_processes_really_train_with_the_torchrun_command(tmp_path: Path) -> None:
    """Both on the CPU with gloo; each says its rank and the gradient that both agreed on."""
    (tmp_path / "train.py").write_text(
        "import torch\nfrom accelerate import Accelerator\n"
        "a = Accelerator(); model = torch.nn.Linear(1, 1, bias=False); model.weight.data.fill_(1.0)\n"
        "model = a.prepare(model)\n"
        "a.backward(model(torch.tensor([[float(a.process_index + 1)]])).sum())\n"
        "weight = next(model.parameters())\n"
        "print('RANK', a.process_index, a.num_processes, weight.grad.item(), flush=True)\n"
    )
    words = commands(PLANS["ddp"])[1].split()
    assert words[0] == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:]],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    # inputs 1 and 2: each has its own gradient, DDP leaves the mean, 1.5, in both
    assert said == ["RANK 0 2 1.5", "RANK 1 2 1.5"], done.stderr[-2000:]


def test_the_trainer_takes_the_fsdp_settings(tmp_path: Path) -> None:
    write_launch(tmp_path / "launch", PLANS["fsdp"])
    code = (
        "from transformers import TrainingArguments\n"
        "settings = 'launch/fsdp_config.json'\n"
        "made = TrainingArguments('out', fsdp='full_shard auto_wrap', fsdp_config=settings, use_cpu=True)\n"
        "print(made.fsdp_config['version'], made.fsdp_config['cpu_ram_efficient_loading'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == ["2", "True"]


def test_deepspeed_offloads_what_its_stage_divides() -> None:
    three, two = (deepspeed_config(Plan(gpus=8, parallel=name, offload=True)) for name in ("zero3", "zero2"))
    assert three["zero_optimization"]["stage"] == 3 and "offload_param" in three["zero_optimization"]
    assert two["zero_optimization"]["stage"] == 2 and "offload_param" not in two["zero_optimization"]
    assert deepspeed_config(PLANS["zero1"])["fp16"] == {"enabled": True}


def test_commands_name_every_machine() -> None:
    assert commands(PLANS["ddp"]) == [
        "accelerate launch --config_file accelerate.yaml train.py",
        "torchrun --nproc_per_node 2 train.py",
    ]
    assert machines_of(PLANS["hybrid"]) == 2 and "--machine_rank NUMBER" in commands(PLANS["hybrid"])[0]
    assert "main_process_ip" in launch_files(PLANS["hybrid"])["accelerate.yaml"]


@pytest.mark.parametrize(("plan", "says"), [(Plan(), "one GPU"), (Plan(gpus=2, parallel="pipeline"), "pipeline")])
def test_what_has_no_launcher_is_said(plan: Plan, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        write_launch(tmp_path / "x", plan)
    assert not (tmp_path / "x").exists()


def test_the_model_stage_writes_the_files_and_never_over_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(ROOT / "tests" / "configs" / "Qwen__Qwen2.5-0.5B"), "--no-report", "--method", "lora"]
    arguments += ["--gpus", "2", "--parallel", "ddp", "--gpu-vram-gb", "24", "--write-launch", str(tmp_path / "launch")]
    assert run_main(model_analyzer.main, arguments) == 0
    assert "accelerate.yaml" in capsys.readouterr().err
    before = (tmp_path / "launch" / "accelerate.yaml").read_bytes()
    assert run_main(model_analyzer.main, arguments) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (tmp_path / "launch" / "accelerate.yaml").read_bytes() == before
