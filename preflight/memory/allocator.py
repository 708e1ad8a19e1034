"""How much of the card does a sequence of allocations take? A model of PyTorch's CUDA caching allocator."""

from __future__ import annotations

from bisect import bisect_left, insort

SMALL = 1 << 20  # requests up to this size come from the small pool, and larger free blocks are split above it
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20
BLOCK = 512


class OutOfMemory(Exception):
    """The request does not fit under the limit, even after the cache was given back."""

    def __init__(self, wanted: int, allocated: int, reserved: int) -> None:
        super().__init__(wanted)
        self.wanted, self.allocated, self.reserved = wanted, allocated, reserved


class _Block:
    __slots__ = ("before", "free", "next", "number", "segment", "size", "small")

    def __init__(self, number: int, size: int, small: bool, segment: int) -> None:
        self.number, self.size, self.small, self.segment = number, size, small, segment
        self.free = False
        self.before: _Block | None = None
        self.next: _Block | None = None


class CachingAllocator:
    """PyTorch's caching allocator with its default settings, on one stream.

    `allocated` counts whole blocks, as torch.cuda.memory_allocated does: a block that is reused and leaves less than
    1 MiB is handed out unsplit, so it may exceed the sum of the tensors. Sizes are bytes.
    Source: pytorch c10/cuda/CUDACachingAllocator.cpp (2.0 to 2.13): round_size, get_allocation_size, should_split.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.released_cache = False
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, _Block] = {}
        self._live: dict[int, _Block] = {}
        self._number = 0

    def allocate(self, key: int, size: int) -> None:
        """Hand out a block for `size` bytes under the name `key`. Raises OutOfMemory under a limit."""
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        small = size <= SMALL
        pool = self._pools[small]
        at = bisect_left(pool, (size, -1))
        if at < len(pool):
            block = self._blocks[pool.pop(at)[1]]
        else:
            block = self._new_segment(size, small)
        left = block.size - size
        if left >= BLOCK if small else left > SMALL:
            rest = self._make(left, small, block.segment)
            rest.before, rest.next = block, block.next
            if block.next is not None:
                block.next.before = rest
            block.next, block.size = rest, size
            self._put_back(rest)
        block.free = False
        self._live[key] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def release(self, key: int) -> None:
        """Take the block named `key` back into the cache; free neighbours become one."""
        block = self._live.pop(key)
        self.allocated -= block.size
        pool = self._pools[block.small]
        other = block.before
        if other is not None and other.free:
            self._remove(pool, other)
            other.size += block.size
            other.next = block.next
            if block.next is not None:
                block.next.before = other
            del self._blocks[block.number]
            block = other
        other = block.next
        if other is not None and other.free:
            self._remove(pool, other)
            block.size += other.size
            block.next = other.next
            if other.next is not None:
                other.next.before = block
            del self._blocks[other.number]
        self._put_back(block)

    def empty_cache(self) -> None:
        """Give whole free segments back to the driver."""
        for small, pool in self._pools.items():
            kept = []
            for size, number in pool:
                block = self._blocks[number]
                if block.before is None and block.next is None:
                    self.reserved -= size
                    del self._blocks[number]
                else:
                    kept.append((size, number))
            self._pools[small] = kept

    def reset_peaks(self) -> None:
        """What torch.cuda.reset_peak_memory_stats does."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        if self.limit_bytes is not None and self.reserved + segment > self.limit_bytes:
            self.released_cache = True
            self.empty_cache()
            if self.reserved + segment > self.limit_bytes:
                raise OutOfMemory(segment, self.allocated, self.reserved)
        self.reserved += segment
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        return self._make(segment, small, self._number + 1)

    def _make(self, size: int, small: bool, segment: int) -> _Block:
        self._number += 1
        block = _Block(self._number, size, small, segment)
        self._blocks[block.number] = block
        return block

    def _put_back(self, block: _Block) -> None:
        block.free = True
        insort(self._pools[block.small], (block.size, block.number))

    @staticmethod
    def _remove(pool: list[tuple[int, int]], block: _Block) -> None:
        at = bisect_left(pool, (block.size, block.number))
        del pool[at]
