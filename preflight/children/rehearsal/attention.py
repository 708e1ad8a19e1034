"""Which attention kernel CUDA would take, and what that kernel keeps and allocates."""

import contextlib
import sys


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


def math_with_dropout(torch, query, key, value, mask, dropout_p, is_causal, scale, gqa):
    """The math path written out, because the CPU's own keeps a wide dropout mask where CUDA keeps one byte.

    Source: pytorch aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math.
    """
    origin = query.dtype
    if origin in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    factor = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    if is_causal:
        allowed = torch.ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril()
        mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(allowed.logical_not(), float("-inf"))
        del allowed
    elif mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    query = query * factor
    if gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, (key * factor).transpose(-2, -1))
    if mask is not None:
        scores.add_(mask)
    scores = torch.softmax(scores, -1)
    scores = torch.native_dropout(scores, dropout_p, True)[0]
    return torch.matmul(scores, value).to(origin)


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
                if dropout_p > 0 and as_cuda:
                    return math_with_dropout(torch, query, key, value, attn_mask, dropout_p, is_causal, scale, gqa)
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
