"""What does a block of a network keep for its backward pass, and how high does its memory rise? Only counting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROUND = 512  # the CUDA caching allocator hands out multiples of this


def in_blocks(text: str, size: int) -> str:
    """The product behind `size` bytes; blocks(...) says that it is rounded up to whole blocks of 512 bytes."""
    return text if size % ROUND == 0 else f"blocks({text})"


class Storage:
    """A piece of memory that one or more values share. `text` is its size as a product that a reader can recompute."""

    __slots__ = ("bytes", "kind", "name", "text")

    def __init__(self, name: str, size: int, text: str = "", kind: str = "activation") -> None:
        self.name, self.bytes, self.kind = name, -(-size // ROUND) * ROUND, kind
        self.text = in_blocks(text or f"{size} B", size)


@dataclass(eq=False)
class Value:
    """A tensor in the program of a block: rows x columns elements of `width` bytes each."""

    storage: Storage
    rows: int
    columns: int
    width: int
    grad: bool = True
    last_use: int = -1

    @property
    def size(self) -> int:
        """Bytes of the values, rounded as the allocator does."""
        return -(-self.rows * self.columns * self.width // ROUND) * ROUND


@dataclass(eq=False)
class Operation:
    """One operation: what it reads, makes and keeps, and what it needs only while it runs."""

    name: str
    inputs: tuple[Value, ...]
    output: Value
    keeps: tuple[Storage, ...]
    forward_extra: int
    backward_extra: int
    texts: tuple[str, str]  # the products behind the two
    weight_grad: int
    passes: bool  # the gradient of the output is the gradient of the inputs, without a copy
    makes: bool  # the output has memory of its own


@dataclass(frozen=True)
class Held:
    """One line of a breakdown."""

    name: str
    bytes: int
    text: str = ""
    kind: str = "activation"


@dataclass
class Profile:
    """Bytes of one block. `kept` stays from its forward pass until its backward pass; its input is not in it.

    `forward_peak` and `backward_peak` are the highest points, both including what is kept; `backward_peak` also has
    the gradient that comes in. `weight_grads` stays after backward.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    weight_grads: int
    output: int
    keeps_input: bool = False
    at_backward_peak: tuple[Held, ...] = ()
    at_forward_peak: tuple[Held, ...] = ()
    kept_rows: tuple[Held, ...] = field(default=())


