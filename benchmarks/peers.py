#!/usr/bin/env python3
"""How do other offline estimators do on the same published measurements, and how long does one answer take?

Each peer runs in a virtual environment of its own, made once in the user's cache. Rows: Hugging Face stack, one GPU,
certain length, a method and an optimizer that the peer knows. Each peer and this program are compared on the same rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
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
TABLE = ROOT / "benchmarks" / "peers.json"
CANIFINETUNE, FITCHECK, ALLOC = "canifinetune==0.4.1", "fitcheck-llm==0.3.1", "alloc==0.0.16"
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
_ABOUT = {
    "canifinetune": "formulas; reserved is its total",
    "fitcheck-llm": "formulas; its overhead was fitted on T4 runs that are among these rows; reserved is its total",
    "alloc ghost": "full fine-tuning only; reserved is its total",
}


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


def asked(command: list[str], env: dict[str, str] | None = None) -> dict[str, Any] | None:
    """The JSON object that a program prints; None when it prints none."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
    try:
        found = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def canifinetune(row: Row, config: Path) -> dict[str, int] | None:
    """Its estimate of allocated (components without CUDA overhead and margin) and reserved (its total), in bytes."""
    plan = row.plan
    if plan is None or plan.method not in ("full", "lora", "qlora") or plan.optimizer not in _OPTIMIZERS:
        return None
    checkpointing = "--gradient-checkpointing" if plan.gradient_checkpointing else "--no-gradient-checkpointing"
    found = asked([
        str(environment(CANIFINETUNE) / "canifinetune"), "estimate", "--offline", "--json",
        "--model", str(row.raw["model_id"]), "--override-json", str(config),
        "--gpu-vram-gb", str(row.raw.get("gpu_total_gib") or 80), "--method", plan.method,
        "--seq-len", str(plan.sequence_tokens), "--micro-batch-size", str(plan.micro_batch),
        "--lora-rank", str(plan.lora_rank), "--optimizer", plan.optimizer, checkpointing,
        "--target-scope", "all_linear" if not plan.target_modules else "attention",
    ])  # fmt: skip
    if found is None or "memory" not in found:
        return None
    memory = found["memory"]
    total = memory["total_estimated_gb"]
    return {
        "allocated": int((total - memory["cuda_overhead_gb"] - memory["safety_margin_gb"]) * 2**30),
        "reserved": int(total * 2**30),
    }


def fitcheck(row: Row, config: Path) -> dict[str, int] | None:
    """Its estimate without (allocated) and with its overhead (reserved), in bytes. It reads a hub cache, offline."""
    plan = row.plan
    if plan is None or plan.method not in ("full", "lora", "qlora"):
        return None
    optimizer = "adam8bit" if "8bit" in plan.optimizer_name() else "adamw"
    with tempfile.TemporaryDirectory(prefix="preflight-peer-") as home:
        snapshot = "0" * 40
        folder = Path(home, "hub", "models--peer--model")
        (folder / "snapshots" / snapshot).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(snapshot, encoding="utf-8")
        shutil.copy(config, folder / "snapshots" / snapshot / "config.json")
        command = [
            str(environment(FITCHECK) / "fitcheck"), "peer/model", "--json", "--vram-mib", "81920",
            "--quant", "nf4" if plan.method == "qlora" else "none",
            "--precision", plan.autocast or plan.weight_dtype, "--lora-r", str(plan.lora_rank),
            "--batch-size", str(plan.micro_batch), "--seq-len", str(plan.sequence_tokens),
            "--optimizer", optimizer, "--optimizer-dtype", "bf16" if plan.method == "full" else "fp32",
            "--lora-targets", ",".join(plan.target_modules) or "full",
            *(["--no-lora"] if plan.method == "full" else []),
            *(["--double-quant"] if plan.method == "qlora" and plan.double_quant else []),
            *(["--grad-checkpoint"] if plan.gradient_checkpointing else []),
            *(["--flash-attn"] if plan.attention != "eager" else []),
        ]  # fmt: skip
        found = asked(command, {"HF_HOME": home, "HF_HUB_OFFLINE": "1"})
    memory = (found or {}).get("memory_mib")
    if not isinstance(memory, dict):
        return None
    return {
        "allocated": int((memory["total"] - memory["overhead"]) * 2**20),
        "reserved": int(memory["total"] * 2**20),
    }


def alloc(row: Row, config: Path) -> dict[str, int] | None:
    """Its estimate without and with its buffer, in bytes. It knows full fine-tuning with float32 states only."""
    plan = row.plan
    if plan is None or plan.method != "full":
        return None
    from preflight.model_shape import read_shape

    shape = read_shape(json.loads(config.read_text(encoding="utf-8")))
    found = asked([
        str(environment(ALLOC) / "alloc"), "ghost", os.devnull, "--json", "--no-config",
        "--param-count-b", str((shape.parameters or 0) / 1e9), "--dtype", plan.weight_dtype,
        "--batch-size", str(plan.micro_batch), "--seq-length", str(plan.sequence_tokens),
        "--hidden-dim", str(shape.hidden_size),
    ])  # fmt: skip
    if found is None or "total_gb" not in found:
        return None
    total = found["total_gb"]
    return {"allocated": int((total - found["buffer_gb"]) * 2**30), "reserved": int(total * 2**30)}


