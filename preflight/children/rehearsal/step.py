"""Two steps of the training loop as the Trainer runs it, with marks in the trace."""

import gc

from rehearsal import DTYPES
from rehearsal.cuda_ways import patch_autocast
from rehearsal.layers import hooks
from rehearsal.loss import own_loss


def inputs_for(torch, plan):
    batch, length = plan["micro_batch"], plan["sequence_tokens"]
    ids = torch.zeros((batch, length), dtype=torch.int64)
    inputs = {"input_ids": ids}
    labels = torch.zeros((batch, length), dtype=torch.int64)
    if plan.get("attention_mask"):
        inputs["attention_mask"] = torch.ones((batch, length), dtype=torch.int64)
    if plan["loss"] == "classification":
        labels = torch.zeros((batch,), dtype=torch.int64)
    return inputs, labels


def ddp_buckets(recorder, trainable):
    """What DistributedDataParallel allocates when it wraps the model: flat copies of all gradients, by bucket.

    Gradients stay tensors of their own, as accelerate leaves gradient_as_bucket_view off. Source: torch
    nn/parallel/distributed.py and csrc/distributed/c10d/reducer.cpp.
    """
    recorder.mark("load", 0, -1)
    for parameter in trainable:
        owner = recorder.owner_of.get(recorder.id_of(parameter), -1)
        label = recorder.what("gradients", "bucket of DDP", list(parameter.shape), str(parameter.dtype)[6:])
        recorder.add(parameter.numel() * parameter.element_size(), label, owner)


def steps(torch, plan, model, recorder, optimizer, trainable, stacks):
    """Run two steps under the recorder; the ids of the gradients are in `recorder.grad_ids` afterwards."""
    clock = {"phase": "fwd", "step": 0}
    hooks(torch, stacks, recorder, clock)
    loss_of = own_loss(torch, plan, model, recorder)
    autocast = plan["autocast"]
    dtype = getattr(torch, DTYPES[autocast]) if autocast else None
    recorder.grad_ids = []
    recorder.mark("input", 0, -1)
    inputs, labels = inputs_for(torch, plan)
    for tensor in [*inputs.values(), labels]:
        recorder.watch(tensor, recorder.what("activation", "input", list(tensor.shape), "int64"))
    held = None
    gc.collect()
    gc.disable()  # reference cycles would be collected at moments that the real run does not share
    micro_steps = 2 if plan["gradient_accumulation"] > 1 else 1
    if autocast and recorder.as_cuda:
        patch_autocast(torch)
    with recorder:
        for step in range(2):
            clock["step"] = step
            for _ in range(micro_steps):
                clock["phase"] = "fwd"
                recorder.mark("fwd", step, -1)
                with torch.autocast("cpu", dtype=dtype, enabled=autocast is not None):
                    if loss_of is None:
                        out = model(**inputs, labels=labels)
                        loss = out.loss
                    else:
                        loss, out = loss_of(inputs, labels)
                if autocast and out is not None:
                    # accelerate's ConvertOutputsToFp32 around forward
                    out = {
                        k: v.float()
                        if isinstance(v, torch.Tensor) and v.dtype in (torch.float16, torch.bfloat16)
                        else v
                        for k, v in out.items()
                    }
                held = out if plan["holds_outputs"] else None
                del out
                clock["phase"] = "bwd"
                recorder.mark("bwd", step, -1)
                loss.backward()
                recorder.mark("bwd", step, -1)
                del loss
            for parameter in trainable:
                if parameter.grad is not None:
                    ident = recorder.id_of(parameter.grad)
                    if ident is not None:
                        recorder.grad_ids.append(ident)
                        owner = recorder.owner_of.get(recorder.id_of(parameter))
                        recorder.owner_of[ident] = owner
            if plan["grad_clip"]:
                recorder.mark("clip", step, -1)
                norm = torch.nn.utils.clip_grad_norm_(trainable, plan["grad_clip"], foreach=True)
                del norm
            recorder.mark("opt", step, -1)
            optimizer.step()
            recorder.mark("zero", step, -1)
            if not plan["holds_across_steps"]:
                held = None
            optimizer.zero_grad()
    del held
    gc.enable()
