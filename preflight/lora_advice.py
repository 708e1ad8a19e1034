"""What to write into a LoRA configuration for this model, in one line."""

from __future__ import annotations

import json
from pathlib import Path

# Common starting values; PEFT's documentation and the LoRA paper use ranks of this size.
RANK, ALPHA = 16, 32


def lora_advice(model: str | None) -> str:
    """LoRA settings in one line, with the trainable parameters where the model's config.json can be read."""
    general = f'LoRA with r={RANK}, lora_alpha={ALPHA}, target_modules="all-linear"'
    if model is None or not Path(model, "config.json").is_file():
        return f"{general} (`python model_analyzer.py MODEL` checks that they exist)"
    try:
        from preflight.lora import reach
        from preflight.model_shape import read_shape

        shape = read_shape(json.loads(Path(model, "config.json").read_text(encoding="utf-8-sig")))
        found = reach(shape, "all-linear", RANK)
    except Exception:  # an odd config costs the figure only; the model stage says what is odd about it
        return f"{general} (`python model_analyzer.py {model}` checks that they exist)"
    if found.trainable is None:
        return f"LoRA; `python model_analyzer.py {model}` finds target modules that exist in this model"
    return f"{general}: {found.trainable:,} trainable parameters here (`python model_analyzer.py {model}`)"