PEERS = {"canifinetune": canifinetune, "fitcheck-llm": fitcheck, "alloc ghost": alloc}


def ours(row: Row, config: Path) -> dict[str, int]:
    """Our closed form for the same row."""
    from preflight.memory.closed_form import estimate
    from preflight.model_shape import read_shape

    assert row.plan is not None
    made = estimate(read_shape(json.loads(config.read_text(encoding="utf-8"))), row.plan)
    return {"allocated": made.allocated_bytes, "reserved": made.reserved_bytes}


def seconds_of(command: Sequence[str], times: int = 5) -> float:
    """The fastest of some runs of a command, in seconds."""
    found = []
    for _ in range(times):
        began = time.monotonic()
        subprocess.run(list(command), capture_output=True, check=False, cwd=ROOT)
        found.append(time.monotonic() - began)
    return min(found)


def compare(rows: Sequence[Row], configs: Path) -> dict[str, Any]:
    """For each peer the rows that it can answer: its errors and ours on just these."""
    found: dict[str, Any] = {}
    for name, peer in PEERS.items():
        errors: dict[str, dict[str, list[float]]] = {
            who: {"allocated": [], "reserved": []} for who in (name, "this program, closed form")
        }
        for row in rows:
            config = config_path(row, configs)
            theirs = peer(row, config)
            if theirs is None:
                continue
            for who, made in ((name, theirs), ("this program, closed form", ours(row, config))):
                for metric in errors[who]:
                    if row.readings.get(metric):
                        errors[who][metric].append(100.0 * (made[metric] / row.readings[metric] - 1))
        found[name] = {
            "about": _ABOUT[name],
            **{who: {metric: figures(values) for metric, values in e.items()} for who, e in errors.items()},
        }
    return found


def config_path(row: Row, configs: Path) -> Path:
    """Where the row's config.json lies."""
    return configs / str(row.raw["config"]).removeprefix("configs/")


def timings(configs: Path) -> dict[str, float]:
    """Seconds of one cold answer each, by turns in the same run: the fastest of five."""
    config = configs / "meta-llama__Llama-3.1-8B" / "config.json"
    theirs = [str(environment(CANIFINETUNE) / "canifinetune"), "estimate", "--offline", "--json", "--model", "m/m"]
    theirs += ["--override-json", str(config), "--gpu-vram-gb", "24"]
    code = (
        "import json,sys;from preflight.model_shape import read_shape;from preflight.plan import Plan;"
        "from preflight.memory.closed_form import estimate;"
        f"print(estimate(read_shape(json.load(open({str(config)!r}))),Plan()).allocated_bytes)"
    )
    commands = {
        "canifinetune estimate": theirs,
        "this program, closed form": [sys.executable, "-c", code],
        "model_analyzer.py, the whole answer": [
            sys.executable, "model_analyzer.py", str(config.parent), "--gpu-vram-gb", "24", "--method", "qlora",
            "--no-report",
        ],
    }  # fmt: skip
    best = {name: float("inf") for name in commands}
    for _ in range(5):
        for name, command in commands.items():
            best[name] = min(best[name], seconds_of(command, 1))
    return {name: round(seconds, 3) for name, seconds in best.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks" / "measured.jsonl", metavar="FILE.jsonl")
    parser.add_argument("--configs", type=Path, default=ROOT / "tests" / "configs", metavar="DIR")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only every so many rows, N in all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="renew benchmarks/peers.json, which the docs show")
    args = parser.parse_args(argv)
    rows = [
        row
        for row in read_rows(args.rows)
        if not row.left_out and row.hugging_face and row.certainty == "exact" and row.kind == "peak"
        and row.plan is not None and row.plan.gpus == 1 and config_path(row, args.configs).exists()
    ]  # fmt: skip
    if args.limit:
        rows = rows[:: max(1, len(rows) // args.limit)][: args.limit]
    document: dict[str, Any] = {"accuracy": compare(rows, args.configs), "seconds": timings(args.configs)}
    if args.write:
        TABLE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(document, indent=1))
        return 0
    for peer, both in document["accuracy"].items():
        for who, metrics in both.items():
            for metric, f in metrics.items() if isinstance(metrics, dict) else ():
                if f["n"]:
                    text = f"n={f['n']:3d} median {f['median_abs_pct']} p95 {f['p95_abs_pct']} %"
                    print(f"{peer:14s} {who:28s} {metric:10s} {text}")
    for name, seconds in document["seconds"].items():
        print(f"{name:36s} {seconds:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
