"""What collection finds, what it leaves alone, and that it takes its time."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore, Retention
from infra.artifacts.backend import Backend
from infra.artifacts.leases import LEASE_LIFE, Claim, lease
from infra.artifacts.locks import OLD, OLD_UNFINISHED, How, new_record
from infra.artifacts.manifest import ENDED
from infra.artifacts.ref import blob_key
from infra.errors import StoreError
from tests.unit.artifacts.collecting import (  # noqa: F401 - fixtures
    DAY,
    KEEP_TWO,
    at_once,
    backend_fixture,
    let_pass_fixture,
    lists,
    store_fixture,
    uris,
)
from tests.unit.artifacts.store_contract import sha256


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


def test_the_base_of_adapters_stays_however_old_it_is(store: ArtifactStore) -> None:
    sft = [store.commit("sft", "s", {"f": b"s%d" % step}) for step in range(3)]
    store.commit("policy", "p", {"base.json": b"{}"}, parents=[sft[1], sft[0]])  # over the last, which has adapters too
    store.commit("policy", "p", {"base.json": b"{1}"}, parents=[sft[1], "model/base"])
    store.commit("policy", "p", {"whole": b"p"}, parents=[sft[1]])
    assert at_once(store, Retention.parse("sft=1")).versions == ["sft/s@2"]
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


def test_lock_and_plan_of_a_run_go_long_after_its_end_and_a_deployments_lock_stays(
    store: ArtifactStore, backend: Backend, let_pass: Callable[[timedelta], None]
) -> None:
    for name in ("run-a", "run-b", "deployment-c"):
        held = store.lock(name).take(None, new_record(name, name), beat_s=None)
        assert held is not None
        if name != "run-b":
            held.release("completed")
    for run in ("a", "b"):
        store.record(run, "draft", "what?", run)
    let_pass(OLD - timedelta(minutes=1))
    assert store.collect(delete=True).survey.old_locks == []
    let_pass(timedelta(minutes=2))
    assert store.collect().as_dict()["old_locks"] == ["locks/run-a.json"]
    store.collect(delete=True)
    assert backend.children("locks/") == ["deployment-c.json", "run-b.json"]
    assert (store.recall("a", "draft"), store.recall("b", "draft").answer) == (None, "b")  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_what_a_run_began_with_stays_for_a_year_when_it_can_still_go_on(
    store: ArtifactStore, how: How, let_pass: Callable[[timedelta], None]
) -> None:
    held = store.lock("run-a").take(None, new_record("a", "a"), beat_s=None)
    assert held is not None
    store.record("a", "draft", "what?", "an answer")
    held.release(how)
    let_pass(OLD_UNFINISHED - timedelta(minutes=1))
    store.collect(delete=True)
    assert store.recall("a", "draft") is not None
    let_pass(timedelta(minutes=2))
    store.collect(delete=True)
    assert (store.recall("a", "draft"), store.lock("run-a").look()) == (None, None)


def test_by_default_two_training_states_of_each_name_are_kept_and_everything_else(store: ArtifactStore) -> None:
    for name in ("a", "b"):
        for episode in range(1, 4):
            store.commit("ppo-state", name, {"f": b"%d" % episode}, version=episode)
    for kind in ("run", "policy", "dataset"):
        for step in range(3):
            store.commit(kind, "x", {"f": b"x%d" % step})
    assert sorted(at_once(store, Retention()).versions) == ["ppo-state/a@1", "ppo-state/b@1"]


def test_of_a_run_that_has_ended_no_older_training_state_is_kept_by_default(store: ArtifactStore) -> None:
    for episode in (1, 2):
        store.commit("ppo-state", "a", {"f": b"%d" % episode}, version=episode)
    store.commit("ppo-state", "a", {"f": b""}, version=3, metrics={ENDED: True})  # killed before it deleted them
    assert not at_once(store, Retention.parse("ppo-state=3")).versions
    assert sorted(at_once(store, Retention()).versions) == ["ppo-state/a@1", "ppo-state/a@2"]


def test_a_short_grace_time_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(StoreError, match=r"a grace time of 1 h is too short: .* 12 hours .* give at least 24"):
        store.collect(grace=timedelta(hours=1))
