"""Collection when something moves, is damaged, is killed or takes too long meanwhile."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore, Retention, collect, deletion
from infra.artifacts.backend import Backend, clock
from infra.artifacts.leases import INTENT_LIFE
from infra.artifacts.ref import blob_key
from infra.errors import StoreError
from tests.unit.artifacts.collecting import (  # noqa: F401 - fixtures
    KEEP_TWO,
    at_once,
    backend_fixture,
    lists,
    store_fixture,
    uris,
)
from tests.unit.artifacts.store_contract import sha256


def test_an_alias_that_moves_while_versions_are_deleted_keeps_its_own(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [store.commit("dataset", "d", {"f": b"d%d" % step}) for step in range(2)]
    for step in range(2):
        store.commit("policy", "p", {"f": b"p%d" % step}, parents=[data[step]])
    real = collect.delete_unreached

    def move_first(*arguments: Any, **named: Any) -> deletion.Deleted:
        store.set_alias("policy/p@1", "champion", why="meanwhile", who="test")
        return real(*arguments, **named)

    monkeypatch.setattr(collect, "delete_unreached", move_first)
    assert at_once(store, Retention.parse("dataset=1,policy=1")).versions == []
    assert len(store.list()) == 4


def test_where_something_cannot_be_read_nothing_is_deleted(
    store: ArtifactStore, backend: Backend, tmp_path: Path
) -> None:
    for step in range(3):
        store.commit("policy", "p", {"f": b"%d" % step})
    newer = tmp_path / "store" / "versions" / "policy" / "q" / "00000001.json"
    newer.parent.mkdir()
    newer.write_text(json.dumps({"schema_version": "2.0"}))
    with pytest.raises(StoreError, match=r"policy/q@1 cannot be read: .*upgrade rlhf-flows"):
        at_once(store)
    newer.unlink()
    backend.create("versions/adapter/x/00000001.json", b"{}")
    with pytest.raises(StoreError, match=r"a kind that this release does not know \(adapter\)"):
        at_once(store)
    assert len(store.list()) == 3
    backend.create("versions/policy/.DS_Store", b"")
    with pytest.raises(
        StoreError, match=r"versions/policy/\.DS_Store in the artifact store is no artifact's: remove it"
    ):
        store.list()


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '{"created": "yesterday"}',
        '{"created": "2026-01-01T00:00:00"}',
        '{"created": "2026-01-01T00:00:00Z", "blobs": [{"size": 1, "sha256": "../../../x"}]}',
        '{"created": "2026-01-01T00:00:00Z", "leftovers": ["probe/../versions"]}',
        '{"created": "2026-01-01T00:00:00Z", "leftovers": ["versions/policy/p/00000001.json"]}',
        '{"created": "2026-01-01T00:00:00Z", "versions": [{"uri": "policy/p", "digest": "%s"}]}' % ("0" * 64),
    ],
)
def test_a_list_that_is_damaged_or_leads_elsewhere_is_refused(
    store: ArtifactStore, backend: Backend, content: str
) -> None:
    backend.create("trash/odd.json", content.encode())
    with pytest.raises(StoreError, match=r"trash/odd\.json in the artifact store cannot be read .*; remove it"):
        store.collect()


def test_what_a_killed_collector_left_is_finished(
    store: ArtifactStore, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4):
        store.commit("policy", "p", {"f": b"%d" % step})
    delete = backend.delete

    def die(key: str) -> None:
        if not key.startswith("blobs/") or key == blob_key(sha256(b"0")):
            delete(key)
        if key.startswith("blobs/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(store._backend, "delete", die)
    with pytest.raises(KeyboardInterrupt):
        at_once(store)
    monkeypatch.undo()
    assert uris(store) == ["policy/p@3", "policy/p@4"]
    assert len(lists(backend)) == len(backend.children("trash/deleting/")) == 1
    real = clock.now
    monkeypatch.setattr(clock, "now", lambda: real() + INTENT_LIFE + timedelta(minutes=1))
    assert store.collect(KEEP_TWO).survey.unfinished == 1
    assert at_once(store).blobs == 1  # the killed one had deleted the other
    assert lists(backend) == backend.children("trash/deleting/") == []
    assert store.verify().problems == ()


def test_many_are_deleted_in_batches_each_within_its_limit(
    store: ArtifactStore, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "BATCH_BLOBS", 3)
    monkeypatch.setattr(collect, "BATCH_VERSIONS", 2)
    for step in range(6):
        store.commit("policy", "p", {"f": b"%d" % step, "g": b"g%d" % step})
    for number in range(4):
        backend.upload(blob_key(sha256(b"orphan%d" % number)), b"orphan%d" % number)
    sizes: list[tuple[int, ...]] = []
    real = collect.delete_unreached

    def counted(*arguments: Any, needed: set[str]) -> deletion.Deleted:
        sizes.append(tuple(map(len, arguments[2:])))
        return real(*arguments, needed=needed)

    monkeypatch.setattr(collect, "delete_unreached", counted)
    gone = at_once(store)
    assert sizes == [(1, 0, 0)] * 4 + [(0, 3, 0), (0, 1, 0)]  # two blobs a version
    assert (len(gone.versions), gone.blobs) == (4, 12)


def test_what_time_did_not_suffice_for_stays_listed(
    store: ArtifactStore, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        store.commit("policy", "p", {"f": b"%d" % step})
    with monkeypatch.context() as patched:
        patched.setattr(deletion, "DELETE_LIMIT_S", -1.0)
        assert at_once(store).versions == []
    assert len(lists(backend)) == 1
    assert at_once(store).versions == ["policy/p@1"]
