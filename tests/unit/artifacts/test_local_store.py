"""The store in a directory."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore, local, open_store
from infra.artifacts import commit as commits
from infra.artifacts.backend import Backend
from infra.artifacts.local import LocalBackend
from infra.artifacts.ref import VERSIONS, blob_key
from infra.errors import ReferenceNotFoundError, StoreError, StoreNotReadyError
from tests.unit.artifacts.alias_contract import AliasContract
from tests.unit.artifacts.pruning_contract import PruningContract
from tests.unit.artifacts.store_contract import StoreContract, sha256


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


class TestAliasesInADirectory(AliasContract):
    pass


class TestPruningInADirectory(PruningContract):
    pass


def test_what_is_not_an_address_is_refused(tmp_path: Path) -> None:
    for url in ("gs://bucket", "file://relative/path", "/plain/path", "s3://", ""):
        with pytest.raises(StoreError, match="RLHF_STORE_URL to s3://bucket/prefix or file:///directory"):
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


@contextmanager
def without_privileges() -> Iterator[None]:
    """Be nobody for a while: permissions do not bind the superuser, as whom the tests may run."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody may enter and nobody may write to, with a store in it."""
    directory = Path(tempfile.mkdtemp())
    store = open_store((directory / "store").as_uri(), cache_dir=directory / "cache")
    store.commit("policy", "p", {"f": b"1"})
    for folder, _, _ in os.walk(directory):
        Path(folder).chmod(0o555)
    yield directory
    for folder, _, _ in os.walk(directory):
        Path(folder).chmod(0o755)
    shutil.rmtree(directory)


def test_who_may_only_read_opens_the_store_and_is_told_at_the_first_write(open_directory: Path) -> None:
    with without_privileges():
        store = open_store((open_directory / "store").as_uri(), cache_dir=open_directory / "cache")
        assert store.read_bytes(store.resolve("policy/p"), "f") == b"1"
        with pytest.raises(
            StoreError, match=r"cannot write to the artifact store in the directory .*Permission denied"
        ):
            store.commit("policy", "p", {"f": b"2"})
        with pytest.raises(StoreError, match=r"cannot open the artifact store in the directory .*Permission denied"):
            open_store((open_directory / "new").as_uri(), cache_dir=open_directory / "cache")


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small file system cannot be mounted here: it takes privileges")
    try:
        store = open_store((mounted / "store").as_uri(), cache_dir=tmp_path / "cache")
        ref = store.commit("policy", "p", {"f": b"1"})
        with pytest.raises(StoreError, match=r"cannot write to .* No space left on device"):
            store.commit("policy", "p", {"f": os.urandom(2 << 20)})
        assert [manifest.ref for manifest in store.list()] == [ref]
        assert list((mounted / "store" / "tmp").iterdir()) == []
        assert store.commit("policy", "p", {"f": b"2"}).uri == "policy/p@2"
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_disk_that_is_full_at_any_write_is_told(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = store.commit("policy", "p", {"f": b"1"})
    sync = os.fsync
    for good in range(4):
        left = iter([True] * good)

        def fill(descriptor: int, left: Iterator[bool] = left) -> None:
            if not next(left, False):
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fill)
            with pytest.raises(StoreError, match=r"cannot write to .* No space left on device"):
                store.commit("policy", "p", {"f": b"body %d" % good})
        assert [manifest.ref for manifest in store.list()] == [ref]
        assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_folders_that_others_have_made_are_on_the_disk_before_what_is_in_them(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made them may have been killed before he had entered them."""
    root = tmp_path / "store"
    blob, manifests = root / blob_key(sha256(b"1")), root / "versions" / "policy" / "p"
    for folder in (blob.parent, manifests):
        folder.mkdir(parents=True)
    synced: list[Path] = []
    sync, link = os.fsync, os.link

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    def look(source: Path, target: Path) -> None:
        if target.parent == manifests:
            assert {*manifests.parents[:3], *blob.parents[:4]} <= set(synced)
        link(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "link", look)
    store.commit("policy", "p", {"f": b"1"})
    assert manifests in synced
    store.commit("policy", "p", {"f": b"2"})
    assert synced.count(manifests.parent) == 1  # once for each process


def test_a_file_system_with_another_clock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another machine, say: it is the server who writes down when a file was written."""
    write = LocalBackend._write_temporary

    def write_long_ago(self: LocalBackend, data: bytes) -> Path:
        path = write(self, data)
        os.utime(path, (time.time() - 600, time.time() - 600))
        return path

    monkeypatch.setattr(LocalBackend, "_write_temporary", write_long_ago)
    with pytest.raises(
        StoreNotReadyError, match=r"our clock is 10 minutes ahead of that of the file system of .*store; leases"
    ):
        open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (7, "sft/s@7 was removed while it was written; commit it again"),
        (None, "no free version number for sft/s from 1 on in 2 attempts: .*commit again"),
    ],
)
def test_a_commit_that_others_thwart_may_go_well_the_next_time(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, version: int | None, says: str
) -> None:
    create = store._backend.create
    monkeypatch.setattr(commits, "NUMBER_ATTEMPTS", 2)
    monkeypatch.setattr(store._backend, "create", lambda key, data: not key.startswith(VERSIONS) and create(key, data))
    with pytest.raises(StoreNotReadyError, match=says):
        store.commit("sft", "s", {"f": b"1"}, version=version)


def test_a_file_system_that_overwrites_what_is_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", shutil.copyfile)
    with pytest.raises(StoreError, match=r"does not do create-if-absent .*so two writers would overwrite each other"):
        open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path)


def test_what_is_tried_at_opening_does_not_stay(store: ArtifactStore, backend: Backend) -> None:
    assert store.list() == backend.children("probe/") == []


def test_a_folder_that_a_killed_writer_left_empty_is_not_offered(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "store" / "versions" / "policy" / "p").mkdir(parents=True)
    with pytest.raises(ReferenceNotFoundError, match=r"no policy/p: it is empty so far"):
        store.resolve("policy/p")
