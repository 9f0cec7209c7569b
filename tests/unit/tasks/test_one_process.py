"""Which start of a run works on it, and which run has its deployment: by what the locks, and the server, say."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.states import Cancelled, Completed, Crashed, Failed, Paused, Pending, Running, Scheduled

from infra.artifacts import ArtifactStore, open_store
from infra.artifacts.backend import clock
from infra.artifacts.locks import SILENT_S, Held, new_record
from infra.errors import StoreAwayError, StoreError
from infra.services.automations import RESTARTING, RESUMES
from infra.services.prefect_yaml import ONE_AT_A_TIME
from tasks import deadlines, taken_over, task_errors
from tasks import one_process as module
from tasks.one_process import CRASH_S, SILENCE_S, SKIPPED, WAIT_S, leave_deployment, one_process
from tasks.taken_over import leave_if_taken_over
from tasks.task_errors import in_one_sentence

RUN, OTHER, DEPLOYMENT = (UUID(int=number) for number in (1, 2, 3))


class Stage:
    """One process in which runs go on, with a server that is told what to answer and a clock that pauses move."""

    def __init__(self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.said: list[str] = []
        self.states: list[State[Any] | Exception | None] = []
        """What the server says of the other run, from look to look; the last for ever."""
        self.while_it_waits: dict[int, Callable[[], object]] = {}
        """What happens at which pause."""
        self.pauses = 0
        self.seconds = 0.0
        self.run: Any = None
        monkeypatch.setattr(module, "open_context", lambda: SimpleNamespace(store=store))
        monkeypatch.setattr(module, "_outermost_run", lambda: None if module.HELD.get() else self.run)
        monkeypatch.setattr(module, "_read_run", self._read_run)
        for speaker in (module, taken_over):
            monkeypatch.setattr(speaker, "say", lambda _, text: self.said.append(text))
        monkeypatch.setattr(clock, "boottime", lambda: self.seconds)
        monkeypatch.setattr(clock, "pause", self._pause)

    def begin(self, run: UUID, *tags: str) -> None:
        """Be the process of a run."""
        deployment = DEPLOYMENT if tags else None
        self.run = SimpleNamespace(
            auto_scheduled=False,
            id=run,
            name=f"run-{run.int}",
            tags=list(tags),
            deployment_id=deployment,
            parent_task_run_id=None,
            run_count=1,
        )

    def other_holds(self, run: UUID = RUN, *, elsewhere: bool = False) -> Held:
        """Let another process hold a run's lock: this one, under another name, or one of another machine."""
        record = new_record(str(run), f"run-{run.int}")
        if elsewhere:
            assert record.process is not None
            record = record.model_copy(update={"process": record.process.model_copy(update={"place": "another"})})
        lock = self.store.lock(f"run-{run}")
        held = lock.take(lock.look(), record, beat_s=None)
        assert held is not None
        return held

    def other_has_the_deployment(self) -> None:
        lock = self.store.lock(f"deployment-{DEPLOYMENT}")
        assert lock.swap(lock.look(), new_record(str(OTHER), "run-2", by_process=False))

    def of_deployment(self) -> str | None:
        """Return the run that has the deployment."""
        seen = self.store.lock(f"deployment-{DEPLOYMENT}").look()
        return None if seen is None or seen.record.ended is not None else seen.record.run

    def ending(self, run: UUID = RUN) -> str | None:
        seen = self.store.lock(f"run-{run}").look()
        return None if seen is None or seen.record.ended is None else seen.record.ended.how

    def _read_run(self, run_id: str) -> Any:
        assert run_id == str(OTHER)
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, Exception):
            raise state
        return None if state is None else SimpleNamespace(state=state)

    def _pause(self, seconds: float) -> None:
        self.pauses += 1
        self.seconds += seconds
        self.while_it_waits.pop(self.pauses, lambda: None)()
        assert self.pauses < 5000, "it waits for ever"


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache"), monkeypatch)


@one_process
def made(what: str = "made it") -> Any:
    """Stand for a flow."""
    leave_if_taken_over()
    return Completed(message=what)


def known(state: State[Any]) -> State[Any]:
    """Return a state as the server has it: with an id that stays from look to look."""
    return state.model_copy(update={"id": uuid4()})


def test_outside_of_a_run_and_inside_of_one_that_is_guarded_nothing_is_taken(play: Stage) -> None:
    assert made().message == "made it"
    assert play.store._backend.children("locks/") == []
    play.begin(RUN)

    @one_process
    def outer() -> Any:
        return made("from inside")

    assert outer().message == "from inside"
    assert play.store._backend.children("locks/") == [f"run-{RUN}.json"]
    leave_if_taken_over()  # of a run that is over, nothing is asked


