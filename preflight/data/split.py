"""Which records go to the test side, so that what asks the same never stands on both sides?"""

from __future__ import annotations

import hashlib

from preflight.data.spool import Piece


def test_side(pieces: list[Piece], state: bytearray, share: float, seed: int, same_as: dict[int, int]) -> bytearray:
    """One byte a record: 1 for the test side. Only records with state 0 take part.

    Whole groups (the same prompt, or the same value of the group column) go to one side; `same_as` ties a record to an
    earlier near duplicate. Which side depends on the group and the seed alone, so that it does not change when records
    are added to the file.
    """
    side = bytearray(len(state))
    marks = list(_marks(pieces, state, seed))
    for index, earlier in sorted(same_as.items()):
        if not state[index] and not state[earlier]:
            marks[index] = marks[earlier]
    sizes: dict[int, int] = {}
    for mark in marks:
        if mark is not None:
            sizes[mark] = sizes.get(mark, 0) + 1
    total = sum(sizes.values())
    wanted = round(total * share)
    chosen: set[int] = set()
    taken = 0
    for mark in sorted(sizes):
        if taken >= wanted:
            break
        # A group that is too big for what is still wanted is passed over; the test side never takes everything.
        if taken + sizes[mark] <= max(wanted, 1) and len(sizes) > 1:
            chosen.add(mark)
            taken += sizes[mark]
    for index, mark in enumerate(marks):
        if mark is not None and mark in chosen:
            side[index] = 1
    return side


def _marks(pieces: list[Piece], state: bytearray, seed: int) -> list[int | None]:
    marks: list[int | None] = []
    salt = seed.to_bytes(8, "little", signed=True)
    for piece in pieces:
        for key in piece.each_key():
            if state[len(marks)]:
                marks.append(None)
            else:
                digest = hashlib.blake2b(key[7], digest_size=8, salt=salt).digest()
                marks.append(int.from_bytes(digest, "big"))
    return marks
