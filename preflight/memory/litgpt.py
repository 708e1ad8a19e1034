"""The same for litgpt, whose layers are its own: one fused QKV, LoRA written out, head and loss in pieces.

Source: litgpt model.py, lora.py, finetune/lora.py, finetune/full.py (0.4 and 0.5); lightning fabric
plugins/precision/half.py (outputs become float32) and bitsandbytes.py (4-bit weights are made from float16).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from preflight.memory.tape import Storage, Tape, Value
from preflight.model_shape import Layers, ModelShape, Module
from preflight.plan import Plan

if TYPE_CHECKING:
    from preflight.memory.blocks import Builder

PIECE = 128  # positions of the sequence that head and loss take at a time
_NAMES = {
    "query": "attn", "key": "attn", "value": "attn", "q_proj": "attn", "k_proj": "attn", "v_proj": "attn",
    "projection": "proj", "o_proj": "proj", "mlp": "mlp", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
    "head": "head", "lm_head": "head",
}  # fmt: skip
_QKV = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))


def reshaped(shape: ModelShape) -> ModelShape | None:
    """The model with the modules that litgpt gives it; None when litgpt has none like it (mixtures, state spaces)."""
    heads, hidden, head_dim = shape.heads, shape.hidden_size, shape.head_dim
    if not heads or not hidden or not head_dim or shape.moe or shape.mla or shape.encoder_decoder:
        return None
    groups = []
    for group in shape.groups:
        if group.mixer != "attention" or group.mlp != "dense":
            return None
        linears = [m for m in group.modules if m.kind in ("linear", "conv1d")]
        if any(m.kind not in ("linear", "conv1d", "norm") for m in group.modules):
            return None
        bias = any(m.bias for m in linears)
        inner = max(m.in_features for m in linears if m.out_features == hidden)
        gated = shape.gated_mlp is not False
        wide = (heads + 2 * (shape.kv_heads or heads)) * head_dim
        inner = shape.intermediate_size or inner

        def linear(name: str, out: int, into: int, bias: bool = bias) -> Module:
            return Module(f"transformer.h.*.{name}", "linear", (out, into), out if bias else 0)

        modules = [
            linear("attn.attn", wide, hidden),
            linear("attn.proj", hidden, heads * head_dim),
            *(
                [linear("mlp.fc_1", inner, hidden), linear("mlp.fc_2", inner, hidden)]
                if gated
                else [linear("mlp.fc", inner, hidden)]
            ),
            linear("mlp.proj", hidden, inner),
            *(m for m in group.modules if m.kind == "norm"),
        ]
        groups.append(replace(group, modules=tuple(modules)))
    rest = [m for m in shape.rest if not shape.is_head(m)]
    vocabulary = shape.vocab_size or 0
    old = next((m for m in shape.rest if shape.is_head(m)), None)
    rest.append(Module("lm_head", "linear", (vocabulary, hidden), old.bias if old else 0))  # never tied
    return replace(shape, groups=tuple(groups), rest=tuple(rest), head_path="lm_head", tied_embeddings=False)


def targeted(plan: Plan, module: Module) -> bool:
    """Whether a LoRA branch sits on this module. litgpt's own default is query and value."""
    if not plan.adapters or module.kind != "linear":
        return False
    wanted = {_NAMES.get(name, name) for name in plan.target_modules or ("query", "value")}
    if module.path == "lm_head":
        return "head" in wanted
    return ("mlp" if ".mlp." in module.path else module.name) in wanted


def branches(plan: Plan, shape: ModelShape) -> tuple[int, ...]:
    """Output widths of the LoRA branches inside the fused QKV layer."""
    wanted = plan.target_modules or ("query", "value")
    heads, kv_heads, head_dim = shape.heads or 1, shape.kv_heads or shape.heads or 1, shape.head_dim or 0
    widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    return tuple(width for names, width in zip(_QKV, widths, strict=True) if any(name in wanted for name in names))


def adapter_elements(plan: Plan, shape: ModelShape, module: Module) -> tuple[int, int]:
    """Elements of A and B of one module's LoRA branch."""
    if module.name == "attn":
        widths = branches(plan, shape)
        return plan.lora_rank * len(widths) * module.in_features, sum(widths) * plan.lora_rank
    return plan.lora_rank * module.in_features, plan.lora_rank * module.out_features


