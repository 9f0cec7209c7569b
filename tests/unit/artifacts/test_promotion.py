"""Aliases forth and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore, aliases, open_store
from infra.artifacts.aliases import AliasMove
from infra.artifacts.ref import alias_key
from infra.errors import ReferenceNotFoundError, StoreError
from tests.unit.artifacts.store_contract import at_once


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    for step in range(1, 5):
        store.commit("policy", "p", {"f": b"%d" % step})
    return store


def history(store: ArtifactStore) -> list[tuple[str, str, str]]:
    return [(move.uri, move.why, move.who) for move in store.aliases("policy", "p")["champion"].history]


def back(store: ArtifactStore) -> str:
    return store.rollback("policy", "p", why="worse", who="me").uri


def test_promote_tells_where_the_alias_pointed_and_does_not_move_it_in_place(store: ArtifactStore) -> None:
    assert store.promote("policy/p@1", why="first", who="me") is None
    assert store.promote("policy/p@2", why="better", who="you") == "policy/p@1"
    assert store.promote("policy/p@2", why="again", who="you") == "policy/p@2"
    assert history(store) == [("policy/p@1", "first", "me"), ("policy/p@2", "better", "you")]


def test_rollbacks_go_further_back_each_time_and_keep_the_history(store: ArtifactStore) -> None:
    for version in (1, 2, 3):
        store.promote(f"policy/p@{version}", why="better", who="me")
    assert [back(store), back(store)] == ["policy/p@2", "policy/p@1"]
    with pytest.raises(StoreError, match="points at policy/p@1 and cannot be rolled back: it pointed at nothing"):
        back(store)
    assert [uri for uri, _, _ in history(store)] == [f"policy/p@{version}" for version in (1, 2, 3, 2, 1)]


def test_after_a_rollback_a_promotion_is_what_the_next_one_takes_back(store: ArtifactStore) -> None:
    for version in (1, 2, 3):
        store.promote(f"policy/p@{version}", why="better", who="me")
    back(store)
    store.promote("policy/p@4", why="better still", who="me")
    assert [back(store), back(store)] == ["policy/p@2", "policy/p@1"]


def test_an_older_version_that_was_promoted_is_left_for_the_newer_one_it_replaced(store: ArtifactStore) -> None:
    for version in (2, 3, 2):
        store.promote(f"policy/p@{version}", why="better", who="me")
    assert [back(store), back(store)] == ["policy/p@3", "policy/p@2"]


def test_a_version_that_is_gone_is_passed_over(store: ArtifactStore, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        store.promote(f"policy/p@{version}", why="better", who="me")
    assert store.prune("policy", "p", keep=1) == [1, 2]
    with pytest.raises(StoreError, match=r"cannot be rolled back: of policy/p@1, policy/p@2 none is in the store any"):
        back(store)
    store.promote("policy/p@4", why="newest", who="me")
    assert back(store) == "policy/p@3"
    del tmp_path


def test_there_must_be_such_an_alias(store: ArtifactStore) -> None:
    with pytest.raises(ReferenceNotFoundError, match="there is no alias 'champion' of policy/p to roll back"):
        back(store)
    with pytest.raises(StoreError, match="no kind of artifact 'polcy'"):
        store.rollback("polcy", "p", why="", who="")


def test_of_many_who_roll_back_at_once_each_takes_back_one_or_is_told(store: ArtifactStore) -> None:
    for version in (1, 2, 3, 4):
        store.promote(f"policy/p@{version}", why="better", who="me")
    results = at_once(lambda _: back(store), 3)
    went = [result for result in results if isinstance(result, str)]
    assert store.alias("policy", "p", "champion") == f"policy/p@{4 - len(went)}"
    assert len(went) >= 1
    assert all("it stays: decide anew" in str(result) for result in results if isinstance(result, StoreError))


def test_a_history_that_was_cut_by_hand_still_says_where_the_alias_stands() -> None:
    def move(uri: str, number: int, undoes: str | None = None) -> AliasMove:
        when = "2026-01-01T00:00:00Z"
        facts = {"uri": uri, "digest": "d", "why": "", "who": "", "when": when, "id": str(number), "undoes": undoes}
        return AliasMove.model_validate(facts)

    standing = aliases.stand([move("policy/p@3", 3), move("policy/p@1", 4, undoes="2")])
    assert [each.uri for each in standing] == ["policy/p@3", "policy/p@1"]


@pytest.fixture
def champion(store: ArtifactStore, tmp_path: Path) -> Path:
    """The file of an alias that points at version 1."""
    store.promote("policy/p@1", why="first", who="me")
    return tmp_path / "store" / alias_key("policy", "p", "champion")


def content(path: Path) -> Any:
    return json.loads(path.read_bytes())


def test_an_alias_says_which_form_it_has_and_one_without_is_of_the_first(store: ArtifactStore, champion: Path) -> None:
    stored = content(champion)
    assert stored.pop("schema_version") == "1.0"
    champion.write_text(json.dumps(stored))
    assert store.resolve("policy/p@champion").uri == "policy/p@1"
    store.promote("policy/p@2", why="better", who="me")
    assert content(champion)["schema_version"] == "1.0"


def test_what_a_later_minor_release_has_added_stays_when_the_alias_moves(store: ArtifactStore, champion: Path) -> None:
    stored = content(champion)
    move = stored["history"][0] | {"approved": {"by": ["you"]}}
    champion.write_text(json.dumps({"schema_version": "1.7", "history": [move], "team": "red", "uri": "other"}))
    store.promote("policy/p@2", why="better", who="me")
    assert back(store) == "policy/p@1"
    found = content(champion)
    assert (found["schema_version"], found["team"], found["uri"], found["history"][0]) == ("1.7", "red", "other", move)
    assert [each["uri"] for each in found["history"]] == ["policy/p@1", "policy/p@2", "policy/p@1"]
    assert store.verify().problems == ()


@pytest.mark.parametrize("major", ["2.0", 2])
def test_an_alias_of_a_later_major_release_is_left_alone(
    store: ArtifactStore, champion: Path, major: str | int
) -> None:
    champion.write_text(json.dumps({"schema_version": major, "moves": []}))
    before = champion.read_bytes()
    said = r"the alias aliases/policy/p/champion.json cannot be read: .*schema 2\.0, this release .* upgrade rlhf-flows"
    for do in (
        lambda: store.resolve("policy/p@champion"),
        lambda: store.promote("policy/p@2", why="", who=""),
        lambda: back(store),
        lambda: store.prune("policy", "p", keep=1),
        store.collect,
    ):
        with pytest.raises(StoreError, match=said):
            do()
    [problem] = store.verify().problems
    assert "upgrade rlhf-flows" in problem
    assert champion.read_bytes() == before


def test_an_alias_whose_number_holds_other_files_is_refused_until_it_is_moved(
    store: ArtifactStore, champion: Path
) -> None:
    stored = content(champion)
    stored["history"][0]["digest"] = "f" * 64
    champion.write_text(json.dumps(stored))
    said = (
        "policy/p@champion points at policy/p@1 with digest ffffffffffff, which has .* move it: rlhf artifacts promote"
    )
    with pytest.raises(StoreError, match=said):
        store.resolve("policy/p@champion")
    assert store.promote("policy/p@1", why="it is meant", who="me") == "policy/p@1"
    assert store.resolve("policy/p@champion").uri == "policy/p@1"
    assert store.verify().problems == ()
