"""The plan for several GPUs as the files that accelerate, torchrun and DeepSpeed read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from preflight.console import UsageError
from preflight.plan import Plan

GPUS_PER_MACHINE = 8  # the largest common machine; more GPUs than that are taken for several machines
_STAGE = {"zero1": 1, "zero2": 2, "zero3": 3}


def machines_of(plan: Plan) -> int:
    """How many machines the plan's GPUs fill, 8 to a machine."""
    return max(1, -(-plan.gpus // GPUS_PER_MACHINE))


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """The keys of `accelerate launch --config_file`. Raises UsageError for a plan that has no launcher.

    Source: accelerate commands/config/config_args.py (ClusterConfig) and utils/dataclasses.py (the plugins), 1.15.
    """
    machines = machines_of(plan)
    made: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_machines": machines,
        "num_processes": plan.gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": plan.autocast or "no",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if machines > 1:
        made |= {"main_process_ip": "ADDRESS_OF_THE_FIRST_MACHINE", "main_process_port": 29500}
    if plan.parallel in ("fsdp_full", "fsdp_hybrid"):
        made["distributed_type"] = "FSDP"
        made["fsdp_config"] = {f"fsdp_{key}": value for key, value in fsdp_settings(plan).items()}
        if plan.parallel == "fsdp_hybrid" and machines > 1:
            made["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": machines,
                "parallelism_config_dp_shard_size": plan.gpus // machines,
            }
    elif plan.parallel in _STAGE:
        made["distributed_type"] = "DEEPSPEED"
        # precision is named in the DeepSpeed file; accelerate refuses it in both
        made.pop("mixed_precision")
        made["deepspeed_config"] = {
            "deepspeed_config_file": "deepspeed.json",
            "zero3_init_flag": plan.parallel == "zero3",
        }
    elif plan.parallel not in ("none", "ddp"):
        raise UsageError(
            f"--write-launch: `{plan.parallel}` has no launcher of its own: one process loads the model with "
            "device_map='auto'; allowed: ddp, fsdp_full, fsdp_hybrid, zero1, zero2, zero3"
        )
    return made


def fsdp_settings(plan: Plan) -> dict[str, Any]:
    """FSDP2 as accelerate and TrainingArguments name it. A layer's class is taken from the model itself.

    Full states are gathered at a checkpoint: sharded ones of adapters cannot be loaded by PEFT. Checkpointing of
    activations is the Trainer's `gradient_checkpointing`, which refuses to be asked for twice.
    """
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "offload_params": plan.offload,
        # one process reads the weights and the others receive theirs: the host holds them once
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "FULL_STATE_DICT" if plan.adapters else "SHARDED_STATE_DICT",
    }


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's JSON; "auto" is filled in by the Trainer from its own arguments. Source: transformers, DeepSpeed."""
    stage = _STAGE[plan.parallel]
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": plan.autocast == "bf16"},
        "fp16": {"enabled": plan.autocast == "fp16"},
        "zero_optimization": zero,
    }


def commands(plan: Plan, script: str = "train.py") -> list[str]:
    """The ways to start `script`, the recommended one first."""
    machines = machines_of(plan)
    found = [f"accelerate launch --config_file accelerate.yaml {script}"]
    if machines > 1:
        found[0] = f"accelerate launch --config_file accelerate.yaml --machine_rank NUMBER {script}"
    if plan.parallel in ("none", "ddp"):
        places = f" --nnodes {machines} --node_rank NUMBER --master_addr ADDRESS" if machines > 1 else ""
        found.append(f"torchrun --nproc_per_node {min(plan.gpus, GPUS_PER_MACHINE)}{places} {script}")
    return found


def launch_files(plan: Plan) -> dict[str, str]:
    """File name -> text. The engines' own names are used, so that each file can be handed over as it is."""
    if plan.gpus < 2:
        raise UsageError(
            "--write-launch: the plan is for one GPU, which needs no launcher; add `--gpus N --parallel ddp`"
        )
    import yaml

    settings = accelerate_config(plan)
    lines = [f"# {command}" for command in commands(plan)]
    if machines_of(plan) > 1:
        lines.append("# Start it once on every machine; NUMBER is 0 on the first.")
    files = {"accelerate.yaml": "\n".join(lines) + "\n" + yaml.safe_dump(settings, sort_keys=False)}
    if plan.parallel in _STAGE:
        files["deepspeed.json"] = json.dumps(deepspeed_config(plan), indent=2) + "\n"
    if plan.parallel in ("fsdp_full", "fsdp_hybrid"):
        files["fsdp_config.json"] = json.dumps(fsdp_settings(plan), indent=2) + "\n"
    return files


def write_launch(folder: str | os.PathLike[str], plan: Plan) -> list[Path]:
    """Writes the files into a new or empty folder, all or none. Raises UsageError when that cannot be."""
    target = Path(folder)
    files = launch_files(plan)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"--write-launch {folder}: exists and is not empty; name a new folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise UsageError(f"--write-launch {folder}: cannot be written ({error.strerror or error})") from error
    try:
        temporary.chmod(0o755)
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8", newline="\n")
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"--write-launch {folder}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [target / name for name in files]
