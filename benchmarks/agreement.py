#!/usr/bin/env python3
"""Do the formulas agree with the rehearsal? Many architectures, methods and settings side by side.

The rehearsed peaks are kept in tests/rehearsed_peaks.json; `--renew` rehearses them again with the stack that is
installed here (about ten minutes); without it the kept ones are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from preflight.console import run_main
from preflight.findings import say
from preflight.machine import Machine, choose_python
from preflight.memory.closed_form import estimate
from preflight.memory.rehearsal import Job, rehearse
from preflight.model_shape import read_shape
from preflight.plan import Plan, plan_from

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "tests" / "rehearsed_peaks.json"
DENSE = [
    "meta-llama__Llama-3.2-1B",
    "openai-community__gpt2",
    "Qwen__Qwen2.5-0.5B",
    "Qwen__Qwen3-0.6B",
    "mistralai__Mistral-7B-v0.1",
    "google__gemma-2b",
    "google__gemma-2-2b",
    "google__gemma-3-1b-it",
    "microsoft__phi-2",
    "microsoft__Phi-3-mini-4k-instruct",
    "microsoft__Phi-4-mini-instruct",
    "EleutherAI__pythia-1.4b",
    "tiiuae__falcon-7b",
    "bigscience__bloom-7b1",
    "facebook__opt-1.3b",
    "bigcode__gpt_bigcode-santacoder",
    "allenai__OLMo-2-1124-7B",
    "allenai__Olmo-3-7B-Instruct-SFT",
    "ibm__PowerLM-3b",
    "ibm-granite__granite-3.1-8b-instruct",
    "swiss-ai__Apertus-8B-Instruct-2509",
    "arcee-ai__AFM-4.5B",
    "google__gemma-3-4b-it",
    "Qwen__Qwen2.5-VL-7B-Instruct",
    "HuggingFaceTB__SmolVLM2-2.2B-Instruct",
    "OpenGVLab__InternVL3_5-8B-HF",
    "ByteDance-Seed__Seed-OSS-36B-Instruct",
    "bigscience__mt0-xxl",
]
MIXTURES = [
    "ibm-granite__granite-3.0-3b-a800m-instruct",
    "Qwen__Qwen3-30B-A3B",
    "mistralai__Mixtral-8x7B-v0.1",
    "deepseek-ai__DeepSeek-V2-Lite",
    "openai__gpt-oss-20b",
    "zai-org__GLM-4.5-Air",
]
BASE: dict[str, Any] = {"sequence_tokens": 1024, "optimizer": "adamw_torch"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"method": "lora", "lora_dropout": 0.05, "gradient_checkpointing": False, "autocast": None},
    {"method": "lora", "lora_dropout": 0.05, "autocast": "bf16"},
    {"method": "qlora", "autocast": "bf16"},
    {"method": "qlora", "gradient_checkpointing": False, "autocast": None, "sequence_tokens": 512},
    {"method": "full", "autocast": None},
)


# Settings beyond the five, on one small model (Llama-3.2-1B: tied embeddings, grouped heads).
OTHERS: tuple[dict[str, Any], ...] = (
    {"method": "lora", "use_dora": True, "gradient_checkpointing": False},
    {"method": "lora", "modules_to_save": ["lm_head", "embed_tokens"]},
    {"method": "ia3"},
    {"method": "prefix_tuning"},
    {"method": "lora_int8"},
    {"method": "lora_gptq"},
    {"method": "lora", "loss": "fused_linear_ce", "sequence_tokens": 2048},
    {"method": "full", "optimizer": "adamw_8bit"},
    {"method": "full", "optimizer": "adamw_torch_fused"},
    {"method": "full", "optimizer": "lion_8bit"},
    {"method": "full", "optimizer": "sgd"},
    {"method": "full", "optimizer": "galore_adamw"},
    {"method": "full", "weight_dtype": "fp32"},
    {"method": "full", "gradient_accumulation": 4},
    {"method": "full", "loss": "full_logits_chunked_ce", "sequence_tokens": 2048},
)


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(configuration folder, settings of the plan)."""
    for name in DENSE:
        for setting in SETTINGS:
            yield name, {**BASE, **setting}
    for name in MIXTURES:
        for setting in SETTINGS:
            made = {**BASE, **setting, "lora_dropout": 0.0}
            if setting["method"] != "full":
                made["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
            yield name, made
        yield name, {**BASE, "method": "lora", "lora_rank": 8, "sequence_tokens": 512}  # adapts stacked experts too
    for setting in OTHERS:
        yield "meta-llama__Llama-3.2-1B", {**BASE, "sequence_tokens": 512, "autocast": "bf16", **setting}


def plan_of(settings: dict[str, Any]) -> Plan:
    """The plan of a case. None means "off" here, so it is set after the rest."""
    plan = plan_from({key: value for key, value in settings.items() if value is not None})
    return replace(plan, autocast=None) if settings.get("autocast", "") is None else plan


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a case."""
    loaded: dict[str, Any] = json.loads((ROOT / "tests" / "configs" / name / "config.json").read_text(encoding="utf-8"))
    return loaded


def renew(python: str, only: str, missing: bool, kept: dict[str, Any]) -> dict[str, Any]:
    """Rehearse every case whose folder contains `only`; those that do not run keep the reason."""
    machine = Machine()
    old = {(row["config"], json.dumps(row["settings"])): row for row in kept["rows"]}
    todo = [
        (name, settings)
        for name, settings in cases()
        if only in name and not (missing and (name, json.dumps(settings)) in old)
    ]
    made: dict[tuple[str, str], dict[str, Any]] = {}
    versions: dict[str, str] = dict(kept["versions"])
    for start in range(0, len(todo), 30):
        part = todo[start : start + 30]
        say(f"rehearsing {start + 1} to {start + len(part)} of {len(todo)}")
        jobs = [Job(config_of(name), plan_of(settings)) for name, settings in part]
        for (name, settings), one in zip(part, rehearse(machine, python, jobs, 1800.0), strict=True):
            row: dict[str, Any] = {"config": name, "settings": settings}
            if one.estimate is None or one.replay is None:
                row["trouble"] = one.trouble
            else:
                row["tensors_bytes"] = one.replay.tensors_bytes
                row["moment"] = one.replay.moment
                versions = one.estimate.detail["versions"]
            made[name, json.dumps(settings)] = row
    keys = [(name, json.dumps(settings)) for name, settings in cases()]
    rows = [made.get(key) or old[key] for key in keys if key in made or key in old]
    return {"schema": 1, "made_by": "python benchmarks/agreement.py --renew", "versions": versions, "rows": rows}


def gap_pct(row: dict[str, Any]) -> float:
    """The closed form less the rehearsal, in per cent of the rehearsal."""
    closed = estimate(read_shape(config_of(row["config"])), plan_of(row["settings"])).allocated_bytes
    return 100.0 * (closed - row["tensors_bytes"]) / row["tensors_bytes"]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; with --renew rehearse first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="renew only what has this in its folder's name")
    parser.add_argument("--missing", action="store_true", help="renew only what is not kept yet")
    parser.add_argument("--python")
    args = parser.parse_args(argv)
    if args.renew:
        kept = json.loads(KEPT.read_text(encoding="utf-8"))
        python = choose_python(Machine(), args.python, ("torch", "transformers", "peft", "bitsandbytes")).path
        KEPT.write_text(json.dumps(renew(python, args.only, args.missing, kept), indent=1) + "\n", encoding="utf-8")
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    gaps = []
    for row in kept["rows"]:
        label = f"{row['config']} {row['settings']['method']} {row['settings'].get('autocast', '')}"
        if "trouble" in row:
            print(f"   not run  {label}: {row['trouble']}")
            continue
        gaps.append(gap_pct(row))
        print(f"{gaps[-1]:+8.2f} %  {label}")
    close = sum(1 for gap in gaps if abs(gap) <= 3)
    print(f"{close} of {len(gaps)} within 3 %")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
