"""How much memory does this plan take on this model? By formulas alone: eight components, each with its source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from preflight.memory import litgpt
from preflight.memory.blocks import WIDTHS, Builder, version_of
from preflight.memory.tape import Held, Profile, Storage, Tape, Value
from preflight.model_shape import Layers, ModelShape, Module, of_a_tower
from preflight.plan import Plan

COMPONENTS = {
    "static_model": "weights as they are stored, adapters, buffers",
    "quantisation_overhead": "scales and tables of quantised weights; a weight dequantised for its product",
    "gradients": "gradients of what is trained",
    "optimizer": "states of what is trained; the temporary of a foreach step",
    "activations": "what the forward pass keeps for the backward pass, and what the layer at the peak works on",
    "logits_loss": "logits, their float32 copy, log-probabilities and their gradients",
    "cuda_overhead": "workspaces of cuBLAS inside torch's figure",
    "safety_margin": "what the caching allocator holds beyond the tensors",
}
_SOURCES = {
    "static_model": "parameters of config.json x bytes per element",
    "quantisation_overhead": "bitsandbytes functional.py quantize_4bit: blocks of 64, float32 or 8-bit scales (of 256)",
    "gradients": "torch: one gradient per trained parameter, in its dtype",
    "optimizer": "torch optim/adamw.py; bitsandbytes optim/optimizer.py (8-bit: block 256; paged from 1e5 elements)",
    "activations": "transformers 5 and peft layers operation by operation: preflight/memory/blocks.py",
    "logits_loss": "transformers loss/loss_utils.py ForCausalLMLoss; torch cross_entropy and its backward",
    "cuda_overhead": "pytorch ATen/cuda/CublasHandlePool.cpp: 8.125 MiB per handle, 32 MiB from compute capability 9",
    "safety_margin": "facts/memory_errors.json: reserved over allocated on published rows",
}


class NoEstimate(Exception):
    """This model or plan has no closed form; the reason is one line."""


@dataclass(frozen=True)
class Component:
    """One of the eight parts of the peak."""

    name: str
    bytes: int
    items: tuple[Held, ...]
    what: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data; items largest first."""
        return {
            "bytes": self.bytes,
            "what": self.what,
            "source": self.source,
            "items": [{"what": i.name, "bytes": i.bytes, "formula": _grouped(i.text)} for i in self.items],
        }


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of one GPU under a plan. `allocated_bytes` is what torch.cuda.max_memory_allocated would say.

    `reserved_bytes` adds the allocator's cache. The CUDA context (`context_bytes`) and other processes come on top.
    `low_bytes` and `high_bytes` bound the allocated and the reserved peak, from this evidence's errors on published
    measurements. `moment` is when the peak happens; `moments` holds the peaks of all of them. `static_bytes` is the
    part of the peak that lies there all the time.
    """

    evidence: str
    allocated_bytes: int
    reserved_bytes: int
    low_bytes: int
    high_bytes: int
    context_bytes: int
    moment: str
    moments: dict[str, int]
    components: tuple[Component, ...]
    trainable_parameters: int
    notes: tuple[str, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    static_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "evidence": self.evidence,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "low_bytes": self.low_bytes,
            "high_bytes": self.high_bytes,
            "context_bytes": self.context_bytes,
            "moment": self.moment,
            "moments_bytes": self.moments,
            "components": {component.name: component.as_json() for component in self.components},
            "trainable_parameters": self.trainable_parameters,
            "notes": list(self.notes),
            **self.detail,
        }


def _grouped(text: str) -> str:
    """Long numbers in groups of three digits, as people read them."""
    return re.sub(r"(?<![.\d])\d{5,}", lambda found: f"{int(found[0]):,}", text)


def _filled(text: str, product: int, size: int) -> str:
    """The product with what whole blocks of 512 bytes add to it."""
    return text if size == product else f"{text} + {size - product} B of blocks not filled"


def estimate(shape: ModelShape, plan: Plan) -> MemoryEstimate:
    """The peak of a training step by formulas. Raises NoEstimate when the structure of the model is not known."""
    if shape.structure == "unknown" or not shape.groups or not shape.hidden_size:
        raise NoEstimate("the structure of this model is not known, so nothing can be counted")
    if plan.modelling == "litgpt":
        remade = litgpt.reshaped(shape)
        if remade is None:
            raise NoEstimate("litgpt's layers for this kind of model are not known here")
        shape = remade
    plan, divided = as_fsdp_keeps_it(plan)
    counted = _Counted(shape, plan)
    counted.notes += divided
    moments = {name: counted.on_one_gpu(name, rows) for name, rows in counted.moments()}
    moment = max(moments, key=lambda name: sum(row.bytes for row in moments[name]))
    rows = moments[moment]
    allocated = sum(row.bytes for row in rows)
    from preflight.memory.errors import interval

    static = static_bytes(rows)
    low, high, reserved = interval("closed", plan, allocated, static)
    share = reserved / allocated - 1
    margin = Held("allocator cache and rounding", reserved - allocated, f"{allocated} x {share:.12f} B", "safety")
    return MemoryEstimate(
        evidence="closed form",
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        low_bytes=low,
        high_bytes=high,
        context_bytes=context_bytes(plan),
        moment=moment,
        moments={name: sum(row.bytes for row in held) for name, held in moments.items()},
        components=components_of([*rows, margin]),
        trainable_parameters=counted.trained,
        notes=tuple(counted.notes),
        static_bytes=static,
    )


_KINDS = {
    "static": "static_model",
    "adapter": "static_model",
    "quantisation": "quantisation_overhead",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "logits": "logits_loss",
    "cuda": "cuda_overhead",
    "safety": "safety_margin",
}


def as_fsdp_keeps_it(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan as accelerate runs it under FSDP, and what a reader must know about it.

    Trained weights of mixed precision are kept in float32, of which 16-bit copies are gathered. Source: accelerate
    utils/fsdp_utils.py, fsdp2_prepare_model, and accelerator.py, prepare_model (FSDP 1).
    """
    if plan.gpus == 1 or not plan.parallel.startswith("fsdp"):
        return plan, []
    notes = []
    if plan.quantised:
        notes.append(
            "FSDP divides 4-bit weights only when they are stored as a float type "
            "(`bnb_4bit_quant_storage=torch.bfloat16`), which is assumed here; else each GPU holds them whole."
        )
    if not plan.adapters and plan.autocast and plan.weight_dtype != "fp32":
        notes.append("Under FSDP with mixed precision accelerate keeps trained weights in float32, as counted here.")
        plan = replace(plan, weight_dtype="fp32")
    return plan, notes


