"""What pruning takes away and what it must not, on every backend; their tests inherit these."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from infra.artifacts import KINDS, ArtifactStore
from infra.artifacts.backend import Backend, clock
from infra.artifacts.leases import DELETION_LIFE, INTENT_LIFE, LEASE_LIFE, Claim, claims, lease
from infra.artifacts.ref import DELETING, blob_key
from infra.errors import StoreError, VersionExistsError
from tests.unit.artifacts.store_contract import at_once, sha256


def note(backend: Backend, folder: str, body: bytes, created: datetime) -> str:
    """Leave a lease or an intent over one blob, as another process would; return its key."""
    key = f"{folder}/{uuid4().hex}.json"
    backend.create(key, json.dumps({"created": created.isoformat(), "blobs": [sha256(body)]}).encode())
    return key


def await_true(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.01)


class PruningContract:
    """Inherited by the tests of each backend, which give the fixtures `store` and `backend` (of the same place)."""

    def test_prune_keeps_what_is_new_what_an_alias_names_and_what_others_reach(
        self, store: ArtifactStore, backend: Backend
    ) -> None:
        for episode in range(5):
            files = {"own": b"own%d" % episode, "frozen": b"frozen", "shared": b"shared%d" % episode}
            store.commit("ppo-state", "run", files, version=episode, key=f"k{episode}")
        store.commit("policy", "p", {"f": b"shared1"})
        store.set_alias("ppo-state/run@2", "good", why="look at it", who="test")

        assert store.prune("ppo-state", "run", keep=2) == [0, 1]

        assert [manifest.version for manifest in store.list("ppo-state", "run")] == [2, 3, 4]
        there = {
            body: backend.size(blob_key(sha256(body))) is not None
            for body in (b"own0", b"own1", b"own2", b"own3", b"shared0", b"shared1", b"frozen")
        }
        gone = {b"own0", b"own1", b"shared0"}
        assert there == {body: body not in gone for body in there}
        assert store.find("ppo-state", "k0") is None
        assert store.find("ppo-state", "k4") is not None
        assert store.read_bytes(store.resolve("policy/p"), "f") == b"shared1"
        assert store.prune("ppo-state", "run", keep=2) == []
        assert backend.children("trash/deleting/") == backend.children("leases/") == []

    def test_prune_keeps_what_an_alias_or_a_lease_of_another_artifact_reaches(
        self, store: ArtifactStore, backend: Backend
    ) -> None:
        states = [store.commit("ppo-state", "run", {"f": b"%d" % n}, version=n) for n in range(5)]
        store.commit("policy", "p", {"f": b"p"}, parents=states[:1])
        evaluation = store.commit("evaluation", "e", {"f": b"e"}, parents=states[1:2])
        store.set_alias("policy/p@1", "champion", why="best", who="test")
        with lease(backend, "a-reader", Claim(versions=frozenset({evaluation.uri}))):
            assert store.prune("ppo-state", "run", keep=1) == [2, 3]
        assert store.prune("ppo-state", "run", keep=1) == [1]
        assert [manifest.version for manifest in store.list("ppo-state", "run")] == [0, 4]

    def test_a_key_whose_version_was_pruned_is_given_to_the_next(self, store: ArtifactStore, backend: Backend) -> None:
        first = store.commit("ppo-state", "run", {"f": b"0"}, key="same")
        second = store.commit("ppo-state", "run", {"f": b"1"}, key="same")
        found = store.find("ppo-state", "same")
        assert found is not None
        assert found.ref == first
        backend.delete("versions/ppo-state/run/00000001.json")
        assert store.find("ppo-state", "same") is None
        third = store.commit("ppo-state", "run", {"f": b"2"}, key="same")
        found = store.find("ppo-state", "same")
        assert found is not None
        assert found.ref == third != second

    @pytest.mark.parametrize("damaged", [b"{", b"[]"])
    def test_a_damaged_entry_of_the_key_index_does_not_keep_a_version(
        self, store: ArtifactStore, backend: Backend, damaged: bytes
    ) -> None:
        for episode in range(2):
            store.commit("ppo-state", "run", {"f": b"%d" % episode}, version=episode, key=f"k{episode}")
        backend.upload("keys/ppo-state/k0.json", damaged)
        assert store.prune("ppo-state", "run", keep=1) == [0]
        assert backend.read("keys/ppo-state/k0.json") is not None
        assert backend.size(blob_key(sha256(b"0"))) is None

    def test_a_prune_lists_each_name_twice_and_reads_no_manifest_that_is_known(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for kind, name in (("dataset", "d"), ("sft", "s"), ("policy", "p"), ("policy", "p")):
            store.commit(kind, name, {"f": name.encode()})
        for episode in range(3):
            store.commit("ppo-state", "run", {"f": b"%d" % episode}, version=episode)
        looks: list[str] = []

        def note_manifests(method: Callable[[str], object]) -> Callable[[str], object]:
            def noted(key: str) -> object:
                if key.startswith("versions/"):
                    looks.append(key)
                return method(key)

            return noted

        for method in ("read", "children", "tags"):
            monkeypatch.setattr(store._backend, method, note_manifests(getattr(store._backend, method)))
        assert store.prune("ppo-state", "run", keep=2) == [0]
        own = "versions/ppo-state/run/"
        kinds = [f"versions/{kind}/" for kind in KINDS]
        names = ["versions/dataset/d/", "versions/policy/p/", own, "versions/sft/s/"]
        before_and_after = [*kinds, *names, "versions/"] * 2  # the last: are there kinds that are not known here?
        assert sorted(looks) == sorted([own, *before_and_after])

    def test_a_number_that_was_pruned_is_not_given_again(self, store: ArtifactStore) -> None:
        for body in (b"old", b"newer"):
            store.commit("ppo-state", "run", {"f": body})
        store.prune("ppo-state", "run", keep=1)
        for body in (b"old", b"other"):
            with pytest.raises(
                VersionExistsError, match=r"ppo-state/run@1 cannot be written: .* has gone on to 2, and"
            ):
                store.commit("ppo-state", "run", {"f": body}, version=1)
        assert store.commit("ppo-state", "run", {"f": b"old"}).uri == "ppo-state/run@3"
        assert [manifest.uri for manifest in store.list()] == ["ppo-state/run@2", "ppo-state/run@3"]

    def test_a_key_that_leads_to_another_content_leads_nowhere(self, store: ArtifactStore, backend: Backend) -> None:
        store.commit("policy", "p", {"f": b"1"}, key="k")
        store.commit("policy", "p", {"f": b"2"})
        key = "keys/policy/k.json"
        stored = backend.read(key)
        assert stored is not None
        assert backend.replace(key, stored.data.replace(b"p@1", b"p@2"), stored.tag)
        assert store.find("policy", "k") is None

    def test_writers_and_pruners_at_once_lose_nothing(self, store: ArtifactStore) -> None:
        """Eight names share blobs; each commits and prunes all the time, and what is there must be whole."""

        def work(number: int) -> None:
            for step in range(6):
                body = b"%d" % (step // 2)
                store.commit("ppo-state", f"run{number}", {"mine": b"%d-%d" % (number, step), "shared": body})
                store.prune("ppo-state", f"run{number}", keep=1)

        assert at_once(work, 8) == [None] * 8
        manifests = store.list("ppo-state")
        assert [(manifest.name, manifest.version) for manifest in manifests] == [(f"run{n}", 6) for n in range(8)]
        for manifest in manifests:
            assert store.read_bytes(manifest, "shared") == b"2"

    def test_a_blob_that_a_writer_has_leased_is_not_deleted(self, store: ArtifactStore, backend: Backend) -> None:
        for body in (b"leased", b"newer"):
            store.commit("ppo-state", "run", {"f": body})
        with lease(backend, "another-writer", Claim(blobs=frozenset({sha256(b"leased")}))):
            assert store.prune("ppo-state", "run", keep=1) == [1]
        assert backend.size(blob_key(sha256(b"leased"))) == len(b"leased")

    def test_the_lease_of_a_dead_writer_ends(self, store: ArtifactStore, backend: Backend) -> None:
        for body in (b"leased", b"newer"):
            store.commit("ppo-state", "run", {"f": body})
        note(backend, "leases", b"leased", datetime.now(UTC) - 2 * LEASE_LIFE)
        assert store.prune("ppo-state", "run", keep=1) == [1]
        assert backend.size(blob_key(sha256(b"leased"))) is None
        assert backend.children("leases/") == []

    def test_a_writer_waits_for_a_pruner_of_its_blob_and_sends_it_again(
        self, store: ArtifactStore, backend: Backend
    ) -> None:
        store.commit("ppo-state", "old", {"f": b"body"})
        intent = note(backend, "trash/deleting", b"body", datetime.now(UTC))
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(store.commit, "policy", "p", {"f": b"body"})
            await_true(lambda: bool(backend.children("leases/")), "the writer's lease")
            with pytest.raises(TimeoutError):
                writing.result(timeout=1)
            assert store.latest("policy", "p") is None
            backend.delete(blob_key(sha256(b"body")))  # what the pruner came for
            backend.delete(intent)
            ref = writing.result(timeout=30)
        assert store.read_bytes(store.resolve(ref), "f") == b"body"

    def test_a_pruner_that_is_killed_keeps_no_writer_of_what_others_reach_waiting(
        self, store: ArtifactStore, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for step in range(2):
            store.commit("ppo-state", "run", {"own": b"own%d" % step, "empty": b""})
        delete = store._backend.delete

        def delete_until_killed(key: str) -> None:
            if key.startswith("versions/"):
                raise KeyboardInterrupt
            delete(key)

        monkeypatch.setattr(store._backend, "delete", delete_until_killed)
        with pytest.raises(KeyboardInterrupt):
            store.prune("ppo-state", "run", keep=1)
        [(_, claim, _)] = claims(backend, DELETING)
        assert claim.blobs == {sha256(b"own0")}

    def test_a_writer_waits_once_for_a_deletion_that_does_not_end(
        self, store: ArtifactStore, backend: Backend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.commit("ppo-state", "old", {"f": b"body"})
        note(backend, "trash/deleting", b"body", datetime.now(UTC))
        waited: list[float] = []
        monkeypatch.setattr(clock, "pause", lambda _: waited.append(60.0))
        monkeypatch.setattr(clock, "boottime", lambda: sum(waited))
        store.commit("policy", "p", {"f": b"body"})
        assert sum(waited) == DELETION_LIFE.total_seconds()

    def test_a_dead_pruner_stops_no_writer_and_its_work_is_finished(
        self, store: ArtifactStore, backend: Backend
    ) -> None:
        backend.upload(blob_key(sha256(b"orphan")), b"orphan")
        backend.upload(blob_key(sha256(b"needed")), b"needed")
        for body in (b"orphan", b"needed"):
            note(backend, "trash/deleting", body, datetime.now(UTC) - 2 * INTENT_LIFE)
        store.commit("policy", "p", {"f": b"needed"})
        for step in range(2):
            store.commit("ppo-state", "run", {"f": b"%d" % step})
        store.prune("ppo-state", "run", keep=1)
        assert backend.size(blob_key(sha256(b"orphan"))) is None
        assert backend.size(blob_key(sha256(b"needed"))) == len(b"needed")
        assert backend.children("trash/deleting/") == []

    def test_a_blob_that_vanishes_before_the_manifest_is_written_is_sent_again(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.commit("policy", "p", {"f": b"body"})
        create = store._backend.create

        def create_after_the_hand(key: str, data: bytes) -> bool:
            if key.startswith("versions/"):
                store._backend.delete(blob_key(sha256(b"body")))
            return create(key, data)

        monkeypatch.setattr(store._backend, "create", create_after_the_hand)
        ref = store.commit("policy", "p", {"f": b"body"})
        assert store.read_bytes(store.resolve(ref), "f") == b"body"

    def test_a_note_that_cannot_be_read_is_named(self, store: ArtifactStore, backend: Backend) -> None:
        backend.create("trash/deleting/odd.json", b"[]")
        with pytest.raises(StoreError, match=r"trash/deleting/odd\.json in the artifact store cannot be read"):
            store.commit("policy", "p", {"f": b"1"})
