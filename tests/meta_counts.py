"""Print what transformers and PEFT themselves count on the meta device, one JSON line a configuration.

argv: files with a configuration, or "type:NAME" for a model type with its default configuration.
"""

import copy
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")
sys.argv, wanted = [sys.argv[0], os.devnull, os.devnull], sys.argv[1:]
_SPEC = importlib.util.spec_from_file_location(
    "meta_model", Path(__file__).parent.parent / "preflight" / "children" / "meta_model.py"
)
child = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(child)
TWO = {
    "gpt2": ["c_attn"], "gpt_bigcode": ["c_attn"], "gpt_neox": ["query_key_value"], "bloom": ["query_key_value"],
    "falcon": ["query_key_value"], "phi3": ["qkv_proj"], "t5": ["q", "v"], "mt5": ["q", "v"],
    "bert": ["query", "value"],
}  # fmt: skip


def trained(model, targets, r=8):
    import peft

    try:
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=r, target_modules=targets))
        return sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


for name in wanted:
    config = {"model_type": name[5:]} if name.startswith("type:") else json.loads(Path(name).read_text("utf-8"))
    line = {"name": name}
    try:
        job = {"config": config}
        model = child.build(child.load_config(job), job)
        line["class"] = type(model).__name__
        line["parameters"] = sum(p.numel() for p in model.parameters())
        if "--lora" in os.environ.get("META_COUNTS", "--lora"):
            two = TWO.get(config["model_type"], ["q_proj", "v_proj"])
            line["two"], line["lora_two"] = two, trained(model, two)
            line["lora_all"] = trained(model, "all-linear")
        child.say = lambda line=line, **values: line.update(four_bit=values.get("quantised"))
        child.four_bit(model)
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(line), flush=True)
