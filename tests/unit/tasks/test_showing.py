"""What only shows things: it warns where it cannot, once, and neither fails a run nor holds it up."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prefect.exceptions import TerminationSignal

from tasks import progress, showing, task_errors
from tasks.progress import Progress, say
from tasks.report import page, write
from tasks.results import StageResult
from tasks.showing import only_shows

REQUEST = httpx.Request("POST", "http://127.0.0.1:4200/api/artifacts/")


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(showing, "_told", set())
    yield
    showing._is_late.clear()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("deadline_s", [None, 60.0])
@pytest.mark.parametrize("error", [ValueError("a bug\nin a table"), httpx.ConnectError("refused", request=REQUEST)])
def test_whatever_it_raises_becomes_one_warning_for_each_kind_of_thing(
    warnings: Callable[[], list[str]], error: Exception, deadline_s: float | None
) -> None:
    @only_shows("a picture", deadline_s=deadline_s)
    def draw() -> bytes:
        raise error

    @only_shows("a page", deadline_s=deadline_s)
    def show() -> bytes:
        raise error

    assert [draw(), draw(), show()] == [None, None, None]
    said = warnings()
    assert [each.partition(":")[0] for each in said] == ["a picture", "a page"]
    assert all("\n" not in each and type(error).__name__ in each for each in said)


@pytest.mark.parametrize("deadline_s", [None, 60.0])
def test_it_returns_what_was_made_and_sees_its_run(deadline_s: float | None) -> None:
    told: list[str] = []

    @only_shows("a page", deadline_s=deadline_s)
    def show(left: int, *, right: int) -> int:
        say("sft", "shown")
        return left + right

    with progress.telling(told.append):
        assert show(1, right=2) == 3
    assert len(told) == 1  # a thread has its caller's context


def test_a_server_that_hangs_holds_a_run_up_once_and_then_hardly(
    warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    answers, is_over = threading.Event(), threading.Event()

    class Waiting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            limits.append(timeout)
            return super().wait(0.01)

    @only_shows("a page", deadline_s=60.0)
    def show() -> None:
        answers.wait()
        is_over.set()

    with monkeypatch.context() as patched:
        patched.setattr(showing, "Event", Waiting)
        show()
        show()
    assert limits == [60.0, showing.AGAIN_S]
    assert warnings() == ["a page: not shown, and the run goes on without (it took more than 60 s)"]
    answers.set()
    assert is_over.wait(60), "what was late is shown after all"


@pytest.mark.parametrize("error", [TerminationSignal(signal.SIGTERM), KeyboardInterrupt()])
def test_a_signal_comes_through(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            del timeout
            raise error

    @only_shows("a page", deadline_s=60.0)
    def asks() -> None:
        """Do nothing."""

    @only_shows("a picture")
    def draws() -> None:
        raise error

    with pytest.raises(type(error)):
        draws()
    with monkeypatch.context() as patched:
        patched.setattr(showing, "Event", Interrupted)
        with pytest.raises(type(error)):
            asks()


def test_what_ends_the_thread_of_a_page_does_not_end_the_run(warnings: Callable[[], list[str]]) -> None:
    @only_shows("a page", deadline_s=60.0)
    def show() -> None:
        raise SystemExit(3)

    show()
    assert warnings() == ["a page: not shown, and the run goes on without (RuntimeError: SystemExit: 3)"]


def test_a_line_that_cannot_be_logged_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("no log")

    for module in (progress, showing, task_errors):
        monkeypatch.setattr(module, "run_logger", broken)
    say("sft", "step 1")
    Progress("sft", 1, "step").step(1, loss=0.5)


def test_a_figure_that_cannot_be_written_stops_nothing() -> None:
    Progress("sft", 0, "step").step(1, loss=object())
    Progress("sft", None, "step").step(1)  # type: ignore[arg-type]


def test_a_picture_that_cannot_be_drawn_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.pictures import style

    def broken(_: Any) -> bytes:
        raise MemoryError("no memory for a figure")

    monkeypatch.setattr(style, "png", broken)
    assert write.episodes_picture([], compared={}) is None
    assert page.inline("PPO by episode", None) == ""


@pytest.mark.usefixtures("store")
def test_the_pages_of_stages_need_neither_store_nor_server(warnings: Callable[[], list[str]]) -> None:
    result = StageResult(stage="sft", uri="sft/none@1", digest="", reused=False, seconds=1, metrics={})
    write.show_training.fn(result)
    write.show_episodes.fn(result, 0)
    write.show_evaluations.fn({}, 0)
    said = warnings()
    assert len(said) == 1
    assert said[0].startswith("a page in Prefect: not shown, and the run goes on without (ReferenceNotFoundError: ")
