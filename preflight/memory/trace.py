"""The trace of a rehearsal with few layers, completed to the whole depth, and what it says about memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from preflight.memory.allocator import CachingAllocator, OutOfMemory
from preflight.memory.tape import Held

Layer = tuple[int, int]  # (stack, index in the whole model)
Event = tuple[Any, ...]


class CannotComplete(Exception):
    """The layers that ran are not alike enough to stand for the others; the reason is one line."""


@dataclass
class Segment:
    """The events between two marks. `layer` is the number of a layer that ran, -1 outside the layers."""

    phase: str
    turn: int
    layer: int
    events: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Stack:
    """One list of layers of the model: which kind each layer is, which of them ran, and who stands for the others."""

    kinds: tuple[int, ...]
    run: tuple[int, ...]
    first: int  # number of its first layer that ran

    @property
    def missing(self) -> list[int]:
        """Layers that did not run, in order."""
        ran = set(self.run)
        return [index for index in range(len(self.kinds)) if index not in ran]

    def template(self, index: int) -> int:
        """The number of the layer that ran which stands for layer `index`."""
        if index in self.run:
            return self.first + self.run.index(index)
        inner = [i for i in range(1, len(self.run) - 1) if self.kinds[self.run[i]] == self.kinds[index]]
        if not inner:
            raise CannotComplete(f"no layer like layer {index} ran between two others")
        # the one before the gap has the last layer as its neighbour, so an earlier one is the better pattern
        return self.first + (inner[-1] if inner[-1] < len(self.run) - 2 or len(inner) == 1 else inner[-2])


def stacks_of(layers: Sequence[Mapping[str, Any]]) -> list[Stack]:
    """The stacks that the child reported."""
    found, first = [], 0
    for item in layers:
        stack = Stack(tuple(item["kinds"]), tuple(item["run"]), first)
        found.append(stack)
        first += len(stack.run)
    return found


def complete(events: Sequence[list[Any]], stacks: Sequence[Stack]) -> list[Event]:
    """The events of the whole depth: ("mark", phase, turn) | (id, bytes, what, id in the trace) | (id,).

    Each missing layer replays the segments of the layer that stands for it, with storages of its own. What a layer
    releases of its neighbour is found by its place among what neighbours release of each other.
    Raises CannotComplete when that leaves something open.
    """
    return _Completion(events, stacks).run()


class _Completion:
    def __init__(self, events: Sequence[list[Any]], stacks: Sequence[Stack]) -> None:
        self.stacks = stacks
        self.segments = _segments(events)
        self.identity: list[Layer] = [(s, i) for s, stack in enumerate(stacks) for i in stack.run]
        self.stack_of = [s for s, stack in enumerate(stacks) for _ in stack.run]
        self.born: dict[int, tuple[int, Segment, int, int]] = {}  # id -> owner, segment, bytes, order
        self.label: dict[int, int] = {}
        self.survivors: dict[tuple[int, str, int, int], list[int]] = {}  # what outlives the segment it was made in
        order = 0
        for segment in self.segments:
            for event in segment.events:
                if len(event) > 1:
                    self.born[event[0]] = (event[3], segment, event[1], order)
                    self.label[event[0]] = event[2]
                    order += 1
            dead = {event[0] for event in segment.events if len(event) == 1}
            for event in segment.events:
                if len(event) > 1 and event[0] not in dead:
                    key = (event[3], segment.phase, segment.turn, event[2])
                    self.survivors.setdefault(key, []).append(event[0])
        # the layer in whose segment a storage is released, -1 outside the layers
        self.dies_in = {e[0]: segment.layer for segment in self.segments for e in segment.events if len(e) == 1}
        self.names: dict[tuple[Layer | None, int], int] = {}
        self.next = 0
        self.out: list[Event] = []

    def run(self) -> list[Event]:
        for segment in self.segments:
            self.out.append(("mark", segment.phase, segment.turn))
            if segment.layer < 0:
                self._outside(segment)
                continue
            stack_number = self.stack_of[segment.layer]
            stack = self.stacks[stack_number]
            place = segment.layer - stack.first
            gap_before, gap_after = len(stack.run) - 2, len(stack.run) - 1
            missing = stack.missing
            self._replay(segment, (stack_number, stack.run[place]))
            if not missing or segment.phase not in ("fwd", "bwd"):
                continue
            if segment.phase == "fwd" and place == gap_before:
                self._fill(segment, stack_number, missing)
            elif segment.phase == "bwd" and place == gap_after:
                self._fill(segment, stack_number, missing[::-1])
        return self.out

    def _fill(self, like: Segment, stack_number: int, missing: Sequence[int]) -> None:
        stack = self.stacks[stack_number]
        for index in missing:
            template = stack.template(index)
            found = [s for s in self.segments if (s.phase, s.turn, s.layer) == (like.phase, like.turn, template)]
            for segment in found:
                self._replay(segment, (stack_number, index))

    def _new(self, key: tuple[Layer | None, int]) -> int:
        self.next += 1
        self.names[key] = self.next
        return self.next

    def _release(self, key: tuple[Layer | None, int]) -> None:
        name = self.names.pop(key, None)
        if name is None:
            other = self._taken_over(key)
            if other is None:
                raise CannotComplete(f"a storage is released that is not there ({key})")
            name = self.names.pop(other)
        self.out.append((name,))

    def _taken_over(self, key: tuple[Layer | None, int]) -> tuple[Layer, int] | None:
        """What stands for a storage that is gone already.

        The layer before the gap passes its output on to the first layer in the gap; what comes after the last layer
        then releases the output of the last layer in the gap.
        """
        layer, ident = key
        if layer is None or layer not in self.identity:
            return None
        stack = self.stacks[layer[0]]
        if not stack.missing or layer[1] not in (stack.run[-2], stack.run[-1]):
            return None
        target = (layer[0], stack.missing[-1] if layer[1] == stack.run[-2] else stack.missing[0])
        other = self._counterpart(target, ident)
        return None if other is None else (target, other)

    def _replay(self, segment: Segment, layer: Layer) -> None:
        """The events of a layer's segment, carried out by `layer`."""
        real = self.identity[segment.layer] == layer
        for event in segment.events:
            ident = event[0]
            if len(event) > 1:
                owner = event[3]
                whose = layer if owner == segment.layer else (self.identity[owner] if owner >= 0 else None)
                if owner == segment.layer or real:
                    self.out.append((self._new((whose, ident)), event[1], event[2], ident))
                continue
            owner = self.born[ident][0]
            if owner == segment.layer:
                self._release((layer, ident))
            elif owner < 0:
                if real:
                    self._release((None, ident))
            elif self.stack_of[owner] != self.stack_of[segment.layer]:
                if real:
                    self._release((self.identity[owner], ident))
            else:
                self._release_of_neighbour(segment, layer, ident, owner, real)

    def _release_of_neighbour(self, segment: Segment, layer: Layer, ident: int, owner: int, real: bool) -> None:
        distance = owner - segment.layer
        if abs(distance) > 1:
            if real:
                self._release((self.identity[owner], ident))
            return
        stack = self.stacks[layer[0]]
        target = (layer[0], layer[1] + distance)
        if not 0 <= target[1] < len(stack.kinds):
            raise CannotComplete("a layer at the edge releases what a neighbour it does not have made")
        template = stack.template(target[1])
        if template == owner:
            self._release((target, ident))
            return
        other = self._counterpart(target, ident)
        if other is None:
            raise CannotComplete(f"layer {target[1]} made nothing that layer {layer[1]} could release")
        self._release((target, other))

    def _counterpart(self, target: Layer, ident: int) -> int | None:
        """What `target` made that corresponds to the storage `ident` of the layer that ran; None when it is gone.

        The same operation in the same phase; of several, the one at the same place among those that are passed on.
        """
        owner, home, _, _ = self.born[ident]
        template = self.stacks[target[0]].template(target[1])
        label = self.label[ident]
        mine = self.survivors.get((owner, home.phase, home.turn, label), [])
        theirs = self.survivors.get((template, home.phase, home.turn, label), [])
        there = [other for other in theirs if (target, other) in self.names]
        if not there:
            return None
        passed = [other for other in mine if self.dies_in.get(other, owner) != owner]
        others = [other for other in theirs if self.dies_in.get(other, template) != template]
        if ident in passed and passed.index(ident) < len(others) and others[passed.index(ident)] in there:
            return others[passed.index(ident)]
        return there[-1]

    def _outside(self, segment: Segment) -> None:
        """Events outside the layers, in groups by whose storages they touch; groups of missing layers are put in."""
        groups: list[tuple[int, list[list[Any]]]] = []
        for event in segment.events:
            owner = event[3] if len(event) > 1 else self.born[event[0]][0]
            if groups and groups[-1][0] == owner:
                groups[-1][1].append(event)
            else:
                groups.append((owner, [event]))
        signatures = [self._signature(events) for _, events in groups]
        standing = self._standing()
        passing = self._passing(groups, signatures)
        for number, (owner, events) in enumerate(groups):
            whose = self.identity[owner] if owner >= 0 else None
            for event in events:
                if len(event) > 1:
                    self.out.append((self._new((whose, event[0])), event[1], event[2], event[0]))
                    continue
                self._release((whose, event[0]))
                # the order of releases may be arbitrary (autocast's cache is a hash table): at once for all of a kind
                for layer in standing.get(owner, ()):
                    if (layer, event[0]) in self.names:
                        self._release((layer, event[0]))
            if owner < 0:
                continue
            stack_number = self.stack_of[owner]
            stack = self.stacks[stack_number]
            if owner - stack.first != len(stack.run) - 2:
                continue
            left: list[tuple[Layer | None, int]] = []
            for index in stack.missing:
                for key in left:
                    self._release(key)
                left = []
                for event in self._pattern(groups, signatures, number, stack.template(index)):
                    key = ((stack_number, index), event[0])
                    if len(event) > 1:
                        self.out.append((self._new(key), event[1], event[2], event[0]))
                        if event[0] in passing:
                            left.append(key)
                    elif key in self.names:
                        self._release(key)
                left = [key for key in left if key in self.names]
            for key in left:
                self._release(key)

    @staticmethod
    def _passing(
        groups: Sequence[tuple[int, list[list[Any]]]], signatures: Sequence[tuple[Any, ...]]
    ) -> frozenset[int]:
        """Storages of one layer that live until the next layer has begun and end before it makes its own of them.

        A loop over parameters leaves them behind (a variable is overwritten one turn later); an operation over all
        layers at once makes all of them before the first ends.
        """
        ends = {event[0]: number for number, (_, events) in enumerate(groups) for event in events if len(event) == 1}
        found = set()
        for number, (owner, events) in enumerate(groups):
            same = (
                later
                for later in range(number + 1, len(groups))
                if groups[later][0] == owner + 1 and signatures[later] == signatures[number]
            )
            if owner >= 0 and signatures[number] and (following := next(same, None)) is not None:
                made = [event[0] for event in events if len(event) > 1]
                found |= {ident for ident in made if number < ends.get(ident, number) < following}
        return frozenset(found)

    def _standing(self) -> dict[int, list[Layer]]:
        """Which missing layers each layer that ran stands for."""
        found: dict[int, list[Layer]] = {}
        for number, stack in enumerate(self.stacks):
            for index in stack.missing:
                found.setdefault(stack.template(index), []).append((number, index))
        return found

    def _signature(self, events: Sequence[list[Any]]) -> tuple[Any, ...]:
        """What a group allocates, without whose storages they are."""
        return tuple((event[1], event[2]) for event in events if len(event) > 1)

    @staticmethod
    def _pattern(
        groups: Sequence[tuple[int, list[list[Any]]]], signatures: Sequence[tuple[Any, ...]], number: int, owner: int
    ) -> list[list[Any]]:
        """The group of `owner` that does what group `number` does for its own layer.

        The k-th of those that do the same; where none does (layers of another kind), the nearest one.
        """
        if not signatures[number]:
            return []
        mine = groups[number][0]
        same = [i for i, (whose, _) in enumerate(groups) if whose == owner and signatures[i] == signatures[number]]
        rank = sum(1 for i in range(number) if groups[i][0] == mine and signatures[i] == signatures[number])
        if rank < len(same):
            return groups[same[rank]][1]
        if same:
            return []
        others = [i for i, (whose, _) in enumerate(groups) if whose == owner]
        return groups[min(others, key=lambda i: abs(i - number))][1] if others else []


