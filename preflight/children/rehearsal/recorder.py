"""Sees every operation of torch and keeps an event for every storage that appears and for every one that goes."""

import math
import weakref

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")


def make_recorder(torch):
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    aten = torch.ops.aten

    class Recorder(TorchDispatchMode):
        """Sees every operation; keeps an event for every storage that appears and for every one that goes."""

        def __init__(self, vocabulary, routing):
            super().__init__()
            self.events = []
            self.live = {}  # storage -> (id, bytes)
            self.names = {}
            self.table = []
            self.owner_of = {}  # id -> owner
            self.next_id = 0
            self.owner = -1
            self.by_input = False
            self.vocabulary = vocabulary
            self.routing = routing
            self.flops = {}
            self.place = ("load", 0, -1)
            self.workspaces = set()
            self.device = "cpu"
            self.real = False
            self.as_cuda = True
            self.workspace_bytes = 0
            self.paused = False

        # -- marks and direct events

        def mark(self, phase, step, layer):
            self.place = (phase, step, layer)
            self.owner = layer
            self.by_input = phase in ("clip", "opt", "zero")
            self.events.append([phase, step, layer])

        def what(self, *parts):
            key = "|".join(str(part) for part in parts)
            if key not in self.names:
                self.names[key] = len(self.table)
                self.table.append(key)
            return self.names[key]

        def add(self, size, what, owner=None):
            """An allocation that no operation of torch shows; returns its id."""
            self.next_id += 1
            owner = self.owner if owner is None else owner
            self.owner_of[self.next_id] = owner
            self.events.append([self.next_id, int(size), what, owner])
            return self.next_id

        def drop(self, ident):
            self.events.append([ident])

        def watch(self, tensor, what, owner=None):
            """Follow the storage of this tensor from now on; its id, None when it is known already or empty."""
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.live:
                return None
            size = storage.nbytes()
            if size == 0:
                return None
            ident = self.add(size, what, owner)
            self.live[key] = (ident, size)
            weakref.finalize(storage, self.gone, key, ident)
            return ident

        def gone(self, key, ident):
            known = self.live.get(key)
            if known is not None and known[0] == ident:
                del self.live[key]
                self.events.append([ident])

        def resized(self, storage, size):
            """A storage that was shrunk to nothing ends; one that grew out of nothing begins."""
            key = storage._cdata
            known = self.live.pop(key, None)
            if known is not None:
                self.events.append([known[0]])
            if size:
                ident = self.add(size, self.what("activation", "gathered weights", [size], "byte"))
                self.live[key] = (ident, size)
                weakref.finalize(storage, self.gone, key, ident)

        def id_of(self, tensor):
            tensor = getattr(tensor, "_local_tensor", tensor)  # of a divided tensor the part that lies here
            known = self.live.get(tensor.untyped_storage()._cdata)
            return None if known is None else known[0]

        # -- operations

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if self.paused:
                return func(*args, **kwargs)
            if any(kind.__name__ == "DTensor" for kind in types):
                return NotImplemented  # taken apart first: the operations on its parts come here again
            name = func._schema.name
            if name in ("aten::nonzero", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"):
                replaced = self.routing(name, args)
                if replaced is not NotImplemented:
                    for tensor in tree_iter(replaced):
                        if isinstance(tensor, torch.Tensor):
                            self.watch(tensor, self.what("activation", "aten.nonzero", list(tensor.shape), "int64"))
                    return replaced
            if name in MATMULS:
                self.matmul(name, args)
            extra = None
            if name == "aten::_softmax_backward_data" and self.as_cuda:
                # CUDA writes grad * output to a temporary first (aten/native/cuda/SoftMax.cu)
                size = args[0].numel() * args[0].element_size()
                extra = self.add(size, self.what("activation", "softmax backward", list(args[0].shape), "temporary"))
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                self.see(out, name, args)
            elif out is not None:
                for index, tensor in enumerate(tree_iter(out)):
                    if isinstance(tensor, torch.Tensor):
                        self.see(tensor, name, args, index)
            if extra is not None:
                self.drop(extra)
            return out

        def see(self, tensor, name, args, index=0):
            storage = tensor.untyped_storage()
            if storage._cdata in self.live:
                return
            owner = None
            if self.by_input:
                owner = self.input_owner(args, index)
            phase = self.place[0]
            shape = list(tensor.shape)
            kind = "activation"
            if phase in ("opt", "clip", "zero"):
                kind = "optimizer"
                if tensor.dim() == 0 and owner is None:
                    return  # step counters and loop scalars: host memory in the real run
            elif shape and shape[-1] == self.vocabulary and len(shape) > 1:
                kind = "logits"
            self.watch(tensor, self.what(kind, name, shape, str(tensor.dtype)[6:]), owner)

        def input_owner(self, args, index):
            for argument in args:
                if isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], torch.Tensor):
                    argument = argument[index] if index < len(argument) else argument[0]
                if isinstance(argument, torch.Tensor):
                    ident = self.id_of(argument)
                    if ident is not None:
                        return self.owner_of.get(ident)
            return None

        def matmul(self, name, args):
            thread = "backward" if self.place[0] == "bwd" else "forward"
            if self.workspace_bytes and thread not in self.workspaces:
                # cuBLAS keeps one workspace per handle; autograd's thread has a handle of its own.
                self.workspaces.add(thread)
                self.add(
                    self.workspace_bytes, self.what("cuda", "cublas workspace", [self.workspace_bytes], "byte"), -1
                )
            shapes = [argument.shape for argument in args if isinstance(argument, torch.Tensor)]
            if name == "aten::addmm" or name == "aten::baddbmm":
                shapes = shapes[1:]
            if len(shapes) >= 2:
                self.count(2 * math.prod(shapes[0]) * shapes[1][-1])

        def count(self, flops):
            self.flops[self.place] = self.flops.get(self.place, 0) + int(flops)

    del aten
    return Recorder


def make_routing(torch, experts, per_token, padded):
    """Stand-ins for the operations whose result depends on data.

    Tokens are spread evenly over the experts; a mask has padding in it only when the plan says so.
    """

    def routing(name, args):
        mask = args[0]
        if name == "aten::nonzero":
            if mask.dim() and mask.shape[0] == experts and mask.numel() <= experts * 8:
                found = experts
            elif experts:
                found = -(-mask.numel() * 1 // experts)
                if mask.dim() >= 2 and mask.shape[0] == per_token:
                    found = -(-mask.shape[-1] * per_token // experts)
            else:
                found = mask.numel()
            return torch.empty((found, mask.dim()), dtype=torch.int64)
        if name == "aten::equal":
            return False
        if mask.dtype == torch.bool:
            return not padded
        return 1.0 if mask.dtype.is_floating_point else 0  # 1.0: an optimizer's step counter

    return routing
