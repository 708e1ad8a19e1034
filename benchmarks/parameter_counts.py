"""How do the counts read from config.json compare with those of transformers, PEFT and bitsandbytes on the meta device?

Prints one row a published configuration: parameters read here, published, and measured (tests/measured), the LoRA
counts of all-linear and of two projections at r = 8, and what 4-bit loading quantises. `--measure` measures again with
the installed packages (minutes) and writes tests/measured/meta_counts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from preflight.model.lora import trainable_parameters  # noqa: E402 (after the path)
from preflight.model_shape import read_shape  # noqa: E402

CONFIGS = ROOT / "tests" / "configs"
MEASURED = ROOT / "tests" / "measured" / "meta_counts.jsonl"
# Keys that do not change which parameters there are: equal configurations are measured once.
_NO_MATTER = {
    "torch_dtype", "dtype", "quantization_config", "max_position_embeddings", "rope_scaling", "rope_theta",
    "eos_token_id", "bos_token_id", "sliding_window", "transformers_version",
}  # fmt: skip
_REMOTE = {"qwen", "chatglm", "baichuan", "internlm2", "minicpm", "mimo"}


def key_of(config: dict[str, Any]) -> str:
    """What decides the parameters of a configuration."""
    return json.dumps({k: v for k, v in config.items() if k not in _NO_MATTER}, sort_keys=True)


def load(name: str, file: str = "config.json") -> dict[str, Any]:
    """A file of a published configuration."""
    loaded: dict[str, Any] = json.loads((CONFIGS / name / file).read_text(encoding="utf-8"))
    return loaded


def measure(names: list[str]) -> None:
    """Count on the meta device with the installed transformers, PEFT and bitsandbytes."""
    from importlib.metadata import version

    first: dict[str, str] = {}
    for name in names:
        if load(name)["model_type"] not in _REMOTE:
            first.setdefault(key_of(load(name)), name)
    chosen = sorted(first.values())
    command = [sys.executable, str(ROOT / "tests" / "meta_counts.py")]
    answer = subprocess.run(
        [*command, *(str(CONFIGS / name / "config.json") for name in chosen)], stdout=subprocess.PIPE, check=True
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft", "bitsandbytes", "torch"))
    about = {"about": f"Counted on the meta device (LoRA r=8) by tests/meta_counts.py with {packages}."}
    lines = [json.dumps(about)]
    for line in answer.stdout.decode("utf-8").splitlines():
        row = json.loads(line)
        lines.append(json.dumps({**row, "name": Path(row["name"]).parent.name}))
    MEASURED.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Print the table; 1 when a count differs from a measured one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure again first")
    args = parser.parse_args()
    names = sorted(path.name for path in CONFIGS.iterdir())
    if args.measure:
        measure(names)
    rows = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    measured = {key_of(load(row["name"])): row for row in rows if "name" in row}
    print(rows[0]["about"])
    head = ("model", "parameters", "published", "meta device", "LoRA all-linear", "LoRA two", "4-bit quantised", "")
    print(f"{head[0]:46} {head[1]:>16} {head[2]:>16} {head[3]:>12} {head[4]:>16} {head[5]:>12} {head[6]:>16}")
    equal = differ = alone = 0
    began = time.perf_counter()
    for name in names:
        config = load(name)
        shape = read_shape(config)
        row = measured.get(key_of(config))
        published = load(name, "provenance.json")["counted_params"]
        lora = (trainable_parameters(shape, "all-linear", 8), None)
        verdict = "not built"
        if row is None:
            alone += 1
        else:
            lora = (lora[0], trainable_parameters(shape, row["two"], 8))
            mine = (shape.parameters, lora[0], lora[1], shape.bitsandbytes_weights)
            counted = [row[key] if isinstance(row[key], int) else None for key in ("lora_all", "lora_two")]
            theirs = (row["parameters"], *counted, row["four_bit"])
            verdict = "equal" if mine == theirs else f"DIFFERS {theirs}"
            equal, differ = equal + (mine == theirs), differ + (mine != theirs)
        two = f"{lora[1]:,}" if lora[1] is not None else "-"
        print(
            f"{name:46} {shape.parameters:>16,} {published:>16,} {verdict:>12} {lora[0] or 0:>16,} {two:>12} "
            f"{shape.bitsandbytes_weights:>16,}"
        )
    took = time.perf_counter() - began
    print(f"{len(names)} read in {took:.2f} s; {equal} equal to the meta device in all four counts, {differ} differ, "
          f"{alone} cannot be built by transformers (remote code)")  # fmt: skip
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
