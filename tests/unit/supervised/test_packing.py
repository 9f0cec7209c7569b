"""Rows are filled by length, whole sequences only, and the same way every time."""

from __future__ import annotations

import random

import pytest

from rlhf_core.supervised.sft import pack_rows


def test_each_sequence_goes_into_the_first_row_with_room_longest_first() -> None:
    # longest first: 7 | 5 | 4 into the second row | 3 into the first | 2 into a third
    assert pack_rows([2, 3, 4, 5, 7], capacity=10) == [[4, 1], [3, 2], [0]]


def test_every_sequence_is_in_one_row_and_no_row_is_overfull() -> None:
    generator = random.Random(0)
    for _ in range(20):
        lengths = [generator.randint(1, 40) for _ in range(generator.randint(1, 60))]
        rows = pack_rows(lengths, capacity=40)
        assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
        assert all(0 < sum(lengths[place] for place in row) <= 40 for row in rows)


def test_no_two_rows_could_have_been_one() -> None:
    lengths = [random.Random(1).randint(1, 30) for _ in range(50)]
    loads = [sum(lengths[place] for place in row) for row in pack_rows(lengths, capacity=30)]
    assert all(a + b > 30 for i, a in enumerate(loads) for b in loads[:i])


def test_equal_lengths_keep_their_order() -> None:
    assert pack_rows([5, 5, 5], capacity=10) == [[0, 1], [2]]


def test_no_sequences_need_no_row() -> None:
    assert pack_rows([], capacity=10) == []


@pytest.mark.parametrize("length", [0, 11])
def test_a_sequence_that_fits_no_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 10 tokens, got one of {length}"):
        pack_rows([3, length], capacity=10)
