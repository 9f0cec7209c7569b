"""Fetching: linked or copied, resumed, side by side, in bounded memory, on a disk that gives out."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.artifacts import commit, download, open_store
from infra.artifacts.download import Downloads
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest
from infra.artifacts.ref import blob_key, version_key
from infra.artifacts.shared_files import try_lock
from infra.errors import StoreError
from tests.unit.artifacts.cache_place import LARGE, PIECE, Place, blobs_of, flip, leftovers, place_fixture  # noqa: F401 - a fixture
from tests.unit.artifacts.store_contract import at_once, sha256


def test_a_body_that_is_damaged_on_its_way_is_asked_for_again(place: Place) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE})
    real, spoilt = place.store._backend.download, []

    def spoil_once(key: str, size: int) -> Iterator[bytes]:
        body = b"".join(real(key, size))
        if key not in spoilt:
            spoilt.append(key)
            body = b"longer and wrong" + body
        yield body

    place.store._backend.download = spoil_once  # type: ignore[method-assign]
    assert (place.store.cached(ref) / "w").read_bytes() == LARGE
    assert len(spoilt) == 5


def test_blobs_that_are_not_the_files_are_refused(place: Place) -> None:
    """The digest by which an artifact is known covers its files' hashes, not those of their blobs."""
    manifest = place.store.resolve(place.store.commit("policy", "p", {"w": LARGE}))
    [entry] = manifest.files
    swapped = entry.model_copy(update={"blobs": entry.blobs[::-1]})
    altered = manifest.model_copy(update={"files": (swapped,)})
    (place.root / "store" / version_key("policy", "p", 1)).write_bytes(altered.to_json())
    for attempt in (place.store.cached, lambda ref: place.store.fetch(ref, place.root / "out", keep=False)):
        with pytest.raises(StoreError, match=r"'w' of policy/p@1 does not hash to \w+: its manifest is damaged"):
            attempt("policy/p")
    assert not place.kept(LARGE).exists()
    assert not (place.root / "out" / "w").exists()


def test_the_error_that_is_told_is_the_one_that_ended_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = place.store.commit("policy", "p", {"a": b"fine", "b": b"lost"})
    (place.root / "store" / blob_key(sha256(b"lost"))).unlink()
    give_up, given_up = Downloads._give_up, threading.Event()

    def tell(downloads: Downloads, error: BaseException) -> None:
        give_up(downloads, error)
        given_up.set()

    def come_late(_: str, size: int) -> Iterator[bytes]:
        assert given_up.wait(timeout=60)
        yield bytes(size)

    monkeypatch.setattr(Downloads, "_give_up", tell)
    monkeypatch.setattr(place.store._backend, "download", come_late)
    with pytest.raises(StoreError, match=r"'b' of policy/p@1 .* is missing from the store"):
        place.store.cached(ref)


def test_the_blobs_of_one_file_come_side_by_side(place: Place) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE})
    real, together = place.store._backend.download, threading.Barrier(3)

    def meet(key: str, size: int) -> Iterator[bytes]:
        if blobs_of(LARGE).index(key.removeprefix("blobs/sha256/").replace("/", "")) < 3:
            together.wait(timeout=60)
        return real(key, size)

    place.store._backend.download = meet  # type: ignore[method-assign]
    assert (place.store.cached(ref) / "w").read_bytes() == LARGE  # one after the other, the first would wait in vain


def test_many_who_want_the_same_fetch_it_once(place: Place) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE, "c": b"1"})
    stores = [place.another() for _ in range(6)]

    def get(number: int) -> bytes:
        if number % 2:
            return (stores[number].cached(ref) / "w").read_bytes()
        return (stores[number].fetch(ref, place.root / f"out{number}") / "w").read_bytes()

    assert at_once(get, 6) == [LARGE] * 6
    assert sorted(place.downloaded) == sorted([*blobs_of(LARGE), sha256(b"1")])


def test_a_download_that_another_process_has_stopped_in_is_an_error_after_a_while(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "STALL_S", 0.05)
    ref = place.store.commit("policy", "p", {"w": LARGE})
    part = place.cache / "parts" / sha256(LARGE)
    part.parent.mkdir(parents=True)
    with part.open("wb") as file:
        assert try_lock(file.fileno())
        with pytest.raises(StoreError, match=rf"another process has held {part} for 0 s without writing to it"):
            place.store.cached(ref)
    assert (place.store.cached(ref) / "w").read_bytes() == LARGE


