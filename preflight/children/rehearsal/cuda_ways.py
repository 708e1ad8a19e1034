"""What CUDA does with memory where the CPU does something else: dropout, softmax, autocast, products of experts."""

import contextlib


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
