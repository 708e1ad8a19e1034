"""FSDP on one rank of a group that exists in name only: torch's fake process group moves nothing and allocates all."""

from rehearsal import DTYPES


def local(tensor):
    """The part of a divided tensor that lies here; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


class Muted:
    """In place of the recorder while the whole model stands there before it is divided: no GPU ever holds it so."""

    real, device, as_cuda = False, "cpu", True

    def what(self, *parts):
        return 0

    def add(self, size, what, owner=None):
        return 0

    def drop(self, ident):
        pass

    def watch(self, tensor, what, owner=None):
        return None


def upcast_trained(torch, model, plan):
    """Trained weights in float32 under mixed precision. Source: accelerate utils/fsdp_utils.py, fsdp2_prepare_model."""
    if plan["autocast"]:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.data = parameter.data.to(torch.float32)


def make_mesh(plan):
    """The mesh of all ranks; made before tensors are fake, because it holds numbers."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan["gpus"])
    return init_device_mesh("cpu", (plan["gpus"],))


def divide(torch, plan, model, recorder, owners, stacks, mesh):
    """fully_shard as accelerate calls it: each layer, the embedding, final norm and head, then the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    follow_resizing(torch, recorder)
    skip_bookkeeping(recorder)
    dtype = getattr(torch, DTYPES[plan["autocast"]]) if plan["autocast"] else None
    how = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if dtype else MixedPrecisionPolicy(),
    }
    for _, layers in stacks:
        for layer in layers:
            fully_shard(layer, reshard_after_forward=True, **how)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and embedding.weight is head.weight
    if not tied:
        fully_shard(embedding, reshard_after_forward=True, **how)
    tail = [module for module in ((embedding, head) if tied else (head,)) if module is not None]
    if tail:
        fully_shard(tail, reshard_after_forward=False, **how)
    fully_shard(model, **how)
    modules = {id(parameter): module for module in model.modules() for parameter in module._parameters.values()}
    for name, parameter in model.named_parameters():
        part = local(parameter)
        kind = "adapter" if parameter.requires_grad and plan["method"] != "full" else "static"
        label = recorder.what(kind, name.rsplit(".", 1)[-1], list(part.shape), str(part.dtype)[6:])
        recorder.watch(part, label, owners.get(id(modules[id(parameter)]), -1))


def follow_resizing(torch, recorder):
    """FSDP gives gathered weights back by shrinking their storage to nothing, and grows it again."""
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        result = original(storage, size)
        recorder.resized(storage, size)
        return result

    torch.UntypedStorage.resize_ = resize_


def skip_bookkeeping(recorder):
    """DTensor works out the shape of a result on stand-ins of the whole tensors, which no GPU ever holds."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    for name, function in list(vars(ShardingPropagator).items()):
        if "tensor_meta" in name and callable(function):
            setattr(ShardingPropagator, name, _paused(recorder, function))


def _paused(recorder, function):
    def call(*args, **kwargs):
        before, recorder.paused = recorder.paused, True
        try:
            return function(*args, **kwargs)
        finally:
            recorder.paused = before

    return call
