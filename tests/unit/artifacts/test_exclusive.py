"""Who holds a lock, when processes end, stop, and machines fall silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infra.artifacts import ArtifactStore, clock, open_store
from infra.artifacts.exclusive import POLL_S, RENEW_S, SILENCE_S, ExclusiveLock, Holder, LockLostError, this_machine
from infra.errors import StoreError
from infra.process_record import ProcessRecord
from tests.unit.artifacts.lock_contract import LockContract, elsewhere


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


class TestLocksInADirectory(LockContract):
    pass


class Time:
    """A clock that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(clock, "boottime", lambda: self.now)

    def look_for(self, seconds: float, lock: ExclusiveLock) -> None:
        """Let a process try to take a lock every few seconds."""
        for _ in range(int(seconds / POLL_S)):
            self.now += POLL_S
            lock.take()


def of_process(store: ArtifactStore, pid: int) -> ExclusiveLock:
    """Return a lock as another process of this machine sees it."""
    lock = store.lock("night", "first")
    lock._me = lock._me.model_copy(update={"process": ProcessRecord.of(pid)})
    return lock


def test_on_one_machine_a_process_that_is_stopped_holds_its_lock_until_it_has_ended(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        of_process(store, child.pid).take()
        os.kill(child.pid, signal.SIGSTOP)
        second, time = store.lock("night", "second"), Time(monkeypatch)
        time.look_for(10 * SILENCE_S, second)
        assert not second.is_held
    finally:
        child.kill()
        child.wait(timeout=20)
    second.take()
    assert second.is_held


def test_from_elsewhere_a_silent_holder_is_given_up_and_one_that_is_heard_of_is_not(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, time = elsewhere(store, "first"), elsewhere(store, "second"), Time(monkeypatch)
    first.take()
    for _ in range(5):
        time.look_for(SILENCE_S - RENEW_S, second)
        first.renew()
    assert not second.is_held
    time.look_for(SILENCE_S + 2 * POLL_S, second)
    assert second.is_held
    with pytest.raises(LockLostError):
        first.check()


def test_the_time_in_which_nobody_could_look_is_no_silence(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener slept, or the store was away for both."""
    first, second, time = elsewhere(store, "first"), elsewhere(store, "second"), Time(monkeypatch)
    first.take()
    for _ in range(10):
        time.look_for(4 * POLL_S, second)
        time.now += 3600
    assert not second.is_held


def test_what_an_earlier_hold_of_this_process_left_is_free(store: ArtifactStore) -> None:
    store.lock("night", "first").take()
    second = store.lock("night", "first")
    second.take()
    assert second.is_held


def test_a_process_of_the_same_id_in_another_place_says_nothing(store: ArtifactStore) -> None:
    """A container counts its processes anew."""
    stranger = Holder.this_process("first").model_copy(update={"machine": f"{this_machine()}5"})
    lock = store.lock("night", "first")
    lock._me = stranger
    lock.take()
    second = store.lock("night", "second")
    second.take()
    assert not second.is_held


@pytest.mark.parametrize("method", ["create", "replace"])
def test_a_write_whose_answer_was_lost_is_known_for_ones_own(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    backend, real = store._backend, getattr(store._backend, method)
    lock = store.lock("night", "me")
    if method == "replace":
        lock.take()

    def forgetful(*what: object) -> bool:
        real(*what)
        return False

    monkeypatch.setattr(backend, method, forgetful)
    lock.take() if method == "create" else lock.renew()
    assert lock.is_held
    found = lock.look()
    assert found is not None
    assert found.beats == (0 if method == "create" else 1)


def test_a_store_that_is_away_loses_no_lock(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = store.lock("night", "me")
    lock.take()

    def away(*_: object) -> bool:
        raise StoreError("away")

    with monkeypatch.context() as patch:
        patch.setattr(store._backend, "replace", away)
        with pytest.raises(StoreError, match="away"):
            lock.renew()
    lock.renew()
    assert lock.is_held


def test_what_is_no_lock_is_refused_in_a_sentence(store: ArtifactStore) -> None:
    store._backend.create("locks/night.json", b"{}")
    with pytest.raises(StoreError, match=r"the lock locks/night.json cannot be read: .*; remove it if nothing is runn"):
        store.lock("night", "me").take()


class Holders(RuleBasedStateMachine):
    """Three machines want one lock; each may sleep, wake, die or be told that it has lost."""

    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.time = Time(self.patch)

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        root = Path(self.directory.name)
        self.store = open_store((root / "store").as_uri(), cache_dir=root / "cache")
        self.locks = {name: elsewhere(self.store, name) for name in self.NAMES}
        self.asleep: set[str] = set()
        self.heard: dict[str, float] = {}

    def teardown(self) -> None:
        self.patch.undo()
        if hasattr(self, "directory"):
            self.directory.cleanup()

    def _each_awake(self) -> None:
        for name, lock in self.locks.items():
            if name in self.asleep:
                continue
            if lock.is_held:
                try:
                    lock.renew()
                    self.heard[name] = self.time.now
                except LockLostError:
                    self.locks[name] = elsewhere(self.store, name)  # it ended, and comes back as another process
            else:
                lock.take()
                if self.locks[name].is_held:
                    self.heard[name] = self.time.now

    @rule()
    def moments_pass(self) -> None:
        for _ in range(5):
            self.time.now += POLL_S
            self._each_awake()

    @rule()
    def minutes_pass(self) -> None:
        for _ in range(100):
            self.time.now += POLL_S
            self._each_awake()

    @precondition(lambda self: len(self.asleep) < 2)
    @rule()
    def the_holder_falls_asleep(self) -> None:
        self.asleep |= {name for name, lock in self.locks.items() if lock.is_held}

    @rule()
    def all_wake_up(self) -> None:
        self.asleep.clear()

    @rule()
    def a_process_dies(self) -> None:
        self.locks["a"] = elsewhere(self.store, "a")
        self.asleep.discard("a")

    @invariant()
    def one_at_most_is_awake_and_holds_it(self) -> None:
        if hasattr(self, "locks"):
            awake = []
            for name, lock in self.locks.items():
                if name not in self.asleep and lock.is_held:
                    try:
                        lock.check()
                        awake.append(name)
                    except LockLostError:
                        self.locks[name] = elsewhere(self.store, name)
            assert len(awake) <= 1

    @invariant()
    def nobody_who_was_heard_of_is_given_up(self) -> None:
        found = self.locks["a"].look() if hasattr(self, "locks") else None
        if found is None:
            return
        for name, lock in self.locks.items():
            if lock.is_held and found.holder.id != lock._me.id:
                assert self.time.now - self.heard[name] >= SILENCE_S - 6 * POLL_S


Holders.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
TestHolders = Holders.TestCase