@pytest.mark.parametrize(("deployment", "taken"), [(None, False), (DEPLOYMENT, True)])
def test_a_run_that_another_flow_lets_a_worker_start_is_no_part_of_that_one(
    monkeypatch: pytest.MonkeyPatch, deployment: UUID | None, taken: bool
) -> None:
    run = SimpleNamespace(parent_task_run_id=UUID(int=9), deployment_id=deployment)
    monkeypatch.setattr(FlowRunContext, "get", lambda: SimpleNamespace(flow_run=run))
    assert module._outermost_run() == (run if taken else None)


def test_a_run_that_is_done_is_not_done_again_and_one_that_failed_is(play: Stage) -> None:
    play.begin(RUN)
    assert made("the first time").is_completed()
    assert play.ending() == "completed"
    again = made("another time")
    assert (again.type, again.message) == (StateType.COMPLETED, "the first time")
    assert "has done its work already" in play.said[0]
    play.begin(OTHER)
    for _ in range(2):
        assert one_process(lambda: Failed(message="no"))().is_failed()
        assert play.ending(OTHER) == "failed"
    with pytest.raises(ValueError, match="broken"):
        one_process(lambda: int("broken"))()
    assert play.ending(OTHER) == "failed"
    with pytest.raises(KeyboardInterrupt):
        one_process(interrupted)()
    assert play.ending(OTHER) == "stopped"
    assert made().is_completed()


def interrupted() -> None:
    raise KeyboardInterrupt


def suspended() -> None:
    raise Pause


def late(meanwhile: Callable[[], object] = lambda: None) -> Any:
    """Be a flow that hangs."""
    try:
        threading.Event().wait(300)
    finally:
        meanwhile()


def gone() -> None:
    raise OSError("what it waited for is gone")


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_FLOW_TIMEOUT_S", "0.05")


@pytest.mark.usefixtures("in_no_time")
@pytest.mark.parametrize("clear_up", [lambda: None, gone])
def test_a_flow_that_is_late_has_failed_with_the_sentence_whatever_its_clearing_up_meets(
    play: Stage, clear_up: Callable[[], None]
) -> None:
    play.begin(RUN)
    state = in_one_sentence(one_process(late))(clear_up)
    assert state.type is StateType.FAILED
    assert state.message.endswith("if it needs more time, raise RLHF_FLOW_TIMEOUT_S")
    assert play.ending() == "failed"


@pytest.mark.usefixtures("in_no_time")
def test_a_late_flow_whose_run_was_taken_over_leaves_without_a_word(play: Stage) -> None:
    play.begin(RUN)
    with pytest.raises(Abort, match="was silent for so long"):
        in_one_sentence(one_process(late))(play.other_holds)
    assert play.ending() is None, "the lock is another's"


def test_the_time_of_a_flow_begins_when_it_may_work(play: Stage) -> None:
    counted: list[list[str]] = []

    def look() -> None:
        counted.append([each.what for each in deadlines._open])

    first = play.other_holds()
    play.begin(RUN)
    play.while_it_waits = {1: look, 2: lambda: first.release("stopped")}
    in_one_sentence(one_process(look))()
    assert counted == [[], ["the flow"]]


class Ended(BaseException):
    """Stand for the end of the process."""


