"""Entries of the key index: what a killed writer leaves leads nobody astray, and what leads to nothing is collected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.artifacts import ArtifactStore, collect
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import keys_of
from infra.artifacts.leases import Claim, LeaseOutlivedError, lease
from infra.errors import StoreAwayError
from tests.unit.artifacts.collecting import at_once, backend_fixture, store_fixture, uris  # noqa: F401 - fixtures

KEY = "keys/policy/k.json"


def commit(store: ArtifactStore, body: bytes, **more: Any) -> str:
    return store.commit("policy", "p", {"f": body}, **more).uri


def commit_and_die(store: ArtifactStore, body: bytes, *, after_manifest: bool) -> None:
    create = store._backend.create

    def create_and_die(key: str, data: bytes) -> bool:
        is_manifest = key.startswith("versions/")
        result = (after_manifest or not is_manifest) and create(key, data)
        if is_manifest:
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store._backend, "create", create_and_die)
        with pytest.raises(KeyboardInterrupt):
            commit(store, body)


def test_a_writer_that_was_killed_after_its_manifest_finds_it_again(store: ArtifactStore) -> None:
    commit_and_die(store, b"mine", after_manifest=True)
    assert commit(store, b"another's") == "policy/p@2"
    assert commit(store, b"mine", key="k") == "policy/p@1"
    found = store.find("policy", "k")
    assert found is not None
    assert found.uri == "policy/p@1"


def test_the_entry_of_a_writer_that_was_killed_before_its_manifest_leads_nobody_astray(store: ArtifactStore) -> None:
    commit_and_die(store, b"mine", after_manifest=False)
    assert commit(store, b"mine", config={"lr": 1}) == "policy/p@1"  # the same files under the number in the entry
    assert store.verify().problems == ()
    assert commit(store, b"mine") == "policy/p@2"
    assert commit(store, b"mine") == "policy/p@2"


def test_entries_that_lead_to_nothing_are_collected(store: ArtifactStore, backend: Backend) -> None:
    commit(store, b"gone", key="k")
    gone = keys_of(store.resolve("policy/p"))
    commit(store, b"there", key="other")
    backend.create("keys/policy/damaged.json", b"{")
    backend.delete("versions/policy/p/00000001.json")
    dry = store.collect()
    assert sorted(dry.survey.stale_keys) == sorted(dry.as_dict()["stale_keys"]) == sorted(gone)
    assert backend.read(KEY) is not None
    at_once(store)
    left = keys_of(store.resolve("policy/p"))
    assert [f"keys/policy/{name}" for name in backend.children("keys/policy/")] == sorted(
        [*left, "keys/policy/damaged.json"]
    )
    assert at_once(store).survey.stale_keys == []
    assert backend.children("trash/deleting/") == []


def test_an_entry_that_a_writer_is_about_to_use_is_not_collected(store: ArtifactStore, backend: Backend) -> None:
    entry = json.dumps({"uri": "policy/p@7", "digest": "0" * 64}).encode()
    assert backend.create(KEY, entry)
    with lease(backend, "a-writer", Claim(keys=frozenset({KEY}))):
        assert at_once(store).survey.stale_keys == [KEY]
        assert backend.read(KEY) is not None
    at_once(store)
    assert backend.read(KEY) is None


def test_an_entry_that_leads_to_something_by_now_is_not_collected(
    store: ArtifactStore, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.create(KEY, json.dumps({"uri": "policy/p@7", "digest": "0" * 64}).encode())
    real = collect.delete_unreached

    def commit_first(*arguments: Any, **named: Any) -> object:
        commit(store, b"new", key="k")
        return real(*arguments, **named)

    monkeypatch.setattr(collect, "delete_unreached", commit_first)
    assert at_once(store).survey.stale_keys == [KEY]
    found = store.find("policy", "k")
    assert found is not None
    assert [found.uri] == uris(store)


def test_a_commit_of_what_is_there_writes_no_version_and_leaves_no_lease(
    store: ArtifactStore, backend: Backend
) -> None:
    for body in (b"old", b"new", b"old"):
        commit(store, body)
    assert uris(store) == ["policy/p@1", "policy/p@2"]
    assert backend.children("leases/") == []


def test_a_commit_is_done_though_the_store_goes_away_before_its_lease_is_let_go_of(
    store: ArtifactStore, backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(key: str) -> None:
        raise StoreAwayError(f"no answer while deleting {key}")

    with monkeypatch.context() as patched:
        patched.setattr(store._backend, "delete", away)
        commit(store, b"new")
    assert uris(store) == ["policy/p@1"]
    assert len(backend.children("leases/")) == 1
    assert "a lease stays in the artifact store for 12 h, and keeps what it names: no answer" in caplog.text


def test_a_lease_that_was_outlived_must_be_let_go_of_before_another_attempt(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(key: str) -> None:
        raise StoreAwayError(f"no answer while deleting {key}")

    monkeypatch.setattr(backend, "delete", away)
    with pytest.raises(StoreAwayError), lease(backend, "writer", Claim()):
        raise LeaseOutlivedError("stopped for hours")
