"""The local cache: shared, checked, mended, within its limit."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.artifacts import cache, commit, open_default_store, open_store
from infra.artifacts.ref import blob_key
from infra.errors import SettingsError, StoreError
from tests.unit.artifacts.cache_place import LARGE, PIECE, Place, age, blobs_of, flip, leftovers, place_fixture, write  # noqa: F401 - a fixture
from tests.unit.artifacts.store_contract import sha256


def test_a_file_is_kept_once_read_only_under_its_hash_and_linked_where_it_is_wanted(place: Place) -> None:
    first = place.store.commit("policy", "p", {"w": LARGE, "c/d": b"1"})
    second = place.store.commit("policy", "p", {"w": LARGE, "c/d": b"2"})
    directories = [place.store.cached(ref) for ref in (first, second)]
    assert [(path / "c" / "d").read_bytes() for path in directories] == [b"1", b"2"]
    assert place.kept(LARGE).read_bytes() == LARGE
    assert stat.S_IMODE(place.kept(LARGE).stat().st_mode) == 0o444
    assert place.kept(LARGE).samefile(directories[0] / "w")
    assert place.kept(LARGE).samefile(directories[1] / "w")
    assert sorted(place.downloaded) == sorted([*blobs_of(LARGE), sha256(b"1"), sha256(b"2")])
    place.downloaded.clear()
    tomorrow = time.time() + 86_400
    os.utime(place.kept(LARGE), (tomorrow, tomorrow))
    assert place.another().cached(first) == directories[0]
    assert place.downloaded == []
    assert place.kept(LARGE).stat().st_atime < tomorrow  # used just now, whatever the disk notes of reading
    assert leftovers(place) == []


@pytest.mark.parametrize(
    ("spoil", "complaint", "lost"),
    [
        (flip, "is damaged", blobs_of(LARGE)[1:2]),
        (lambda path: write(path, LARGE[: 3 * PIECE]), "has 12288 B instead of 20480", blobs_of(LARGE)[3:]),
        (lambda path: write(path, LARGE + b"!"), "has 20481 B instead of 20480", []),
        (Path.unlink, "is missing", []),  # its bytes are in the artifact's directory still
    ],
)
def test_what_is_wrong_with_a_cached_file_is_named_and_only_what_is_lost_is_fetched_again(
    place: Place, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], complaint: str, lost: list[str]
) -> None:
    directory = place.store.cached(place.store.commit("policy", "p", {"w": LARGE, "c": b"1"}))
    spoil(place.kept(LARGE))
    place.downloaded.clear()
    with caplog.at_level(logging.WARNING):
        assert place.store.cached("policy/p") == directory
    assert f"the cached copy of 'w' of policy/p@1 {complaint}; it is mended from the store" in caplog.text
    assert (directory / "w").read_bytes() == place.kept(LARGE).read_bytes() == LARGE
    assert (directory / "w").samefile(place.kept(LARGE))
    assert sorted(place.downloaded) == sorted(lost)
    caplog.clear()
    place.store.cached("policy/p")
    assert caplog.text == ""


def test_an_artifacts_directory_is_put_right(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    directory = place.store.cached(place.store.commit("policy", "p", {"w": LARGE, "c/d": b"1", "e/f": b"2"}))
    (directory / "c" / "d").unlink()
    (directory / "w").unlink()
    (directory / "w").write_bytes(b"mine")
    (directory / "c" / "notes").write_bytes(b"stranger")
    (directory / "e").rename(place.root / "elsewhere")
    (directory / "e").symlink_to(place.root / "elsewhere")
    place.downloaded.clear()
    with caplog.at_level(logging.WARNING):
        place.store.cached("policy/p")
    there = {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert there == {"w": LARGE, "d": b"1", "f": b"2"}
    assert (place.root / "elsewhere" / "f").read_bytes() == b"2"
    for told in (
        "e is no file of policy/p@1",
        "c/d is missing; it is put back",
        "w has 4 B instead of",
        "c/notes is no file of policy/p@1",
    ):
        assert told in caplog.text
    assert place.downloaded == []


def test_a_blob_that_is_damaged_in_the_store_does_not_mend_the_cache(place: Place, tmp_path: Path) -> None:
    place.store.cached(place.store.commit("policy", "p", {"w": LARGE}))
    flip(place.kept(LARGE))
    key = blob_key(blobs_of(LARGE)[1])
    (tmp_path / "store" / key).write_bytes(b"x" * PIECE)
    for attempt in (lambda: place.store.cached("policy/p"), lambda: place.store.fetch("policy/p", tmp_path / "out")):
        with pytest.raises(StoreError, match=rf"'w' of policy/p@1 \(blob {key}\) is damaged: its content hashes to"):
            attempt()
    assert list((tmp_path / "out").iterdir()) == []


def test_the_least_recently_used_is_evicted_first_and_what_this_process_was_given_never(place: Place) -> None:
    bodies = [bytes([number]) * 30_000 for number in range(4)]
    refs = [place.store.commit("policy", f"p{number}", {"w": body, "c": b"same"}) for number, body in enumerate(bodies)]
    small = place.another(limit_gb=100_000 / 1e9)
    mine = small.cached(refs[0])
    for ref in refs[1:3]:
        place.store.fetch(ref, place.root / ref.uri)
    age(place.kept(bodies[0]), 300)
    age(place.kept(bodies[2]), 200)
    age(place.kept(bodies[1]), 100)
    small.fetch(refs[3], place.root / "out")
    assert place.bodies() == {sha256(body) for body in (bodies[0], bodies[1], bodies[3], b"same")}
    age(place.kept(bodies[3]), 50)
    small.fetch(refs[1], place.root / "second")  # used again: what is used counts, not what is new
    small.fetch(refs[2], place.root / "third")
    assert place.bodies() == {sha256(body) for body in (bodies[0], bodies[1], bodies[2], b"same")}
    assert (mine / "w").read_bytes() == bodies[0]
    tiny = place.another(limit_gb=0)
    tiny.fetch(refs[3], place.root / "again")
    assert place.bodies() == {sha256(bodies[0]), sha256(b"same")}
    assert (place.root / "again" / "w").read_bytes() == bodies[3]


def test_a_directory_that_nobody_uses_goes_with_its_files_and_old_parts_go_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE})
    part = place.cache / "parts" / sha256(b"given up")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 5000)
    dead = place.cache / "holds" / "dead"
    dead.mkdir(parents=True)
    (dead / "names").write_text(place.store.resolve(ref).digest)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_lifelong", cache.LifelongPins())  # a process that ends
        directory = place.store.cached(ref)
        [pin] = cache._lifelong._pins.values()
    assert [path.name for path in place.cache.glob("holds/*")] == [pin.scratch.name]
    tiny = place.another(limit_gb=0)
    other = place.store.commit("policy", "q", {"w": b"2"})
    tiny.fetch(other, place.root / "out")
    assert (directory / "w").exists()
    assert not part.exists()
    assert not dead.exists()
    pin.end()
    tiny.fetch(other, place.root / "again")
    assert not directory.exists()
    assert place.bodies() == set()


def test_a_pin_that_cannot_be_looked_at_is_nobodys_to_remove(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No more files may be open, say, or it is another user's: what he uses is not known, so nothing is evicted."""
    mine = place.store.cached(place.store.commit("policy", "p", {"w": LARGE}))
    real = os.open

    def run_out(path: Path, *arguments: int) -> int:
        if str(path).endswith("/names") and not arguments[0] & os.O_CREAT:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", run_out)
        tiny = place.another(limit_gb=0)
        tiny.fetch(place.store.commit("policy", "q", {"w": b"2"}), place.root / "out")
    assert "could not be brought within its limit: [Errno 24]" in caplog.text
    assert (mine / "w").read_bytes() == LARGE


