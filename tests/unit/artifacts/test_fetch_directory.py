"""A user's directory that is fetched into: what is put there, what stays, and what is not touched."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.artifacts.shared_files import try_lock
from infra.errors import StoreError
from tests.unit.artifacts.cache_place import LARGE, PIECE, Place, blobs_of, flip, place_fixture  # noqa: F401 - a fixture
from tests.unit.artifacts.store_contract import sha256


def test_a_fetch_links_what_is_large_and_copies_what_people_edit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.artifacts.cache.COPIED_BYTES", PIECE)
    place.store.commit("policy", "p", {"w": LARGE, "config.json": b"{}"})
    out = place.store.fetch("policy/p", place.root / "out")
    assert (out / "w").samefile(place.kept(LARGE))
    assert stat.S_IMODE((out / "w").stat().st_mode) == 0o444
    assert not (out / "config.json").samefile(place.kept(b"{}"))
    assert (out / "config.json").stat().st_mode & stat.S_IWUSR
    (out / "config.json").write_bytes(b"edited")
    assert (place.store.cached("policy/p") / "config.json").read_bytes() == b"{}"
    shutil.rmtree(place.root / "cache")
    assert (out / "w").read_bytes() == LARGE


@pytest.mark.parametrize("keep", [True, False])
def test_what_a_user_has_edited_is_named_and_left_alone_and_what_is_right_stays(place: Place, keep: bool) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE, "c/config.json": b"{}", "d": b"same"})
    out = place.store.fetch(ref, place.root / "out", keep=keep)
    (out / "c" / "config.json").write_bytes(b"edited")
    (out / "w").unlink()
    with pytest.raises(
        StoreError,
        match=rf"{out} holds files that are not as policy/p@1 has them \(c/config.json\); fetch into an empty",
    ):
        place.store.fetch(ref, out, keep=keep)
    assert (out / "c" / "config.json").read_bytes() == b"edited"
    assert not (out / "w").exists()
    (out / "c" / "config.json").unlink()
    inode = (out / "d").stat().st_ino
    place.store.fetch(ref, out, keep=keep)
    assert {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file()} == {
        "w": LARGE,
        "config.json": b"{}",
        "d": b"same",
    }
    assert (out / "d").stat().st_ino == inode


def test_a_link_to_the_cache_that_was_written_through_is_mended_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.artifacts.cache.COPIED_BYTES", 0)
    ref = place.store.commit("policy", "p", {"w": LARGE})
    out = place.store.fetch(ref, place.root / "out")
    place.downloaded.clear()
    flip(out / "w")
    place.store.fetch(ref, out)
    assert (out / "w").read_bytes() == LARGE
    assert (out / "w").samefile(place.kept(LARGE))
    assert place.downloaded == blobs_of(LARGE)[1:2]


@pytest.mark.parametrize(
    "put", [Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.write_text("2")]
)
def test_what_is_in_the_way_of_a_file_is_not_replaced(place: Place, put: Callable[[Path], object]) -> None:
    ref = place.store.commit("policy", "p", {"w": b"1"})
    out = place.root / "out"
    out.mkdir()
    put(out / "w")
    before = (out / "w").lstat()
    for keep in (True, False):
        with pytest.raises(StoreError, match=r"holds files that are not as policy/p@1 has them \(w\)"):
            place.store.fetch(ref, out, keep=keep)
    assert (out / "w").lstat().st_ino == before.st_ino


def test_a_fetch_that_is_complete_leaves_nothing_of_those_that_were_killed(place: Place) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE, "c/d": b"1"})
    out = place.root / "out"
    (out / "c").mkdir(parents=True)
    dead, living = out / f".{sha256(LARGE)[:16]}.part", out / "c" / f".{'0' * 16}.part"
    dead.write_bytes(LARGE[:PIECE])
    with living.open("wb") as file:
        assert try_lock(file.fileno())
        place.store.fetch(ref, out)
    assert {path.name for path in out.rglob("*") if path.is_file()} == {"w", "d", living.name}


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_is_written_through_a_link_that_is_called_as_an_unfinished_file(place: Place, keep: bool) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE})
    out, precious = place.root / "out", place.root / "precious"
    out.mkdir()
    precious.write_bytes(b"mine")
    (out / f".{sha256(LARGE)[:16]}.part").symlink_to(precious)
    with pytest.raises(StoreError, match=rf"cannot write policy/p@1 to {out}: Too many levels of symbolic links"):
        place.store.fetch(ref, out, keep=keep)
    assert precious.read_bytes() == b"mine"


def test_a_file_that_is_called_as_an_unfinished_one_is_refused(place: Place) -> None:
    """It would get in the way of another's download."""
    unfinished = f".{sha256(LARGE)[:16]}.part"
    ref = place.store.commit("policy", "p", {"w": LARGE, unfinished: b"left"})
    for keep in (True, False):
        with pytest.raises(StoreError, match=rf"policy/p@1 has files that are called as .* \({unfinished}\)"):
            place.store.fetch(ref, place.root / "out", keep=keep)
    assert (place.store.cached(ref) / unfinished).read_bytes() == b"left"


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_files_cannot_be_linked_they_are_copied(
    place: Place, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    ref = place.store.commit("policy", "p", {"w": LARGE})
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("infra.artifacts.cache.COPIED_BYTES", 0)
    out, directory = place.store.fetch(ref, place.root / "out"), place.store.cached(ref)
    assert (out / "w").read_bytes() == (directory / "w").read_bytes() == LARGE
    inode = (directory / "w").stat().st_ino
    assert (place.store.cached(ref) / "w").stat().st_ino == inode  # not copied again
    assert len(place.downloaded) == 5
    assert [path.name for path in out.iterdir()] == ["w"]


def test_a_fetch_to_another_file_system_copies(place: Place) -> None:
    candidates = [path for path in map(Path, ("/dev/shm", "/tmp", "/var/tmp")) if os.access(path, os.W_OK)]
    others = [path for path in candidates if path.stat().st_dev != place.root.stat().st_dev]
    if not others:
        pytest.skip("there is no second file system")
    out = others[0] / f"rlhf-test-{os.getpid()}"
    body = b"w" * 1_000_001
    try:
        place.store.fetch(place.store.commit("policy", "p", {"w": body}), out)
        assert (out / "w").read_bytes() == body
        assert not (out / "w").samefile(place.kept(body))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def test_a_fetch_past_the_cache_leaves_nothing_in_it_and_goes_on_where_it_was_killed(place: Place) -> None:
    ref = place.store.commit("policy", "p", {"w": LARGE})
    out = place.root / "out"
    out.mkdir()
    part = out / f".{sha256(LARGE)[:16]}.part"
    part.write_bytes(LARGE[: 2 * PIECE])
    place.store.fetch(ref, out, keep=False)
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [("w", LARGE)]
    assert (out / "w").stat().st_mode & stat.S_IWUSR
    assert sorted(place.downloaded) == sorted(blobs_of(LARGE)[2:])
    assert not place.cache.exists()