def adapter(plan: Plan, shape: ModelShape, tape: Tape, x: Value, y: Value, module: Module) -> Value:
    """y + scaling * B A dropout(x). In the fused QKV layer, branches that are left out are filled with zeros."""
    rows, out, name = x.rows, module.out_features, module.name
    width = y.width
    grad_a, grad_b = (elements * width for elements in adapter_elements(plan, shape, module))
    inner = x
    if plan.lora_dropout:
        mask = Storage(f"{name} dropout mask", rows * x.columns, f"{rows} x {x.columns} x 1 B")
        inner = tape.op(f"{name} dropped input", [x], rows, x.columns, width, keeps=[mask])
    widths = branches(plan, shape) if name == "attn" else (out,)
    rank = plan.lora_rank * len(widths)
    a = tape.op(f"{name} A", [inner], rows, rank, width, keeps=[inner], trains=True, weight_grad=grad_a)
    b = tape.op(f"{name} B", [a], rows, sum(widths), width, keeps=[a], trains=True, weight_grad=grad_b)
    if len(widths) < 3 and name == "attn":
        # index_copy_ into zeros keeps its source for the backward pass (torch derivatives.yaml)
        b = tape.op(f"{name} branches among zeros", [b], rows, out, width, keeps=[b])
    scaled = tape.op(f"{name} scaled", [b], rows, out, width)
    total = tape.op(f"{name} + adapter", [y, scaled], rows, out, width, passes=True)
    tape.hold(y)
    return total


def loss_pieces(plan: Plan, vocabulary: int, tape: Tape, logits: Value, before: int) -> tuple[Value, int]:
    """Cross-entropy over pieces of the logits, which lightning has made float32; the bytes the loop holds afterwards.

    Every piece's cross-entropy goes backward before any piece's head, because that is the order in which they were
    made: log-probabilities give way to gradients piece by piece. `before`: bytes of the previous step (its float32
    logits, and what hangs on their graph), which the loop holds until the forward pass returns.
    """
    rows = logits.rows
    piece = min(PIECE, plan.sequence_tokens) * plan.micro_batch * vocabulary * 4
    wide = rows * vocabulary * 4
    keep = wide - rows * vocabulary * logits.width + 2 * piece
    kept = Storage("log-probabilities in 32 bit", keep, f"{rows} x {vocabulary} x 4 B, in pieces", "logits")
    extra = max(2 * wide - logits.size, wide + before) - keep
    result = tape.op("loss", [logits], 1, 1, 4, keeps=[kept], forward_extra=max(0, extra), kind="logits")
    return result, wide


def loss_of_full(plan: Plan, vocabulary: int, tape: Tape, logits: Value, before: int) -> tuple[Value, int]:
    """Full fine-tuning: logits as a whole, float32; shifted (a copy from two samples on); pieces joined again."""
    rows = logits.rows
    wide = rows * vocabulary * 4
    shifted = wide if plan.micro_batch > 1 else 0
    kept = Storage("log-probabilities in 32 bit", wide, f"{rows} x {vocabulary} x 4 B", "logits")
    result = tape.op(
        "loss", [logits], 1, 1, 4, keeps=[kept], forward_extra=max(wide + shifted - logits.size, before),
        backward_extra=max(0, wide - logits.size), kind="logits",
    )  # fmt: skip
    return result, wide


def layer(build: Builder, tape: Tape, x: Value, group: Layers) -> Value:
    """One block: norm, attention, norm, MLP; parallel or after one another."""
    named = {m.name if ".mlp." not in m.path else f"mlp.{m.name}": m for m in group.modules if m.kind == "linear"}
    norms = sum(m.per_layer for m in group.modules if m.kind == "norm" and m.shape[-1] == x.columns)
    first = build.norm(tape, x, "norm 1")
    y = _attention(build, tape, first, named["attn"], named["proj"])
    if norms >= 4:
        y = build.norm(tape, y, "norm after attention")
    if build.parallel:
        second = build.norm(tape, x, "norm 2") if norms > 1 else first
        m = _mlp(build, tape, second, named)
        total = tape.op("attention + MLP", [m, y], x.rows, x.columns, x.width, passes=True)
        return tape.op("hidden states", [total, x], x.rows, x.columns, x.width, passes=True)
    h = tape.op("residual", [y, x], x.rows, x.columns, x.width, passes=True)
    m = _mlp(build, tape, build.norm(tape, h, "norm 2"), named)
    if norms >= 4:
        m = build.norm(tape, m, "norm after MLP")
    return tape.op("hidden states", [m, h], x.rows, x.columns, x.width, passes=True)


