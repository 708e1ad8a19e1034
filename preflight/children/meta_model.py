"""Build a model on the meta device and say what it is made of. argv: results file, job file.

Needs torch and transformers. The job is {"config": {...} or "directory": path, "trust_remote_code": bool,
"lora": [[targets, r, target_parameters], ...], "four_bit": bool}. One JSON line per finished step. No weights are read
and no memory is taken for them.
"""

import json
import os
import re
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def say(**line):
    with open(sys.argv[1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def load_config(job):
    from transformers import AutoConfig

    trust = bool(job.get("trust_remote_code"))
    if job.get("directory"):
        config = AutoConfig.from_pretrained(job["directory"], trust_remote_code=trust, local_files_only=True)
    else:
        from transformers import CONFIG_MAPPING

        values = dict(job["config"])
        values.pop("auto_map", None)
        kind = values.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise ValueError("transformers does not know the model type %r" % (kind,))
        config = CONFIG_MAPPING[kind].from_dict(values)
    for part in [config] + [value for value in vars(config).values() if hasattr(value, "model_type")]:
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def build(config, job):
    """The model on the meta device: the class that the config names, else what the Auto classes take."""
    import torch
    import transformers

    trust = bool(job.get("trust_remote_code"))
    names = getattr(config, "architectures", None) or []
    chosen = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        if chosen is not None and hasattr(chosen, "from_pretrained"):
            return chosen(config)
        errors = []
        for auto in (
            "AutoModelForCausalLM",
            "AutoModelForImageTextToText",
            "AutoModelForSeq2SeqLM",
            "AutoModelForSpeechSeq2Seq",
            "AutoModelForMaskedLM",
            "AutoModel",
        ):
            maker = getattr(transformers, auto, None)
            if maker is None:
                continue
            try:
                return maker.from_config(config, trust_remote_code=trust)
            except ValueError as error:
                errors.append(str(error)[:200])
        raise ValueError(errors[-1] if errors else "no Auto class takes this configuration")


def kind_of(module, name, parameter):
    import torch

    if parameter.dim() == 3 and name not in ("weight",) and not isinstance(module, torch.nn.Conv1d):
        return "experts"
    if type(module).__name__ == "Conv1D" and name == "weight":
        return "conv1d"
    if isinstance(module, torch.nn.Linear) and name == "weight":
        return "linear"
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
        return "conv"
    if name == "weight" and parameter.dim() == 1:
        return "norm"
    if name == "weight" and parameter.dim() == 2:
        return "router"
    return "parameter"


def describe(model):
    """Modules grouped by equal layers. Tied parameters are counted where they appear first."""
    import torch

    seen, layers, rest = set(), {}, []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if id(parameter) in seen:
                continue
            kind = kind_of(module, name, parameter)
            if name == "bias" and "weight" in own and id(own["weight"]) not in seen:
                continue  # counted with its weight
            seen.add(id(parameter))
            bias = 0
            if name == "weight" and own.get("bias") is not None and id(own["bias"]) not in seen:
                bias = own["bias"].numel()
                seen.add(id(own["bias"]))
            full = path if name == "weight" else (path + "." + name if path else name)
            where = re.match(r"(.*?\.)?(layers|h|block|blocks|layer)\.(\d+)(\.|$)", full)
            derived = kind == "linear" and type(module) is not torch.nn.Linear
            entry = {"kind": kind, "shape": list(parameter.shape), "bias": bias, "subclass": derived}
            general = re.sub(r"\.\d+(?=\.|$)", ".*", full)
            if where is None:
                rest.append(dict(entry, path=full, per_layer=1))
            else:
                key = where.group(0).rstrip(".")
                parts = layers.setdefault(key, {})
                signature = (general, kind, tuple(parameter.shape), bias, derived)
                parts[signature] = parts.get(signature, 0) + 1
    return layers, rest


def grouped(layers):
    """Equal layers put together; what a layer mixes with and how its MLP looks is told from names."""
    groups = {}
    for key, parts in layers.items():
        root = re.sub(r"\.\d+$", "", key)
        signature = (root, tuple(sorted(parts.items())))
        groups.setdefault(signature, [0, parts, root])[0] += 1
    made = []
    for count, parts, root in groups.values():
        paths = [signature[0] for signature in parts]
        text = " ".join(paths).lower()
        lower = root.lower()
        stack = "decoder"
        if any(word in lower for word in ("vision", "visual", "image", "vit")):
            stack = "vision"
        elif any(word in lower for word in ("audio", "speech")):
            stack = "audio"
        elif "encoder" in lower and "decoder" not in lower:
            stack = "encoder"
        if "kv_a_proj" in text or "kv_lora" in text:
            mixer = "mla"
        elif re.search(r"(q_proj|qkv|query|c_attn|wqkv|w_pack|\.attn\.|attention|q_lin)", text):
            mixer = "attention"
        elif "a_log" in text and "dt_bias" in text and "linear_attn" not in text:
            mixer = "mamba2"
        elif "a_log" in text and "x_proj" in text:
            mixer = "mamba"
        elif "linear_attn" in text:
            mixer = "linear_attention"
        elif "rg_lru" in text or "time_mix" in text:
            mixer = "recurrent"
        elif ".conv." in text:
            mixer = "conv"
        else:
            mixer = "none"
        experts = any(signature[1] == "experts" for signature in parts) or ".experts.*" in text
        dense = re.search(r"(mlp|ffn|feed_forward|fc1|intermediate|dense_h_to_4h)", text)
        made.append(
            {
                "count": count,
                "mixer": mixer,
                "mlp": "moe" if experts else "dense" if dense else "none",
                "stack": stack,
                "window": None,
                "modules": [
                    {
                        "path": path,
                        "kind": kind,
                        "shape": list(shape),
                        "bias": bias,
                        "per_layer": times,
                        "subclass": derived,
                    }
                    for (path, kind, shape, bias, derived), times in parts.items()
                ],
            }
        )
    return made


def lora_counts(model, requests):
    import copy

    try:
        import peft
    except Exception as error:
        say(step="peft", error=type(error).__name__ + ": " + str(error)[:300])
        return
    say(step="peft", version=peft.__version__)
    for targets, r, parameters in requests:
        line = {"step": "lora", "targets": targets, "r": r, "target_parameters": parameters}
        try:
            options = {"r": r, "target_modules": targets}
            if parameters:
                options["target_parameters"] = parameters
            adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options))
            line["trainable"] = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        except Exception as error:
            line["error"] = type(error).__name__ + ": " + str(error)[:400]
        say(**line)