class Tape:
    """Writes down the operations of a block, then counts its memory forwards and backwards.

    A value lives until its last use, or longer when an operation keeps its storage for backward. Gradients of values
    that are used more than once are added in place where nothing else holds them, as PyTorch's engine does
    (torch/csrc/autograd/input_buffer.cpp).
    """

    def __init__(self, grad: bool = True) -> None:
        self.operations: list[Operation] = []
        self.grad = grad
        self.inputs: list[Value] = []
        self.grad_width = 1  # bytes per element of the gradients of weights, for the products that are shown

    def input(self, name: str, rows: int, columns: int, width: int, grad: bool = True) -> Value:
        """A value from outside; its memory is not counted."""
        value = Value(Storage(name, rows * columns * width), rows, columns, width, grad and self.grad)
        self.inputs.append(value)
        return value

    def op(
        self,
        name: str,
        inputs: Sequence[Value],
        rows: int,
        columns: int,
        width: int,
        *,
        keeps: Iterable[Value | Storage] = (),
        keeps_output: bool = False,
        forward_extra: int = 0,
        backward_extra: int = 0,
        forward_text: str = "",
        backward_text: str = "",
        weight_grad: int = 0,
        passes: bool = False,
        kind: str = "activation",
        trains: bool = False,
    ) -> Value:
        """An operation with an output of its own. `trains`: it has trained weights, so its output needs a gradient."""
        grad = self.grad and (trains or any(value.grad for value in inputs))
        storage = Storage(name, rows * columns * width, f"{rows} x {columns} x {width} B", kind)
        output = Value(storage, rows, columns, width, grad)
        kept = [item.storage if isinstance(item, Value) else item for item in keeps]
        if keeps_output:
            kept.append(storage)
        self._add(
            Operation(
                name,
                tuple(inputs),
                output,
                tuple(kept) if grad else (),
                forward_extra,
                backward_extra,
                (forward_text or f"{forward_extra} B", backward_text or f"{backward_extra} B"),
                weight_grad,
                passes,
                True,
            )
        )
        return output

    def view(self, value: Value, rows: int, columns: int) -> Value:
        """The same memory in another shape."""
        output = Value(value.storage, rows, columns, value.width, value.grad)
        self._add(Operation("view", (value,), output, (), 0, 0, ("", ""), 0, True, False))
        return output

    def cast(self, value: Value, width: int, name: str | None = None) -> Value:
        """The value in another width; the value itself when it has that width."""
        if value.width == width:
            return value
        label = name or f"{value.storage.name} in {width * 8} bit"
        return self.op(label, [value], value.rows, value.columns, width, kind=value.storage.kind)

    def hold(self, *values: Value) -> None:
        """The program still has a name for these values here."""
        for value in values:
            value.last_use = max(value.last_use, len(self.operations) - 1)

    def _add(self, operation: Operation) -> None:
        index = len(self.operations)
        self.operations.append(operation)
        for value in operation.inputs:
            value.last_use = index
        operation.output.last_use = index

    def profile(self, result: Value) -> Profile:
        """Count. `result` is the output of the block: not freed in the forward pass, and first to get a gradient."""
        outside = {value.storage for value in self.inputs}
        kept_order: list[Storage] = []
        for operation in self.operations:
            for storage in operation.keeps:
                if storage not in outside and storage not in kept_order:
                    kept_order.append(storage)
        kept = set(kept_order)
        last: dict[Storage, int] = {}
        for index, operation in enumerate(self.operations):
            for value in (*operation.inputs, operation.output):
                last[value.storage] = max(last.get(value.storage, -1), value.last_use, index)
        live: dict[Storage, int] = {}
        total = peak = 0
        peak_rows: tuple[Held, ...] = ()
        dying: dict[int, list[Storage]] = {}
        for storage, index in last.items():
            if storage not in outside and storage not in kept and storage is not result.storage:
                dying.setdefault(index, []).append(storage)
        for index, operation in enumerate(self.operations):
            if operation.makes:
                live[operation.output.storage] = operation.output.storage.bytes
                total += operation.output.storage.bytes
            for storage in operation.keeps:  # copies of weights that only backward needs are made here
                if storage not in live and storage not in outside:
                    live[storage] = storage.bytes
                    total += storage.bytes
            if total + operation.forward_extra > peak:
                peak = total + operation.forward_extra
                peak_rows = _rows(live, operation.forward_extra, f"while {operation.name} runs", operation.texts[0])
            for storage in dying.get(index, ()):
                total -= live.pop(storage, 0)
        kept_bytes = sum(storage.bytes for storage in kept)
        backward_peak, rows, weight_grads = self._backward(result, kept_order, outside)
        return Profile(
            kept=kept_bytes,
            forward_peak=peak,
            backward_peak=backward_peak,
            weight_grads=weight_grads,
            output=result.storage.bytes,
            keeps_input=any(storage in outside for op in self.operations for storage in op.keeps),
            at_backward_peak=rows,
            at_forward_peak=peak_rows,
            kept_rows=tuple(Held(s.name, s.bytes, s.text, s.kind) for s in kept_order),
        )

    def _backward(self, result: Value, kept: list[Storage], outside: set[Storage]) -> tuple[int, tuple[Held, ...], int]:
        uses: dict[Storage, int] = {}
        for operation in self.operations:
            for storage in set(operation.keeps):
                if storage not in outside:
                    uses[storage] = uses.get(storage, 0) + 1
        live = {storage: storage.bytes for storage in kept}
        first = _Gradient(result)
        gradients: dict[Value, _Gradient] = {result: first}
        buffers: dict[_Gradient, int] = {first: 1}
        total = sum(live.values()) + first.bytes
        peak, rows = total, _rows(live, 0, "", "", buffers)
        weight_grads = 0

        def drop(gradient: _Gradient) -> None:
            nonlocal total
            buffers[gradient] -= 1
            if buffers[gradient] == 0:
                del buffers[gradient]
                total -= gradient.bytes

        def look(extra: int = 0, why: str = "", text: str = "") -> None:
            nonlocal peak, rows
            if total + weight_grads + extra > peak:
                peak = total + weight_grads + extra
                rows = _rows(live, extra, why, text, buffers)
                if weight_grads:
                    product = f"{weight_grads // self.grad_width} x {self.grad_width} B"
                    rows = (*rows, Held("gradients of the weights so far", weight_grads, product, "gradients"))

        for operation in reversed(self.operations):
            incoming = gradients.pop(operation.output, None)
            if incoming is not None:
                made: list[tuple[Value, _Gradient]] = []
                for value in operation.inputs:
                    if not value.grad:
                        continue
                    if operation.passes and value.size == incoming.bytes:
                        gradient = incoming
                        buffers[gradient] += 1
                    else:
                        gradient = _Gradient(value)
                        buffers[gradient] = 1
                        total += gradient.bytes
                    made.append((value, gradient))
                weight_grads += operation.weight_grad
                why = f"while the gradient of {operation.name} is computed"
                look(operation.backward_extra, why, operation.texts[1])
                drop(incoming)
                for storage in set(operation.keeps):
                    if storage in uses:
                        uses[storage] -= 1
                        if uses[storage] == 0:
                            total -= live.pop(storage)
                for value, gradient in made:
                    pending = gradients.get(value)
                    if pending is None:
                        gradients[value] = gradient
                    elif buffers[pending] == 1:
                        drop(gradient)
                    else:
                        summed = _Gradient(value)
                        buffers[summed] = 1
                        total += summed.bytes
                        look()
                        drop(pending)
                        drop(gradient)
                        gradients[value] = summed
            else:
                for storage in set(operation.keeps):
                    if storage in uses:
                        uses[storage] -= 1
                        if uses[storage] == 0:
                            total -= live.pop(storage)
        return peak, rows, weight_grads


class _Gradient:
    __slots__ = ("bytes", "kind", "name", "text")

    def __init__(self, value: Value) -> None:
        self.bytes, self.name, self.kind = value.size, f"gradient of {value.storage.name}", value.storage.kind
        product = f"{value.rows} x {value.columns} x {value.width} B"
        self.text = in_blocks(product, value.rows * value.columns * value.width)


def _rows(
    live: dict[Storage, int], extra: int, why: str, text: str, buffers: dict[_Gradient, int] | None = None
) -> tuple[Held, ...]:
    rows = [Held(storage.name, size, storage.text, storage.kind) for storage, size in live.items()]
    rows += [Held(gradient.name, gradient.bytes, gradient.text, gradient.kind) for gradient in buffers or {}]
    if extra:
        rows.append(Held(why, extra, text, "activation"))
    return tuple(rows)
