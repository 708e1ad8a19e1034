"""One training step of the real stack on fake tensors: which storages are allocated and released, and when.

Runs alone in any interpreter that has torch and transformers (peft and bitsandbytes where the plan needs them).
argv: results file, job file (JSON: config, plan, and optionally model_dir, trust_remote_code, layers).
Writes one JSON line per finished step: imported, built, prepared, rehearsed; or failed with the step it failed in.

The trace is a list of events in order. An allocation is [id, bytes, what, owner]; a release is [id]; a mark
["phase", step, layer] says what follows. `layer` and `owner` number the layers that really ran, -1 is outside them.
Which layers of the whole model these stand for is in `layers`; preflight/memory/trace.py puts the others in.
"""

import contextlib
import gc
import json
import math
import os
import sys
import time
import weakref

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if __name__ == "__main__":
    # bitsandbytes and triton look for a GPU; a rehearsal must not touch one that is busy.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

MIN_LAYERS = 4
LINEAR_4BIT_BLOCK = 64


class CannotRehearse(Exception):
    """The reason in one line."""


# ---------------------------------------------------------------------------------------------------------------------
# recording


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

        def id_of(self, tensor):
            known = self.live.get(tensor.untyped_storage()._cdata)
            return None if known is None else known[0]

        # -- operations

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
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


MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")


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


# ---------------------------------------------------------------------------------------------------------------------
# what CUDA would do where the CPU does something else


def sdpa_backend(dtype, head_dim, value_dim, mask, gqa, capability, pinned):
    """flash, efficient or math: what scaled_dot_product_attention takes on a card of this compute capability.

    Source: pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (2.6 to 2.13), see facts/FACTS.md section 5.
    """
    if pinned in ("flash", "efficient", "math"):
        return pinned
    half = dtype in ("float16", "bfloat16")
    if half and capability >= 8.0 and not mask and head_dim == value_dim and head_dim <= 256:
        return "flash"
    if gqa or (dtype == "bfloat16" and capability < 8.0):
        return "math"
    if dtype in ("float16", "bfloat16", "float32") and head_dim % (8 if half else 4) == 0:
        return "efficient"
    return "math"


