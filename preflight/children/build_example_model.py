"""Turns the example's GGUF weights into an ordinary model directory.

Arguments: results file, GGUF file, folder with the small files (config.json, ...), folder to fill.
"""

import json
import os
import shutil
import sys
import time

BEGAN = time.time()


def step(name, **facts):
    facts.update(step=name, seconds=round(time.time() - BEGAN, 2))
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


def main():
    gguf, small_files, folder = sys.argv[2:5]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    step("import", torch=torch.__version__, transformers=transformers.__version__)
    where, name = os.path.split(gguf)
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=name)
    tokenizer.save_pretrained(folder)
    step("tokenizer")
    model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name)
    step("weights")
    # The loaded model counts as quantised, which cannot be saved; an unquantised twin takes over its tensors.
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        twin = type(model)(type(model.config).from_dict(settings))
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.tie_weights()
    twin.to(torch.bfloat16).save_pretrained(folder)
    # The hand-written small files are read by transformers 4 and 5 alike; those just saved, only by the same major.
    for small in sorted(os.listdir(small_files)):
        shutil.copyfile(os.path.join(small_files, small), os.path.join(folder, small))
    step("saved")


if __name__ == "__main__":
    main()