def test_an_error_does_not_wait_for_what_another_process_downloads(place: Place) -> None:
    """That process is stopped: whoever wanted its file too would wait for minutes, and for nothing."""
    ref = place.store.commit("policy", "p", {"a": LARGE, "b": b"lost"})
    (place.root / "store" / blob_key(sha256(b"lost"))).unlink()
    part = place.cache / "parts" / sha256(LARGE)
    part.parent.mkdir(parents=True)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command, pipe = [sys.executable, "-c", hold, str(part)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other, ThreadPoolExecutor(1) as beside:
        assert other.stdout is not None
        other.stdout.readline()
        fetching = beside.submit(place.store.cached, ref)
        try:
            with pytest.raises(StoreError, match=r"'b' of policy/p@1 .* is missing from the store"):
                fetching.result(timeout=100)  # less than download.STALL_S
        finally:
            other.communicate(b"\n")


def test_memory_does_not_grow_with_the_artifact(tmp_path: Path) -> None:
    """Blobs of the largest size that there is; their bodies are holes in files, so that the disk does not matter."""
    size, whole, blobs = commit.PIECE_BYTES, hashlib.sha256(), []
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    for number in range(3):
        body = bytearray(size)
        body[0] = number
        whole.update(body)
        blobs.append(BlobEntry(size=size, sha256=sha256(body)))
        path = tmp_path / "store" / blob_key(blobs[-1].sha256)
        path.parent.mkdir(parents=True)
        path.write_bytes(body[:1])
        os.truncate(path, size)
    entry = FileEntry(path="w", size=3 * size, sha256=whole.hexdigest(), blobs=tuple(blobs))
    draft = Manifest.draft((entry,), kind="policy", name="p", version=1)
    store._backend.create(version_key("policy", "p", 1), draft.to_json())
    tracemalloc.start()
    try:
        store.fetch("policy/p", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 2 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_gives_out_is_one_sentence_and_nothing_half_written_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE, "a": b"small"})
    out = place.root / "out"
    real = os.pwrite

    def give_out(descriptor: int, data: bytes, offset: int) -> int:
        if offset >= 2 * PIECE:
            raise OSError(reason, os.strerror(reason))
        return real(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", give_out)
        with pytest.raises(StoreError, match=rf"cannot keep policy/p@1 in the cache {place.cache}: .*; see that it"):
            place.store.fetch(ref, out)
        assert list(out.iterdir()) == leftovers(place) == []
        with pytest.raises(StoreError, match=rf"cannot write policy/p@1 to {out}: {os.strerror(reason)}"):
            place.store.fetch(ref, out, keep=False)
        assert list(out.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", lambda *_: give_out(0, b"", 2 * PIECE))
        with pytest.raises(StoreError, match=rf"cannot write policy/p@1 to {out}: {os.strerror(reason)}"):
            place.store.fetch(ref, out)
        assert list(out.iterdir()) == leftovers(place) == []
    assert (place.store.fetch(ref, out) / "w").read_bytes() == LARGE


def test_a_cache_that_cannot_be_written_is_named(place: Place) -> None:
    ref = place.store.commit("policy", "p", {"w": b"1"})
    (place.root / "file").write_text("in the way")
    store = open_store(place.store.url, cache_dir=place.root / "file")
    for attempt in (lambda: store.cached(ref), lambda: store.fetch(ref, place.root / "out")):
        with pytest.raises(
            StoreError, match=rf"cannot keep policy/p@1 in the cache {place.root}/file/artifacts: Not a"
        ):
            attempt()


def test_a_disk_that_is_really_full_is_one_sentence(tmp_path: Path) -> None:
    """A cache on a file system of 2 MB, which exists for one process alone."""
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    store.commit("policy", "p", {"small": b"1", "w": os.urandom(3_000_000)})
    (tmp_path / "small").mkdir()
    code = f"""
from pathlib import Path
from infra.artifacts import open_store
store = open_store({store.url!r}, cache_dir=Path("small"))
for fetch in (store.cached, lambda ref: store.fetch(ref, Path("small/out"), keep=False)):
    try:
        fetch("policy/p")
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
print([str(path) for path in Path("small").rglob("*") if path.is_file() and path.name not in ("lock", "names")])
"""
    (tmp_path / "fill.py").write_text(code)
    mount = 'mount -t tmpfs -o size=2m none small && exec "$0" fill.py'
    alone = ["unshare", "--mount", "--map-root-user"]
    tried = subprocess.run([*alone, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    if tried is None or tried.returncode:
        pytest.skip("this machine lets nobody mount a file system for himself")
    command = [*alone, "sh", "-c", mount, sys.executable]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    *said, left = told.stdout.splitlines()
    assert said == [
        f"StoreError: cannot keep policy/p@1 in the cache {tmp_path}/small/artifacts: No space left on device; see "
        "that it can be written and has 0.003 GB free, or choose another directory (RLHF_HOME)",
        "StoreError: cannot write policy/p@1 to small/out: No space left on device",
    ], told.stderr
    # the small file is there as a whole, or was given up with the large one
    assert left in ("[]", "['small/artifacts/files/6b/86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b']")
