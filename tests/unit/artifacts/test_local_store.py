"""The store in a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore, local, open_store
from infra.artifacts.backend import Backend
from infra.artifacts.local import LocalBackend
from infra.errors import StoreError
from tests.unit.artifacts.pruning_contract import PruningContract
from tests.unit.artifacts.store_contract import StoreContract


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


@pytest.fixture
def backend(tmp_path: Path, store: ArtifactStore) -> Backend:
    return LocalBackend(store.url, tmp_path / "store")


class TestStoreInADirectory(StoreContract):
    opens_store = """
    from pathlib import Path
    from infra.artifacts import open_store

    store = open_store(url, cache_dir=Path("unused"))
    """


class TestPruningInADirectory(PruningContract):
    pass


def test_what_is_not_an_address_is_refused(tmp_path: Path) -> None:
    for url in ("gs://bucket", "file://relative/path", "/plain/path", "s3://", ""):
        with pytest.raises(StoreError, match="expected s3://bucket/prefix or file:///directory"):
            open_store(url, cache_dir=tmp_path)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=rf"cannot open the artifact store in the directory {tmp_path}/file/store: "):
        open_store(f"file://{tmp_path}/file/store", cache_dir=tmp_path)


def test_opening_clears_what_killed_writers_left_and_leaves_the_living_alone(tmp_path: Path) -> None:
    temporary = tmp_path / "store" / "tmp"
    temporary.mkdir(parents=True)
    for name, age_s in (("old", 2 * local.STALE_S), ("new", 0.0)):
        (temporary / name).write_bytes(b"half")
        modified = (temporary / name).stat().st_mtime - age_s
        os.utime(temporary / name, (modified, modified))
    open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path)
    assert [path.name for path in temporary.iterdir()] == ["new"]


def test_nothing_temporary_stays_after_a_commit(store: ArtifactStore, tmp_path: Path) -> None:
    store.commit("policy", "p", {"f": b"1"}, key="k")
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_a_lock_that_is_never_free_is_an_error_that_names_it(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(local, "LOCK_TIMEOUT_S", 0.05)
    assert backend.create("aliases/a", b"1")
    stored = backend.read("aliases/a")
    assert stored is not None
    with (tmp_path / "store" / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"was not free within 0 s; another process holds .*\.lock"):
            backend.replace("aliases/a", b"2", stored.tag)
    assert backend.replace("aliases/a", b"2", stored.tag)
    assert not backend.replace("aliases/a", b"3", stored.tag)