def four_bit(model):
    """Elements that bitsandbytes' replacement in transformers would really quantise."""
    import torch
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = get_keys_to_not_convert(model)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with torch.device("meta"):
        replaced = replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=config)
    import bitsandbytes

    count = 0
    for _, module in replaced.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            count += module.in_features * module.out_features
    say(step="four_bit", quantised=count, kept=sorted(kept))


def main():
    with open(sys.argv[2], encoding="utf-8") as stream:
        job = json.load(stream)
    began = time.monotonic()
    import torch

    say(step="torch", version=torch.__version__)
    import transformers

    say(step="transformers", version=transformers.__version__, seconds=round(time.monotonic() - began, 1))
    config = load_config(job)
    say(step="config", type=type(config).__name__)
    model = build(config, job)
    layers, rest = describe(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head_path = next((path for path, module in model.named_modules() if module is head), None) if head else None
    try:
        inputs = model.get_input_embeddings()
    except NotImplementedError:  # a model of several (Qwen2.5-Omni: thinker and talker) has none of its own
        inputs = None
    tied = head is not None and inputs is not None and head.weight is inputs.weight
    say(
        step="tree",
        **{
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tied": tied,
            "head": head_path,
            "groups": grouped(layers),
            "rest": rest,
            "attention": {
                "sdpa": bool(getattr(model, "_supports_sdpa", False)),
                "flash": bool(getattr(model, "_supports_flash_attn", getattr(model, "_supports_flash_attn_2", False))),
                "flex": bool(getattr(model, "_supports_flex_attn", False)),
                "taken": getattr(model.config, "_attn_implementation", None),
            },
        },
    )
    if job.get("lora"):
        lora_counts(model, job["lora"])
    if job.get("four_bit"):
        try:
            four_bit(model)
        except Exception as error:
            say(step="four_bit", error=type(error).__name__ + ": " + str(error)[:300])
    say(step="end", seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        say(step="failed", error=type(error).__name__ + ": " + str(error)[:500])
        sys.exit(1)
