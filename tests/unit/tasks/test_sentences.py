"""What ends a task at once, and what is tried again."""

from __future__ import annotations

import signal

import pytest
from prefect.exceptions import TerminationSignal
from prefect.states import StateType

from infra.errors import ClusterError
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


def test_a_signal_that_ray_turned_into_an_error_is_raised_as_itself() -> None:
    @in_one_sentence
    def task() -> None:
        hidden = "<built-in method __new__ of type object> returned a result with an exception set"
        raise SystemError(hidden) from TerminationSignal(signal.SIGTERM)

    with pytest.raises(TerminationSignal):
        task()


def test_what_fails_while_a_cancelled_run_clears_up_does_not_make_it_a_failed_one() -> None:
    @in_one_sentence
    def flow() -> None:
        try:
            raise TerminationSignal(signal.SIGTERM)
        finally:
            raise ClusterError("the cluster has died")

    with pytest.raises(TerminationSignal):
        flow()


def test_an_error_without_a_signal_behind_it_stays_what_it_is() -> None:
    @in_one_sentence
    def task() -> None:
        raise SystemError("a bug")

    with pytest.raises(SystemError, match="a bug"):
        task()