def patch_attention(torch, recorder, capability, pinned, as_cuda):
    functional = torch.nn.functional

    class Fused(torch.autograd.Function):
        """What the fused kernels keep and allocate: output, log-sum-exp; in backward their float32 accumulators."""

        @staticmethod
        def forward(ctx, query, key, value, kind):
            batch, heads, rows, _ = query.shape
            out = torch.empty((batch, rows, heads, value.shape[-1]), dtype=query.dtype).transpose(1, 2)
            rounded = -(-rows // 32) * 32 if kind == "efficient" else rows
            lse = torch.empty((batch, heads, rounded), dtype=torch.float32)
            ctx.kind = kind
            ctx.save_for_backward(query, key, value, out, lse)
            recorder.count(4 * batch * heads * rows * key.shape[2] * query.shape[-1] / 2)
            return out

        @staticmethod
        def backward(ctx, grad):
            query, key, value = ctx.saved_tensors[:3]
            batch, heads, rows, dim = query.shape
            half = query.dtype in (torch.float16, torch.bfloat16)
            recorder.count(10 * batch * heads * rows * key.shape[2] * dim / 2)
            if ctx.kind == "efficient":
                grads = [torch.empty_like(t) for t in (query, key, value)]
                delta = torch.empty((batch, heads, rows), dtype=torch.float32)
                work = torch.empty((batch, heads, -(-rows // 64) * 64, dim), dtype=torch.float32) if half else None
                del delta, work
                return grads[0], grads[1], grads[2], None
            grads = [torch.empty_like(t) for t in (query, key, value)]
            rounded = -(-rows // 128) * 128
            wide = -(-dim // 32) * 32 if dim <= 128 else -(-dim // 64) * 64
            delta = torch.empty((batch, heads, rounded), dtype=torch.float32)
            accumulator = torch.empty((batch, heads, rounded, wide), dtype=torch.float32)
            if key.shape[1] != heads:
                wide_k = torch.empty((batch, key.shape[2], heads, dim), dtype=key.dtype)
                wide_v = torch.empty((batch, value.shape[2], heads, value.shape[-1]), dtype=key.dtype)
                del wide_k, wide_v
            del delta, accumulator
            return grads[0], grads[1], grads[2], None

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        dtype = query.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
        gqa = enable_gqa and query.shape[1] != key.shape[1]
        kind = sdpa_backend(
            str(dtype)[6:], query.shape[-1], value.shape[-1], attn_mask is not None, gqa, capability, pinned
        )
        backends[kind] = backends.get(kind, 0) + 1
        if kind == "math":
            with torch.autocast("cpu", enabled=False):
                return torch.ops.aten._scaled_dot_product_attention_math(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa
                )[0]
        if gqa and kind == "efficient":
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return Fused.apply(query, key, value, kind)

    backends = {}
    if as_cuda:
        functional.scaled_dot_product_attention = attention

    def flash_package(module, query, key, value, attention_mask, *rest, **options):
        """transformers' call of the flash-attn package: half precision inputs, K and V not repeated."""
        dtype = query.dtype
        if dtype == torch.float32:
            if torch.is_autocast_enabled("cpu"):
                dtype = torch.get_autocast_dtype("cpu")
            else:
                dtype = flash_dtype[0]
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        backends["flash_attention_2"] = backends.get("flash_attention_2", 0) + 1
        return Fused.apply(query, key, value, "flash").transpose(1, 2), None

    flash_dtype = [torch.bfloat16]
    return backends, flash_package, flash_dtype


def patch_dropout(torch):
    """CUDA's dropout keeps a mask of one byte per element; the CPU's keeps one of the input's width."""

    def dropout(input, p=0.5, training=True, inplace=False):
        if not training or p == 0.0:
            return input
        return torch.native_dropout(input, p, True)[0]

    torch.nn.functional.dropout = dropout


def patch_softmax(torch):
    """On CUDA a float16 softmax with a float32 result is one kernel, which needs no float32 copy of its input.

    Source: pytorch aten/src/ATen/native/SoftMax.cpp, softmax with dtype.
    """
    plain = torch.nn.functional.softmax

    class HalfToFloat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input):
            out = torch.empty(input.shape, dtype=torch.float32)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            temporary = torch.empty(grad.shape, dtype=torch.float32)
            result = torch.empty(grad.shape, dtype=torch.float16)
            del temporary
            return result

    def softmax(input, dim=None, _stacklevel=3, dtype=None):
        if dtype is torch.float32 and input.dtype is torch.float16:
            return HalfToFloat.apply(input)
        return plain(input, dim=dim, dtype=dtype)

    torch.nn.functional.softmax = softmax


def patch_autocast(torch):
    """Add CUDA autocast's float32 list to the CPU's, which leaves these operations in half precision.

    Source: pytorch aten/src/ATen/autocast_mode.h, AT_FORALL_FP32. Patched functions, because a function mode is off
    inside backward, where checkpointed layers run again.
    """
    functional, tensor = torch.nn.functional, torch.Tensor
    names = ("softmax", "log_softmax", "pow", "rsqrt", "exp", "log", "cumsum", "norm", "prod", "sum", "reciprocal")
    places = [(place, name) for place in (torch, functional, tensor) for name in names]
    places += [(tensor, "__pow__"), (torch, "layer_norm")]
    places += [
        (functional, n) for n in ("layer_norm", "cross_entropy", "nll_loss", "group_norm", "softplus", "mse_loss")
    ]
    half = (torch.float16, torch.bfloat16)

    def wrapped(function):
        def in_float32(*args, **kwargs):
            if torch.is_autocast_enabled("cpu"):
                args = tuple(a.float() if isinstance(a, torch.Tensor) and a.dtype in half else a for a in args)
            return function(*args, **kwargs)

        return in_float32

    for place, name in places:
        function = getattr(place, name, None)
        if function is not None:
            setattr(place, name, wrapped(function))


# ---------------------------------------------------------------------------------------------------------------------
# building the model


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def read_config(transformers, job):
    if job.get("trust_remote_code") and job.get("model_dir"):
        return transformers.AutoConfig.from_pretrained(job["model_dir"], trust_remote_code=True)
    config = dict(job["config"])
    config.pop("quantization_config", None)
    kind = config.pop("model_type", None)
    if not kind:
        raise CannotRehearse("config.json names no model_type")
    if config.get("auto_map"):
        config.pop("auto_map")
    try:
        return transformers.AutoConfig.for_model(kind, **config)
    except ValueError:
        raise CannotRehearse(
            "transformers %s does not know the model type %s" % (transformers.__version__, kind)
        ) from None


def model_class(transformers, job, config):
    """The class that is trained: the one that config.json names, else by what the configuration is registered for."""
    if job["plan"].get("loss") == "classification":
        return transformers.AutoModelForSequenceClassification
    if job.get("trust_remote_code") and job.get("model_dir"):
        return transformers.AutoModelForCausalLM
    names = job["config"].get("architectures") or ()
    for name in names:
        found = getattr(transformers, str(name), None)
        if found is not None and hasattr(found, "_from_config"):
            heads = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
            if str(name).endswith(heads):
                return found
    for auto in (
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForImageTextToText",
        "AutoModelForVision2Seq",
        "AutoModelForMaskedLM",
    ):
        chosen = getattr(transformers, auto, None)
        if chosen is not None and type(config) in chosen._model_mapping:
            return chosen
    raise CannotRehearse(
        "transformers %s has no trainable class for %s" % (transformers.__version__, type(config).__name__)
    )


def build(torch, transformers, job, config, attention):
    plan = job["plan"]
    dtype = getattr(torch, DTYPES[plan["weight_dtype"]])
    cls = model_class(transformers, job, config)
    make = cls.from_config if cls.__name__.startswith("AutoModel") else cls._from_config
    options = (
        {"trust_remote_code": True} if job.get("trust_remote_code") and cls.__name__.startswith("AutoModel") else {}
    )
    trouble = None
    for name in (attention, "eager"):
        for key in ("dtype", "torch_dtype"):
            try:
                with torch.device("meta"):
                    return make(config, attn_implementation=name, **{key: dtype}, **options), name
            except TypeError as error:
                trouble = error
            except ValueError as error:
                if name == "eager":
                    raise
                trouble = error
                break
    raise trouble


def stacks_of(torch, model):
    """The outermost lists of layers: [(path, ModuleList)], those of at least two layers that hold parameters."""
    found = []

    def walk(module, path):
        for name, child in module.named_children():
            here = path + "." + name if path else name
            if (
                isinstance(child, torch.nn.ModuleList)
                and len(child) > 1
                and all(any(True for _ in item.parameters()) for item in child)
            ):
                found.append((here, child))
            else:
                walk(child, here)

    walk(model, "")
    return found


def layer_signature(layer):
    parts = [type(layer).__name__]
    for name in ("layer_type", "attention_type", "is_sliding", "layer_block_type", "block_type"):
        if isinstance(getattr(layer, name, None), (str, bool, int)):
            parts.append((name, getattr(layer, name)))
    for name, child in layer.named_children():
        parts.append((name, type(child).__name__))
        for key in ("is_sliding", "sliding_window", "layer_type", "is_local"):
            value = getattr(child, key, None)
            if isinstance(value, (str, bool, int)):
                parts.append((name, key, value))
    parts.extend((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return tuple(parts)


def choose_layers(kinds, limit=None):
    """Which layers run: the first few, until each kind stood between two others, and the last."""
    total = len(kinds)
    if total <= MIN_LAYERS + 2 or (limit is not None and limit >= total):
        return list(range(total))
    wanted = set(kinds[1:-1])
    end = MIN_LAYERS - 1
    while end < total - 1 and set(kinds[1 : end - 1]) < wanted:
        end += 1
    if limit is not None:
        end = max(end, limit - 1)
    return list(range(total)) if end >= total - 2 else [*range(end), total - 1]


def quantise(torch, model, plan, config):
    """Put bitsandbytes' own 4-bit or 8-bit layers in place of the linear ones, as loading does."""
    method = plan["method"]
    if method in ("lora_gptq", "lora_awq"):
        return quantise_gptq(torch, model, plan)
    try:
        import bitsandbytes as bnb
    except Exception as error:
        raise CannotRehearse("bitsandbytes cannot be imported: %s" % error) from None
    compute = getattr(
        torch, DTYPES[plan["autocast"] or (plan["weight_dtype"] if plan["weight_dtype"] != "fp32" else "bf16")]
    )
    keep = head_names(model) if not plan.get("quantise_head") else ()
    conv1d = conv1d_class()
    exact = replaces_only_linear_itself()
    wide = set(getattr(model, "_keep_in_fp32_modules", None) or ())  # T5's `wo`: loading leaves it out
    for name, module in list(model.named_modules()):
        linear = type(module) is torch.nn.Linear if exact else isinstance(module, torch.nn.Linear)
        if not (linear or (conv1d and isinstance(module, conv1d))):
            continue
        if name in keep or any(name.startswith(k + ".") for k in keep) or wide.intersection(name.split(".")):
            continue
        rows, columns = (module.out_features, module.in_features) if linear else (module.nf, module.weight.shape[0])
        with torch.device("meta"):
            if method == "qlora":
                new = bnb.nn.Linear4bit(
                    columns,
                    rows,
                    module.bias is not None,
                    compute_dtype=compute,
                    compress_statistics=bool(plan["double_quant"]),
                    quant_type=plan["quant_type"],
                )
            else:
                new = bnb.nn.Linear8bitLt(columns, rows, module.bias is not None, has_fp16_weights=False, threshold=6.0)
        if module.bias is not None:
            new.bias = module.bias
        new.source_dtype = module.weight.dtype
        new.requires_grad_(False)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    if method == "qlora":
        model.is_loaded_in_4bit = True
    else:
        model.is_loaded_in_8bit = True
    return bnb


def replaces_only_linear_itself():
    """Whether the installed transformers leaves subclasses of nn.Linear (Falcon's) unquantised, as 5.x does."""
    import inspect

    with contextlib.suppress(Exception):
        from transformers.integrations import bitsandbytes as integration

        return "type(module) is nn.Linear" in inspect.getsource(integration)
    return False


def conv1d_class():
    with contextlib.suppress(Exception):
        from transformers.pytorch_utils import Conv1D

        return Conv1D
    return None


def head_names(model):
    """Paths that loading leaves unquantised: the output head (and what is tied to the embedding)."""
    names = {"lm_head"}
    with contextlib.suppress(Exception):
        head = model.get_output_embeddings()
        names.update(name for name, module in model.named_modules() if module is head)
    return names


def patch_4bit(torch, bnb, recorder, plan):
    """Linear layers of bitsandbytes do on fake tensors what their CUDA kernels do with memory.

    Beyond a few tokens the forward pass writes the dequantised weight and calls a plain product; backward the same.
    Source: bitsandbytes 0.43 to 0.50, autograd/_functions.py (MatMul4Bit), backends/cuda/ops.py (gemm_4bit).
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, state):
            ctx.state = state
            full = dequantised(state, x.dtype)
            return torch.nn.functional.linear(x, full, bias)

        @staticmethod
        def backward(ctx, grad):
            full = dequantised(ctx.state, grad.dtype)
            return torch.matmul(grad, full), None, None, None

    def dequantised(state, dtype):
        if state.nested:
            blocks = -(-state.shape[0] * state.shape[1] // LINEAR_4BIT_BLOCK)
            scale = torch.empty((blocks,), dtype=torch.float32)
            full = torch.empty(state.shape, dtype=state.dtype)
            del scale
        else:
            full = torch.empty(state.shape, dtype=state.dtype)
        return full if state.dtype == dtype else full.to(dtype)

    def matmul_4bit(A, B, quant_state=None, out=None, bias=None):
        if torch.is_autocast_enabled("cpu"):
            A = A.to(torch.get_autocast_dtype("cpu"))
            bias = None if bias is None else bias.to(A.dtype)
        with torch.autocast("cpu", enabled=False):
            return Product.apply(A, B, bias, quant_state)

    bnb.matmul_4bit = matmul_4bit
    bnb.autograd._functions.matmul_4bit = matmul_4bit

    class Product8(torch.autograd.Function):
        """LLM.int8(): activations are quantised by row, the product is int32 and dequantised; backward dequantises."""

        @staticmethod
        def forward(ctx, x, weight, bias):
            half = x if x.dtype == torch.float16 else x.to(torch.float16)
            rows = torch.empty(half.shape, dtype=torch.int8)
            scale = torch.empty(half.shape[:-1], dtype=torch.float32)
            product = torch.empty((*half.shape[:-1], weight.shape[0]), dtype=torch.int32)
            result = torch.empty(product.shape, dtype=torch.float16)
            ctx.dtype, ctx.weight = x.dtype, weight
            del rows, scale, product
            return result if x.dtype == torch.float16 else result.to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            full = torch.empty(ctx.weight.shape, dtype=grad.dtype)
            return torch.matmul(grad, full).to(ctx.dtype), None, None

    def forward_8bit(self, x):
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        return Product8.apply(x, self.weight, self.bias)

    if plan["method"] == "lora_int8":
        bnb.nn.Linear8bitLt.forward = forward_8bit


def quantise_gptq(torch, model, plan):
    """Stand-ins for GPTQ and AWQ layers: packed int32 weights, scales, zeros, group indices."""
    half = torch.float16

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            ctx.dtype = x.dtype
            out = torch.empty((*x.shape[:-1], module.out_features), dtype=half)
            return out

        @staticmethod
        def backward(ctx, grad):
            return torch.empty((*grad.shape[:-1], ctx.module.in_features), dtype=half).to(ctx.dtype), None

    class PackedLinear(torch.nn.Linear):
        """nn.Linear to the outside, so that adapters find it; its weight holds 8 values in an int32."""

        def __init__(self, source):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = source.in_features, source.out_features
            group = 128
            self.weight = torch.nn.Parameter(
                torch.empty((self.in_features // 8, self.out_features), dtype=torch.int32), requires_grad=False
            )
            groups = -(-self.in_features // group)
            self.register_buffer("scales", torch.empty((groups, self.out_features), dtype=half))
            self.register_buffer("qzeros", torch.empty((groups, self.out_features // 8), dtype=torch.int32))
            self.register_buffer("g_idx", torch.empty((self.in_features,), dtype=torch.int32))
            self.bias = source.bias

        def forward(self, x):
            dtype = x.dtype
            out = Product.apply(x.to(half), self)
            if self.bias is not None:
                out = out + self.bias.to(half)
            return out.to(dtype)

    keep = head_names(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name not in keep:
            with torch.device("meta"):
                new = PackedLinear(module)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
    model.quantization_method = "gptq"
    return None


def add_adapters(torch, model, plan):
    from peft import LoraConfig, get_peft_model

    method = plan["method"]
    targets = list(plan["target_modules"]) or "all-linear"
    kind = "CAUSAL_LM"
    if getattr(model.config, "is_encoder_decoder", False):
        kind = "SEQ_2_SEQ_LM"
    if plan.get("loss") == "classification":
        kind = "SEQ_CLS"
    if method == "ia3":
        from peft import IA3Config

        return get_peft_model(model, IA3Config(task_type=kind))
    if method == "prefix_tuning":
        from peft import PrefixTuningConfig

        return get_peft_model(model, PrefixTuningConfig(task_type=kind, num_virtual_tokens=plan["virtual_tokens"]))
    options = {}
    if plan.get("use_dora"):
        options["use_dora"] = True
    if plan.get("modules_to_save"):
        options["modules_to_save"] = list(plan["modules_to_save"])
    config = LoraConfig(
        r=plan["lora_rank"],
        lora_alpha=plan["lora_alpha"],
        lora_dropout=plan["lora_dropout"],
        target_modules=targets,
        task_type=kind,
        **options,
    )
    model = get_peft_model(model, config)
    wanted = getattr(torch, DTYPES[plan["adapter_dtype"]])
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != wanted and parameter.dtype.is_floating_point:
            parameter.data = parameter.data.to(wanted)
    return model


def prepare_kbit(torch, model, plan, recorder_events):
    """prepare_model_for_kbit_training of the installed peft, on the meta device; by hand when that fails."""
    try:
        from peft import prepare_model_for_kbit_training

        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    except Exception:
        for parameter in model.parameters():
            parameter.requires_grad = False
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.to(torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# loading


def owners_of(stacks):
    """Which running layer a module belongs to: {id(module): number}."""
    owners = {}
    number = 0
    for _, layers in stacks:
        for layer in layers:
            for module in layer.modules():
                owners[id(module)] = number
            number += 1
    return owners


def new_tensor(torch, recorder, shape, dtype):
    """A tensor of this shape: empty when only its size matters, small random numbers when it is used in earnest."""
    if recorder.real and dtype.is_floating_point and len(shape):
        return torch.randn(shape, dtype=torch.float32, device=recorder.device).mul_(0.02).to(dtype)
    return torch.zeros(shape, dtype=dtype, device=recorder.device)


def put_fakes(torch, model, recorder, plan, owners, source_dtypes):
    """A fake (or real, random) tensor in place of every parameter and buffer, in loading order; tied ones stay tied.

    The trace gets what loading allocates: 16-bit weights that are quantised one after the other, float32 copies.
    """
    seen = {}
    nested = bool(plan["double_quant"])
    upcasts = []
    later = []
    for path, module in model.named_modules():
        owner = owners.get(id(module), -1)
        bnb4 = (
            type(module).__name__ == "Linear4bit" and hasattr(module, "compute_dtype") and not hasattr(module, "lora_A")
        )
        bnb8 = type(module).__name__ == "Linear8bitLt" and not hasattr(module, "lora_A")
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in seen:
                module._parameters[name] = seen[id(parameter)]
                continue
            trained = parameter.requires_grad
            if bnb4 and name == "weight":
                fake = fake_4bit(torch, module, recorder, nested, owner)
            elif bnb8 and name == "weight":
                temporary = recorder.add(
                    parameter.numel() * 2, recorder.what("static", "loading", list(parameter.shape), "half"), owner
                )
                fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=torch.int8), requires_grad=False)
                recorder.watch(fake, recorder.what("static", path + ".weight", list(parameter.shape), "int8"), owner)
                scale = torch.empty((parameter.shape[0],), dtype=torch.float32)
                recorder.watch(scale, recorder.what("quantisation", "row scales", list(scale.shape), "float32"), owner)
                module.row_scales = scale
                fake.CB, fake.SCB = fake, scale
                recorder.drop(temporary)
            else:
                value = new_tensor(torch, recorder, parameter.shape, parameter.dtype)
                fake = torch.nn.Parameter(value, requires_grad=trained)
                del value
                kind = "adapter" if trained and plan["method"] != "full" else "static"
                label = recorder.what(
                    kind, name if owner >= 0 else path + "." + name, list(parameter.shape), str(parameter.dtype)[6:]
                )
                if trained and plan["method"] != "full":
                    later.append((fake, label, owner))
                elif source_dtypes.get(path + "." + name) is not None:
                    half = recorder.add(
                        parameter.numel() * 2, recorder.what("static", "loading", list(parameter.shape), "half"), owner
                    )
                    upcasts.append((fake, label, owner, half))
                else:
                    recorder.watch(fake, label, owner)
            seen[id(parameter)] = fake
            module._parameters[name] = fake
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                fake = new_tensor(torch, recorder, buffer.shape, buffer.dtype)
                module._buffers[name] = fake
                recorder.watch(
                    fake,
                    recorder.what(
                        "quantisation" if name in ("scales", "qzeros", "g_idx", "absmax") else "static",
                        name,
                        list(buffer.shape),
                        str(buffer.dtype)[6:],
                    ),
                    owner,
                )
    for fake, label, owner, half in upcasts:
        recorder.watch(fake, label, owner)
        recorder.drop(half)
    for fake, label, owner in later:
        recorder.watch(fake, label, owner)


def fake_4bit(torch, module, recorder, nested, owner):
    """Packed weight and its scales, with the transients of quantising at load.

    bitsandbytes 4-bit: block of 64 values, float32 scale each; nested: scales in 8 bit, blocks of 256 with float32
    scale, an offset and a table of 256. Source: bitsandbytes functional.py, quantize_4bit.
    """
    from bitsandbytes.functional import QuantState

    shape = torch.Size((module.out_features, module.in_features))
    count = shape[0] * shape[1]
    blocks = -(-count // LINEAR_4BIT_BLOCK)
    source, kind = module.source_dtype, module.weight.quant_type
    what = recorder.what
    width = torch.empty((), dtype=source).element_size()
    loading = recorder.add(count * width, what("static", "loading", list(shape), str(source)[6:]), owner)
    packed = torch.zeros((-(-count // 2), 1), dtype=torch.uint8, device=recorder.device)
    weight = torch.nn.Parameter(packed, requires_grad=False)
    recorder.watch(weight, what("static", "4-bit weight", list(shape), "4bit"), owner)

    def keep(size, dtype, label):
        tensor = torch.zeros((size,), dtype=dtype, device=recorder.device)
        recorder.watch(tensor, what("quantisation", label, [size], str(dtype)[6:]), owner)
        return tensor

    offset = state2 = None
    if nested:
        scale = recorder.add(blocks * 4, what("quantisation", "loading", [blocks], "float32"), owner)
        absmax = keep(blocks, torch.uint8, "absmax")
        state2 = QuantState(
            absmax=keep(-(-blocks // 256), torch.float32, "absmax of absmax"),
            code=keep(256, torch.float32, "table"),
            blocksize=256,
            dtype=torch.float32,
        )
        offset = keep(1, torch.float32, "offset").reshape(())
        recorder.drop(scale)
    else:
        absmax = keep(blocks, torch.float32, "absmax")
    weight.quant_state = QuantState(
        absmax=absmax,
        shape=shape,
        code=keep(16, torch.float32, "code"),
        blocksize=LINEAR_4BIT_BLOCK,
        quant_type=kind,
        dtype=source,
        offset=offset,
        state2=state2,
    )
    recorder.drop(loading)
    weight.compress_statistics, weight.quant_type = nested, kind
    weight.bnb_quantized = True
    module.quant_state = weight.quant_state
    return weight


# ---------------------------------------------------------------------------------------------------------------------
# the step


def make_optimizer(torch, plan, recorder, parameters, version):
    name = plan["optimizer"]
    if name is None:
        name = "adamw_torch_fused" if version >= (2, 8) else "adamw_torch"
    if name in ("adamw_torch", "adamw_torch_fused"):
        fused = name.endswith("fused")
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=not fused, fused=fused), name
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, foreach=True), name
    if name == "adafactor" and hasattr(torch.optim, "Adafactor"):
        with contextlib.suppress(Exception):
            from transformers.optimization import Adafactor

            return Adafactor(parameters, lr=1e-4, relative_step=False, scale_parameter=False), name
    return StateOnly(torch, name, parameters, recorder), name


class StateOnly:
    """An optimizer whose kernels work in place: only the states that it keeps are allocated.

    bitsandbytes 8-bit: tensors of 4096 elements or more keep one byte per element and state plus float32 scales per
    block of 256; paged: states of 1e5 elements or more live in unified memory, outside torch's figures.
    Source: bitsandbytes optim/optimizer.py, get_state_buffer and init_state.
    """

    def __init__(self, torch, name, parameters, recorder):
        self.torch, self.name, self.parameters, self.recorder = torch, name, parameters, recorder
        self.states = {}

    def step(self):
        for parameter in self.parameters:
            if parameter.grad is None or id(parameter) in self.states:
                continue
            ident = self.recorder.id_of(parameter)
            owner = self.recorder.owner_of.get(ident, -1)
            kept = []
            self.recorder.owner = owner
            for _ in range(1 if "lion" in self.name or self.name in ("muon",) else 2):
                for size, dtype in self.state(parameter):
                    tensor = self.torch.empty((size,), dtype=dtype)
                    label = self.recorder.what("optimizer", self.name + " state", [size], str(dtype)[6:])
                    kept.append(tensor)
                    self.recorder.watch(tensor, label, owner)
            self.states[id(parameter)] = kept
        self.recorder.owner = -1

    def state(self, parameter):
        torch, count = self.torch, parameter.numel()
        if "paged" in self.name and count >= 100000:
            return []
        if "8bit" in self.name and count >= 4096:
            return [(count, torch.uint8), (-(-count // 256), torch.float32)]
        return [(count, torch.float32)]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def own_loss(torch, plan, model, recorder):
    """How the loss is computed when the plan does not take the model's own: None, or a function of (inputs, labels)."""
    kind = plan["loss"]
    if kind in ("full_logits_fp32_upcast", "classification"):
        return None

    class InPlace(torch.autograd.Function):
        """A fused kernel: keeps log-sum-exp per row and writes the gradient over the logits."""

        @staticmethod
        def forward(ctx, logits):
            rows = torch.empty(logits.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(logits, rows)
            return torch.empty((), dtype=torch.float32)

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0].detach()

    class Linear(torch.autograd.Function):
        """Liger's fused linear cross-entropy: logits in pieces, the gradient made in the forward pass."""

        @staticmethod
        def forward(ctx, hidden, weight):
            rows, width = hidden.shape
            vocabulary = weight.shape[0]
            pieces = -(-vocabulary // width)
            size = 1 << max(0, (-(-rows // pieces) - 1)).bit_length()
            grad = torch.zeros_like(hidden)
            grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
            losses = torch.zeros((rows,), dtype=torch.float32)
            for start in range(0, rows, size):
                piece = hidden[start : start + size] @ weight.t()
                part = piece @ weight
                grad[start : start + size] = part
                if grad_weight is not None:
                    grad_weight.addmm_(piece.t(), hidden[start : start + size])
                del piece, part
            del losses
            ctx.grads = (grad, grad_weight)
            return torch.empty((), dtype=torch.float32)

        @staticmethod
        def backward(ctx, grad):
            return ctx.grads

    def base_and_head():
        inner = model
        while hasattr(inner, "base_model") and inner.base_model is not inner and hasattr(inner.base_model, "model"):
            if not hasattr(inner, "peft_config"):
                break
            inner = inner.base_model.model
        head = inner.get_output_embeddings()
        base = getattr(inner, inner.base_model_prefix)
        return base, head

    def loss(inputs, labels):
        if kind in ("fused_linear_ce", "chunked_lm_head_and_ce"):
            base, head = base_and_head()
            hidden = base(**inputs)[0]
            hidden = hidden.reshape(-1, hidden.shape[-1])
            weight = head.weight
            if torch.is_autocast_enabled("cpu"):
                hidden, weight = hidden.to(torch.get_autocast_dtype("cpu")), weight.to(torch.get_autocast_dtype("cpu"))
            elif hidden.dtype != weight.dtype:
                hidden = hidden.to(weight.dtype)
            with torch.autocast("cpu", enabled=False):
                return Linear.apply(hidden, weight), None
        out = model(**inputs)
        logits = out.logits if hasattr(out, "logits") else out[0]
        if kind == "fused_ce_on_full_logits":
            return InPlace.apply(logits), out
        flat = logits.view(-1, logits.shape[-1])
        if kind == "full_logits_chunked_ce":
            total = 0
            for piece, part in zip(flat.split(128), labels.view(-1).split(128)):
                total = total + torch.nn.functional.cross_entropy(piece, part)
            return total, out
        return torch.nn.functional.cross_entropy(flat, labels.view(-1)), out

    return loss


def inputs_for(torch, plan, config, model):
    batch, length = plan["micro_batch"], plan["sequence_tokens"]
    ids = torch.zeros((batch, length), dtype=torch.int64)
    inputs = {"input_ids": ids}
    labels = torch.zeros((batch, length), dtype=torch.int64)
    if plan.get("attention_mask"):
        inputs["attention_mask"] = torch.ones((batch, length), dtype=torch.int64)
    if plan["loss"] == "classification":
        labels = torch.zeros((batch,), dtype=torch.int64)
    return inputs, labels


def hooks(torch, stacks, recorder, clock):
    """Marks in the trace where a layer's forward (also its recomputation) and backward begin."""

    def before(number):
        def hook(module, args):
            if clock["phase"] == "fwd":
                recorder.mark("fwd", clock["step"], number)
            elif recorder.place[2] != number or recorder.place[0] != "bwd":
                recorder.mark("bwd", clock["step"], number)

        return hook

    def after(number, last):
        def hook(module, args, output):
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:

                def arrived(grad):
                    if recorder.place[2] != number or recorder.place[0] != "bwd":
                        recorder.mark("bwd", clock["step"], number)

                tensor.register_hook(arrived)
            if last and clock["phase"] == "fwd":
                recorder.mark("fwd", clock["step"], -1)

        return hook

    number = 0
    for _, layers in stacks:
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(before(number))
            layer.register_forward_hook(after(number, index == len(layers) - 1))
            number += 1


def rehearse(job, say):
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
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    began = time.time()
    config = read_config(transformers, job)
    attention = plan["attention"]
    capability = float(plan.get("compute_capability") or 8.0)
    pinned = {"sdpa_math": "math", "sdpa_mem_efficient": "efficient", "sdpa_flash": "flash"}.get(attention)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    experts = next(
        (getattr(text, n) for n in ("num_local_experts", "num_experts", "n_routed_experts") if getattr(text, n, None)),
        0,
    )
    per_token = next((getattr(text, n) for n in ("num_experts_per_tok", "moe_k") if getattr(text, n, None)), 1)
    recorder = make_recorder(torch)(
        vocabulary, make_routing(torch, experts, per_token, bool(plan.get("attention_mask")))
    )
    recorder.workspace_bytes = 0 if job.get("no_workspace") else (32 << 20 if capability >= 9.0 else 8519680)
    recorder.real = bool(job.get("real"))
    as_cuda = not job.get("cpu")
    if not as_cuda:
        recorder.workspace_bytes = 0
    if recorder.real:
        recorder.routing = lambda name, args: NotImplemented
    backends, flash_package, flash_dtype = patch_attention(torch, recorder, capability, pinned, as_cuda)
    flash_dtype[0] = getattr(
        torch, DTYPES[plan["autocast"] or ("bf16" if plan["weight_dtype"] == "fp32" else plan["weight_dtype"])]
    )
    if as_cuda:
        patch_dropout(torch)
        patch_softmax(torch)
    recorder.as_cuda = as_cuda
    patch_grouped_product(torch)
    forget_fakes(transformers)
    flash = attention == "flash_attention_2"
    wanted = "eager" if attention == "eager" else "sdpa"
    if flash and not has_attention_interface():
        wanted = "flash_attention_2"
        allow_flash_classes(transformers)
    model, used = build(torch, transformers, job, config, wanted)
    if used == "flash_attention_2":
        patch_flash_classes(torch, model, flash_package)
    elif flash and used == "sdpa":
        use_flash_package(model, flash_package)
        used = "flash_attention_2"
    if pinned == "efficient":
        repeat_keys_and_values(transformers)
    model.train()
    with contextlib.suppress(Exception):
        model.tie_weights()
    whole = sum(p.numel() for p in model.parameters())
    stacks = stacks_of(torch, model)
    chosen = []
    for path, layers in stacks:
        signatures = [layer_signature(layer) for layer in layers]
        distinct = {signature: index for index, signature in reversed(list(enumerate(signatures)))}
        kinds = [distinct[signature] for signature in signatures]
        run = choose_layers(kinds, job.get("layers"))
        chosen.append({"path": path, "kinds": kinds, "run": run})
        kept = [layers[i] for i in run]
        parent, _, child = path.rpartition(".")
        fresh = torch.nn.ModuleList(kept)
        setattr(model.get_submodule(parent), child, fresh)
    stacks = [(item["path"], model.get_submodule(item["path"])) for item in chosen]
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
    bnb = None
    if plan["method"] in ("qlora", "lora_int8", "lora_gptq", "lora_awq"):
        bnb = quantise(torch, model, plan, config)
    source_dtypes = {}
    if plan["method"] in ("qlora", "lora_int8") and plan["kbit_preparation"]:
        before = {name: p.dtype for name, p in model.named_parameters()}
        prepare_kbit(torch, model, plan, None)
        after = dict(model.named_parameters())
        changed = {id(after[name]) for name in before if after[name].dtype != before[name]}
        source = {id(p): True for p in model.parameters() if id(p) in changed}
    else:
        source = {}
    if adapters:
        model = add_adapters(torch, model, plan)
    if plan["trl_casting"]:
        cast_like_trl(torch, model)
    owners = owners_of(stacks)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in source:
                source_dtypes[path + "." + name] = True
    checkpointing = plan["gradient_checkpointing"]
    mode = contextlib.nullcontext() if recorder.real else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        recorder.mark("load", 0, -1)
        put_fakes(torch, model, recorder, plan, owners, source_dtypes)
        if bnb is not None and as_cuda:
            patch_4bit(torch, bnb, recorder, plan)
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
        began = time.time()
        optimizer, optimizer_name = make_optimizer(torch, plan, recorder, trainable, numbers)
        steps(torch, job, plan, model, config, recorder, optimizer, trainable, stacks)
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


def patch_grouped_product(torch):
    """grouped_mm on the CPU takes bfloat16 only; elsewhere transformers' own loop over the experts stands in for it."""
    with contextlib.suppress(Exception):
        from transformers.integrations import moe

        able = moe._can_use_grouped_mm
        moe._can_use_grouped_mm = lambda input, weight, offs: (
            input.dtype == weight.dtype == torch.bfloat16 and able(input, weight, offs)
        )


def forget_fakes(transformers):
    """transformers takes more careful paths (a mask always built) when it sees a fake tensor; the real run does not."""
    with contextlib.suppress(Exception):
        from transformers.utils import import_utils

        if hasattr(import_utils, "is_fake_tensor"):
            import_utils.is_fake_tensor = lambda tensor: False


def count_trainable(model, owners):
    """Trained elements: {owner: count}, -1 outside the layers."""
    counts, seen = {}, set()
    for module in model.modules():
        owner = owners.get(id(module), -1)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                counts[owner] = counts.get(owner, 0) + parameter.numel()
    return counts


def cast_like_trl(torch, model):
    """TRL's SFTTrainer (0.7 to 0.18) on a 4-bit model with bf16: norms in float32, embeddings and head in bfloat16.

    Source: trl trainer/utils.py, peft_module_casting_to_bf16.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.LayerNorm) or "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe")):
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dtype == torch.float32:
                module.to(torch.bfloat16)


def has_attention_interface():
    """Whether attention is a function that can be registered (from transformers 4.48)."""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: F401
    except ImportError:
        return False
    return True


def allow_flash_classes(transformers):
    """Before 4.48 each model has a class of its own for flash-attn; let it be built although the package is absent."""

    def enable(cls, config, *args, **kwargs):
        config._attn_implementation = "flash_attention_2"
        return config

    transformers.PreTrainedModel._check_and_enable_flash_attn_2 = classmethod(enable)


def patch_flash_classes(torch, model, flash_package):
    """Stand in for the call of flash-attn in those classes. Shapes there: [batch, length, heads, dim]."""

    def forward(query, key, value, *args, **kwargs):
        swapped = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return flash_package(None, *swapped, None)[0]

    for module in {type(part).__module__ for part in model.modules()}:
        if module.startswith("transformers.models"):
            sys.modules[module]._flash_attention_forward = forward


def use_flash_package(model, flash_package):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = flash_package
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = "flash_attention_2"


def repeat_keys_and_values(transformers):
    with contextlib.suppress(Exception):
        from transformers.integrations import sdpa_attention

        sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False


def set_cache(model, wanted):
    for module in model.modules():
        config = getattr(module, "config", None)
        for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
            if part is not None and hasattr(part, "use_cache"):
                with contextlib.suppress(Exception):
                    part.use_cache = wanted


def enable_checkpointing(model, plan, adapters):
    reentrant = plan.get("reentrant")
    options = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": bool(reentrant)}}
    try:
        model.gradient_checkpointing_enable(**options)
    except TypeError:
        model.gradient_checkpointing_enable()
    except ValueError as error:
        raise CannotRehearse(str(error)) from None
    if adapters:
        model.enable_input_require_grads()


def steps(torch, job, plan, model, config, recorder, optimizer, trainable, stacks):
    clock = {"phase": "fwd", "step": 0}
    hooks(torch, stacks, recorder, clock)
    loss_of = own_loss(torch, plan, model, recorder)
    autocast = plan["autocast"]
    dtype = getattr(torch, DTYPES[autocast]) if autocast else None
    recorder.grad_ids = []
    recorder.mark("input", 0, -1)
    inputs, labels = inputs_for(torch, plan, config, model)
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
