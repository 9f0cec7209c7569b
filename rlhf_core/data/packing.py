"""Which sequences share a row, so that little of it is padding; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return the sequences of each row: first fit, longest first.

    Every sequence goes, whole, into the first row that has room for it; equal lengths keep their order, so the result
    depends on the lengths alone. First fit by decreasing length needs at most 11/9 of the fewest possible rows, plus
    6/9 of a row (Dosa 2007).

    Args:
        lengths: tokens of each sequence, at least 1.
        capacity: tokens of a row.

    Returns:
        Places in `lengths`, by row, in the order in which they stand in it.

    Raises:
        ValueError: if a sequence is longer than a row.

    Example:
        >>> pack_rows([3, 6, 4, 4], capacity=10)
        [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[place]
        if not 0 < length <= capacity:
            raise ValueError(f"expected sequences of 1 to {capacity} tokens, got one of {length}")
        row = next((number for number, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(place)
        room[row] -= length
    return rows
