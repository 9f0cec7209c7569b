"""A block that does not end in time, in whatever thread and wherever it hangs."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from prefect.states import StateType

from tasks.deadlines import LateError, in_time
from tasks.task_errors import in_one_sentence

LONG_S = 300.0


def hang(seconds: float = LONG_S) -> None:
    threading.Event().wait(seconds)


def test_what_hangs_is_told_where_it_is_and_which_setting_to_raise() -> None:
    with (
        pytest.raises(LateError, match=r"^waited 0 s for the test to end, .* at tests/unit/tasks/test_deadlines\.py:"),
        in_time("the test", 0.05, "RLHF_NONE"),
    ):
        hang()


def test_what_ends_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with in_time("the test", LONG_S, "RLHF_NONE"):
        pass
    assert signal.getsignal(signal.SIGUSR2) == before
    left = [each.name for each in threading.enumerate() if each.name == "deadline of the test" and each.is_alive()]
    assert len(left) <= 1, "the one that has just been told"


def test_a_deadline_counts_for_its_own_block_and_for_all_that_is_called_there() -> None:
    with (
        pytest.raises(LateError, match="for the flow to end"),
        in_time("the flow", 0.05, "RLHF_FLOW"),
        in_time("the stage", LONG_S, "RLHF_STAGE"),
    ):
        hang()
    with in_time("the flow", LONG_S, "RLHF_FLOW"):
        with pytest.raises(LateError, match="for the stage to end"), in_time("the stage", 0.05, "RLHF_STAGE"):
            hang()
        hang(0.01)  # and goes on


def test_nothing_on_the_way_takes_it_for_an_error_of_its_own_and_an_interrupt_stays_one() -> None:
    def swallow() -> None:
        try:
            hang()
        except Exception:
            hang()

    with pytest.raises(LateError), in_time("the test", 0.05, "RLHF_NONE"):
        swallow()
    with pytest.raises(KeyboardInterrupt), in_time("the test", LONG_S, "RLHF_NONE"):
        signal.raise_signal(signal.SIGINT)


def test_another_thread_hears_it_when_it_comes_back_to_python() -> None:
    met: list[type[BaseException]] = []

    def work() -> None:
        try:
            with in_time("the thread", 0.05, "RLHF_NONE"):
                while True:
                    time.sleep(0.01)
        except BaseException as error:
            met.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG_S)
    assert met == [LateError]


def test_a_flow_that_is_late_has_failed_with_the_sentence_whatever_its_clearing_up_meets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLHF_FLOW_TIMEOUT_S", "0.05")

    @in_one_sentence
    def flow() -> None:
        try:
            hang()
        finally:
            raise OSError("what it waited for is gone")

    state = flow()  # type: ignore[func-returns-value]
    assert state.type == StateType.FAILED  # type: ignore[attr-defined]
    assert state.message.endswith("if it needs more time, raise RLHF_FLOW_TIMEOUT_S")  # type: ignore[attr-defined]
