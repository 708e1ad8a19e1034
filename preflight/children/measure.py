"""The same training step for real: random weights of the same shape, a few steps, on the accelerator or the CPU.

argv: results file, job file (as for rehearse.py; "device": "cpu" or "cuda", "steps"). On the CPU every storage is
recorded as in a rehearsal; on CUDA torch's own figures are read at each stage. Running out of memory is a result.
"""

import contextlib
import json
import sys
import time

import rehearse
from rehearsal import DTYPES, CannotRehearse
from rehearsal.adapters import add_adapters
from rehearsal.meta_build import build, enable_checkpointing, read_config, set_cache
from rehearsal.quantised import quantise


def measure_cpu(job, say):
    """The steps of a rehearsal with real tensors; the trace is that of the rehearsal, line "rehearsed"."""
    rehearse.rehearse(dict(job, cpu=True, real=True, layers=10**6), say)


def measure_cuda(job, say):
    """Stage by stage: torch's allocated and reserved peaks and the device's memory; or where memory ran out."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if not torch.cuda.is_available():
        say({"step": "failed", "where": "no gpu", "reason": "torch sees no CUDA device"})
        return
    plan = job["plan"]
    device = torch.device("cuda")
    stages = {}

    def stage(name):
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        stages[name] = {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_used_bytes": total - free,
        }
        say({"step": "stage", "stage": name, **stages[name]})

    free, total = torch.cuda.mem_get_info()
    say(
        {
            "step": "imported",
            "versions": versions,
            "gpu": torch.cuda.get_device_name(0),
            "total_bytes": total,
            "context_bytes": total - free,
        }
    )
    began = time.time()
    try:
        model = real_model(torch, transformers, job, device)
        stage("load")
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = real_optimizer(torch, plan, trainable)
        batch, length = plan["micro_batch"], plan["sequence_tokens"]
        ids = torch.randint(0, 1000, (batch, length), device=device)
        autocast = plan["autocast"]
        dtype = getattr(torch, DTYPES[autocast]) if autocast else None
        for step in range(int(job.get("steps", 3))):
            for _ in range(2 if plan["gradient_accumulation"] > 1 else 1):
                with torch.autocast("cuda", dtype=dtype, enabled=autocast is not None):
                    out = model(input_ids=ids, labels=ids)
                    loss = out.loss
                held = out if plan["holds_outputs"] else None
                del out
                stage("forward %d" % step)
                loss.backward()
                stage("backward %d" % step)
                del loss
            if plan["grad_clip"]:
                torch.nn.utils.clip_grad_norm_(trainable, plan["grad_clip"])
            optimizer.step()
            del held
            optimizer.zero_grad(set_to_none=True)
            stage("optimizer %d" % step)
    except torch.cuda.OutOfMemoryError as error:
        last = list(stages)[-1] if stages else "load"
        say({"step": "measured", "out_of_memory": True, "after": last, "message": str(error).splitlines()[0][:300]})
        return
    finally:
        model = optimizer = None
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()
    say(
        {
            "step": "measured",
            "out_of_memory": False,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "seconds": round(time.time() - began, 2),
        }
    )


def real_model(torch, transformers, job, device):
    """The model of the plan with random weights on the device, quantised and with adapters as the plan says."""
    plan = job["plan"]
    config = read_config(transformers, job)
    attention = plan["attention"]
    names = {"auto": "sdpa", "sdpa_math": "sdpa", "sdpa_flash": "sdpa", "sdpa_mem_efficient": "sdpa"}
    model, _ = build(torch, transformers, job, config, names.get(attention, attention))
    quantised = plan["method"] in ("qlora", "lora_int8")
    if quantised:
        quantise(torch, model, plan, config)
    fill(torch, model, device)
    with contextlib.suppress(Exception):
        model.tie_weights()
    if quantised and plan["kbit_preparation"]:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if plan["method"] not in ("full", "freeze"):
        model = add_adapters(torch, model, plan)
    if plan["gradient_checkpointing"]:
        enable_checkpointing(model, plan, plan["method"] not in ("full", "freeze"))
    set_cache(model, False)
    return model.train()


def fill(torch, model, device):
    """Small random numbers in place of every tensor of the meta device; 4-bit weights are quantised on the way."""
    seen = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.device.type != "meta":
                continue
            if id(parameter) not in seen:
                source = getattr(module, "source_dtype", parameter.dtype)
                dtype = source if source.is_floating_point else torch.bfloat16
                value = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(0.0, 0.02)
                if type(parameter).__name__ in ("Params4bit", "Int8Params"):
                    fresh = type(parameter)(value.cpu(), requires_grad=False, **quantised_options(parameter))
                    module._parameters[name] = fresh
                    seen[id(parameter)] = fresh.to(device)
                else:
                    seen[id(parameter)] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
                del value
            module._parameters[name] = seen[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.device.type == "meta":
                fresh = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
                module._buffers[name] = fresh.normal_(0.0, 0.02) if buffer.dtype.is_floating_point else fresh


def quantised_options(parameter):
    """The settings of a bitsandbytes parameter that its copy on the device must have."""
    names = ("compress_statistics", "quant_type", "blocksize", "quant_storage", "has_fp16_weights")
    return {name: getattr(parameter, name) for name in names if getattr(parameter, name, None) is not None}


def real_optimizer(torch, plan, trainable):
    """The optimizer that the plan names, from torch or bitsandbytes."""
    name = plan["optimizer"] or "adamw_torch_fused"
    if name in ("adamw_torch", "adamw_torch_fused"):
        return torch.optim.AdamW(trainable, lr=1e-4, fused=name.endswith("fused"))
    if name == "sgd":
        return torch.optim.SGD(trainable, lr=1e-4)
    import bitsandbytes as bnb

    classes = {
        "adamw_8bit": bnb.optim.AdamW8bit,
        "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bnb.optim.PagedAdamW32bit,
        "lion_32bit": bnb.optim.Lion32bit,
        "lion_8bit": bnb.optim.Lion8bit,
    }
    if name not in classes:
        raise CannotRehearse("no measurement with the optimizer %s" % name)
    return classes[name](trainable, lr=1e-4)


def main():
    results, job_path = sys.argv[1], sys.argv[2]
    with open(job_path, encoding="utf-8") as stream:
        job = json.load(stream)

    def say(line):
        with open(results, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()

    import warnings

    warnings.filterwarnings("ignore")
    try:
        if job.get("device") == "cuda":
            measure_cuda(job, say)
        else:
            measure_cpu(job, say)
    except CannotRehearse as reason:
        say({"step": "failed", "reason": str(reason)})
        return 4
    except Exception as error:
        import traceback

        first = str(error).splitlines()[0][:300] if str(error) else ""
        say(
            {
                "step": "failed",
                "reason": "%s: %s" % (type(error).__name__, first),
                "trace": traceback.format_exc()[-3000:],
            }
        )
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main())
