"""How many sequences do samples of these lengths make, packed and not?"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Packing:
    """`sequences` of `limit_tokens`, each holding whole samples; `samples` one a sequence without packing.

    `filled` and `filled_unpacked`: the share of positions that hold a real token, padded to the limit.
    """

    limit_tokens: int
    samples: int
    sequences: int
    filled: float
    filled_unpacked: float

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        gain = self.samples / self.sequences if self.sequences else None
        return {**vars(self), "gain": round(gain, 3) if gain is not None else None}


def packing(lengths: Counter[int], limit_tokens: int) -> Packing:
    """Best-fit-decreasing packing of samples (token lengths, with how often each occurs) into sequences.

    Samples over the limit are counted at the limit. Source: Ding et al. 2024, Fewer Truncations Improve Language
    Modeling (best-fit-decreasing), the strategy `bfd` of TRL.
    """
    room: list[int] = []  # free tokens, ascending, of sequences that are not full
    counts: Counter[int] = Counter()  # how many sequences have that much room
    sequences = 0
    for length in sorted(lengths, reverse=True):
        size = min(length, limit_tokens)
        left = lengths[length]
        while left:
            at = bisect.bisect_left(room, size)
            if at < len(room):
                free = room[at]
                moved = min(left, counts[free])
                counts[free] -= moved
                if not counts[free]:
                    room.pop(at)
            else:
                fit = max(1, limit_tokens // max(1, size))
                whole, rest = divmod(left, fit)
                sequences += whole
                _give(room, counts, limit_tokens - fit * size, whole)
                if rest:
                    sequences += 1
                    _give(room, counts, limit_tokens - rest * size, 1)
                break
            left -= moved
            _give(room, counts, free - size, moved)
    samples = sum(lengths.values())
    tokens = sum(min(length, limit_tokens) * count for length, count in lengths.items())
    return Packing(
        limit_tokens,
        samples,
        sequences,
        round(tokens / (sequences * limit_tokens), 4) if sequences else 0.0,
        round(tokens / (samples * limit_tokens), 4) if samples else 0.0,
    )


def _give(room: list[int], counts: Counter[int], free: int, how_many: int) -> None:
    if free > 0 and how_many:
        if not counts[free]:
            bisect.insort(room, free)
        counts[free] += how_many


def percentile(lengths: Counter[int], share: float) -> int | None:
    """The smallest length that at least `share` of the samples do not exceed; None without samples."""
    total = sum(lengths.values())
    if not total:
        return None
    seen = 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= share * total:
            return length
    return max(lengths)
