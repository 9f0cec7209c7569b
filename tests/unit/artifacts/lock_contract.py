"""Locks, taken by many at once too: what holds in every store; each backend's tests inherit these."""

from __future__ import annotations

import pytest

from infra.artifacts import ArtifactStore, locks
from infra.artifacts.backend import clock
from infra.artifacts.locks import GAP_S, SILENT_S, Held, Life, Observer, Record, new_record
from infra.errors import LockLostError, StoreError
from tests.unit.artifacts.store_contract import at_once


def elsewhere(run: str = "a") -> Record:
    """Return what a process of another machine takes a lock with."""
    record = new_record(run, "name")
    assert record.process is not None
    return record.model_copy(update={"process": record.process.model_copy(update={"place": "another", "host": "far"})})


class Time:
    """A clock that a test lets run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        monkeypatch.setattr(clock, "boottime", lambda: self.s)


class LockContract:
    """Inherited by the tests of each backend, which give the fixture `store`."""

    def test_of_many_that_take_a_lock_one_gets_it(self, store: ArtifactStore) -> None:
        lock = store.lock("run-a")
        assert Observer().judge(lock.look()) is Life.ENDED
        results = at_once(lambda _: lock.take(None, new_record("a", "name"), beat_s=None), 8)
        [held] = [each for each in results if isinstance(each, Held)]
        seen = lock.look()
        assert seen is not None
        assert seen.record.incarnation == held.record.incarnation
        held.check()
        held.release("completed", "made it")
        ended = lock.look()
        assert ended is not None
        assert ended.record.ended is not None
        assert (ended.record.ended.how, ended.record.ended.said) == ("completed", "made it")
        assert Observer().judge(ended) is Life.ENDED
        again = at_once(lambda _: lock.take(ended, new_record("a", "name"), beat_s=None), 8)
        assert sum(isinstance(each, Held) for each in again) == 1

    def test_a_holder_of_this_machine_lives_as_long_as_its_process(self, store: ArtifactStore) -> None:
        lock = store.lock("run-a")
        held = lock.take(None, new_record("a", "name"), beat_s=None)
        assert held is not None
        assert Observer().judge(lock.look()) is Life.LIVES
        assert held.record.process is not None
        gone = held.record.process.model_copy(update={"started": held.record.process.started - 1})
        seen = lock.look()
        assert seen is not None
        assert lock.swap(seen, seen.record.model_copy(update={"process": gone}))
        assert Observer().judge(lock.look()) is Life.DEAD

    def test_a_holder_elsewhere_lives_while_it_counts_and_is_dead_when_it_was_silent_under_our_eyes(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        time, observer, lock = Time(monkeypatch), Observer(), store.lock("run-a")
        held = lock.take(None, elsewhere(), beat_s=None)
        assert held is not None
        assert observer.judge(lock.look()) is Life.UNKNOWN
        time.s += 5
        held.beat()
        assert observer.judge(lock.look()) is Life.LIVES
        for _ in range(int(SILENT_S) // 10 - 1):
            time.s += 10
            assert observer.judge(lock.look()) is Life.UNKNOWN
        time.s += 10
        assert observer.judge(lock.look()) is Life.DEAD

    def test_a_time_in_which_the_observer_saw_nothing_does_not_count(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        time, observer, lock = Time(monkeypatch), Observer(), store.lock("run-a")
        lock.take(None, elsewhere(), beat_s=None)
        for _ in range(4):
            assert observer.judge(lock.look()) is Life.UNKNOWN
            time.s += max(SILENT_S, GAP_S) + 1  # it slept, or the store was away

    def test_a_holder_that_was_taken_for_dead_finds_out_at_its_next_check_or_beat(self, store: ArtifactStore) -> None:
        lock = store.lock("run-a")
        first = lock.take(None, elsewhere(), beat_s=None)
        assert first is not None
        second = lock.take(lock.look(), new_record("a", "name"), beat_s=None)
        assert second is not None
        assert not first.is_lost
        with pytest.raises(LockLostError, match=r"that process \d+ on .* has gone on with the run"):
            first.check()
        first.beat()
        first.release("completed")
        seen = lock.look()
        assert seen is not None
        assert seen.record.ended is None, "a loser ends nothing"
        second.check()

    def test_a_lock_that_somebody_removed_is_taken_again_by_its_holder_unless_another_was_faster(
        self, store: ArtifactStore
    ) -> None:
        lock = store.lock("run-a")
        held = lock.take(None, new_record("a", "name"), beat_s=None)
        assert held is not None
        store._backend.delete("locks/run-a.json")
        held.check()
        assert lock.look() is not None
        store._backend.delete("locks/run-a.json")
        other = lock.take(None, new_record("a", "name"), beat_s=None)
        assert other is not None
        with pytest.raises(LockLostError):
            held.check()

    def test_a_holder_counts_by_itself_and_rides_out_a_store_that_is_away(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lock, replace = store.lock("run-a"), store._backend.replace
        away = []

        def not_there(*what: object) -> bool:
            if len(away) < 3:
                away.append(what)
                raise StoreError("away")
            return replace(*what)  # type: ignore[arg-type]

        monkeypatch.setattr(store._backend, "replace", not_there)
        held = lock.take(None, new_record("a", "name"), beat_s=0.01)
        assert held is not None
        observer = Observer(lives_here=lambda _: None)
        while observer.judge(lock.look()) is not Life.LIVES:  # the test's own time-out is the deadline
            clock.pause(0.01)
        assert len(away) == 3
        held.release("failed")

    def test_a_writer_whose_answer_was_lost_knows_that_it_won(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create, replace = store._backend.create, store._backend.replace
        monkeypatch.setattr(store._backend, "create", lambda *what: create(*what) and False)
        monkeypatch.setattr(store._backend, "replace", lambda *what: replace(*what) and False)
        lock = store.lock("run-a")
        held = lock.take(None, new_record("a", "name"), beat_s=None)
        assert held is not None
        held.beat()
        held.check()
        held.release("stopped", timeout_s=None)
        assert Observer().judge(lock.look()) is Life.ENDED

    def test_a_lock_that_cannot_be_read_is_named_and_taken_by_nobody(self, store: ArtifactStore) -> None:
        store.commit("policy", "p", {"f": b"1"})
        for data in (b"{", b'{"schema_version": "2.0"}', b"[]"):
            store._backend.upload("locks/run-a.json", data)
            with pytest.raises(StoreError, match=r"the lock locks/run-a\.json .* cannot be read"):
                store.lock("run-a").look()
            assert any("locks/run-a.json" in each for each in store.verify().problems)
        with pytest.raises(StoreError, match="cannot name a lock"):
            store.lock("../run")

    def test_what_a_later_minor_version_added_stays(self, store: ArtifactStore) -> None:
        lock = store.lock("run-a")
        record = Record.model_validate({**elsewhere().model_dump(), "schema_version": "1.7", "colour": "green"})
        held = lock.take(None, record, beat_s=None)
        assert held is not None
        held.beat()
        seen = lock.look()
        assert seen is not None
        assert seen.record.model_extra == {"colour": "green"}
        assert seen.record.schema_version == "1.7"

    def test_a_run_holds_a_lock_without_a_process(self, store: ArtifactStore) -> None:
        lock = store.lock("deployment-a")
        assert lock.swap(None, new_record("a", "fancy-otter", by_process=False))
        seen = lock.look()
        assert seen is not None
        assert seen.record.holder == "the run 'fancy-otter'"
        assert locks.process_lives(seen.record) is None

    def test_what_processes_of_a_run_have_worked_adds_up_and_the_time_between_two_is_free(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lock, now = store.lock("run-a"), [100.0]
        monkeypatch.setattr(clock, "awake", lambda: now[0])

        def take() -> Held:
            seen = lock.look()
            worked_s = 0.0 if seen is None else seen.record.worked_s
            held = lock.take(seen, new_record("a", "name", worked_s=worked_s), beat_s=None)
            assert held is not None
            return held

        first = take()
        now[0] += 40
        first.beat()
        now[0] += 7  # after its last beat it dies, and this is not counted
        now[0] += 1000
        second = take()
        assert second.worked_s == 40
        now[0] += 5
        assert second.worked_s == 45
        second.release("stopped", timeout_s=None)
        now[0] += 1000
        assert take().worked_s == 45
