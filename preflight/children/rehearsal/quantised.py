"""Quantised linear layers in the place of plain ones, and what their kernels do with memory."""

import contextlib

from rehearsal import DTYPES, CannotRehearse

LINEAR_4BIT_BLOCK = 64


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
