#!/usr/bin/env python3
"""Measure at least twelve fine-tuning configurations on this GPU, with random weights, and keep them as rows.

Run it on a machine with a CUDA GPU, torch, transformers, peft (and bitsandbytes for 4-bit):

    python tests/gpu/measure_memory.py

Appends to benchmarks/measured_own.jsonl and prints measured beside rehearsed and closed form. Under six minutes on one
data-centre GPU; a run that does not fit is recorded as such and the next one goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from preflight.console import run_main
from preflight.findings import say
from preflight.machine import Machine, choose_python
from preflight.memory.closed_form import estimate
from preflight.memory.rehearsal import Job, measure_on_gpu, rehearse
from preflight.model_shape import read_shape
from preflight.plan import Plan

ROOT = Path(__file__).resolve().parent.parent.parent
BASE = Plan(sequence_tokens=1024, optimizer="adamw_torch", lora_rank=16)
LIMIT_S = 340.0
RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Qwen__Qwen2.5-0.5B", {"method": "full", "autocast": None}),
    ("Qwen__Qwen2.5-0.5B", {"method": "lora"}),
    ("Qwen__Qwen2.5-0.5B", {"method": "lora", "gradient_checkpointing": False}),
    ("Qwen__Qwen2.5-0.5B", {"method": "qlora"}),
    ("Qwen__Qwen2.5-1.5B", {"method": "lora", "micro_batch": 2}),
    ("Qwen__Qwen2.5-1.5B", {"method": "qlora", "autocast": None}),
    ("Qwen__Qwen2.5-1.5B", {"method": "qlora", "sequence_tokens": 4096}),
    ("meta-llama__Llama-3.2-1B", {"method": "full", "autocast": None}),
    ("meta-llama__Llama-3.2-1B", {"method": "lora", "attention": "eager"}),
    ("meta-llama__Llama-3.2-1B", {"method": "qlora", "gradient_checkpointing": False}),
    ("ibm-granite__granite-3.0-3b-a800m-instruct", {"method": "lora", "target_modules": ("q_proj", "v_proj")}),
    ("ibm-granite__granite-3.0-3b-a800m-instruct", {"method": "full", "autocast": None, "sequence_tokens": 512}),
    ("Qwen__Qwen2.5-7B", {"method": "lora"}),
    ("Qwen__Qwen2.5-7B", {"method": "qlora"}),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter with torch, transformers and peft")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "measured_own.jsonl")
    parser.add_argument("--rehearse", action="store_true", help="also rehearse each run here (a minute more)")
    args = parser.parse_args(argv)
    machine = Machine()
    python = choose_python(machine, args.python, ("torch", "transformers", "peft")).path
    began = time.monotonic()
    measured = 0
    for name, settings in RUNS:
        if time.monotonic() - began > LIMIT_S:
            say("the time is up; the remaining runs were left out")
            break
        config = json.loads((ROOT / "tests" / "configs" / name / "config.json").read_text(encoding="utf-8"))
        plan = replace(BASE, **settings)
        job = Job(config, plan)
        made = measure_on_gpu(machine, python, job, timeout_s=90.0)
        if made.estimate is None:
            say(f"{name} {plan.method}: not measured ({made.trouble})")
            if made.step == "no gpu":
                return 3
            continue
        row: dict[str, Any] = {
            "config": name,
            "plan": plan.as_json(),
            "out_of_memory": made.estimate.detail["out_of_memory"],
            "allocated_bytes": made.estimate.allocated_bytes,
            "reserved_bytes": made.estimate.reserved_bytes,
            "context_bytes": made.estimate.context_bytes,
            "stages_bytes": made.estimate.moments,
            "versions": made.estimate.detail["versions"],
            "closed_form_bytes": estimate(read_shape(config), plan).allocated_bytes,
        }
        if args.rehearse:
            told = rehearse(machine, python, [job])[0].estimate
            row["rehearsed_bytes"] = None if told is None else told.allocated_bytes
            row["rehearsed_reserved_bytes"] = None if told is None else told.reserved_bytes
        with args.rows.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        measured += 1
        off = 100.0 * (row["closed_form_bytes"] - row["allocated_bytes"]) / max(1, row["allocated_bytes"])
        print(
            f"{name:44s} {plan.method:6s} measured {row['allocated_bytes'] / 2**30:7.3f} GiB, reserved "
            f"{row['reserved_bytes'] / 2**30:7.3f}, closed form {off:+.2f} %"
        )
    print(f"{measured} runs kept in {args.rows}")
    return 0 if measured >= 12 else 3


if __name__ == "__main__":
    sys.exit(run_main(main))
