"""Locks in a directory and in memory, and any history of processes that want the same one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from infra.artifacts import ArtifactStore, locks, open_store
from infra.artifacts.backend import Backend, clock
from infra.artifacts.local import LocalBackend
from infra.artifacts.locks import GAP_S, SILENT_S, Held, Life, Lock, Observer, Process, Record, new_record
from infra.artifacts.ref import lock_key
from infra.errors import LockLostError
from infra.process_record import ProcessRecord, here
from tests.unit.artifacts.histories.stage import Actor, MemoryBackend, StageClock, stage
from tests.unit.artifacts.lock_contract import LockContract

HISTORIES = 60
COMMITS = 3
BEAT_S = 15.0


class TestLocksInADirectory(LockContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ArtifactStore:
        return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


class TestLocksInMemory(LockContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ArtifactStore:
        return ArtifactStore(MemoryBackend(), tmp_path / "cache")


def test_a_process_that_is_stopped_lives_and_one_that_is_killed_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        there = ProcessRecord.of(process.pid)
        record = new_record("a", "name").model_copy(
            update={
                "process": Process(pid=there.pid, started=there.started, boot=there.boot, place=here(), host="this one")
            }
        )
        assert locks.process_lives(record) is True
        process.send_signal(19)
        assert locks.process_lives(record) is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as its parent has not asked after it
        assert locks.process_lives(record) is False


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="there are no namespaces of process ids")
def test_an_id_of_another_container_says_nothing_here() -> None:
    record = new_record("a", "name")
    assert record.process is not None
    there = record.process.model_copy(update={"place": record.process.place.replace("pid:[", "pid:[9")})
    assert locks.process_lives(record.model_copy(update={"process": there})) is None


class Worker:
    """A process on a machine: one line that takes the lock and commits under it, one that counts."""

    def __init__(self, pid: int, host: str, history: History) -> None:
        self.pid, self.host, self.history = pid, host, history
        self.held: Held | None = None
        self.is_stopped = self.is_done = self.is_checking = False
        self.lost_answers = 0
        self.lines = [self._line("works", self._work)]

    @property
    def lives(self) -> bool:
        return not self.is_done and not self.lines[0].is_killed

    def step(self, line: int) -> None:
        if line < len(self.lines) and not self.is_stopped and not self.lines[line].is_over:
            self.lines[line].step()
            while self.is_checking and not self.lines[line].is_over:  # who stands still in between commits all the same
                self.lines[line].step()
            if self.lines[line].error is not None:
                self.history.fail(repr(self.lines[line].error))

    def step_until(self, reached: Callable[[], bool]) -> None:
        """Go on, both lines in turn, until something is so."""
        for step in range(3000):
            if reached() or self.history.wrong:
                return
            self.step(step % 2)
        self.history.fail(f"{self.pid} does not come to its end")

    def kill(self) -> None:
        for line in self.lines:
            line.kill()

    def _line(self, name: str, body: object) -> Actor:
        return Actor(f"{self.pid} {name}", body, Unreliable(self, self.history.place), self.history.note, [])  # type: ignore[arg-type]

    def _work(self, backend: Backend) -> None:
        lock, observer = Lock(backend, "run"), Observer(lives_here=self._lives_here)
        while (held := self._take(lock, observer)) is None:
            if self.is_done:
                return
            clock.pause(2.0)
        self.held = held
        self.lines.append(self._line("counts", self._count))
        try:
            for _ in range(COMMITS):
                self.is_checking = True
                held.check()
                self.history.commit(self)
                self.is_checking = False
                clock.pause(2.0)
            held.release("completed", timeout_s=None)
        except LockLostError:
            pass
        self.is_done, self.is_checking = True, False

    def _take(self, lock: Lock, observer: Observer) -> Held | None:
        seen = lock.look()
        life = observer.judge(seen)
        if seen is not None and seen.record.ended is not None:
            self.is_done = True
            return None
        if life not in {Life.ENDED, Life.DEAD}:
            return None
        process = Process(pid=self.pid, started=0, boot="", place=self.host, host=self.host)
        return lock.take(seen, new_record("run", "name").model_copy(update={"process": process}), beat_s=None)

    def _count(self, backend: Backend) -> None:
        assert self.held is not None
        self.held._lock = Lock(backend, "run")
        while not self.is_done and not self.held.is_lost:
            clock.pause(BEAT_S)
            self.held.beat()

    def _lives_here(self, record: Record) -> bool | None:
        assert record.process is not None
        if record.process.place != self.host:
            return None
        return self.history.workers[record.process.pid].lives


class Unreliable:
    """A backend that does not always say that it has written: its answer was lost on the way."""

    def __init__(self, worker: Worker, place: Backend) -> None:
        self._worker, self._place = worker, place
        self.url = place.url
        self.read = place.read

    def create(self, key: str, data: bytes) -> bool:
        return self._answered(self._place.create(key, data))

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        return self._answered(self._place.replace(key, data, tag))

    def _answered(self, written: bool) -> bool:
        if self._worker.lost_answers:
            self._worker.lost_answers -= 1
            return False
        return written


class History:
    """Processes on two machines that want one lock, and what must hold of it all the time."""

    def __init__(self, clock: StageClock, place: Backend) -> None:
        self.clock, self.place = clock, place
        self.workers: dict[int, Worker] = {}
        self.commits: list[int] = []
        self.wrong: str | None = None
        self._record: Record | None = None
        self._changed_s = 0.0

    def enter(self, host: str) -> Worker:
        pid = len(self.workers)
        self.workers[pid] = Worker(pid, host, self)
        return self.workers[pid]

    def fail(self, what: str) -> None:
        self.wrong = self.wrong or what

    def note(self, actor: Actor, method: str, key: str, data: bytes, result: object) -> None:
        """Look at the lock after each request."""
        del actor, method, key, data, result
        stored = self.place.read(lock_key("run"))
        now = None if stored is None else Record.model_validate_json(stored.data)
        former = self._record
        if now == former:
            return
        if now is not None and former is not None and now.incarnation != former.incarnation:
            self._judge_takeover(former, now)
        self._record, self._changed_s = now, self.clock.seconds

    def _judge_takeover(self, former: Record, now: Record) -> None:
        assert former.process is not None
        assert now.process is not None
        loser = self.workers[former.process.pid]
        if former.ended is not None:
            self.fail("a run that had ended was begun again")
        elif loser.lives and now.process.place == former.process.place:
            self.fail(f"{now.process.pid} took the lock of {former.process.pid}, which lives on its own machine")
        elif now.process.place != former.process.place and self.clock.seconds - self._changed_s < SILENT_S:
            self.fail(f"{now.process.pid} took a lock that had counted {self.clock.seconds - self._changed_s} s before")

    def commit(self, worker: Worker) -> None:
        """Called in the very step of the check that allows it."""
        assert worker.held is not None
        if self._record is None or self._record.incarnation != worker.held.record.incarnation:
            self.fail(f"{worker.pid} committed, but does not have the lock")
        self.commits.append(worker.pid)


class LockMachine(RuleBasedStateMachine):
    """Anybody enters, goes on, is stopped, sleeps with its machine, is killed, or loses an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._curtain = ExitStack()
        self.history = History(self._curtain.enter_context(stage()), MemoryBackend())

    workers = st.integers(0, 3)

    @initialize(hosts=st.lists(st.sampled_from("ab"), min_size=4, max_size=4))
    def begin(self, hosts: list[str]) -> None:
        for host in hosts:
            self.history.enter(host)

    @rule(worker=workers, line=st.integers(0, 1), steps=st.integers(1, 12))
    def go_on(self, worker: int, line: int, steps: int) -> None:
        for _ in range(steps):
            self.history.workers[worker].step(line)

    @rule(steps=st.integers(1, 60))
    def all_go_on(self, steps: int) -> None:
        for _ in range(steps):
            for worker in self.history.workers.values():
                worker.step(0)
                worker.step(1)

    @rule(worker=workers)
    def stop_or_continue(self, worker: int) -> None:
        self.history.workers[worker].is_stopped ^= True

    @rule(worker=workers)
    @precondition(lambda self: sum(each.lives for each in self.history.workers.values()) > 1)
    def kill(self, worker: int) -> None:
        self.history.workers[worker].kill()

    @rule(worker=workers)
    def lose_an_answer(self, worker: int) -> None:
        self.history.workers[worker].lost_answers = 1

    @rule(seconds=st.sampled_from([1.0, GAP_S + 1, SILENT_S + 1, 3600.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.history.clock.seconds += seconds

    def teardown(self) -> None:
        try:
            self._end()
            assert self.history.wrong is None, self.history.wrong
        finally:
            self._curtain.close()

    def _end(self) -> None:
        """Let everybody go on; the work is done by then, if one is left who lives."""
        workers = self.history.workers.values()
        for worker in workers:
            worker.is_stopped = False
        left = [worker for worker in workers if worker.lives]
        for _ in range(3000):
            for worker in workers:
                worker.step(0)
                worker.step(1)
            if not any(worker.lives for worker in workers):
                break
        else:
            assert not left, "somebody who lives waits for ever"
        if left and self.history._record is not None:
            assert self.history._record.ended is not None
        assert not left or len(self.history.commits) >= COMMITS


def play(count: int = HISTORIES) -> None:
    run_state_machine_as_test(
        LockMachine,
        settings=settings(
            max_examples=count, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_any_history_has_one_worker_at_a_time_and_comes_to_its_end() -> None:
    play()


def one_falls_silent_elsewhere(history: History) -> None:
    """Its machine is stopped in mid-work; another takes over after a while, and the first wakes up."""
    first, second = history.enter("a"), history.enter("b")
    first.step_until(lambda: bool(history.commits))
    first.is_stopped = True
    second.step_until(lambda: len(history.commits) > 1)
    first.is_stopped = False
    first.step_until(lambda: first.is_done)
    second.step_until(lambda: second.is_done)


def one_sleeps_and_both_look_at_the_same_time(history: History) -> None:
    """A holder is killed; two on its machine see that in the same moment, and both write."""
    first, second, third = history.enter("a"), history.enter("a"), history.enter("a")
    first.step_until(lambda: bool(history.commits))
    first.kill()
    for _ in range(2):  # the look, and then the write
        second.step(0)
        third.step(0)
    second.step_until(lambda: second.is_done)
    third.step_until(lambda: third.is_done)


def a_machine_sleeps(history: History) -> None:
    """Holder and observer elsewhere are away for an hour together, as when the store is; neither is dead."""
    first, second = history.enter("a"), history.enter("b")
    first.step_until(lambda: bool(history.commits))
    for _ in range(5):
        second.step(0)
    history.clock.seconds += 3600.0
    for _ in range(5):
        second.step(0)
    first.step_until(lambda: first.is_done)
    second.step_until(lambda: second.is_done)
    if set(history.commits) != {first.pid}:
        history.fail("a holder that slept with its observer was taken for dead")


def overwrite(place: MemoryBackend, key: str, data: bytes, tag: str) -> bool:
    """Stand for `replace` where nothing is compared."""
    del tag
    place.upload(key, data)
    return True


HISTORIES_BY_HAND = [one_falls_silent_elsewhere, one_sleeps_and_both_look_at_the_same_time, a_machine_sleeps]


def tell(play_one: Callable[[History], None]) -> str | None:
    """Return what went wrong in a history."""
    with stage() as clock:
        history = History(clock, MemoryBackend())
        play_one(history)
        return history.wrong


@pytest.mark.parametrize("play_one", HISTORIES_BY_HAND)
def test_a_dangerous_history_ends_well(play_one: Callable[[History], None]) -> None:
    assert tell(play_one) is None


@pytest.mark.parametrize(
    ("play_one", "without", "name", "instead"),
    [
        (one_falls_silent_elsewhere, Held, "check", lambda _: None),
        (one_falls_silent_elsewhere, Observer, "_judge_count", lambda *_: Life.DEAD),
        (one_sleeps_and_both_look_at_the_same_time, MemoryBackend, "replace", overwrite),
        (a_machine_sleeps, locks, "GAP_S", 1e9),
    ],
    ids=["nobody checks", "whoever is elsewhere is dead", "a swap does not compare", "a gap counts"],
)
def test_a_history_shows_what_is_lost_without_a_safeguard(
    monkeypatch: pytest.MonkeyPatch, play_one: Callable[[History], None], without: object, name: str, instead: object
) -> None:
    monkeypatch.setattr(without, name, instead)
    assert tell(play_one) is not None


def test_a_directory_of_one_place_is_one_lock(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path.as_uri(), tmp_path)
    (tmp_path / "tmp").mkdir()
    assert Lock(backend, "run-a").swap(None, new_record("a", "name"))
    assert (tmp_path / "locks" / "run-a.json").exists()
