"""Write facts/config_defaults.json: what transformers takes when config.json leaves a key out.

Run it in an environment with the transformers version that the table is for.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "facts" / "config_defaults.json"
# Nothing of this changes the number or the shape of parameters.
DROPPED = re.compile(
    r"drop|eps$|epsilon|initializer|_id$|_token$|_token_|_ids$|use_cache|output_|return_dict|id2label|label2id"
    r"|problem_type|architectures|transformers_version|chunk_size|^rope_|_theta|loss|temperature|summary|mask_time"
    r"|mask_feature|sampling|pretraining_tp|scale_|_scale$|multiplier|is_decoder|aux_|router_|norm_topk|jitter"
    r"|time_step_(min|max|floor|limit)|z_loss|ctc_|classifier|_std$|init_|num_labels|mrope|softmax|rescale|image_seq"
    r"|interpolat|query_pre|topk_method|logits_|label_|apply_spec|use_mamba_kernels|tokens_per|^dtype$"
)
KEPT = ("time_step_rank", "scale_factor", "num_experts_per_token", "experts_per_token")


def fields(cls: Any) -> dict[str, Any]:
    """Class defaults that are plain numbers, flags or short words."""
    found = {}
    for field in dataclasses.fields(cls):
        value = field.default
        if value is dataclasses.MISSING or value is None or not isinstance(value, (int, bool, str)):
            continue
        if isinstance(value, str) and len(value) > 40:
            continue
        if field.name in KEPT or not DROPPED.search(field.name):
            found[field.name] = value
    return found


def main() -> None:
    """Write the table."""
    import transformers
    from transformers import CONFIG_MAPPING

    rows: dict[str, Any] = {}
    for kind in sorted(CONFIG_MAPPING.keys()):
        cls = CONFIG_MAPPING[kind]
        row: dict[str, Any] = {}
        if values := fields(cls):
            row["defaults"] = values
        if names := getattr(cls, "attribute_map", {}):
            row["names"] = dict(names)
        rows[kind] = row
    head = {
        "schema": 1,
        "as_of": "2026-11-30",
        "about": "What transformers takes when config.json of this model_type leaves a key out: class defaults "
        "(absent here: None) and the other names of a key. Written by benchmarks/config_defaults.py.",
        "sources": [
            f"transformers {transformers.__version__}, dataclass fields and attribute_map of every class in "
            "CONFIG_MAPPING"
        ],
    }
    lines = ["{", *(f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()), '"model_types": {']
    lines.append(",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in rows.items()))
    TABLE.write_text("\n".join([*lines, "}}"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