def components_of(rows: list[Held]) -> tuple[Component, ...]:
    """The eight components, always all of them and in their order; equal lines are put together."""
    gathered: dict[str, dict[tuple[str, str, int], int]] = {name: {} for name in COMPONENTS}
    for row in rows:
        place = gathered[_KINDS.get(row.kind, "activations")]
        place[row.name, row.text, row.bytes] = place.get((row.name, row.text, row.bytes), 0) + 1
    made = []
    for name, what in COMPONENTS.items():
        lines = [
            Held(called, size * times, text if times == 1 or not text else f"{times} x ({text})")
            for (called, text, size), times in gathered[name].items()
        ]
        items = sorted(lines, key=lambda item: -item.bytes)
        made.append(Component(name, sum(i.bytes for i in items), tuple(items), what, _SOURCES[name]))
    return tuple(made)


def static_bytes(rows: Iterable[Held]) -> int:
    """Bytes of weights, their scales and optimizer states among the lines of a peak."""
    kinds = ("static", "adapter", "quantisation", "optimizer")
    return sum(row.bytes for row in rows if row.kind in kinds and row.name not in (_FOREACH, _STEP))


# peft utils/constants.py: attention's keys and values, and the input of the last layer of the MLP
_IA3_FEEDFORWARD = ("down_proj", "fc2", "w2", "dense_4h_to_h", "wo")
_IA3_TARGETS = ("k_proj", "v_proj", "k", "v", "key", "value", "query_key_value", "c_attn", "c_proj", *_IA3_FEEDFORWARD)
_FOREACH, _STEP = "foreach temporary", "temporaries of the step"


def context_bytes(plan: Plan) -> int:
    """The CUDA context and loaded kernels, outside torch's figures: 0.14 GiB on a T4 to 1.3 GiB on old drivers.

    0.5 GiB stands for current drivers with lazy loading of kernels. Source: tests/../benchmarks rows with both
    figures (T4, torch 2.10: 0.138 GiB; V100, torch 1.10: 1.31 GiB).
    """
    return 1 << 29


