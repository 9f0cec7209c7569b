"""Demonstrations by step number."""

from __future__ import annotations

from collections import Counter

import pytest

from rlhf_core.errors import DataError
from rlhf_core.ppo.ptx import Demonstrations
from rlhf_core.strategy.ranks import Ranks

EXAMPLES = [([1], [10 + number, 2]) for number in range(6)]


def firsts(source: Demonstrations, step: int) -> list[int]:
    return source.batch(step).sequences[:, 1].tolist()


def test_every_pass_sees_every_demonstration_in_an_order_of_its_own() -> None:
    source = Demonstrations(EXAMPLES, batch_size=4, seed=0, device="cpu")
    drawn = [number for step in range(3) for number in firsts(source, step)]  # two passes of six
    assert Counter(drawn[:6]) == Counter(drawn[6:]) == Counter(range(10, 16))
    assert drawn[:6] != drawn[6:]


def test_a_step_has_the_same_demonstrations_whenever_it_is_asked_for() -> None:
    source = Demonstrations(EXAMPLES, batch_size=4, seed=0, device="cpu")
    later = firsts(source, 7)
    firsts(source, 0)
    assert firsts(source, 7) == later == firsts(Demonstrations(EXAMPLES, batch_size=4, seed=0, device="cpu"), 7)


def test_two_ranks_share_what_one_would_have() -> None:
    whole = Demonstrations(EXAMPLES, batch_size=4, seed=0, device="cpu")
    halves = [Demonstrations(EXAMPLES, batch_size=2, seed=0, device="cpu", ranks=Ranks(rank, 2)) for rank in range(2)]
    for step in range(4):
        assert firsts(whole, step) == [number for half in halves for number in firsts(half, step)]


@pytest.mark.parametrize(
    ("examples", "sentence"),
    [
        ([], "there is no demonstration to learn"),
        ([([1], [2]), ([1], [])], "demonstration 2 of 2 has an empty"),
        ([([1, 2], [True, False])], "demonstration 1 of 1 has an empty"),
    ],
)
def test_what_cannot_be_learnt_is_refused(examples: list[tuple[list[int], list[int]]], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        Demonstrations(examples, batch_size=1, seed=0, device="cpu")


def test_of_a_conversation_what_the_mask_says_is_learnt() -> None:
    talk = ([1, 2, 3, 4, 5], [False, True, False, True, True])
    source = Demonstrations([talk, ([6, 7], [8])], batch_size=2, seed=0, device="cpu")
    batch = source.batch(0)
    rows = {tuple(ids[held].tolist()): row for row, (ids, held) in enumerate(zip(*batch[:2], strict=True))}
    learnt = [batch.sequences[row, -4:][batch.action_mask[row]].tolist() for row in sorted(rows.values())]
    assert set(rows) == {(1, 2, 3, 4, 5), (6, 7, 8)}
    assert sorted(learnt) == [[2, 4, 5], [8]]
