"""One training step of the real stack on fake tensors: which storages are allocated and released, and when.

Runs alone in any interpreter that has torch and transformers (peft and bitsandbytes where the plan needs them); its
parts lie in `rehearsal/` beside it.
argv: results file, job file (JSON: config, plan, and optionally model_dir, trust_remote_code, layers).
Writes one JSON line per finished step: imported, built, prepared, rehearsed; or failed with the step it failed in.

The trace is a list of events in order. An allocation is [id, bytes, what, owner]; a release is [id]; a mark
["phase", step, layer] says what follows. `layer` and `owner` number the layers that really ran, -1 is outside them.
Which layers of the whole model these stand for is in `layers`; preflight/memory/trace.py puts the others in.
"""

import contextlib
import json
import os
import sys
import time

from rehearsal import DTYPES, CannotRehearse, cuda_ways, sharded
from rehearsal import attention as attention_kernels
from rehearsal.adapters import add_adapters, cast_like_trl, prepare_kbit
from rehearsal.layers import count_trainable, owners_of, some_layers
from rehearsal.loading import put_fakes
from rehearsal.meta_build import build, enable_checkpointing, read_config, set_cache
from rehearsal.optimizers import make_optimizer
from rehearsal.quantised import patch_4bit, quantise
from rehearsal.recorder import make_recorder, make_routing
from rehearsal.step import ddp_buckets, steps

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if __name__ == "__main__":
    # bitsandbytes and triton look for a GPU; a rehearsal must not touch one that is busy.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def rehearse(job, say):
    """All steps of one job, each said when it is done. Raises CannotRehearse with the reason."""
    began = time.time()
    import torch

    versions = {"torch": torch.__version__}
    import transformers

    versions["transformers"] = transformers.__version__
    plan = job["plan"]
    adapters = plan["method"] not in ("full", "freeze")
    if adapters:
        import peft

        versions["peft"] = peft.__version__
    say({"step": "imported", "versions": versions, "seconds": round(time.time() - began, 2)})
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_num_threads(1)
    began = time.time()
    config = read_config(transformers, job)
    recorder = make_watcher(torch, job, config)
    model, used, backends = built_model(torch, transformers, job, config, recorder)
    whole = sum(p.numel() for p in model.parameters())
    divided = (
        plan.get("parallel") == "fsdp_full" and plan.get("gpus", 1) > 1
    )  # its gathering runs ahead of the layers: all of them run
    chosen, stacks = some_layers(torch, model, 1 << 20 if divided else job.get("layers"))
    say(
        {
            "step": "built",
            "class": type(model).__name__,
            "parameters": whole,
            "layers": chosen,
            "attention": used,
            "seconds": round(time.time() - began, 2),
        }
    )
    began = time.time()
    model, bnb, was_half = with_method(torch, model, plan, config)
    if divided:
        sharded.upcast_trained(torch, model, plan)
    owners = owners_of(stacks)
    mesh = sharded.make_mesh(plan) if divided else None
    mode = contextlib.nullcontext() if recorder.real else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        recorder.mark("load", 0, -1)
        if divided:
            put_fakes(torch, model, sharded.Muted(), plan, owners, was_half)
            sharded.divide(torch, plan, model, recorder, owners, stacks, mesh)
        else:
            put_fakes(torch, model, recorder, plan, owners, was_half)
        if bnb is not None and recorder.as_cuda:
            patch_4bit(torch, bnb, recorder, plan)
        checkpointing = plan["gradient_checkpointing"]
        if checkpointing:
            enable_checkpointing(model, plan, adapters)
        set_cache(model, bool(plan.get("use_cache")) and not checkpointing)
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise CannotRehearse("nothing is trainable under this plan")
        say(
            {
                "step": "prepared",
                "trainable": count_trainable(model, owners),
                "seconds": round(time.time() - began, 2),
            }
        )
        if plan.get("parallel") == "ddp" and plan.get("gpus", 1) > 1:
            ddp_buckets(recorder, trainable)
        began = time.time()
        optimizer, optimizer_name = make_optimizer(torch, plan, recorder, trainable)
        steps(torch, plan, model, recorder, optimizer, trainable, stacks)
    say(
        {
            "step": "rehearsed",
            "events": recorder.events,
            "table": recorder.table,
            "grads": recorder.grad_ids,
            "flops": [[*place, count] for place, count in recorder.flops.items()],
            "optimizer": optimizer_name,
            "backends": backends,
            "seconds": round(time.time() - began, 2),
        }
    )


def make_watcher(torch, job, config):
    """The recorder of this job, told what vocabulary, experts and card it is for."""
    plan = job["plan"]
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def first(names, otherwise):
        return next((getattr(text, name) for name in names if getattr(text, name, None)), otherwise)

    experts = first(("num_local_experts", "num_experts", "n_routed_experts"), 0)
    routing = make_routing(torch, experts, first(("num_experts_per_tok", "moe_k"), 1), bool(plan.get("attention_mask")))
    recorder = make_recorder(torch)(getattr(text, "vocab_size", None), routing)
    recorder.real = bool(job.get("real"))
    recorder.as_cuda = not job.get("cpu")
    if recorder.as_cuda and not job.get("no_workspace"):
        recorder.workspace_bytes = 32 << 20 if capability_of(plan) >= 9.0 else 8519680
    if recorder.real:
        recorder.routing = lambda name, args: NotImplemented
    return recorder


