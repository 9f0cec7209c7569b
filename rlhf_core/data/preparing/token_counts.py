"""How long texts are, in tokens: a histogram with readable edges, and percentiles."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

EDGES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Longest text of each bin; the last bin has no end. The same for every set, so that two can be compared."""
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class TokenCounts:
    """The lengths of a set's texts."""

    texts: int
    bins: tuple[int, ...]
    """Texts up to each of `EDGES`, and those beyond."""
    shortest: int
    median: int
    ninety: int
    """Nine of ten texts are no longer than this."""
    ninety_nine: int
    longest: int


def token_counts(lengths: Iterable[int]) -> TokenCounts | None:
    """Return the histogram and percentiles of lengths (nearest rank); None if there are none.

    Example:
        >>> token_counts([8, 9, 5000])
        TokenCounts(texts=3, bins=(1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1), shortest=8, median=9, ninety=5000, \
ninety_nine=5000, longest=5000)
    """
    ordered = sorted(lengths)
    if not ordered:
        return None
    bins = [0] * (len(EDGES) + 1)
    for length in ordered:
        bins[bisect_left(EDGES, length)] += 1

    def rank(percent: int) -> int:
        return ordered[-(-percent * len(ordered) // 100) - 1]

    return TokenCounts(len(ordered), tuple(bins), ordered[0], rank(50), rank(90), rank(99), ordered[-1])


def bin_names() -> list[str]:
    """Return what each bin holds, in tokens.

    Example:
        >>> bin_names()[:2], bin_names()[-1]
        (['1-8', '9-16'], '4097+')
    """
    starts = [1, *(edge + 1 for edge in EDGES)]
    return [f"{start}-{end}" for start, end in zip(starts, EDGES, strict=False)] + [f"{starts[-1]}+"]


def spark(bins: Iterable[int]) -> str:
    """Return a histogram as one bar a bin, the highest one full, an empty bin blank.

    Example:
        >>> spark([0, 1, 4, 8])
        ' ▁▄█'
    """
    counts = list(bins)
    most = max(counts, default=0)
    return "".join(BARS[-(-count * len(BARS) // most) - 1] if count else " " for count in counts)
