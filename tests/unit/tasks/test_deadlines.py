"""A block that does not end in time, in whatever thread and wherever it hangs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from tasks.deadlines import LateError, in_time

LONG_S = 300.0
BLOCKS = 500
"""Of those that end just at their limit."""


def hang(seconds: float = LONG_S) -> None:
    threading.Event().wait(seconds)


def watchers(what: str = "the test") -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == f"deadline of {what}"]


def in_a_thread(function: Callable[[], None]) -> None:
    """Call a function in a thread of its own, and raise what it raises."""
    met: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            met.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive()
    for error in met:
        raise error


def test_what_hangs_is_told_where_it_is_and_which_setting_to_raise() -> None:
    where = r"at tests/unit/tasks/test_deadlines\.py:\d+ \(hang\)"
    with pytest.raises(LateError, match=rf"^waited 0 s for the test to end, .* {where}; .*, raise RLHF_NONE$"):
        in_time("the test", 0.05, "RLHF_NONE", hang)


def test_what_ends_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    assert in_time("the test", LONG_S, "RLHF_NONE", lambda: len(watchers())) == 1
    assert signal.getsignal(signal.SIGUSR2) == before
    end = time.monotonic() + LONG_S / 10
    while watchers():  # the one that has just been told
        assert time.monotonic() < end, "its watcher goes on"
        time.sleep(0.01)


def test_a_deadline_counts_for_its_own_call_and_for_all_that_is_called_there() -> None:
    with pytest.raises(LateError, match="for the flow to end"):
        in_time("the flow", 0.05, "RLHF_FLOW", lambda: in_time("the stage", LONG_S, "RLHF_STAGE", hang))

    def flow() -> str:
        with pytest.raises(LateError, match="for the stage to end"):
            in_time("the stage", 0.05, "RLHF_STAGE", hang)
        hang(0.01)
        return "went on"

    assert in_time("the flow", LONG_S, "RLHF_FLOW", flow) == "went on"


def test_nothing_on_the_way_takes_it_for_an_error_of_its_own_and_an_interrupt_stays_one() -> None:
    def swallow() -> None:
        try:
            hang()
        except Exception:
            hang()

    with pytest.raises(LateError):
        in_time("the test", 0.05, "RLHF_NONE", swallow)
    with pytest.raises(KeyboardInterrupt):
        in_time("the test", LONG_S, "RLHF_NONE", lambda: signal.raise_signal(signal.SIGINT))


def test_another_thread_hears_it_when_it_comes_back_to_python() -> None:
    def work() -> None:
        while True:
            time.sleep(0.01)

    with pytest.raises(LateError):
        in_a_thread(lambda: in_time("the thread", 0.05, "RLHF_NONE", work))


def test_the_main_thread_hears_it_also_where_another_has_a_deadline() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def beside() -> None:
        begun.set()
        may_end.wait(LONG_S)

    thread = threading.Thread(target=in_time, args=("the thread", LONG_S, "RLHF_NONE", beside))
    thread.start()
    assert begun.wait(LONG_S)
    try:
        with pytest.raises(LateError, match="for the test to end"):
            in_time("the test", 0.05, "RLHF_NONE", hang)
    finally:
        may_end.set()
        thread.join(LONG_S)


def end_at_their_limits() -> None:
    """Have calls end about when they are due, one within another: each ends as it would, or as late."""
    for number in range(BLOCKS):
        work = partial(time.sleep, 0.0007 + number % 10 * 5e-5)
        inner = partial(in_time, "the stage", 0.001, "RLHF_NONE", work)
        with suppress(LateError):
            in_time("the flow", 0.001 + number % 7 * 5e-5, "RLHF_NONE", inner)
        with suppress(LateError):
            inner()


@pytest.mark.parametrize("call", [lambda function: function(), in_a_thread], ids=["main thread", "another"])
def test_one_that_comes_while_its_call_ends_is_late_or_nothing(call: Callable[[Callable[[], None]], None]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    call(end_at_their_limits)
    assert signal.getsignal(signal.SIGUSR2) == before


def test_one_around_another_is_heard_also_if_it_comes_while_that_one_ends() -> None:
    def stages() -> None:
        end = time.monotonic() + LONG_S / 10
        while time.monotonic() < end:
            with suppress(LateError):
                in_time("the stage", LONG_S, "RLHF_NONE", int)

    for _ in range(50):
        with pytest.raises(LateError, match="for the flow to end"):
            in_time("the flow", 0.005, "RLHF_NONE", stages)
