"""Moving aliases, by many at once too: what holds in every store; each backend's tests inherit these."""

from __future__ import annotations

import pytest

from infra.artifacts import ArtifactStore, aliases
from infra.artifacts.backend import clock
from infra.errors import StoreError
from tests.unit.artifacts.store_contract import at_once


class AliasContract:
    """Inherited by the tests of each backend, which give the fixture `store`."""

    def test_an_alias_keeps_every_move_of_many_movers(self, store: ArtifactStore) -> None:
        refs = [store.commit("policy", "p", {"f": bytes([n])}) for n in range(8)]
        assert store.alias("policy", "p", "champion") is None
        at_once(lambda n: store.set_alias(refs[n], "champion", why=f"reason {n}", who="test"), 8)
        history = store.aliases("policy", "p")["champion"].history
        assert {(move.uri, move.why) for move in history} == {(ref.uri, f"reason {n}") for n, ref in enumerate(refs)}
        assert len(history) == 8
        assert store.alias("policy", "p", "champion") == history[-1].uri

    def test_an_alias_that_moved_meanwhile_is_not_moved_from_where_it_was_expected(self, store: ArtifactStore) -> None:
        refs = [store.commit("policy", "p", {"f": bytes([n])}) for n in range(3)]
        with pytest.raises(StoreError, match=r"'champion' of policy/p points at nothing, but .* pointed at policy/p@1"):
            store.set_alias(refs[1], "champion", why="better", who="test", expected="policy/p@1")
        store.set_alias(refs[0], "champion", why="first", who="test", expected=None)
        with pytest.raises(StoreError, match=r"'champion' of policy/p points at policy/p@1, but .* pointed at nothing"):
            store.set_alias(refs[1], "champion", why="first", who="test", expected=None)
        store.set_alias(refs[1], "champion", why="better", who="test", expected="policy/p@1")
        with pytest.raises(StoreError, match=r"points at policy/p@2, but its move to policy/p@3 was decided when"):
            store.set_alias(refs[2], "champion", why="better than 1", who="test", expected="policy/p@1")
        assert [move.uri for move in store.aliases("policy", "p")["champion"].history] == ["policy/p@1", "policy/p@2"]

    def test_what_a_mover_has_to_know_later_stays_with_its_move(self, store: ArtifactStore) -> None:
        refs = [store.commit("policy", "p", {"f": bytes([n])}) for n in range(2)]
        store.set_alias(refs[0], "judged", why="", who="test", facts={"run": "one", "nights": [1, {"of": 2.5}]})
        store.set_alias(refs[1], "judged", why="", who="test")
        moves = store.aliases("policy", "p")["judged"].history
        assert [move.facts for move in moves] == [{"run": "one", "nights": [1, {"of": 2.5}]}, None]

    def test_of_many_movers_who_expect_the_same_one_moves_the_alias(self, store: ArtifactStore) -> None:
        refs = [store.commit("policy", "p", {"f": bytes([n])}) for n in range(8)]
        results = at_once(lambda n: store.set_alias(refs[n], "champion", why="", who=f"{n}", expected=None), 8)
        [winner] = [n for n, result in enumerate(results) if result is None]
        assert store.alias("policy", "p", "champion") == refs[winner].uri
        assert len(store.aliases("policy", "p")["champion"].history) == 1
        assert all(refs[winner].uri in str(result) for result in results if result is not None)

    def test_movers_who_meet_wait_longer_each_time(self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another mover is always faster, eight times."""
        ref = store.commit("policy", "p", {"f": b"1"})
        pauses: list[float] = []
        monkeypatch.setattr(clock, "pause", pauses.append)
        create = store._backend.create
        monkeypatch.setattr(store._backend, "create", lambda *what: len(pauses) == 8 and create(*what))
        store.set_alias(ref, "champion", why="at last", who="test")
        longest = [min(aliases.FIRST_PAUSE_S * 2**n, aliases.LONGEST_PAUSE_S) for n in range(8)]
        assert [limit / 2 <= pause <= limit for pause, limit in zip(pauses, longest, strict=True)] == [True] * 8
        assert store.alias("policy", "p", "champion") == ref.uri
