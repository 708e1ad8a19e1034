#!/usr/bin/env python3
"""How do other offline estimators do on the same published measurements, and how long does one answer take?

Each peer runs in a virtual environment of its own, made once in the user's cache. Rows: Hugging Face stack, one GPU,
certain length, a method and an optimizer that the peer knows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import figures
from benchmarks.measured_rows import Row, read_rows
from preflight.console import run_main
from preflight.findings import say

ROOT = Path(__file__).resolve().parent.parent
CANIFINETUNE = "canifinetune==0.4.1"
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")


def environment(requirement: str) -> Path:
    """The folder with the programs of a virtual environment that holds this package."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "finetune-preflight", "peers")
    folder = cache / requirement.replace("==", "-")
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    if not (folder / "complete").exists():
        say(f"installing {requirement}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(programs / "python"), "-m", "pip", "install", "-q", requirement], check=True)
        (folder / "complete").touch()
    return programs


def canifinetune(programs: Path, row: Row, configs: Path) -> dict[str, int] | None:
    """Its estimate of allocated (components without CUDA overhead and margin) and reserved (its total), in bytes."""
    plan = row.plan
    if plan is None or plan.method not in ("full", "lora", "qlora") or plan.optimizer not in _OPTIMIZERS:
        return None
    config = configs / str(row.raw["config"]).removeprefix("configs/")
    checkpointing = "--gradient-checkpointing" if plan.gradient_checkpointing else "--no-gradient-checkpointing"
    command = [
        str(programs / "canifinetune"), "estimate", "--offline", "--json", "--model", str(row.raw["model_id"]),
        "--override-json", str(config), "--gpu-vram-gb", str(row.raw.get("gpu_total_gib") or 80),
        "--method", plan.method, "--seq-len", str(plan.sequence_tokens), "--micro-batch-size", str(plan.micro_batch),
        "--lora-rank", str(plan.lora_rank), "--optimizer", plan.optimizer, checkpointing,
        "--target-scope", "all_linear" if not plan.target_modules else "attention",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        memory = json.loads(done.stdout)["memory"]
    except (ValueError, KeyError):
        return None
    total = memory["total_estimated_gb"]
    return {
        "allocated": int((total - memory["cuda_overhead_gb"] - memory["safety_margin_gb"]) * 2**30),
        "reserved": int(total * 2**30),
    }


def ours(row: Row, configs: Path) -> dict[str, int]:
    """Our closed form for the same row."""
    from preflight.memory.closed_form import estimate
    from preflight.model_shape import read_shape

    assert row.plan is not None
    config = json.loads((configs / str(row.raw["config"]).removeprefix("configs/")).read_text(encoding="utf-8"))
    made = estimate(read_shape(config), row.plan)
    return {"allocated": made.allocated_bytes, "reserved": made.reserved_bytes}


def seconds_of(command: Sequence[str], times: int = 5) -> float:
    """The fastest of some runs of a command, in seconds."""
    found = []
    for _ in range(times):
        began = time.monotonic()
        subprocess.run(list(command), capture_output=True, check=False, cwd=ROOT)
        found.append(time.monotonic() - began)
    return min(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "measured.jsonl", metavar="FILE.jsonl")
    parser.add_argument("--configs", type=Path, default=ROOT / "tests" / "configs", metavar="DIR")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only every so many rows, N in all")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    programs = environment(CANIFINETUNE)
    rows = [
        row
        for row in read_rows(args.rows)
        if not row.left_out and row.hugging_face and row.certain and row.kind == "peak"
        and row.plan is not None and row.plan.gpus == 1 and (args.configs / str(row.raw["config"])[8:]).exists()
    ]  # fmt: skip
    if args.limit:
        rows = rows[:: max(1, len(rows) // args.limit)][: args.limit]
    errors: dict[str, dict[str, list[float]]] = {
        name: {"allocated": [], "reserved": []} for name in ("canifinetune", "this program, closed form")
    }
    for row in rows:
        peer = canifinetune(programs, row, args.configs)
        if peer is None:
            continue
        for name, made in (("canifinetune", peer), ("this program, closed form", ours(row, args.configs))):
            for metric, measured in row.readings.items():
                if metric in made and measured:
                    errors[name][metric].append(100.0 * (made[metric] - measured) / measured)
    config = args.configs / "meta-llama__Llama-3.1-8B" / "config.json"
    peer_command = [str(programs / "canifinetune"), "estimate", "--offline", "--json", "--model", "m/m"]
    peer_command += ["--override-json", str(config), "--gpu-vram-gb", "24"]
    code = (
        "import json,sys;from preflight.model_shape import read_shape;from preflight.plan import Plan;"
        "from preflight.memory.closed_form import estimate;"
        f"print(estimate(read_shape(json.load(open({str(config)!r}))),Plan()).allocated_bytes)"
    )
    document: dict[str, Any] = {
        "accuracy": {n: {metric: figures(values) for metric, values in e.items()} for n, e in errors.items()},
        "seconds": {
            "canifinetune estimate": round(seconds_of(peer_command), 3),
            "this program, closed form": round(seconds_of([sys.executable, "-c", code]), 3),
        },
    }
    if args.json:
        print(json.dumps(document, indent=1))
        return 0
    for name, metrics in document["accuracy"].items():
        for metric, f in metrics.items():
            print(f"{name:28s} {metric:10s} n={f['n']:3d} median {f['median_abs_pct']} p95 {f['p95_abs_pct']} %")
    for name, seconds in document["seconds"].items():
        print(f"{name:28s} {seconds:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
