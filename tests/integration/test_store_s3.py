"""The store in a bucket of a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore
from infra.artifacts.backend import Backend, Stored
from infra.artifacts.commit import PIECE_BYTES
from infra.artifacts.s3 import S3Backend
from infra.errors import StoreError
from tests.integration.s3_stores import given_backend, given_prefix, given_store  # noqa: F401 - fixtures
from tests.integration.seaweed import seaweed_server  # noqa: F401 - a fixture
from tests.unit.artifacts.alias_contract import AliasContract
from tests.unit.artifacts.lock_contract import LockContract
from tests.unit.artifacts.newest_contract import NewestContract
from tests.unit.artifacts.plan_contract import PlanContract
from tests.unit.artifacts.pruning_contract import PruningContract
from tests.unit.artifacts.store_contract import StoreContract

pytestmark = pytest.mark.integration


class TestStoreInABucket(StoreContract):
    opens_store = """
    from pathlib import Path
    from infra.artifacts import S3Options, open_store

    names = ("TEST_ENDPOINT", "TEST_ACCESS_KEY", "TEST_SECRET_KEY")
    store = open_store(url, cache_dir=Path("unused"), s3=S3Options(*(os.environ[name] for name in names)))
    """


class TestAliasesInABucket(AliasContract):
    pass


class TestLocksInABucket(LockContract):
    pass


class TestPlansInABucket(PlanContract):
    pass


class TestPruningInABucket(PruningContract):
    @pytest.mark.s3
    def test_writers_and_pruners_at_once_lose_nothing(self, store: ArtifactStore) -> None:
        super().test_writers_and_pruners_at_once_lose_nothing(store)


@pytest.mark.s3
class TestNewestInABucket(NewestContract):
    pass


def test_a_file_of_several_blobs_comes_back(store: ArtifactStore, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(PIECE_BYTES + 1))
    ref = store.commit("policy", "p", {"from-disk": path, "from-memory": path.read_bytes()[:-1]})
    directory = store.fetch(ref, tmp_path / "out")
    assert (directory / "from-disk").read_bytes() == path.read_bytes()
    assert (directory / "from-memory").read_bytes() == path.read_bytes()[:-1]


def test_a_store_opened_before_a_fork_works_in_the_child(store: ArtifactStore) -> None:
    code = TestStoreInABucket().in_another_process(
        store,
        """
        print(store.commit("policy", "p", {"f": b"1"}).uri, flush=True)
        child = os.fork()
        if child == 0:
            print(store.commit("policy", "p", {"f": b"2"}).uri, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(store.commit("policy", "p", {"f": b"3"}).uri, flush=True)
        """,
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert finished.stdout.split() == [b"policy/p@1", b"policy/p@2", b"policy/p@3"]


def test_a_long_listing_is_read_to_its_end(backend: Backend, store: ArtifactStore) -> None:
    names = [f"{number:08d}.json" for number in range(1005)]  # a page of S3 has 1000
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda name: backend.create(f"versions/policy/p/{name}", b""), names))
    assert backend.children("versions/policy/p/") == names
    assert backend.children("versions/policy/p/", after=names[1]) == names[2:]
    assert backend.children("versions/policy/p/", most=1003) == names[:1003]
    with pytest.raises(StoreError, match="the manifest policy/p@1004 cannot be read"):
        store.latest("policy", "p")


def test_a_manifest_is_asked_for_once_by_a_machine(
    store: ArtifactStore, backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a night requests does not grow with the nights before; what has changed in the bucket is read again."""
    reads: list[str] = []
    read = S3Backend.read

    def noted(self: S3Backend, key: str) -> Stored | None:
        reads.append(key)
        return read(self, key)

    def look() -> list[str]:
        """Return what another process of this machine sees."""
        reads.clear()
        return [manifest.digest for manifest in ArtifactStore(backend, tmp_path / "cache").list()]

    digests = [store.commit("policy", "p", {"f": b"%d" % number}).digest for number in range(4)]
    keys = [f"versions/policy/p/{number:08d}.json" for number in range(1, 5)]
    monkeypatch.setattr(S3Backend, "read", noted)
    assert look() == digests
    assert sorted(reads) == keys
    assert look() == digests
    assert reads == []
    [folder] = (tmp_path / "cache" / "manifests").iterdir()
    damaged, *_ = sorted(folder.iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (folder / "of-a-killed-writer").touch()
    assert look() == digests
    assert len(reads) == 1  # a kept one that is damaged is no more than one that is missing

    first = backend.read(keys[0])
    assert first is not None
    backend.upload(keys[3], json.dumps(json.loads(first.data) | {"version": 4}).encode())
    backend.delete(keys[1])
    assert look() == [digests[0], digests[2], digests[0]]
    assert reads == [keys[3]]
    assert len(list(folder.iterdir())) == 3


def test_listing_begins_after_a_name_and_ends_where_it_may(backend: Backend) -> None:
    for name in ("b", "d/x", "d/y", "e", "a", "c"):
        backend.create(f"trash/{name}", b"")
    everything = ["a", "b", "c", "d", "e"]
    for most in range(1, 7):
        assert backend.children("trash/", most=most) == everything[:most]
        assert backend.children("trash/", after="b", most=most) == everything[2:][:most]
    assert backend.children("trash/", after="bb") == ["c", "d", "e"]
    assert backend.children("trash/", after="e") == backend.children("nothing/", after="a", most=3) == []