def test_one_file_that_may_not_be_removed_does_not_keep_the_others(place: Place) -> None:
    """As that of another user; here the system itself forbids it."""
    first, second = (place.store.commit("policy", name, {"w": name.encode() * 9000}) for name in "ab")
    place.store.fetch(first, place.root / "a")
    age(place.kept(b"a" * 9000), 100)
    folder = place.kept(b"a" * 9000).parent
    if not shutil.which("chattr") or subprocess.call(["chattr", "+i", folder], stderr=subprocess.DEVNULL):
        pytest.skip("nothing can be made immutable here")
    try:
        place.another(limit_gb=0).fetch(second, place.root / "b")
        assert place.bodies() == {sha256(b"a" * 9000)}
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can be another user for a while")
def test_several_users_share_a_cache_that_all_may_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes on with what another has begun, and evicts what another has fetched, but not what he uses."""
    monkeypatch.setattr(commit, "PIECE_BYTES", PIECE)
    before, root = os.umask(0), Path(tempfile.mkdtemp())
    try:
        root.chmod(0o777)
        store = open_store((root / "store").as_uri(), cache_dir=root / "cache")
        used = store.cached(store.commit("policy", "used", {"w": b"used"}))
        store.fetch(store.commit("policy", "fetched", {"w": b"fetched"}), root / "out")
        begun = store.commit("policy", "begun", {"w": LARGE})
        part = root / "cache" / "artifacts" / "parts" / sha256(LARGE)
        part.write_bytes(LARGE[:PIECE])
        os.seteuid(65534)
        other = open_store(store.url, cache_dir=root / "cache", cache_limit_gb=0)
        assert (other.cached(begun) / "w").read_bytes() == LARGE
        assert not part.exists()
        assert {path.read_bytes() for path in root.glob("cache/artifacts/files/*/*")} == {b"used", LARGE}
        assert (used / "w").read_bytes() == b"used"
    finally:
        os.seteuid(0)
        os.umask(before)
        shutil.rmtree(root)


def test_copies_in_a_directory_count_and_go(place: Place) -> None:
    """As an earlier release left them, and where files cannot be linked."""
    old = place.cache / ("0" * 64)
    old.mkdir(parents=True)
    (old / "w").write_bytes(b"x" * 50_000)
    age(old / "w", 1000)
    place.another(limit_gb=60_000 / 1e9).fetch(place.store.commit("policy", "p", {"w": LARGE}), place.root / "out")
    assert not old.exists()
    assert place.bodies() == {sha256(LARGE)}


def test_what_nobody_uses_makes_room_on_a_full_disk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (place.store.commit("policy", name, {"w": name.encode() * 9000}) for name in "ab")
    place.store.fetch(first, place.root / "first")
    real = shutil.disk_usage

    def nearly_full(path: Path) -> object:
        used = sum(file.stat().st_size for file in place.cache.glob("files/*/*"))
        return real(path)._replace(free=15_000 - used)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    place.store.fetch(second, place.root / "second")
    assert place.bodies() == {sha256(b"b" * 9000)}
    manifest = place.store.resolve(second)
    lie = manifest.files[0].model_copy(update={"size": 10**18, "blobs": (), "sha256": "0" * 64})
    with pytest.raises(StoreError, match="policy/b@1"):
        place.store._cache.directory(place.store._backend, manifest.model_copy(update={"files": (lie,)}))
    assert place.bodies() == {sha256(b"b" * 9000)}


def test_a_cache_that_is_cleared_while_it_is_used_is_begun_anew(place: Place) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE})
    for _ in range(2):
        assert (place.store.cached(ref) / "w").read_bytes() == LARGE
        shutil.rmtree(place.cache)


def test_the_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_STORE_URL", (tmp_path / "store").as_uri())
    assert open_default_store()._cache._limit_bytes == 50 * 10**9
    monkeypatch.setenv("RLHF_CACHE_LIMIT_GB", "0.5")
    assert open_default_store()._cache._limit_bytes == 500_000_000
    monkeypatch.setenv("RLHF_CACHE_LIMIT_GB", "-1")
    with pytest.raises(SettingsError, match="RLHF_CACHE_LIMIT_GB is '-1'"):
        open_default_store()
