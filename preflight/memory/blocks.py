"""The operations of one layer, as transformers and peft carry them out, written on a Tape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from preflight.memory import litgpt
from preflight.memory.tape import Storage, Tape, Value
from preflight.model_shape import Layers, ModelShape, Module
from preflight.plan import Plan

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
_OUT = ("o_proj", "out_proj", "dense", "o", "wo", "c_proj", "resid_attn")
_GATED_IN = ("gate_proj", "w1", "wi_0", "gate")
_UP = ("up_proj", "w3", "w2", "wi_1")


@dataclass(frozen=True)
class Attention:
    """Which attention runs: eager, math, efficient, flash or package (flash-attn), and why."""

    kind: str
    why: str = ""


def sdpa_backend(
    width: int, dtype: str, head_dim: int, value_dim: int, mask: bool, gqa: bool, capability: float
) -> str:
    """flash, efficient or math: what scaled_dot_product_attention takes on a card of this compute capability.

    Source: pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (2.6 to 2.13); facts/FACTS.md section 5.
    """
    if width == 2 and capability >= 8.0 and not mask and head_dim == value_dim and head_dim <= 256:
        return "flash"
    if gqa or (width == 2 and dtype == "bf16" and capability < 8.0):
        return "math"
    return "efficient" if head_dim % (8 if width == 2 else 4) == 0 else "math"


class Builder:
    """Writes layers on tapes for one model and one plan.

    Widths are bytes per element. `plain` is the width of weights that are not quantised (4 after k-bit preparation),
    `stream` that of the hidden states between layers, `cast` that of autocast (None without).
    """

    def __init__(self, shape: ModelShape, plan: Plan) -> None:
        self.shape, self.plan = shape, plan
        self.batch, self.length = plan.micro_batch, plan.sequence_tokens
        self.rows = plan.tokens
        self.source = WIDTHS[plan.weight_dtype]
        self.plain = 4 if plan.upcast and not plan.trl_casting else self.source
        self.norm_width = 4 if plan.upcast else self.source
        # with float32 norms the MLP answers in float32, so the hidden states are from the first layer on
        self.stream = self.norm_width
        self.cast = 2 if plan.autocast else None
        self.adapter = WIDTHS[plan.adapter_dtype]
        self.half = 2
        self.full = not plan.adapters
        self.capability = float(plan.compute_capability or 8.0)
        kind = shape.model_type or ""
        running = [m for group in shape.groups if group.stack in ("decoder", "encoder") for m in group.modules]
        self.layer_norm = kind in _LAYER_NORM or any(m.kind == "norm" and m.bias for m in running)
        self.dropout = kind in _DROPOUT
        self.attention_dropout = self.dropout and kind not in _NO_ATTENTION_DROPOUT
        self.vocabulary = shape.vocab_size or 0
        self.parallel = kind in _PARALLEL
        self.litgpt = plan.modelling == "litgpt"
        # bitsandbytes before 0.43.2 kept the input of every 4-bit product: autograd/_functions.py, MatMul4Bit.forward
        # on its context, which lives as long as the graph does, not only until its own backward
        self.keeps_4bit_input = version_of(plan.bitsandbytes) < (0, 43, 2)
        self.outliving: list[Storage] = []
        self.targets, self.stacked = self._targets()

    def _targets(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Names of adapted modules (none: all linear); adapted stacks of experts by path: the multiple of the rank."""
        wanted = self.plan.target_modules
        stacks = self.shape.moe is not None and any(m.kind == "experts" for g in self.shape.groups for m in g.modules)
        if not stacks or not self.plan.adapters or self.plan.method in ("ia3", "prefix_tuning"):
            return wanted, {}
        from preflight.model.lora import ALL_LINEAR, converted_targets

        names, found = converted_targets(self.shape, wanted or ALL_LINEAR)
        return () if isinstance(names, str) else names, found

    # -- linear layers

    def targeted(self, module: Module) -> bool:
        """Whether an adapter sits on this module."""
        if not self.plan.adapters or self.plan.method in ("ia3", "prefix_tuning"):
            return False
        if self.litgpt:
            return litgpt.targeted(self.plan, module)
        if module.kind not in ("linear", "conv1d") or self.shape.is_head(module):
            return False
        wanted = self.targets
        return not wanted or any(
            module.path == name or module.path.endswith("." + name) or module.name == name for name in wanted
        )

    def quantised(self, module: Module) -> bool:
        """Whether loading stores this module in 4 or 8 bits."""
        if not self.plan.quantised or not module.quantised_by_bitsandbytes:
            return False
        if module.name == "wo" and (self.shape.model_type or "") in ("t5", "mt5", "umt5"):
            return False  # transformers keeps it wide: _keep_in_fp32_modules
        return self.plan.quantise_head or not self.shape.is_head(module)

    def linear(self, tape: Tape, x: Value, module: Module, label: str | None = None) -> Value:
        """x W^T (+ bias), with the adapter of peft when there is one. Shapes: x [rows, in] -> [rows, out]."""
        name = label or module.name
        weights, out, rows = module.weights, module.out_features, x.rows
        if self.quantised(module) and self.plan.method == "qlora":
            y = self._linear_4bit(tape, x, name, weights, out)
        elif self.quantised(module) and self.plan.method == "lora_int8":
            y = self._linear_8bit(tape, x, name, module)
        elif self.quantised(module):
            half = tape.cast(x, 2)
            y = tape.cast(tape.op(name, [half], rows, out, 2), x.width)
        else:
            y = self._linear_plain(tape, x, name, weights, out, module.bias)
        return self._adapter(tape, x, y, module, name) if self.targeted(module) else y

    def _linear_8bit(self, tape: Tape, x: Value, name: str, module: Module) -> Value:
        """bitsandbytes Linear8bitLt: the input stays in 16 bit, before 0.45 in 8 bit too; an int32 product; the
        weight in 16 bit for the gradient. Outliers are not counted.

        Source: bitsandbytes autograd/_functions.py MatMul8bitLt (0.39 to 0.50).
        """
        rows, into, out, weights = x.rows, module.in_features, module.out_features, module.weights
        old = version_of(self.plan.bitsandbytes) < (0, 45)
        half = tape.cast(x, 2)
        keeps: list[Value | Storage] = [half]
        if old:
            keeps.append(Storage(f"{name} input in 8 bit", rows * into, f"{rows} x {into} x 1 B"))
        copies, wide = (2, 3) if old else (1, 2)
        y = tape.op(
            name, [half], rows, out, 2, keeps=keeps,
            forward_extra=rows * (copies * into + 4 * out),
            backward_extra=wide * weights + (2 * rows * out if old else 0),
            forward_text=f"{rows} x ({copies} x {into} + 4 x {out}) B",
            backward_text=f"{weights} x {wide} B" + (f" + {rows} x {out} x 2 B" if old else ""),
        )  # fmt: skip
        return tape.cast(y, x.width)

    def _linear_plain(self, tape: Tape, x: Value, name: str, weights: int, out: int, bias: int) -> Value:
        keeps: list[Value | Storage] = []
        width = x.width
        if self.cast is not None:
            x = tape.cast(x, self.cast)
            width = self.cast
            if self.plain != self.cast:
                keeps.append(Storage(f"{name} weight in {self.cast * 8} bit", weights * self.cast, f"{weights} x 2 B"))
        if self.full:
            keeps.append(x)
        grad = (weights + bias) * self.plain if self.full else 0
        return tape.op(name, [x], x.rows, out, width, keeps=keeps, weight_grad=grad, trains=self.full)

    def _linear_4bit(self, tape: Tape, x: Value, name: str, weights: int, out: int) -> Value:
        """bitsandbytes Linear4bit: input to the compute width, weight dequantised for the product, output cast back.

        Source: bitsandbytes nn/modules.py Linear4bit.forward, autograd/_functions.py MatMul4Bit.
        """
        half = tape.cast(x, self.half)
        extra, text = weights * self.source, f"{weights} x {self.source} B"
        if self.source != self.half or self.litgpt:  # lightning quantises float16: dequantised to that, then cast
            extra += weights * self.half
            text = f"{weights} x ({self.source} + {self.half}) B"
        keeps = [half] if self.keeps_4bit_input else []
        self.outliving += [value.storage for value in keeps if value.storage not in self.outliving]
        y = tape.op(name, [half], x.rows, out, self.half, keeps=keeps, forward_extra=extra, backward_extra=extra,
                    forward_text=text, backward_text=text)  # fmt: skip
        tape.hold(half)
        return tape.cast(y, x.width)

    def _adapter(self, tape: Tape, x: Value, y: Value, module: Module, name: str) -> Value:
        """peft's LoRA: y + B(A(dropout(x))) * scaling, in the adapter's width unless autocast runs.

        Source: peft tuners/lora/layer.py and bnb.py (0.13 to 0.21).
        """
        if self.litgpt:
            return litgpt.adapter(self.plan, self.shape, tape, x, y, module)
        rank, rows, out = self.plan.lora_rank, x.rows, module.out_features
        base = y
        if self.quantised(module) and self.plan.method in ("qlora", "lora_int8"):
            y = tape.op(f"{name} output", [y], rows, out, y.width, passes=True)  # defensive clone
        # plain layers bring their input to the adapter's width always, quantised ones not under autocast
        brought = self.cast is None or not self.quantised(module)
        wide = tape.cast(x, self.adapter, f"{name} input in {self.adapter * 8} bit") if brought else x
        inner = wide
        if self.plan.lora_dropout:
            mask = Storage(
                f"{name} dropout mask", x.rows * module.in_features, f"{x.rows} x {module.in_features} x 1 B"
            )
            inner = tape.op(f"{name} dropped input", [wide], x.rows, module.in_features, wide.width, keeps=[mask])
        width = self.cast or self.adapter
        inner = tape.cast(inner, width)
        grad = self.adapter
        a = tape.op(
            f"{name} A",
            [inner],
            rows,
            rank,
            width,
            keeps=[inner],
            trains=True,
            weight_grad=rank * module.in_features * grad,
        )
        b = tape.op(f"{name} B", [a], rows, out, width, keeps=[a], trains=True, weight_grad=rank * out * grad)
        scaled = tape.op(f"{name} scaled", [b], rows, out, width)
        if self.quantised(module) and self.cast is None:
            scaled = tape.cast(scaled, y.width)
        # DoRA multiplies both outputs with a trained magnitude: they stay (peft tuners/lora/dora.py)
        both = [base, b] if self.plan.use_dora else []
        widest = max(y.width, scaled.width)
        total = tape.op(f"{name} + adapter", [y, scaled], rows, out, widest, passes=not both, keeps=both)
        tape.hold(wide, y, base)
        return tape.cast(total, y.width, f"{name} output")

    # -- normalisation, position, activation

    def norm(self, tape: Tape, x: Value, name: str, width: int | None = None) -> Value:
        """RMSNorm as transformers writes it (in float32), or LayerNorm.

        Keeps the float32 input and one number per row; a trained weight also keeps the normalised input.
        Source: transformers models/llama/modeling_llama.py LlamaRMSNorm; torch native_layer_norm.
        """
        columns = x.columns
        statistic = Storage(f"{name} statistics", x.rows * 4, f"{x.rows} x 4 B")
        grad = 2 * columns * self.plain if self.full else 0
        if self.layer_norm:
            wide = tape.cast(x, 4, f"{name} input in 32 bit") if self.cast is not None else x
            both = Storage(f"{name} statistics", x.rows * 8, f"{x.rows} x 2 x 4 B")
            return tape.op(
                name, [wide], x.rows, columns, wide.width, keeps=[wide, both], weight_grad=grad, trains=self.full
            )
        wide = tape.cast(x, 4, f"{name} input in 32 bit")
        square = tape.op(f"{name} squares", [wide], x.rows, columns, 4, keeps=[wide])
        inverse = tape.op(f"{name} 1/rms", [square], x.rows, 1, 4, keeps=[statistic])
        y = tape.op(f"{name} normalised", [wide, inverse], x.rows, columns, 4, keeps=[wide, statistic])
        tape.hold(wide)
        y = tape.cast(y, width or x.width)
        keeps = [y] if self.full else []
        return tape.op(name, [y], x.rows, columns, max(y.width, self.norm_width), keeps=keeps,
                       weight_grad=grad // 2, trains=self.full)  # fmt: skip

    def rotate(self, tape: Tape, x: Value, name: str) -> Value:
        """Rotary position: x cos + rotate_half(x) sin; keeps only cos and sin, which all layers share."""
        width = max(x.width, self.stream)
        first = tape.op(f"{name} cos", [x], x.rows, x.columns, width)
        negative = tape.op(f"{name} -half", [x], x.rows, x.columns // 2, x.width)
        turned = tape.op(f"{name} turned", [x, negative], x.rows, x.columns, x.width)
        second = tape.op(f"{name} sin", [turned], x.rows, x.columns, width)
        return tape.op(f"{name} rotated", [first, second], x.rows, x.columns, width, passes=True)

    def activation(self, tape: Tape, x: Value, name: str) -> Value:
        """The activation; what it keeps depends on whether it is one kernel or written out."""
        kind = self.shape.activation or "silu"
        if kind == "xielu":
            # where(x > 0, a x x + b x, (expm1(min(x, e)) - x) c + b x), written out
            product = tape.op("alpha x", [x], x.rows, x.columns, x.width)
            positive = tape.op("alpha x x", [product, x], x.rows, x.columns, x.width, keeps=[product, x])
            small = tape.op("min(x, eps)", [x], x.rows, x.columns, x.width, keeps=[x])
            grown = tape.op("expm1", [small], x.rows, x.columns, x.width, keeps_output=True)
            mask = Storage("x > 0", x.rows * x.columns, f"{x.rows} x {x.columns} x 1 B")
            return tape.op(name, [positive, grown], x.rows, x.columns, x.width, keeps=[mask])
        if kind in ("gelu_new", "gelu_python_tanh", "gated-gelu"):
            # NewGELUActivation: 0.5 * x * (1 + tanh(c * (x + 0.044715 * x^3)))
            wide = 4 if self.cast is not None else x.width
            halved = tape.op("0.5 x", [x], x.rows, x.columns, x.width)
            cube_input = tape.cast(x, wide)
            cube = tape.op("x^3", [cube_input], x.rows, x.columns, wide, keeps=[cube_input])
            scaled = tape.op("0.044715 x^3", [cube], x.rows, x.columns, wide)
            inner = tape.op("x + ...", [x, scaled], x.rows, x.columns, wide, passes=True)
            inner = tape.op("c (x + ...)", [inner], x.rows, x.columns, wide)
            bent = tape.op("tanh", [inner], x.rows, x.columns, wide, keeps_output=True)
            plus = tape.op("1 + tanh", [bent], x.rows, x.columns, wide, passes=True)
            return tape.op(name, [halved, plus], x.rows, x.columns, wide, keeps=[halved, plus])
        if kind == "relu2":
            positive = tape.op("relu", [x], x.rows, x.columns, x.width, keeps_output=True)
            return tape.op(name, [positive], x.rows, x.columns, x.width, keeps=[positive])
        if kind == "relu":
            return tape.op(name, [x], x.rows, x.columns, x.width, keeps_output=True)
        return tape.op(name, [x], x.rows, x.columns, x.width, keeps=[x])

    def drop(self, tape: Tape, x: Value, name: str) -> Value:
        """Dropout of the model's own configuration (GPT-2, BERT, T5, OPT: 0.1): an output, a mask of 1 byte each."""
        if not self.dropout:
            return x
        mask = Storage(f"{name} dropout mask", x.rows * x.columns, f"{x.rows} x {x.columns} x 1 B")
        return tape.op(f"{name} dropped", [x], x.rows, x.columns, x.width, keeps=[mask])

    # -- attention

    def attention_kind(self, width: int, head_dim: int, value_dim: int, gqa: bool, window: int | None) -> Attention:
        """Which attention CUDA runs for this plan."""
        wanted = self.plan.attention
        no_sdpa = (self.shape.model_type or "") in _EAGER_ONLY
        if wanted == "eager" or (no_sdpa and not wanted.startswith("flash")):
            return Attention("eager", "asked for" if wanted == "eager" else "this architecture has no other")
        if wanted == "flash_attention_2":
            return Attention("package", "flash-attn")
        if wanted in ("sdpa_math", "sdpa_mem_efficient", "sdpa_flash"):
            kind = {"sdpa_math": "math", "sdpa_mem_efficient": "efficient", "sdpa_flash": "flash"}[wanted]
            return Attention(kind, "pinned")
        biased = (self.shape.model_type or "") in ("t5", "mt5")  # a bias of positions goes in as a mask
        masked = self.plan.attention_mask or biased or (window is not None and window <= self.length)
        dtype = self.plan.autocast or self.plan.weight_dtype
        broadcast = (self.shape.model_type or "") == "falcon"  # it broadcasts its one key head without saying so
        shares = gqa and not broadcast and not masked and head_dim == value_dim and head_dim <= 256
        kind = sdpa_backend(width, dtype, head_dim, value_dim, masked, shares, self.capability)
        return Attention(kind, "what scaled_dot_product_attention chooses")

    def attend(
        self, tape: Tape, q: Value, k: Value, v: Value, heads: int, kv_heads: int, head_dim: int, value_dim: int,
        window: int | None = None, causal: bool = True,
    ) -> Value:  # fmt: skip
        """softmax(Q K^T) V. Shapes: q [rows, heads*head_dim] -> [rows, heads*value_dim]. Bytes that each way keeps:

        eager and math keep [batch, heads, length, length]; the fused kernels keep their output and log-sum-exp.
        """
        rows, length = q.rows, self.length
        gqa = heads != kv_heads
        width = self.cast or q.width
        chosen = self.attention_kind(width, head_dim, value_dim, gqa, window)
        out = heads * value_dim
        if chosen.kind == "package":
            half = [tape.cast(x, self.half) for x in (q, k, v)]
            return self.fused(tape, half, rows, out, heads, head_dim, "flash", gqa)
        if chosen.kind in ("flash", "efficient"):
            inputs = [tape.cast(x, width) for x in (q, k, v)]
            if gqa and chosen.kind == "efficient":
                inputs[1] = tape.op("K repeated", [inputs[1]], rows, heads * head_dim, width)
                inputs[2] = tape.op("V repeated", [inputs[2]], rows, heads * value_dim, width)
            elif gqa and (self.plan.attention_mask or (window is not None and window <= length)):
                inputs[1] = tape.op("K repeated", [inputs[1]], rows, heads * head_dim, width)
                inputs[2] = tape.op("V repeated", [inputs[2]], rows, heads * value_dim, width)
                gqa = False
            return self.fused(tape, inputs, rows, out, heads, head_dim, chosen.kind, gqa)
        square = self.batch * heads * length
        if chosen.kind == "math":
            # torch upcasts half precision inputs, scales Q and K, adds a causal mask of zeros and -inf
            q, k, v = (tape.cast(x, 4) for x in (q, k, v))
            q = tape.op("Q scaled", [q], rows, q.columns, 4)
            if gqa:
                k = tape.op("K repeated", [k], rows, heads * head_dim, 4)
                v = tape.op("V repeated", [v], rows, heads * value_dim, 4)
            k = tape.op("K scaled", [k], rows, heads * head_dim, 4)
            mask = 4 * length * length if causal else 0
            scores = tape.op("scores", [q, k], square, length, 4, keeps=[q, k], forward_extra=mask,
                             forward_text=f"{length} x {length} x 4 B")  # fmt: skip
            soft = tape.op("softmax", [scores], square, length, 4, keeps_output=True,
                           backward_extra=square * length * 4, backward_text=f"{square} x {length} x 4 B")  # fmt: skip
            if self.attention_dropout:
                soft = self.drop(tape, soft, "softmax")
            result = tape.op("attention output", [soft, v], rows, out, 4, keeps=[soft, v])
            return tape.cast(result, width)
        return self._eager(tape, q, k, v, heads, gqa, head_dim, value_dim)

    def _eager(
        self, tape: Tape, q: Value, k: Value, v: Value, heads: int, gqa: bool, head_dim: int, value_dim: int
    ) -> Value:
        rows, length, width = q.rows, self.length, self.cast or q.width
        square = self.batch * heads * length
        if gqa:
            k = tape.op("K repeated", [k], rows, heads * head_dim, k.width)
            v = tape.op("V repeated", [v], rows, heads * value_dim, v.width)
        q, k = tape.cast(q, width), tape.cast(k, width)
        product = tape.op("Q K^T", [q, k], square, length, width, keeps=[q, k])
        scaled = tape.op("scaled scores", [product], square, length, width)
        if self.shape.softcap:
            scaled = tape.op("scores / cap", [scaled], square, length, width)
            scaled = tape.op("tanh of scores", [scaled], square, length, width, keeps_output=True)
            scaled = tape.op("scores * cap", [scaled], square, length, width)
        masked = tape.op("masked scores", [scaled], square, length, width, passes=True)
        # CUDA turns float16 into a float32 softmax in one kernel; bfloat16 is copied first. Its backward writes
        # grad * output to a temporary (aten/native/cuda/SoftMax.cu).
        if self.shape.model_type == "gpt_oss":  # sinks are a further column; the softmax stays in its dtype
            joined = tape.op("scores and sinks", [masked], square, length + 1, width)
            soft = tape.op(
                "softmax",
                [joined],
                square,
                length + 1,
                width,
                keeps_output=True,
                backward_extra=square * length * width,
                backward_text=f"{square} x {length} x {width} B",
            )
            v = tape.cast(v, width)
            return tape.op("attention output", [soft, v], rows, heads * value_dim, width, keeps=[soft, v])
        one_kernel = self.plan.autocast == "fp16" or (self.plan.autocast is None and self.plan.weight_dtype == "fp16")
        entry = masked if one_kernel else tape.cast(masked, 4)
        soft = tape.op("softmax in 32 bit", [entry], square, length, 4, keeps_output=True,
                       backward_extra=square * length * 4, backward_text=f"{square} x {length} x 4 B")  # fmt: skip
        soft = tape.cast(soft, width, "softmax")
        if self.attention_dropout:
            soft = self.drop(tape, soft, "softmax")
        v = tape.cast(v, width)
        return tape.op("attention output", [soft, v], rows, heads * value_dim, width, keeps=[soft, v])

    def fused(
        self, tape: Tape, inputs: Sequence[Value], rows: int, out: int, heads: int, head_dim: int, kind: str, gqa: bool
    ) -> Value:
        """Kernels that keep Q, K, V, the output and its log-sum-exp; float32 accumulators of dQ in backward.

        Source: flash-attention csrc/flash_attn/flash_api.cpp mha_bwd; pytorch mem_eff_attention kernel_backward.h.
        """
        length = self.length
        kept = -(-length // 32) * 32 if kind == "efficient" else length
        statistics = self.batch * heads * kept * 4
        width = inputs[0].width
        if kind == "efficient":
            extra, text = self.batch * heads * length * 4, f"{self.batch} x {heads} x {length} x 4 B"
            if width == 2:
                rounded = -(-length // 64) * 64
                extra += self.batch * heads * rounded * head_dim * 4
                text += f" + {self.batch} x {heads} x {rounded} x {head_dim} x 4 B"
        else:
            rounded = -(-length // 128) * 128
            wide = -(-head_dim // 32) * 32 if head_dim <= 128 else -(-head_dim // 64) * 64
            extra = self.batch * heads * rounded * (wide + 1) * 4
            text = f"{self.batch} x {heads} x {rounded} x ({wide} + 1) x 4 B"
            if gqa:
                extra += 2 * rows * heads * head_dim * width
                text += f" + 2 x {rows} x {heads} x {head_dim} x {width} B"
        lse = Storage("log-sum-exp", statistics, f"{self.batch} x {heads} x {kept} x 4 B")
        return tape.op("attention output", inputs, rows, out, width, keeps=[*inputs, lse], keeps_output=True,
                       backward_extra=extra, backward_text=text)  # fmt: skip

    # -- whole layers

    def layer(self, group: Layers) -> tuple[Tape, Value]:
        """One layer of this kind: its tape and its output."""
        tape = Tape()
        tape.grad_width = self.plain if self.full else self.adapter
        x = tape.input("hidden states", self.rows, self.shape.hidden_size or 0, self.stream)
        return tape, litgpt.layer(self, tape, x, group) if self.litgpt else self.decoder(tape, x, group)

    def decoder(self, tape: Tape, x: Value, group: Layers) -> Value:
        """norm, attention, add, norm, MLP, add; variants: parallel blocks, norms after the blocks (Gemma, OLMo 2)."""
        norms = [m for m in group.modules if m.kind == "norm" and m.shape[-1] == self.shape.hidden_size]
        names = {m.name for m in norms}
        count = sum(m.per_layer for m in norms)
        kind = self.shape.model_type or ""
        if self.parallel:
            first = self.norm(tape, x, "input norm")
            second = self.norm(tape, x, "MLP norm") if count > 1 else first
            a = self.drop(tape, self.attention(tape, first, group), "attention")
            m = self.drop(tape, self.mlp(tape, second, group), "MLP")
            total = tape.op("attention + MLP", [a, m], x.rows, x.columns, max(a.width, m.width), passes=True)
            return tape.op("hidden states", [total, x], x.rows, x.columns, max(total.width, x.width), passes=True)
        after_only = kind in _NORM_AFTER
        y = x if after_only else self.norm(tape, x, "input norm")
        y = self.drop(tape, self.attention(tape, y, group), "attention")
        if after_only or "pre_feedforward_layernorm" in names or "post_self_attn_layernorm" in names:
            y = self.norm(tape, y, "norm after attention")
        h = tape.op("residual", [x, y], x.rows, x.columns, max(x.width, y.width), passes=True)
        if group.cross_attention:
            y = self.norm(tape, h, "cross-attention norm")
            y = self.drop(tape, self.attention(tape, y, group, cross=True), "cross-attention")
            h = tape.op("residual", [h, y], x.rows, x.columns, max(h.width, y.width), passes=True)
        if group.mlp == "none":
            return h
        y = h if after_only else self.norm(tape, h, "MLP norm")
        y = self.drop(tape, self.mlp(tape, y, group), "MLP")
        if after_only or "pre_feedforward_layernorm" in names or "post_mlp_layernorm" in names:
            y = self.norm(tape, y, "norm after MLP")
        return tape.op("hidden states", [h, y], x.rows, x.columns, max(h.width, y.width), passes=True)

    def attention(self, tape: Tape, x: Value, group: Layers, cross: bool = False) -> Value:
        """Self-attention of this layer, whatever its projections are called."""
        shape = self.shape
        heads, kv_heads = shape.heads or 1, shape.kv_heads or shape.heads or 1
        head_dim = shape.head_dim or (shape.hidden_size or 0) // heads
        if group.mixer not in ("attention", "mla"):
            return self.recurrence(tape, x, group)
        modules = [m for m in group.modules if m.kind in ("linear", "conv1d") and _is_attention(m)]
        crossing = [m for m in modules if any(part in m.path.lower() for part in ("encdec", "cross", "encoder_attn"))]
        modules = crossing if cross else [m for m in modules if m not in crossing]
        if not modules:
            return x
        last = next((m for m in reversed(modules) if m.name in _OUT), modules[-1])
        entries = [m for m in modules if m is not last]
        if group.mixer == "mla" and shape.mla is not None:
            return self.latent_attention(tape, x, entries, last)
        value_dim = shape.v_head_dim or head_dim
        outs: list[Value] = []
        for module in entries:
            outs.append(self.linear(tape, x, module))
        if len(outs) == 1:
            fused = outs[0]
            q = tape.view(fused, x.rows, heads * head_dim)
            k = tape.view(fused, x.rows, kv_heads * head_dim)
            v = tape.view(fused, x.rows, kv_heads * value_dim)
        else:
            q, k, v = outs[0], outs[1], outs[2] if len(outs) > 2 else outs[1]
        gated = q.columns == 2 * heads * head_dim
        gate = None
        if gated:  # Qwen3-Next: the query projection also makes a gate for the output
            gate = tape.view(q, x.rows, heads * head_dim)
            q = tape.view(q, x.rows, heads * head_dim)
        if any(m.kind == "norm" and m.name in ("q_norm", "query_layernorm", "q_layernorm") for m in group.modules):
            q, k = self.norm(tape, q, "q norm"), self.norm(tape, k, "k norm")
        if (shape.model_type or "") not in _NO_ROTARY:
            q, k = self.rotate(tape, q, "Q"), self.rotate(tape, k, "K")
        y = self.attend(tape, q, k, v, heads, kv_heads, head_dim, value_dim, group.window)
        if gate is not None:
            bent = tape.op("sigmoid gate", [gate], x.rows, heads * head_dim, gate.width, keeps_output=True)
            y = tape.op("gated attention", [y, bent], x.rows, y.columns, y.width, keeps=[y, bent])
        return self.linear(tape, y, last)

    def latent_attention(self, tape: Tape, x: Value, entries: Sequence[Module], last: Module) -> Value:
        """Multi-head latent attention (DeepSeek): low-rank projections, then ordinary attention over expanded heads."""
        mla, heads = self.shape.mla, self.shape.heads or 1
        assert mla is not None
        named = {m.name: m for m in entries}
        wide = mla.nope_dim + mla.rope_dim
        if "q_a_proj" in named:
            q = self.linear(tape, x, named["q_a_proj"])
            q = self.linear(tape, self.norm(tape, q, "q latent norm"), named["q_b_proj"])
        else:
            q = self.linear(tape, x, named.get("q_proj", entries[0]))
        compressed = self.linear(tape, x, named["kv_a_proj_with_mqa"])
        latent = tape.view(compressed, x.rows, mla.kv_rank)
        shared = tape.view(compressed, x.rows, mla.rope_dim)
        expanded = self.linear(tape, self.norm(tape, latent, "kv latent norm"), named["kv_b_proj"])
        q_rope = self.rotate(tape, tape.view(q, x.rows, heads * mla.rope_dim), "Q rope")
        k_rope = self.rotate(tape, shared, "K rope")
        width = max(q.width, q_rope.width)
        query = tape.op("Q joined", [q, q_rope], x.rows, heads * wide, width)
        key = tape.op("K joined", [expanded, k_rope], x.rows, heads * wide, width)
        value = tape.view(expanded, x.rows, heads * mla.v_dim)
        y = self.attend(tape, query, key, value, heads, heads, wide, mla.v_dim)
        return self.linear(tape, y, last)

    def recurrence(self, tape: Tape, x: Value, group: Layers) -> Value:
        """Mamba, Mamba-2 and gated linear attention with their fused kernels: projections, a short convolution, a scan.

        The scan keeps its inputs, its output and one state per chunk of 256 tokens: [batch, chunks, width, 128] in
        float32. Without these kernels the scan in plain torch takes several times more.
        Source: mamba_ssm ops/triton/ssd_combined.py.
        """
        modules = [m for m in group.modules if m.kind == "linear" and not _is_mlp(m)]
        if not modules:
            return x
        last = next((m for m in reversed(modules) if m.name in _OUT), modules[-1])
        outs = [self.linear(tape, x, m) for m in modules if m is not last and m.in_features == x.columns]
        if not outs:
            return x
        wide = max(outs, key=lambda value: value.columns)
        convolved = next((m.shape[0] for m in group.modules if m.kind == "conv"), last.in_features)
        width = wide.width
        mixed = tape.op("convolved", [wide], x.rows, convolved, width, keeps=[wide])
        bent = tape.op("convolved, activated", [mixed], x.rows, convolved, width, keeps=[mixed])
        chunks = self.batch * -(-self.length // 256)
        product = f"{chunks} x {last.in_features} x 128 x 4 B"
        states = Storage("chunk states", chunks * last.in_features * 128 * 4, product)
        scan = tape.op(
            "scan", [bent, *outs], x.rows, last.in_features, width, keeps=[bent, *outs, states], keeps_output=True
        )
        gated = tape.op("gated scan", [scan, wide], x.rows, last.in_features, width, keeps=[scan, wide])
        return self.linear(tape, gated, last)

    def mlp(self, tape: Tape, x: Value, group: Layers) -> Value:
        """The feed-forward part: gated or not, or a mixture of experts with shared ones."""
        modules = [
            m
            for m in group.modules
            if m.kind in ("linear", "conv1d")
            and (_is_mlp(m) if group.mixer not in ("attention", "mla") else not _is_attention(m))
            and ".experts." not in m.path
        ]
        if not modules and group.mlp not in ("moe", "dense+moe"):
            return x
        if group.mlp in ("moe", "dense+moe"):
            y = self.experts(tape, x, group)
            shared = [m for m in modules if "shared" in m.path and m.out_features > 1]
            if shared:
                other = self.dense(tape, x, shared)
                y = tape.op("experts + shared", [y, other], x.rows, x.columns, max(y.width, other.width), passes=True)
            return y
        return self.dense(tape, x, modules)

    def dense(self, tape: Tape, x: Value, modules: Sequence[Module]) -> Value:
        """down(act(gate(x)) * up(x)), down(act(up(x))), or the fused forms."""
        wide_down = (self.shape.model_type or "") in ("t5", "mt5", "umt5") and self.plain > x.width
        down = next(
            (m for m in reversed(modules) if m.out_features == x.columns and m.in_features != x.columns), modules[-1]
        )
        entries = [m for m in modules if m is not down][:2]
        if len(entries) >= 2 and entries[0].out_features == entries[1].out_features:
            gate = self.linear(tape, x, entries[0])
            bent = self.activation(tape, gate, "activation")
            up = self.linear(tape, x, entries[1])
            inner = tape.op("gated", [bent, up], x.rows, up.columns, max(bent.width, up.width), keeps=[bent, up])
        else:
            both = self.linear(tape, x, entries[0])
            if both.columns == 2 * down.in_features:
                gate = tape.view(both, x.rows, down.in_features)
                up = tape.view(both, x.rows, down.in_features)
                bent = self.activation(tape, gate, "activation")
                inner = tape.op("gated", [bent, up], x.rows, down.in_features, both.width, keeps=[bent, both])
            else:
                inner = self.activation(tape, both, "activation")
        if wide_down:  # T5DenseGatedActDense: the input of `wo` is brought to its weight's width first
            inner = tape.cast(inner, self.plain)
        return self.linear(tape, inner, down)

    def stack_elements(self, module: Module) -> tuple[int, int]:
        """Elements of A and B of an adapted stack of experts (both for each expert) or of a router."""
        rank = self.plan.lora_rank * self.stacked[module.path]
        times = module.shape[0] if len(module.shape) == 3 else 1
        return rank * times * module.in_features, rank * times * module.out_features

    def _stack_with_adapter(self, tape: Tape, module: Module, width: int) -> Value:
        """The whole stack with its adapters added, made anew in each pass, because the product takes one tensor.

        Source: peft tuners/lora/layer.py, ParamWrapper (parametrisation by baddbmm).
        """
        grad = sum(self.stack_elements(module)) * self.adapter
        return tape.op(f"{module.name} with adapters", [], 1, module.parameters, width, trains=True, weight_grad=grad)

    def experts(self, tape: Tape, x: Value, group: Layers) -> Value:
        """Routed experts as transformers 5 runs them: tokens sorted by expert, one grouped product per matrix.

        Shapes: [tokens * experts per token, width].
        Source: transformers integrations/moe.py, grouped_mm_experts_forward.
        """
        moe = self.shape.moe
        assert moe is not None
        rows = x.rows * moe.per_token
        width = self.cast or x.width
        router = tape.op("router logits", [x], x.rows, moe.experts, 4, keeps=[x] if self.full else [], trains=self.full)
        weights = tape.op("router softmax", [router], x.rows, moe.experts, 4, keeps_output=True)
        chosen = Storage("chosen experts", rows * 8 * 3, f"{rows} x 3 x 8 B")
        picked = tape.op("router weights", [weights], rows, 1, 4, keeps=[chosen])
        stack = [m for m in group.modules if m.kind == "experts"]
        up = next((m for m in stack if "gate_up" in m.path or "up" in m.path or "fc1" in m.path), stack[0])
        down = next((m for m in stack if m is not up), stack[-1])
        wide = 2 * moe.width if "gate_up" in up.path else moe.width
        inputs = tape.op("tokens by expert", [x], rows, x.columns, x.width)
        entry = tape.cast(inputs, width)
        # below compute capability 8.0 a loop over the experts stands in: it keeps its input, and makes a gradient of
        # the weights even when they are frozen (integrations/moe.py)
        loop = self.capability < 8.0
        keeps = self.full or loop
        frozen = [m.parameters * self.plain if loop and not self.full else 0 for m in (up, down)]
        product = [entry]
        if up.path in self.stacked:
            product.append(self._stack_with_adapter(tape, up, width))
        first = tape.op("experts up", product, rows, wide, width, keeps=product if keeps or product[1:] else [],
                        trains=self.full, backward_extra=frozen[0],
                        weight_grad=(up.parameters * self.plain) if self.full else 0)  # fmt: skip
        gate = tape.view(first, rows, moe.width)
        if self.shape.model_type == "gpt_oss":
            gate = tape.op("gate clamped", [gate], rows, moe.width, width, keeps=[first])
            sigmoid = tape.op("sigmoid", [gate], rows, moe.width, width, keeps_output=True)
            bent = tape.op("gate sigmoid", [gate, sigmoid], rows, moe.width, width, keeps=[gate, sigmoid])
            more = tape.op("up + 1", [tape.view(first, rows, moe.width)], rows, moe.width, width, keeps=[first])
            bent = tape.op("experts gated", [bent, more], rows, moe.width, width, keeps=[bent, more])
        else:
            bent = self.activation(tape, gate, "expert activation")
        if self.shape.model_type == "gpt_oss":
            pass
        elif wide == 2 * moe.width:
            bent = tape.op("experts gated", [bent, tape.view(first, rows, moe.width)], rows, moe.width, width,
                           keeps=[bent, first])  # fmt: skip
        product = [bent]
        if down.path in self.stacked:
            product.append(self._stack_with_adapter(tape, down, width))
        second = tape.op("experts down", product, rows, x.columns, width, keeps=product if keeps or product[1:] else [],
                         trains=self.full, backward_extra=frozen[1],
                         weight_grad=(down.parameters * self.plain) if self.full else 0)  # fmt: skip
        weighted = tape.op("experts weighted", [second, picked], rows, x.columns, 4, keeps=[second, picked])
        ordered = tape.op("experts in order", [weighted], rows, x.columns, 4)
        summed = tape.op("experts summed", [ordered], x.rows, x.columns, 4)
        return tape.cast(summed, x.width)


def version_of(text: str | None) -> tuple[int, ...]:
    """(major, minor, patch) of a version; very new when none is named."""
    if text is None:
        return (99, 0)
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _is_mlp(module: Module) -> bool:
    """Whether this linear layer belongs to the feed-forward part, by its path."""
    path = module.path.lower()
    return any(part in path for part in ("mlp", "ffn", "feed_forward", "expert", "moe"))


def _is_attention(module: Module) -> bool:
    """Whether this linear layer belongs to attention, by its path."""
    path = module.path.lower()
    if any(
        part in path for part in ("mlp", "ffn", "feed_forward", "intermediate", "denserelu", "experts", "fc1", "fc2")
    ):
        return False
    return "attn" in path or "attention" in path or "mixer" in path


_LAYER_NORM = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "gpt_bigcode", "bert", "mpt",
               "stablelm", "starcoder2", "codegen")  # fmt: skip
_DROPOUT = ("gpt2", "opt", "bert", "t5", "mt5", "gpt_bigcode", "roberta", "codegen", "seed_oss")
_NO_ATTENTION_DROPOUT = ("opt", "codegen")  # their attention_dropout and attn_pdrop are 0 by default
_PARALLEL = ("gpt_neox", "gptj", "falcon", "phi", "cohere", "cohere2", "codegen")
_NORM_AFTER = ("olmo2", "olmo3")
_NO_ROTARY = ("gpt2", "gpt_neo", "opt", "bloom", "mpt", "gpt_bigcode", "bert", "roberta", "t5", "mt5")
# transformers 5.24: no scaled_dot_product_attention for these, facts/arch_support.json
_EAGER_ONLY = ("bloom", "gpt_oss", "gemma2", "mpt", "codegen", "deepseek_v4")
