"""What collection finds, what it leaves alone, and that it takes its time."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts import ArtifactStore, Collection, Retention, clock, collect, deletion, open_store
from infra.artifacts.backend import Backend
from infra.artifacts.layout import blob_key
from infra.artifacts.leases import INTENT_LIFE, LEASE_LIFE, Claim, lease
from infra.artifacts.local import LocalBackend
from infra.errors import StoreError
from tests.unit.artifacts.store_contract import sha256

KEEP_TWO = Retention.parse("policy=2")
DAY = timedelta(hours=24)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


@pytest.fixture
def backend(tmp_path: Path, store: ArtifactStore) -> Backend:
    return LocalBackend(store.url, tmp_path / "store")


@pytest.fixture
def let_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Let time pass on the clock that leases and lists are dated by."""
    ahead = timedelta()
    real = clock.now

    def now() -> datetime:
        return real() + ahead

    def wait(time: timedelta) -> None:
        nonlocal ahead
        ahead += time

    monkeypatch.setattr(clock, "now", now)
    return wait


def at_once(store: ArtifactStore, retention: Retention = KEEP_TWO) -> Collection:
    return store.collect(retention, delete=True, grace=timedelta(), least_grace=timedelta())


def uris(store: ArtifactStore) -> list[str]:
    return [manifest.uri for manifest in store.list()]


def lists(backend: Backend) -> list[str]:
    return [name for name in backend.children("trash/") if name.endswith(".json")]


def snapshot(tmp_path: Path) -> dict[str, int]:
    root = tmp_path / "store"
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def test_a_dry_run_says_what_could_go_and_writes_nothing(
    store: ArtifactStore, backend: Backend, tmp_path: Path
) -> None:
    for step in range(4):
        store.commit("policy", "p", {"own": b"own%d" % step, "shared": b"shared"})
    backend.upload(blob_key(sha256(b"orphan")), b"orphan")
    backend.create("probe/left", b"")
    before = snapshot(tmp_path)
    found = store.collect(KEEP_TWO)
    assert snapshot(tmp_path) == before
    told = found.as_dict()
    assert told["retired"] == ["policy/p@1", "policy/p@2"]
    assert told["kinds"] == {"policy": {"versions": 2, "blobs": 2, "bytes": 8}}
    assert told["unreached"] == {"blobs": 1, "bytes": 6}
    assert (told["total_bytes"], told["leftovers"], told["dry_run"]) == (14, ["probe/left"], True)
    assert told["deleted"] == {"versions": [], "blobs": 0, "bytes": 0}
    assert json.dumps(told)


def test_what_is_listed_is_deleted_a_day_later_and_not_before(
    store: ArtifactStore, backend: Backend, let_pass: Callable[[timedelta], None]
) -> None:
    for step in range(3):
        store.commit("policy", "p", {"f": b"%d" % step}, key=f"k{step}")
    backend.upload(blob_key(sha256(b"orphan")), b"orphan")
    backend.create("probe/left", b"")

    first = store.collect(KEEP_TWO, delete=True)
    assert (first.versions, first.blobs) == ([], 0)
    [name] = lists(backend)
    stored = backend.read(f"trash/{name}")
    assert stored is not None
    listed = json.loads(stored.data)
    assert name.startswith(listed["created"][:10])
    assert listed["blobs"] == [{"size": 6, "sha256": sha256(b"orphan")}]
    assert [version["uri"] for version in listed["versions"]] == ["policy/p@1"]
    assert listed["leftovers"] == ["probe/left"]

    let_pass(DAY - timedelta(minutes=1))
    assert store.collect(KEEP_TWO, delete=True).versions == []
    assert lists(backend) == [name]  # listed once: its time is not begun anew
    let_pass(timedelta(minutes=1))
    last = store.collect(KEEP_TWO, delete=True)
    assert (last.versions, last.blobs, last.blob_bytes) == (["policy/p@1"], 2, 7)
    assert uris(store) == ["policy/p@2", "policy/p@3"]
    assert store.find("policy", "k0") is None
    assert backend.size(blob_key(sha256(b"orphan"))) is None
    assert lists(backend) == backend.children("probe/") == backend.children("trash/deleting/") == []


def test_what_is_found_later_waits_its_own_time(
    store: ArtifactStore, backend: Backend, let_pass: Callable[[timedelta], None]
) -> None:
    for body in (b"first", b"second"):
        backend.upload(blob_key(sha256(body)), body)
        store.collect(delete=True)
        let_pass(DAY / 2)
    assert len(lists(backend)) == 2
    assert store.collect(delete=True).blobs == 1
    assert backend.size(blob_key(sha256(b"second"))) == 6
    let_pass(DAY / 2)
    assert store.collect(delete=True).blobs == 1
    assert lists(backend) == []


