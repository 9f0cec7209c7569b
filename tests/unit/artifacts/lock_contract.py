"""Locks of the store: what holds on every backend; each backend's tests inherit these."""

from __future__ import annotations

import pytest

from infra.artifacts import ArtifactStore
from infra.artifacts.exclusive import ExclusiveLock, LockLostError
from infra.errors import StoreError
from tests.unit.artifacts.store_contract import at_once


def elsewhere(store: ArtifactStore, who: str) -> ExclusiveLock:
    """Return a lock as a process of another machine sees it."""
    lock = store.lock("night", who)
    lock._me = lock._me.model_copy(update={"machine": f"the one of {who}"})
    return lock


class LockContract:
    """Inherited by the tests of each backend, which give the fixture `store`."""

    def test_one_of_many_who_want_a_lock_has_it(self, store: ArtifactStore) -> None:
        locks = [elsewhere(store, f"{n}") for n in range(8)]
        at_once(lambda n: locks[n].take(), 8)
        [winner] = [lock for lock in locks if lock.is_held]
        found = store.lock("night", "me").look()
        assert found is not None
        assert found.holder == winner._me

    def test_who_takes_a_lock_over_is_told_what_its_holder_left(self, store: ArtifactStore) -> None:
        first, second = elsewhere(store, "first"), elsewhere(store, "second")
        assert first.take() is None
        first.leave("done")
        first.renew()
        left = second.take(lambda lock: lock.holder.who == "first")
        assert second.is_held
        assert left is not None
        assert (left.holder.who, left.outcome, left.beats) == ("first", "done", 1)
        with pytest.raises(LockLostError, match=r"silent for so long .* for second, holds it now"):
            first.renew()
        assert not first.is_held

    def test_a_lock_that_another_holds_is_told_and_stays(self, store: ArtifactStore) -> None:
        first, second = elsewhere(store, "first"), elsewhere(store, "second")
        first.take()
        found = second.take()
        assert found is not None
        assert (found.holder.who, second.is_held) == ("first", False)
        first.check()
        first.take(lambda _: True)
        second.check()  # it has nothing to lose

    def test_a_name_that_leads_elsewhere_is_refused(self, store: ArtifactStore) -> None:
        for name in ("../keys", "a/b", "", ".hidden", "A"):
            with pytest.raises(StoreError, match="is no name of a lock"):
                store.lock(name, "me")