def capability_of(plan):
    """Compute capability of the card that is meant; Ampere when the plan names none."""
    return float(plan.get("compute_capability") or 8.0)


def built_model(torch, transformers, job, config, recorder):
    """(model on the meta device, attention it really took, counts of the kernels that will run).

    torch is patched to do with memory what CUDA does.
    """
    plan = job["plan"]
    attention = plan["attention"]
    pinned = {"sdpa_math": "math", "sdpa_mem_efficient": "efficient", "sdpa_flash": "flash"}.get(attention)
    backends, flash_package, flash_dtype = attention_kernels.patch_attention(
        torch, recorder, capability_of(plan), pinned, recorder.as_cuda
    )
    half = plan["autocast"] or ("bf16" if plan["weight_dtype"] == "fp32" else plan["weight_dtype"])
    flash_dtype[0] = getattr(torch, DTYPES[half])
    if recorder.as_cuda:
        cuda_ways.patch_dropout(torch)
        cuda_ways.patch_softmax(torch)
    cuda_ways.patch_grouped_product(torch)
    cuda_ways.forget_fakes(transformers)
    flash = attention == "flash_attention_2"
    wanted = "eager" if attention == "eager" else "sdpa"
    if flash and not attention_kernels.has_attention_interface():
        wanted = "flash_attention_2"
        attention_kernels.allow_flash_classes(transformers)
    model, used = build(torch, transformers, job, config, wanted)
    if used == "flash_attention_2":
        attention_kernels.patch_flash_classes(torch, model, flash_package)
    elif flash and used == "sdpa":
        attention_kernels.use_flash_package(model, flash_package)
        used = "flash_attention_2"
    if pinned == "efficient":
        attention_kernels.repeat_keys_and_values(transformers)
    model.train()
    with contextlib.suppress(Exception):
        model.tie_weights()
    return model, used, backends


def with_method(torch, model, plan, config):
    """(model with the plan's quantised layers and adapters, bitsandbytes or None, {path of what was in half before}).

    Still on the meta device. The third are parameters that the k-bit preparation turned into float32.
    """
    bnb = None
    if plan["method"] in ("qlora", "lora_int8", "lora_gptq", "lora_awq"):
        bnb = quantise(torch, model, plan, config)
    changed = set()
    if plan["method"] in ("qlora", "lora_int8") and plan["kbit_preparation"]:
        before = {name: p.dtype for name, p in model.named_parameters()}
        prepare_kbit(torch, model, plan)
        after = dict(model.named_parameters())
        changed = {id(after[name]) for name in before if after[name].dtype != before[name]}
    if plan["method"] not in ("full", "freeze"):
        model = add_adapters(torch, model, plan)
    if plan["trl_casting"]:
        cast_like_trl(torch, model)
    was_half = {
        path + "." + name
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in changed
    }
    return model, bnb, was_half


def main():
    results, job_path = sys.argv[1], sys.argv[2]
    with open(job_path, encoding="utf-8") as stream:
        job = json.load(stream)
    label = {}

    def say(line):
        line = dict(line, **label)
        with open(results, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()

    import warnings

    warnings.filterwarnings("ignore")
    if "jobs" in job:
        return many(job["jobs"], say, label)
    return one(job, say)


def many(jobs, say, label):
    """Several rehearsals after one import, each in a fork: they patch torch and leave modules behind."""
    if not hasattr(os, "fork"):
        raise SystemExit("several rehearsals in one child need os.fork")
    import torch  # noqa: F401
    import transformers

    for name in ("AutoConfig", "AutoModelForCausalLM"):
        getattr(transformers, name)
    with contextlib.suppress(Exception):
        import peft  # noqa: F401
    with contextlib.suppress(Exception):
        import bitsandbytes  # noqa: F401
    for number, job in enumerate(jobs):
        child = os.fork()
        if child == 0:
            label["job"] = number
            code = 6
            try:
                code = one(job, say)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status and status not in (4 << 8, 5 << 8):
            label["job"] = number
            say({"step": "failed", "reason": "the rehearsal ended with status %s" % status})
            label.clear()
    return 0


def one(job, say):
    try:
        rehearse(job, say)
    except CannotRehearse as reason:
        say({"step": "failed", "reason": str(reason)})
        return 4
    except Exception as error:
        import traceback

        say(
            {
                "step": "failed",
                "reason": "%s: %s" % (type(error).__name__, str(error).splitlines()[0][:300] if str(error) else ""),
                "trace": traceback.format_exc()[-3000:],
            }
        )
        return 5
    return 0


if __name__ == "__main__":
    sys.exit(main())