def _segments(events: Sequence[list[Any]]) -> list[Segment]:
    found: list[Segment] = []
    turn = 0
    backward = False
    for event in events:
        if isinstance(event[0], str):
            phase, _, layer = event
            if phase == "fwd" and layer == -1 and backward:
                turn += 1
                backward = False
            if phase == "bwd":
                backward = True
            found.append(Segment(phase, turn, layer))
        else:
            if not found:
                found.append(Segment("load", 0, -1))
            found[-1].events.append(event)
    return found


@dataclass
class Replay:
    """What the trace says: peaks in bytes, by phase (of each turn: a micro step), and what was there at the peak."""

    allocated_bytes: int
    reserved_bytes: int
    tensors_bytes: int
    phases: dict[str, int]
    moment: str
    at_peak: tuple[Held, ...]
    timeline: tuple[tuple[str, int, int], ...]
    ran_out: bool = False


def replay(
    events: Sequence[Event],
    table: Sequence[str],
    *,
    gradients: frozenset[int] = frozenset(),
    measured_turn: int | None = None,
    empty_before: bool = False,
    limit_bytes: int | None = None,
) -> Replay:
    """Replay the events through the caching allocator.

    `measured_turn`: peaks are reset before this turn (loops that warm up first); `empty_before` also empties the cache
    there. `limit_bytes`: the card; what does not fit ends the replay (`ran_out`).
    """
    allocator = CachingAllocator(limit_bytes)
    phases: dict[str, int] = {}
    phase, turn = "load", 0
    highest = -1
    peak_at = 0
    peak_phase = ("load", 0)
    ran_out = False
    points: list[tuple[str, int, int]] = []
    top: tuple[str, int, int] | None = None  # the highest since the last point, so that no peak falls between two
    every = max(1, len(events) // 400)
    try:
        for number, event in enumerate(events):
            if event[0] == "mark":
                if (event[1], event[2]) != (phase, turn):
                    if measured_turn is not None and event[2] == measured_turn and turn < measured_turn:
                        if empty_before:
                            allocator.empty_cache()
                        allocator.reset_peaks()
                        phases.clear()
                        highest = -1
                    phase, turn = event[1], event[2]
                continue
            if len(event) == 1:
                allocator.release(event[0])
            else:
                allocator.allocate(event[0], event[1])
                name = f"{phase} {turn}"
                if allocator.allocated > phases.get(name, -1):
                    phases[name] = allocator.allocated
                    if allocator.allocated > highest:
                        highest, peak_at, peak_phase = allocator.allocated, number, (phase, turn)
            now = (f"{phase} {turn}", allocator.allocated, allocator.reserved)
            if top is not None and top[0] != now[0]:
                points.append(top)
                top = None
            if top is None or now[1] > top[1]:
                top = now
            if number % every == 0:
                points.append(top)
                top = None
    except OutOfMemory:
        ran_out = True
    if top is not None:
        points.append(top)
    held, tensors = _at(events, peak_at, table, gradients)
    return Replay(
        allocated_bytes=max(highest, 0),
        reserved_bytes=allocator.peak_reserved,
        tensors_bytes=tensors,
        phases=phases,
        moment=f"{_PHASES.get(peak_phase[0], peak_phase[0])} in step {peak_phase[1] + 1}",
        at_peak=held,
        timeline=tuple(points),
        ran_out=ran_out,
    )


_PHASES = {"fwd": "forward", "bwd": "backward", "opt": "optimizer step", "clip": "gradient clipping", "load": "loading"}


def _at(
    events: Sequence[Event], number: int, table: Sequence[str], gradients: frozenset[int]
) -> tuple[tuple[Held, ...], int]:
    """The storages that were there after event `number`, put together by what they are."""
    live: dict[int, tuple[int, int, int]] = {}
    for event in events[: number + 1]:
        if event[0] == "mark":
            continue
        if len(event) == 1:
            live.pop(event[0], None)
        else:
            live[event[0]] = (event[1], event[2], event[3])
    gathered: dict[tuple[str, str, str], list[int]] = {}
    for size, what, ident in live.values():
        kind, operation, shape, dtype = [*table[what].split("|"), "", "", ""][:4]
        if ident in gradients:
            kind = "gradients"
        gathered.setdefault((kind, operation, f"{shape} {dtype}"), []).append(size)
    rows = [
        Held(operation, sum(sizes), f"{len(sizes)} x {shape}", kind)
        for (kind, operation, shape), sizes in gathered.items()
    ]
    rows.sort(key=lambda row: -row.bytes)
    return tuple(rows), sum(row.bytes for row in rows)


def phase_bounds(points: Sequence[tuple[str, int, int]]) -> dict[str, int]:
    """Index of the first point of each phase in a timeline."""
    names = [name for name, _, _ in points]
    return {name: bisect_left(names, name) for name in dict.fromkeys(names)}