@pytest.mark.parametrize("lost", [False, True])
def test_a_process_that_does_not_hear_its_deadline_reports_only_a_run_that_it_still_has(
    play: Stage, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    told: list[tuple[str, str | None]] = []

    def end(status: int) -> None:
        assert status == 0
        raise Ended

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(deadlines.prefect_api, "call", lambda _, __, path, ___: told.append((path, play.ending())))
    monkeypatch.setattr(deadlines, "own_flow_run", lambda: RUN)
    monkeypatch.setattr(os, "_exit", end)
    play.begin(RUN)

    def hang() -> None:
        if lost:
            play.other_holds()
        deadlines._end_process(deadlines._Deadline("the flow", 1, "RLHF_NONE"))

    with pytest.raises(Ended):
        one_process(hang)()
    assert told == ([] if lost else [(f"/flow_runs/{RUN}/set_state", "failed")])


@pytest.mark.parametrize("how", ["completed", "failed"])
def test_a_second_start_waits_for_a_first_that_lives_and_leaves_when_that_one_has_ended(play: Stage, how: Any) -> None:
    first = play.other_holds()
    play.begin(RUN)
    play.while_it_waits = {5: lambda: first.release(how)}
    with pytest.raises(Abort, match=rf"has come to its end \({how}\)"):
        made()
    assert play.pauses == 5
    assert play.ending() == how
    assert len(play.said) == 2
    assert "works on this run and lives; this second start waits for its end" in play.said[0]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_second_start_goes_on_when_the_first_ends_before_its_time(play: Stage, elsewhere: bool) -> None:
    first = play.other_holds(elsewhere=elsewhere)
    play.begin(RUN)
    play.while_it_waits = {5: lambda: first.release("stopped")}
    assert made().is_completed()
    assert play.pauses == 5


def test_a_first_that_is_elsewhere_and_silent_is_taken_for_dead_and_finds_out(play: Stage) -> None:
    first = play.other_holds(elsewhere=True)
    play.begin(RUN)
    assert made().is_completed()
    assert SILENT_S <= play.seconds < SILENT_S + 10
    assert "whether it still does is seen within two minutes" in play.said[0]
    assert "has ended without a word" in play.said[1]
    first.beat()
    assert first.is_lost


def test_a_first_that_is_elsewhere_and_counts_is_waited_for(play: Stage) -> None:
    first = play.other_holds(elsewhere=True)
    play.begin(RUN)
    play.while_it_waits = dict.fromkeys(range(10, 1000, 10), first.beat) | {1000: lambda: first.release("completed")}
    with pytest.raises(Abort):
        made()
    assert play.seconds > 10 * SILENT_S


def goes_away(play: Stage, monkeypatch: pytest.MonkeyPatch, error: StoreError, *, reads: int) -> None:
    """Let the store fail for so many reads from the fourth on, each as long as its patience lasts."""
    read, asked = play.store._backend.read, []

    def away(key: str) -> Any:
        asked.append(key)
        if 3 < len(asked) <= 3 + reads:
            play.seconds += 900.0
            raise error
        return read(key)

    monkeypatch.setattr(play.store._backend, "read", away)


def test_a_store_that_is_away_while_a_start_waits_is_waited_for(play: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = play.other_holds()
    goes_away(play, monkeypatch, StoreAwayError("away"), reads=20)
    play.begin(RUN)
    play.while_it_waits = {50: lambda: first.release("completed")}
    with pytest.raises(Abort, match="has come to its end"):
        made()
    assert play.seconds > 20 * 900


def test_a_start_that_waits_for_a_first_leaves_after_a_day_whoever_is_away(
    play: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.other_holds()
    goes_away(play, monkeypatch, StoreAwayError("away"), reads=10_000)
    play.begin(RUN)
    with pytest.raises(Abort, match="has not ended within 24 h"):
        made()
    assert WAIT_S < play.seconds < WAIT_S + 1000


def test_a_store_that_refuses_ends_a_start_at_once(play: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    play.other_holds()
    goes_away(play, monkeypatch, StoreError("a wrong key"), reads=1)
    play.begin(RUN)
    with pytest.raises(StoreError, match="a wrong key"):
        made()


@pytest.mark.parametrize("end", [made, lambda: int("broken")], ids=["at a border", "by an error"])
def test_a_process_whose_run_was_taken_over_leaves_without_a_word(play: Stage, end: Callable[[], object]) -> None:
    play.begin(RUN)

    def work() -> object:
        play.other_holds()
        return end() if end is not made else leave_if_taken_over()

    with pytest.raises(Abort, match="was silent for so long"):
        one_process(work)()
    assert play.ending() is None, "the lock is another's"


def test_a_process_that_comes_to_its_end_when_another_has_the_run_reports_nothing(play: Stage) -> None:
    play.begin(RUN)
    with pytest.raises(Abort, match="reports its end"):
        one_process(lambda: play.other_holds() and Completed())()


def test_a_run_takes_its_deployment_and_gives_it_back(play: Stage) -> None:
    play.begin(RUN, ONE_AT_A_TIME)

    def look() -> Any:
        assert play.of_deployment() == str(RUN)
        return Completed()

    one_process(look)()
    assert play.of_deployment() is None
    play.begin(OTHER, "another tag")
    one_process(lambda: None)()
    assert play.of_deployment() is None


def test_a_night_that_comes_too_late_is_skipped_but_not_one_that_began_and_was_suspended(
    play: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "missed", lambda _: "skipped: it was due at two")
    play.begin(OTHER)
    state = made()
    assert (state.type, state.name, state.message) == (StateType.CANCELLED, SKIPPED, "skipped: it was due at two")
    monkeypatch.setattr(module, "missed", lambda _: None)
    play.begin(RUN)
    with pytest.raises(Pause):
        one_process(suspended)()
    monkeypatch.setattr(module, "missed", lambda _: "skipped: it was due at two")
    assert made().is_completed()


def test_a_run_that_is_started_again_still_has_its_deployment(play: Stage) -> None:
    play.begin(RUN, ONE_AT_A_TIME)
    with pytest.raises(KeyboardInterrupt):
        one_process(interrupted)()
    assert play.of_deployment() == str(RUN)
    assert made().is_completed()
    assert play.of_deployment() is None


def test_a_run_that_leaves_its_deployment_before_it_waits_takes_no_turn_when_it_goes_on(play: Stage) -> None:
    play.begin(RUN, ONE_AT_A_TIME)

    def waits() -> Any:
        assert play.of_deployment() == str(RUN)
        leave_deployment(play.run)
        leave_deployment(play.run)  # as when it was killed before it could wait
        return suspended()

    with pytest.raises(Pause):
        one_process(waits)()
    assert play.of_deployment() is None
    play.other_has_the_deployment()
    assert made().is_completed()
    assert play.of_deployment() == str(OTHER)


@pytest.mark.parametrize(
    ("states", "process", "outcome", "least_s"),
    [
        ([Running()], "lives", "skipped", 0),
        ([Failed()], "lives", "skipped", 0),  # given up by the server, and still at work
        ([None], "lives", "skipped", 0),
        ([Running()], "elsewhere", "skipped", 0),
        ([Failed()], "gone", "free", 0),
        ([Cancelled()], "gone", "free", 0),
        ([Completed()], "gone", "free", 0),
        ([None], "gone", "free", 0),
        ([None], "never was", "free", 0),
        ([Cancelled()], "elsewhere", "free", SILENT_S),
        ([Crashed(name=RESTARTING)], "gone", "skipped", 0),
        ([Scheduled()], "gone", "skipped", 0),
        ([Paused()], "gone", "skipped", 0),
        ([Crashed()], "gone", "free", CRASH_S),
        ([Crashed(), Crashed(), Crashed(name=RESTARTING)], "gone", "skipped", 0),
        ([Pending(), Pending(), Crashed(), Failed()], "gone", "free", 0),
        ([Running()], "gone", "free", SILENCE_S),
        ([Pending(), Running(), Running(), Completed()], "gone", "free", 0),
    ],
)
def test_what_became_of_the_run_that_has_the_deployment_decides(
    play: Stage, states: list[Any], process: str, outcome: str, least_s: float
) -> None:
    play.states = [known(state) if isinstance(state, State) else state for state in states]
    play.other_has_the_deployment()
    if process != "never was":
        held = play.other_holds(OTHER, elsewhere=process == "elsewhere")
        if process == "gone":
            held.release("stopped")
    play.begin(RUN, ONE_AT_A_TIME)
    state = made()
    assert least_s <= play.seconds < least_s + 60
    if outcome == "free":
        assert state.is_completed()
        assert play.of_deployment() is None
    else:
        assert (state.type, state.name) == (StateType.CANCELLED, SKIPPED)
        assert state.message.startswith("skipped: the run 'run-2' of this deployment, begun at 20")
        assert play.of_deployment() == str(OTHER)


def test_a_server_that_stays_away_leaves_the_run_to_be_started_again(
    play: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.states = [httpx.ConnectError("refused")]
    play.other_has_the_deployment()
    play.begin(RUN, ONE_AT_A_TIME, RESUMES)
    monkeypatch.setattr(task_errors, "_flow_run", lambda: play.run)
    state = in_one_sentence(made)()
    assert state.type is StateType.CRASHED
    assert "refused" in state.message
    assert "this was start 1 of 4" in state.message
    assert play.of_deployment() == str(OTHER)


def test_of_two_that_want_a_deployment_that_has_become_free_one_gets_it(
    play: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.states = [known(Failed())]
    play.other_has_the_deployment()
    lock, third = play.store.lock(f"deployment-{DEPLOYMENT}"), new_record(str(UUID(int=4)), "run-4", by_process=False)
    held = play.other_holds(UUID(int=4))
    replace = play.store._backend.replace

    def too_late(key: str, data: bytes, tag: str) -> bool:
        if key.startswith("locks/deployment"):
            monkeypatch.setattr(play.store._backend, "replace", replace)
            assert lock.swap(lock.look(), third)
        return replace(key, data, tag)

    monkeypatch.setattr(play.store._backend, "replace", too_late)
    play.begin(RUN, ONE_AT_A_TIME)
    assert made().name == SKIPPED
    held.release("completed")
