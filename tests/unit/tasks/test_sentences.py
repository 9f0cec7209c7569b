"""What ends a task at once, and what is tried again."""

from __future__ import annotations

import pytest
from prefect.states import StateType

from rlhf_core.errors import DataError, LostRankError
from tasks.sentences import in_one_sentence


def test_a_users_mistake_is_a_failed_state_with_its_sentence() -> None:
    @in_one_sentence
    def task() -> None:
        raise DataError("no row")

    state = task()  # type: ignore[func-returns-value]
    assert (state.type, state.message) == (StateType.FAILED, "no row")  # type: ignore[attr-defined]


def test_a_lost_rank_is_raised_for_whoever_tries_again() -> None:
    @in_one_sentence
    def task() -> None:
        raise LostRankError("rank 1 of 2 has ended")

    with pytest.raises(LostRankError):
        task()
