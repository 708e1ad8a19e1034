"""What to write into a LoRA configuration for this model, in one line."""

from __future__ import annotations

import json
from pathlib import Path


def lora_advice(model: str | None) -> str:
    """LoRA settings in one line, as the model stage recommends them from config.json (None: nothing to look into)."""
    general = 'LoRA with r=16, lora_alpha=32, target_modules="all-linear"'
    if model is None or not Path(model, "config.json").is_file():
        return f"{general} (`python model_analyzer.py MODEL` checks that they exist)"
    try:
        from preflight.model.adapter_choice import choices, recommend_rank, recommended
        from preflight.model_shape import read_shape

        shape = read_shape(json.loads(Path(model, "config.json").read_text(encoding="utf-8-sig")))
        best = recommended(choices(shape))
        rank = recommend_rank(shape, best, None)
        trained = best.trainable(rank.r) if best is not None else None
        targets = best.targets if best is not None else None
    except Exception:  # an odd config costs the figures only; the model stage says what is odd about it
        return f"{general} (`python model_analyzer.py {model}` checks that they exist)"
    if targets is None or trained is None:
        return f"LoRA; `python model_analyzer.py {model}` finds target modules that exist in this model"
    shown = json.dumps(targets if isinstance(targets, str) else list(targets))
    return f"LoRA with r={rank.r}, lora_alpha={rank.alpha}, target_modules={shown}: {trained:,} trainable parameters"