class _Counted:
    """Everything that is counted once for a model and a plan."""

    def __init__(self, shape: ModelShape, plan: Plan) -> None:
        self.shape, self.plan = shape, plan
        self.build = Builder(shape, plan)
        self.notes: list[str] = []
        self.hidden = plan.tokens * (shape.hidden_size or 0) * self.build.stream
        self.outliving = 0  # of a graph that the loop still holds after its backward
        self.profiles = [(group, self.profile(group)) for group in self.trained_stacks()]
        self.trained_tensors = tuple(self.read_trained_tensors(resting=False))
        self.resting_tensors = tuple(self.read_trained_tensors(resting=True))
        self.trained = sum(elements * count for elements, _, count in (*self.trained_tensors, *self.resting_tensors))
        if any(group.mixer in ("mamba", "mamba2", "linear_attention") for group, _ in self.profiles):
            self.notes.append(
                "State-space layers are counted with their fused kernels (mamba_ssm, causal_conv1d, fla). "
                "Without these packages transformers runs them in plain torch and keeps several times more."
            )
        if self.resting_tensors:
            self.notes.append(
                "Only text runs here: vision and audio towers get no gradients and no optimizer states. "
                "Images or audio in the data add the activations of their tower, and these if it is trained."
            )
        self.loss = self.loss_profile()

    def trained_stacks(self) -> list[Layers]:
        """Groups of layers that run in the step: vision and audio towers rest when only text is given."""
        return [group for group in self.shape.groups if group.stack in ("decoder", "encoder")]

    def profile(self, group: Layers) -> Profile:
        self.build.outliving.clear()
        tape, result = self.build.layer(group)
        self.outliving += group.count * sum(storage.bytes for storage in self.build.outliving)
        return tape.profile(result)

    # -- what lies there all the time

    def static(self) -> list[Held]:
        """Weights, quantisation scales, adapters."""
        plain: dict[int, int] = {}
        packed = scales = tables = weights = modules = inputs = outputs = 0
        width, method = self.build.plain, self.plan.method
        for module, times, _stack in self.shape.occurrences():
            count = module.weights * module.per_layer * times
            biases = module.bias * module.per_layer * times
            copies = module.per_layer * times
            if not self.build.quantised(module):
                wide = self.build.norm_width if module.kind == "norm" else width
                plain[wide] = plain.get(wide, 0) + count + biases
                continue
            plain[width] = plain.get(width, 0) + biases
            weights, modules = weights + count, modules + copies
            inputs, outputs = inputs + copies * module.in_features, outputs + copies * module.out_features
            if method == "qlora":
                packed += copies * _block(-(-module.weights // 2))
                blocks = -(-module.weights // 64)
                if self.plan.double_quant:
                    scales += copies * (_block(blocks) + _block(-(-blocks // 256) * 4))
                    tables += copies * (1024 + 2 * 512)
                else:
                    scales += copies * _block(blocks * 4)
                    tables += copies * 512
            elif method == "lora_int8":
                packed += copies * _block(module.weights)
                scales += copies * _block(module.out_features * 4)
            else:  # GPTQ, AWQ: 8 values in an int32; groups of 128 with a float16 scale and a 4-bit zero
                packed += copies * _block(-(-module.weights // 2))
                groups = -(-module.in_features // 128)
                per_group = module.out_features
                scales += copies * (_block(groups * per_group * 2) + _block(groups * per_group // 2))
                scales += copies * _block(module.in_features * 4)
        rows = [
            Held(f"weights of {wide} bytes", count * wide, f"{count} x {wide} B", "static")
            for wide, count in plain.items()
            if count
        ]
        if packed:
            sides = inputs, outputs
            each = 1 if method == "lora_int8" else 0.5
            text = _filled(f"{weights} x {each} B", int(weights * each), packed)
            rows.append(Held("quantised weights", packed, text, "static"))
            rows.append(Held("scales", scales, self._scale_text(weights, method, sides, scales), "quantisation"))
            if tables:
                text = f"{modules} modules x {tables // modules} B"
                rows.append(Held("code tables", tables, text, "quantisation"))
        if self.plan.adapters and self.trained:
            adapter = self.gradients()
            rows.append(Held("adapters", adapter, self.trained_text(adapter), "static"))
            for elements, wide, count in self.resting_tensors:
                size = _block(elements * wide) * count
                text = _filled(f"{count} x {elements} x {wide} B", elements * wide * count, size)
                rows.append(Held("adapters of towers", size, text, "static"))
        return rows

    def _scale_text(self, weights: int, method: str, sides: tuple[int, int], size: int) -> str:
        """`sides`: inputs and outputs of all quantised modules, summed."""
        inputs, outputs = sides
        if method == "qlora" and self.plan.double_quant:
            text, product = f"{weights} / 64 x 1 B + {weights} / 64 / 256 x 4 B", weights // 64 + weights // 4096
        elif method == "qlora":
            text, product = f"{weights} / 64 x 4 B", weights // 16
        elif method == "lora_int8":
            text, product = f"{outputs} outputs x 4 B", outputs * 4
        else:
            text = f"{weights} / 128 x 2.5 B + {inputs} inputs x 4 B"
            product = weights * 5 // 256 + inputs * 4
        return _filled(text, product, size)

    def trained_text(self, size: int) -> str:
        """The product behind so many bytes of trained tensors, each in a block of its own."""
        counts: dict[int, int] = {}
        for elements, width, count in self.trained_tensors:
            counts[width] = counts.get(width, 0) + elements * count
        text = " + ".join(f"{count} x {width} B" for width, count in counts.items())
        return _filled(text or "0 B", sum(count * width for width, count in counts.items()), size)

    def read_trained_tensors(self, resting: bool) -> Iterator[tuple[int, int, int]]:
        """(elements, bytes per element, how many there are) of each kind of trained tensor.

        `resting`: those of vision and audio towers, which never get a gradient from text alone; else all others.
        """
        plan, adapter = self.plan, self.build.adapter
        for module, times, stack in self.shape.occurrences():
            copies = module.per_layer * times
            if of_a_tower(module, stack) != resting:
                continue
            if not plan.adapters:
                yield module.weights, self.build.plain, copies
                if module.bias:
                    yield module.bias, self.build.plain, copies
            elif self.build.litgpt and self.build.targeted(module):
                for elements in litgpt.adapter_elements(plan, self.shape, module):
                    yield elements, adapter, copies
            elif module.path in self.build.stacked:
                for elements in self.build.stack_elements(module):
                    yield elements, adapter, copies
            elif self.build.targeted(module):
                yield plan.lora_rank * module.in_features, adapter, copies
                yield plan.lora_rank * module.out_features, adapter, copies
                if plan.use_dora:
                    yield module.out_features, adapter, copies
            elif plan.modules_to_save and (module.name in plan.modules_to_save or module.path in plan.modules_to_save):
                yield module.parameters * times, max(adapter, self.build.plain), 1
        if not resting:
            yield from self.read_other_adapters()
        head = self.shape.head_path
        tied = bool(self.shape.embedding_parameters) and not self.shape.head_parameters
        if tied and not resting and plan.adapters and {head, head.rpartition(".")[2]} & set(plan.modules_to_save):
            yield self.shape.embedding_parameters, max(adapter, self.build.plain), 1  # a copy of the tied head

    def read_other_adapters(self) -> Iterator[tuple[int, int, int]]:
        """The same for IA3 (a vector per adapted layer) and prefix tuning (keys and values of virtual tokens)."""
        plan, shape, adapter = self.plan, self.shape, self.build.adapter
        if plan.method == "prefix_tuning":
            width = (shape.kv_heads or shape.heads or 0) * (shape.head_dim or 0)
            yield (shape.layers or 0) * 2 * plan.virtual_tokens * width, adapter, 1
        if plan.method != "ia3":
            return
        wanted = plan.target_modules or _IA3_TARGETS
        for module, times, stack in shape.occurrences():
            if module.kind not in ("linear", "conv1d") or module.name not in wanted or of_a_tower(module, stack):
                continue
            vector = module.in_features if module.name in _IA3_FEEDFORWARD else module.out_features
            yield vector, adapter, module.per_layer * times

    def gradients(self) -> int:
        """Bytes of all gradients."""
        return sum(_block(elements * width) * count for elements, width, count in self.trained_tensors)

    def states(self) -> int:
        """Bytes of the optimizer's states."""
        name = self.plan.optimizer_name()
        return sum(state_bytes(name, elements, width) * count for elements, width, count in self.trained_tensors)

    def states_text(self, size: int) -> str:
        """The product behind the optimizer's states; paged tensors of 1e5 elements or more are on the host."""
        name = self.plan.optimizer_name()
        here = [tensor for tensor in self.trained_tensors if state_bytes(name, *tensor[:2])]
        count = 1 if "lion" in name or name == "muon" else 2
        terms: dict[tuple[str, float], int] = {}  # (text, bytes of one) -> how many
        for elements, width, copies in here:
            large = "8bit" in name and elements >= 4096
            each = width if name in ("adamw_torch", "adamw_torch_fused", "muon") else 1 if large else 4
            found = [((f"{count} x {each} B", float(count * each)), elements)]
            if name == "adafactor":
                found = [((f"2 x sqrt({elements}) x 4 B", 8 * elements**0.5), 1)]
            if large:
                found.append(((f"{count} / 256 x 4 B", count / 64), elements))
            for term, number in found:
                terms[term] = terms.get(term, 0) + number * copies
        text = " + ".join(f"{number} x {term}" for (term, _), number in terms.items()) or "0 B"
        return _filled(text, int(sum(one * number for (_, one), number in terms.items())), size)

    def workspaces(self) -> list[Held]:
        each = 32 << 20 if self.build.capability >= 9.0 else 8519680
        return [Held("cuBLAS workspaces, forward and backward handle", 2 * each, f"2 x {each} B", "cuda")]

    # -- the loss

    def loss_profile(self) -> tuple[Profile, int]:
        """The final norm, the head and the loss; and the bytes of logits that the loop still holds afterwards."""
        build, plan, shape = self.build, self.plan, self.shape
        tape = Tape()
        x = tape.input("last hidden states", plan.tokens, shape.hidden_size or 0, build.stream)
        hidden = build.norm(tape, x, "final norm")
        vocabulary, rows = build.vocabulary, plan.tokens
        head = next((m for m, _, _ in shape.occurrences() if shape.is_head(m)), None)
        if head is None:
            head = Module(shape.head_path, "linear", (vocabulary, shape.hidden_size or 0))
        if build.litgpt:
            before = self.outliving + rows * vocabulary * 4 if plan.holds_across_steps else 0
            previous = tape.op("graph and logits of the step before", [], 1, before, 1, kind="logits")
            logits = build.linear(tape, hidden, head, "logits")
            logits.storage.kind = "logits"
            tape.hold(previous)
            pieces = litgpt.loss_of_full if build.full else litgpt.loss_pieces
            result, held = pieces(plan, vocabulary, tape, logits, before)
            return tape.profile(result), held
        if plan.loss in ("fused_linear_ce", "chunked_lm_head_and_ce"):
            return tape.profile(self.fused_linear(tape, hidden, head)), 0
        if plan.loss == "classification":
            out = tape.op("scores", [hidden], plan.micro_batch, 2, 4, keeps=[hidden] if build.full else [])
            return tape.profile(out), 0
        logits = build.linear(tape, hidden, head, "logits")
        logits.storage.kind = "logits"
        logits.storage.name = "logits"
        held = 0
        if shape.softcap:
            logits = tape.op("logits / cap", [logits], rows, vocabulary, logits.width, kind="logits")
            logits = tape.op(
                "tanh of logits", [logits], rows, vocabulary, logits.width, keeps_output=True, kind="logits"
            )
            logits = tape.op("logits * cap", [logits], rows, vocabulary, logits.width, kind="logits")
        wide = logits
        if shape.encoder_decoder and build.cast is None:
            pass  # T5 and the like take cross-entropy of the logits as they are
        elif plan.loss in ("full_logits_fp32_upcast", "fused_ce_on_full_logits") or build.cast is not None:
            wide = tape.cast(logits, 4, "logits in 32 bit")
        whole = wide
        # before 4.46 the model itself made the float32 copy, under the same name: the half-precision one was free
        keeps_half = version_of(plan.transformers) >= (4, 46)
        if copies_shifted_logits(plan):
            wide = tape.op("shifted logits", [wide], rows, vocabulary, wide.width, kind="logits")
        if plan.loss == "fused_ce_on_full_logits":
            # the kernel writes the gradient over its input, whose memory is then the gradient that goes on
            rest = Storage("log-sum-exp", rows * 4, f"{rows} x 4 B", "logits")
            result = tape.op("loss", [wide], 1, 1, 4, keeps=[rest], kind="logits")
            tape.hold(whole, wide, *([logits] if keeps_half else []))
            return tape.profile(result), logits.size if plan.holds_outputs else 0
        chance = tape.op("log-probabilities", [wide], rows, vocabulary, wide.width, keeps_output=True, kind="logits")
        result = tape.op("loss", [chance], 1, 1, 4, kind="logits")
        tape.hold(whole, wide, *([logits] if keeps_half else []))
        if plan.holds_outputs:
            held = rows * vocabulary * (4 if build.cast is not None else logits.width)
        return tape.profile(result), held

    def fused_linear(self, tape: Tape, hidden: Value, head: Module) -> Value:
        """Liger and cut cross-entropy: logits in pieces, the gradient of the hidden states made on the way.

        Source: liger-kernel ops/fused_linear_cross_entropy.py: pieces of next_power_of_2(rows / (vocabulary / width)).
        """
        rows, vocabulary, columns = self.plan.tokens, self.build.vocabulary, hidden.columns
        width = self.build.cast or hidden.width
        pieces = max(1, -(-vocabulary // max(1, columns)))
        size = 1 << max(0, -(-rows // pieces) - 1).bit_length()
        piece = min(rows, size) * vocabulary * width
        weight = head.weights * width if self.build.full else 0
        entry = tape.cast(hidden, width)
        product = f"{rows} x {columns} x {width} B"
        keeps: list[Value | Storage] = [
            Storage("gradient of the hidden states", rows * columns * width, product, "logits")
        ]
        if self.build.plain != width:
            keeps.append(Storage("head weight cast", head.weights * width, f"{head.weights} x {width} B", "logits"))
        text = f"{min(rows, size)} x {vocabulary} x {width} B" + (f" + {head.weights} x {width} B" if weight else "")
        return tape.op(
            "loss", [entry], 1, 1, 4, keeps=keeps, forward_extra=piece + weight, weight_grad=weight, kind="logits",
            trains=self.build.full, forward_text=text,
        )  # fmt: skip

    # -- moments

    def moments(self) -> Iterator[tuple[str, list[Held]]]:
        """Each moment that can be the highest, with what is there then."""
        plan, hidden = self.plan, self.hidden
        ids = Held("token ids and labels", 2 * plan.tokens * 8, f"2 x {plan.tokens} x 8 B", "activation")
        base = [*self.static(), *self.workspaces(), ids]
        size = self.states()
        states = [Held("optimizer states", size, self.states_text(size), "optimizer")] if size else []
        gradients = self.gradients()
        grads = Held("gradients", gradients, self.trained_text(gradients), "gradients")
        if plan.optimizer_in_backward:  # each gradient goes as soon as its parameter has been stepped
            elements, each, _ = max(self.trained_tensors, default=(0, 4, 0))
            grads = Held("gradient of one parameter", _block(elements * each), f"{elements} x {each} B", "gradients")
            gradients = 0
        waiting = [grads] if plan.gradient_accumulation > 1 else []
        profile, held = self.loss
        wide = held // max(1, plan.tokens * self.build.vocabulary)
        product = f"{plan.tokens} x {self.build.vocabulary} x {wide} B"
        held_rows = [Held("logits that the loop still holds", held, product, "logits")] if held else []
        kept = self.kept_by_all()
        before = [*base, *states, *waiting]
        last = Held("hidden states after the last layer", hidden, self.hidden_text(1), "activation")
        for name, rows in (
            ("forward, at the loss", profile.at_forward_peak),
            ("backward, at the loss", profile.at_backward_peak),
        ):
            extra = held_rows if name.startswith("backward") else []
            yield name, [*before, *kept, last, *rows, *extra]
        of_head = 0 if plan.adapters or waiting else self.head_gradient()
        product = f"{of_head // self.build.plain} x {self.build.plain} B"
        head_grads = [Held("gradients of the head", of_head, product, "gradients")] if of_head else []
        total = sum(group.count for group, _ in self.profiles)
        for group, layer in self.profiles:
            work = list(layer.at_backward_peak)
            if plan.gradient_checkpointing and layer.forward_peak + hidden > layer.backward_peak:
                # the layer runs forward again first, with the gradient of its output there
                coming = Held("gradient of the layer's output", hidden, self.hidden_text(1), "activation")
                work = [*layer.at_forward_peak, coming]
            without = [row for row in work if row.kind != "gradients"]
            label = "" if len(self.profiles) == 1 else f" ({group.mixer}, {group.mlp})"
            others = kept if plan.gradient_checkpointing else self.kept_by_all(less=group)
            if plan.adapters or waiting:
                so_far = 0 if waiting else 2 * gradients // max(1, total)
                text = f"2 / {total} x {gradients} B"
                work = [*without, *([Held("gradients so far", so_far, text, "gradients")] if so_far else [])]
            yield f"backward of the last layer{label}", [*before, *held_rows, *others, *head_grads, *work]
            one = Held("hidden states kept at checkpoints", hidden, self.hidden_text(1), "activation")
            yield f"backward of the first layer{label}", [*base, *states, *held_rows, grads, one, *without]
        once, text = self.step_temporary()
        called = _FOREACH if plan.optimizer_name() == "adamw_torch" else _STEP
        step = [Held(called, once, text, "optimizer")] if once else []
        if not plan.adapters and not plan.optimizer_in_backward:
            # a tied embedding gets the head's gradient, its own and their sum; a sum into gradients that wait
            tied = not self.shape.head_parameters and not self.shape.encoder_only and plan.loss != "classification"
            times = 2 * tied + (plan.gradient_accumulation > 1)
            size = self.shape.embedding_parameters * self.build.plain * times
            text = f"{times} x {self.shape.embedding_parameters} x {self.build.plain} B"
            last_row = [Held("gradients of the embedding on their way", size, text, "gradients")] if size else []
            yield "backward of the embedding", [*base, *states, grads, *held_rows, *last_row]
        yield "optimizer step", [*base, *states, grads, *held_rows, *step]
        yield "loading", self.loading()

    def hidden_text(self, count: int) -> str:
        """The product behind so many hidden states."""
        layers = f"{count} layers x " if count > 1 else ""
        return f"{layers}{self.plan.tokens} x {self.shape.hidden_size} x {self.build.stream} B"

    def head_gradient(self) -> int:
        return (self.shape.head_parameters or self.shape.embedding_parameters) * self.build.plain

    def kept_by_all(self, less: Layers | None = None) -> list[Held]:
        """What all layers keep; with `less`, without one layer of that kind (whose own lines are listed apart)."""
        plan, hidden = self.plan, self.hidden
        total = sum(group.count for group, _ in self.profiles)
        rotary = 2 * plan.sequence_tokens * (self.shape.head_dim or 0) * self.build.stream
        text = f"2 x {plan.sequence_tokens} x {self.shape.head_dim or 0} x {self.build.stream} B"
        rows = [Held("cos and sin of positions", rotary, text, "activation")]
        if (self.shape.model_type or "") in ("t5", "mt5", "umt5"):  # one per stack, and zeros for cross-attention
            square = f"3 x {self.shape.heads} x {plan.sequence_tokens} x {plan.sequence_tokens} x {self.build.plain} B"
            count = 3 * (self.shape.heads or 0) * plan.sequence_tokens**2 * self.build.plain
            rows = [Held("position biases", count, square, "activation")]
        if plan.gradient_checkpointing:
            rows.append(
                Held("hidden states kept at checkpoints", total * hidden, self.hidden_text(total), "activation")
            )
            return rows
        for group, layer in self.profiles:
            count = group.count - (1 if group is less else 0)
            if layer.keeps_input:
                rows.append(Held("layer inputs", group.count * hidden, self.hidden_text(group.count), "activation"))
            rows += [
                Held(row.name, row.bytes * count, f"{count} layers x {row.text}", row.kind)
                for row in layer.kept_rows
                if count
            ]
        return rows

    def on_one_gpu(self, moment: str, rows: list[Held]) -> list[Held]:
        """The lines of one moment on the fullest of several GPUs.

        FSDP and ZeRO-3 divide parameters, gradients and states and gather one layer and what lies outside the layers;
        ZeRO-1 divides the states, ZeRO-2 the gradients too; DDP adds buckets as large as the gradients; a pipeline
        divides the layers, the last GPU has head and loss. Source: torch.distributed.fsdp, deepspeed runtime/zero.
        """
        plan = self.plan
        if plan.parallel == "none" or (plan.gpus == 1 and not plan.offload):
            return rows
        if plan.parallel == "ddp":
            size = self.gradients()
            return [*rows, Held("buckets of DDP", size, self.trained_text(size), "gradients")]
        whole = {"static", "quantisation", "gradients", "optimizer"}
        divided = {"zero1": {"optimizer"}, "zero2": {"optimizer", "gradients"}}.get(plan.parallel, whole)
        made = []
        for row in rows:
            if row.kind in divided or (plan.parallel == "pipeline" and "checkpoint" in row.name):
                away = plan.offload and (row.kind == "optimizer" or plan.parallel in ("fsdp_full", "zero3"))
                if away:  # in host memory
                    continue
                if plan.gpus > 1:
                    row = Held(row.name, -(-row.bytes // plan.gpus), f"({row.text}) / {plan.gpus}", row.kind)
            made.append(row)
        if plan.parallel in ("fsdp_full", "fsdp_hybrid", "zero3") and moment.startswith(("forward", "backward")):
            size, text = self.gathered()
            made.append(Held("gathered: one layer and what lies outside the layers", size, text, "static"))
        return made

    def gathered(self) -> tuple[int, str]:
        """Bytes of the parameters that are whole at a time under FSDP or ZeRO-3, and the product behind them."""
        layer = max((self.stored(group.modules) for group, _ in self.profiles), default=(0, "0 B"))
        rest = self.stored(self.shape.rest)
        return layer[0] + rest[0], f"{layer[1]} + {rest[1]}"

    def stored(self, modules: tuple[Module, ...]) -> tuple[int, str]:
        """Bytes of these modules as they are stored, and the product behind them."""
        packed = sum(m.parameters for m in modules if self.build.quantised(m))
        plain = sum(m.parameters for m in modules if not self.build.quantised(m))
        terms = [f"{packed} x 0.5 B"] if packed else []
        terms += [f"{plain} x {self.build.plain} B"] if plain or not packed else []
        return packed // 2 + plain * self.build.plain, " + ".join(terms)

    def step_temporary(self) -> tuple[int, str]:
        """Bytes that the optimizer step works on beside its states, and the product behind them.

        A foreach AdamW makes one list as large as the gradients (the square roots of the second moments). Adafactor
        goes tensor by tensor in float32: squares, update, and copies of gradient and weight where these are in half
        precision (transformers optimization.py). Muon orthogonalises one matrix at a time in bfloat16.
        """
        name = self.plan.optimizer_name()
        if name == "adamw_torch" and not self.plan.optimizer_in_backward:
            size = self.gradients()
            return size, self.trained_text(size)
        elements, width, _ = max(self.trained_tensors, default=(0, 4, 0))
        if name == "adafactor":
            each = 8 if width == 4 else 16
            return elements * each, f"{elements} x {each} B"
        return (elements * 6, f"{elements} x 3 x 2 B") if name == "muon" else (0, "")

    def loading(self) -> list[Held]:
        """The highest point of loading: all weights, and the largest one twice while it is quantised or cast."""
        rows = [row for row in self.static() if row.name != "adapters"]
        if not self.plan.quantised:
            return rows
        source = WIDTHS[self.plan.weight_dtype]
        largest = max((m.weights for m, _, _ in self.shape.occurrences() if self.build.quantised(m)), default=0)
        name = "a 16-bit weight while it is quantised"
        if self.plan.upcast:
            plain = max((m.weights for m, _, _ in self.shape.occurrences() if not self.build.quantised(m)), default=0)
            name, largest = "16-bit copies while they are cast", max(plain, largest)
        rows.append(Held(name, largest * source, f"{largest} x {source} B", "static"))
        return rows


def trained_sizes(shape: ModelShape, plan: Plan) -> tuple[int, int]:
    """Bytes of all trained tensors and of the optimizer's states for them, not divided over GPUs, wherever they lie.

    Paged states count in full. Raises NoEstimate when the model's structure is not known.
    """
    counted = _Counted(shape, plan)
    name = plan.optimizer_name().replace("paged_", "")
    tensors = counted.trained_tensors
    return (
        sum(elements * width * count for elements, width, count in tensors),
        sum(state_bytes(name, elements, width) * count for elements, width, count in tensors),
    )


def state_bytes(optimizer: str, elements: int, width: int) -> int:
    """Bytes of the states that an optimizer keeps for one tensor. Paged ones of 1e5 elements or more are not on it."""
    if optimizer in ("adamw_torch", "adamw_torch_fused"):
        return 2 * _block(elements * width)
    if optimizer == "sgd":
        return 0
    if optimizer == "adafactor":
        return 2 * _block(int(elements**0.5) * 4)
    if optimizer == "muon":
        return _block(elements * width)
    if "paged" in optimizer and elements >= 100000:
        return 0
    count = 1 if "lion" in optimizer else 2
    if "8bit" in optimizer and elements >= 4096:
        return count * (_block(elements) + _block(-(-elements // 256) * 4))
    return count * _block(elements * 4)


def copies_shifted_logits(plan: Plan) -> bool:
    """Whether the loss copies the logits less their last position: transformers before 4.50.

    Source: transformers loss/loss_utils.py; 4.45 and before: in each model's forward. Later versions shift the labels.
    """
    return version_of(plan.transformers) < (4, 50)


def _block(size: int) -> int:
    return -(-size // 512) * 512
