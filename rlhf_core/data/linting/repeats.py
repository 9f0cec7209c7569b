"""Rows that nearly say what another row says, found by sketches of their texts in time that grows with the rows.

A text's sketch is made of the least hashes of its pieces; texts that share most pieces agree in some band of their
sketches (Broder 1997, On the resemblance and containment of documents). What agrees is then compared word by word.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from rlhf_core.data.linting.findings import Accused, quoted
from rlhf_core.data.linting.rows import normalised, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlhf_core.data.linting.rows import LintRow, LintSet

_PIECE = 8
"""Bytes of a piece: short enough to survive a changed word, long enough to be rare."""
_BANDS, _PER_BAND = 20, 3
_FEW = 12
"""Words of a text that is short."""
_COMPARED = 16
"""Rows that a band keeps, and that a row is compared with, so that a common text costs no more than its share."""
SAME, SAME_PART = 0.8, 0.6
"""Shares of words that two rows must have in common, in all and in each text."""
_LONGEST = 2000
"""Characters of a text that are sketched."""

_random = np.random.default_rng(20260101)
_ODD = _random.integers(0, 2**32, (_BANDS * _PER_BAND, 1), dtype=np.uint32) | np.uint32(1)
_ADDED = _random.integers(0, 2**32, (_BANDS * _PER_BAND, 1), dtype=np.uint32)
_MIXED = np.uint64(0x9E3779B97F4A7C15)


def sketch(text: str) -> list[bytes]:
    """Return the bands of a text: two that share most of their pieces, or all words but one, have one in common."""
    data = text[:_LONGEST].encode("utf-8", "surrogatepass").ljust(_PIECE)
    pieces = np.ndarray((len(data) - _PIECE + 1,), "<u8", data, strides=(1,))  # a piece begins at every byte
    hashes = (pieces * _MIXED >> np.uint64(32)).astype(np.uint32)
    least = (_ODD * hashes + _ADDED).min(axis=1)
    bands = [bytes([number]) + band.tobytes() for number, band in enumerate(least.reshape(_BANDS, _PER_BAND))]
    words = text.split()
    if len(words) > _FEW:
        return bands
    # one changed word leaves a short text few of its pieces, but all of its other words
    shorter = (" ".join(words[:place] + words[place + 1 :]) for place in range(len(words) + 1))
    return [*bands, *{xxhash.xxh3_64_digest(each.encode("utf-8", "surrogatepass")) for each in shorter}]


def repeated(given: LintSet) -> Iterator[Accused]:
    """Yield the rows of which an earlier row says nearly the same: prompt and each response, with equal numbers."""
    rows: tuple[LintRow, ...] = (*given.earlier, *given.rows)
    known: set[tuple[str, ...]] = set()
    index = _Index(lambda one, other: _alike(_parts(rows[one]), _parts(rows[other])))
    for place, row in enumerate(rows):
        is_judged = place >= len(given.earlier)
        if _parts(row) in known:  # it is learnt again, or waits, or stands twice among the earlier rows
            continue
        if not is_judged:
            known.add(_parts(row))
        bands = sketch(normalised("\n".join(text[:_LONGEST] for text in (row.asked, *row.responses))))
        found = index.find(place, bands) if is_judged else None
        if found is None:
            index.add(place, bands)
        else:
            said = f"says nearly the same as {rows[found].where}: {quoted(row.asked)}"
            yield Accused(place - len(given.earlier), said)


def near_prompts(learnt: Sequence[LintRow], held_out: Sequence[LintRow]) -> Iterator[tuple[int, int]]:
    """Yield the places of prompts that are learnt from, each with the place of a held-out prompt that nearly equals it.

    Prompts that are equal but for case and spaces are the same prompt to the splits, and no concern here.
    """
    rows = (*held_out, *learnt)
    index = _Index(lambda one, other: _alike((rows[one].prompt,), (rows[other].prompt,)))
    for place, row in enumerate(held_out):
        index.add(place, sketch(normalised(row.prompt)))
    for place, row in enumerate(learnt):
        found = index.find(len(held_out) + place, sketch(normalised(row.prompt)))
        if found is not None:
            yield place, found


class _Index:
    """Finds, of the texts that were added, one that is nearly the same as another text."""

    def __init__(self, is_same: Callable[[int, int], bool]) -> None:
        self._is_same = is_same
        self._known: defaultdict[bytes, list[int]] = defaultdict(list)

    def add(self, place: int, bands: Sequence[bytes]) -> None:
        for band in bands:
            if len(self._known[band]) < _COMPARED:
                self._known[band].append(place)

    def find(self, place: int, bands: Sequence[bytes]) -> int | None:
        """Return a place whose text is nearly the same, among those that share most bands."""
        near = Counter(each for band in bands for each in self._known.get(band, ()))
        return next((each for each, _ in near.most_common(_COMPARED) if self._is_same(each, place)), None)


def _parts(row: LintRow) -> tuple[str, ...]:
    return (*row.responses, row.prompt)  # what differs soonest comes first


_DIGITS = re.compile(r"\d+")
_SAME_LENGTH = 0.5
"""Texts of more different lengths share too few words, and are not compared word by word."""


def _alike(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Return whether two rows share nearly all words of each text, and have the same numbers."""
    if len(ours) != len(theirs):
        return False
    shared = total = 0
    for one, other in zip(ours, theirs, strict=True):
        if one != other and 2 * min(len(one), len(other)) < _SAME_LENGTH * (len(one) + len(other)):
            return False
        if _DIGITS.findall(one) != _DIGITS.findall(other):
            return False
        words, others = Counter(words_of(one)), Counter(words_of(other))
        both, sizes = (words & others).total(), words.total() + others.total()
        if 2 * both < SAME_PART * sizes:
            return False
        shared, total = shared + 2 * both, total + sizes
    return shared >= SAME * total