def _attention(build: Builder, tape: Tape, x: Value, qkv: Module, out: Module) -> Value:
    shape = build.shape
    heads, head_dim = shape.heads or 1, shape.head_dim or 1
    kv_heads = shape.kv_heads or heads
    fused = build.linear(tape, x, qkv)
    wide = heads * head_dim
    grouped = kv_heads not in (1, heads)
    q = tape.view(fused, x.rows, wide)
    k = tape.view(fused, x.rows, wide)
    v = tape.view(fused, x.rows, wide)
    if grouped:  # interleaved with their keys: none is a view of the fused output
        q, k, v = (tape.op(f"{name} of all heads", [fused], x.rows, wide, fused.width) for name in ("Q", "K", "V"))
    q, k = _rotate(tape, q, "Q"), _rotate(tape, k, "K")
    if shape.softcap:
        y = _capped(build, tape, q, k, v)
    else:
        y = build.fused(tape, [q, k, v], x.rows, wide, heads, head_dim, "flash", False)
    return build.linear(tape, y, out)


def _rotate(tape: Tape, x: Value, name: str) -> Value:
    """cos and sin are float32, so the products are; the result goes back to x's width and is joined with the rest."""
    first = tape.op(f"{name} cos", [x], x.rows, x.columns, 4)
    turned = tape.op(f"{name} turned", [x], x.rows, x.columns, x.width)
    second = tape.op(f"{name} sin", [turned], x.rows, x.columns, 4)
    total = tape.op(f"{name} rotated", [first, second], x.rows, x.columns, 4, passes=True)
    back = tape.cast(total, x.width)
    return tape.op(f"{name} joined", [back], x.rows, x.columns, x.width)


def _capped(build: Builder, tape: Tape, q: Value, k: Value, v: Value) -> Value:
    """Attention with capped scores is written out (Gemma 2)."""
    heads, width = build.shape.heads or 1, q.width
    square, length = build.batch * heads * build.length, build.length
    scores = tape.op("Q K^T", [q, k], square, length, width, keeps=[q, k])
    scores = tape.op("scaled scores", [scores], square, length, width)
    scores = tape.op("scores / cap", [scores], square, length, width)
    scores = tape.op("tanh of scores", [scores], square, length, width, keeps_output=True)
    scores = tape.op("scores * cap", [scores], square, length, width)
    scores = tape.op("masked scores", [scores], square, length, width, passes=True)
    soft = tape.op("softmax in 32 bit", [tape.cast(scores, 4)], square, length, 4, keeps_output=True,
                   backward_extra=square * length * 4)  # fmt: skip
    soft = tape.cast(soft, width, "softmax")
    return tape.op("attention output", [soft, v], q.rows, q.columns, width, keeps=[soft, v])


def _mlp(build: Builder, tape: Tape, x: Value, named: dict[str, Module]) -> Value:
    if "mlp.fc" in named:
        inner = build.linear(tape, x, named["mlp.fc"])
        inner = tape.op("activation", [inner], x.rows, inner.columns, inner.width, keeps=[inner])
        return build.linear(tape, inner, named["mlp.proj"])
    gate = build.linear(tape, x, named["mlp.fc_1"])
    up = build.linear(tape, x, named["mlp.fc_2"])
    bent = tape.op("activation", [gate], x.rows, gate.columns, gate.width, keeps=[gate])
    inner = tape.op("gated", [bent, up], x.rows, up.columns, up.width, keeps=[bent, up])
    return build.linear(tape, inner, named["mlp.proj"])