def test_what_is_needed_again_when_its_time_is_over_stays(
    store: ArtifactStore, backend: Backend, let_pass: Callable[[timedelta], None]
) -> None:
    for step in range(3):
        store.commit("policy", "p", {"f": b"%d" % step})
    backend.upload(blob_key(sha256(b"orphan")), b"orphan")
    store.collect(KEEP_TWO, delete=True)
    store.set_alias("policy/p@1", "champion", why="best after all", who="test")
    store.commit("sft", "s", {"f": b"orphan"})
    let_pass(2 * DAY)
    assert store.collect(KEEP_TWO, delete=True).versions == []
    assert uris(store) == ["sft/s@1", "policy/p@1", "policy/p@2", "policy/p@3"]
    assert store.read_bytes(store.resolve("sft/s"), "f") == b"orphan"
    assert lists(backend) == []


def test_what_an_alias_reaches_through_parents_stays(store: ArtifactStore) -> None:
    data = [store.commit("dataset", "d", {"f": b"d%d" % step}) for step in range(3)]
    sft = [store.commit("sft", "s", {"f": b"s%d" % step}, parents=[data[step]]) for step in range(3)]
    for step in range(3):
        store.commit("policy", "p", {"f": b"p%d" % step}, parents=[sft[step], "model/base"])
    store.set_alias("policy/p@1", "champion", why="best", who="test")
    gone = at_once(store, Retention.parse("dataset=1,sft=1,policy=1"))
    assert sorted(gone.versions) == ["dataset/d@2", "policy/p@2", "sft/s@2"]
    assert uris(store) == ["dataset/d@1", "dataset/d@3", "sft/s@1", "sft/s@3", "policy/p@1", "policy/p@3"]
    assert store.verify().problems == ()


def test_what_a_lease_names_stays_with_what_it_came_from_until_the_lease_ends(
    store: ArtifactStore, backend: Backend, let_pass: Callable[[timedelta], None]
) -> None:
    data = [store.commit("dataset", "d", {"f": b"d%d" % step}) for step in range(2)]
    sft = [store.commit("sft", "s", {"f": b"s%d" % step}, parents=[data[step]]) for step in range(2)]
    backend.upload(blob_key(sha256(b"half")), b"half")
    rules = Retention.parse("dataset=1,sft=1")
    claim = Claim(frozenset({sha256(b"half")}), frozenset({sft[0].uri}))
    with lease(backend, "a-writer", claim):
        assert at_once(store, rules).survey.retired == []
        assert backend.size(blob_key(sha256(b"half"))) == 4
        backend.create("leases/dead.json", claim.to_json())
    let_pass(LEASE_LIFE + timedelta(minutes=1))
    assert store.collect(rules).survey.stale_leases == 1
    gone = at_once(store, rules)
    assert (sorted(gone.versions), gone.blobs) == (["dataset/d@1", "sft/s@1"], 3)
    assert backend.children("leases/") == []


def test_an_alias_that_moves_while_versions_are_deleted_keeps_its_own(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [store.commit("dataset", "d", {"f": b"d%d" % step}) for step in range(2)]
    for step in range(2):
        store.commit("policy", "p", {"f": b"p%d" % step}, parents=[data[step]])
    real = collect.delete_unreached

    def move_first(*arguments: Any) -> deletion.Deleted:
        store.set_alias("policy/p@1", "champion", why="meanwhile", who="test")
        return real(*arguments)

    monkeypatch.setattr(collect, "delete_unreached", move_first)
    assert at_once(store, Retention.parse("dataset=1,policy=1")).versions == []
    assert len(store.list()) == 4


def test_by_default_two_training_states_of_each_name_are_kept_and_everything_else(store: ArtifactStore) -> None:
    for name in ("a", "b"):
        for episode in range(1, 4):
            store.commit("ppo-state", name, {"f": b"%d" % episode}, version=episode)
    for kind in ("run", "policy", "dataset"):
        for step in range(3):
            store.commit(kind, "x", {"f": b"x%d" % step})
    assert sorted(at_once(store, Retention()).versions) == ["ppo-state/a@1", "ppo-state/b@1"]


def test_a_short_grace_time_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(StoreError, match=r"a grace time of 1 hours is too short: .* 12 hours .* give at least 24"):
        store.collect(grace=timedelta(hours=1))


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

    def counted(*arguments: Any) -> deletion.Deleted:
        sizes.append(tuple(map(len, arguments[2:])))
        return real(*arguments)

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
