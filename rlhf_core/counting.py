"""Counts in sentences: `1 maker`, `2 makers`. What code and stored files count from 0, people read from 1."""

from __future__ import annotations


def counted(count: float, one: str, more: str | None = None) -> str:
    """Return a count with its noun.

    Args:
        count: how many.
        one: the noun of a single thing.
        more: the noun of any other count; default: `one` with an s.

    Example:
        >>> counted(1, "maker"), counted(2, "maker"), counted(0, "entry", "entries")
        ('1 maker', '2 makers', '0 entries')
    """
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {one if count == 1 else more or one + 's'}"


def ordinal(index: int) -> int:
    """Return the number that people read for what code counts from 0, such as an episode.

    Example:
        >>> ordinal(0)
        1
    """
    return index + 1
