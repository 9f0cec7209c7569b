"""A store in a directory and its local cache, for the tests of fetching."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from infra.artifacts import ArtifactStore, commit, open_store
from tests.unit.artifacts.store_contract import sha256

PIECE = 4096
LARGE = b"".join(bytes([number]) * PIECE for number in range(5))
"""A file of five blobs."""


class Place(NamedTuple):
    """A store in a directory, its cache, and the blobs that were downloaded from it."""

    root: Path
    store: ArtifactStore
    downloaded: list[str]

    @property
    def cache(self) -> Path:
        return self.root / "cache" / "artifacts"

    def kept(self, body: bytes) -> Path:
        digest = sha256(body)
        return self.cache / "files" / digest[:2] / digest[2:]

    def bodies(self) -> set[str]:
        return {path.parent.name + path.name for path in self.cache.glob("files/*/*")}

    def another(self, limit_gb: float = 1.0) -> ArtifactStore:
        """Return the same store and cache, as another process would open them, with another limit perhaps."""
        return _noted(open_store(self.store.url, cache_dir=self.root / "cache", cache_limit_gb=limit_gb), self)


def _noted(store: ArtifactStore, place: Place) -> ArtifactStore:
    real = store._backend.download

    def download(key: str, size: int) -> Iterator[bytes]:
        place.downloaded.append(key.removeprefix("blobs/sha256/").replace("/", ""))
        return real(key, size)

    store._backend.download = download  # type: ignore[method-assign]
    return store


@pytest.fixture(name="place")
def place_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(commit, "PIECE_BYTES", PIECE)
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    place = Place(tmp_path, store, [])
    _noted(store, place)
    return place


def blobs_of(body: bytes) -> list[str]:
    return [sha256(body[start : start + PIECE]) for start in range(0, len(body), PIECE)]


def age(path: Path, seconds: float) -> None:
    found = path.stat()
    os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


def leftovers(place: Place) -> list[Path]:
    return [*place.cache.glob("parts/*"), *(path for path in place.cache.glob("holds/*/*") if path.name != "names")]


def write(path: Path, body: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(body)


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[PIECE + 7] ^= 1
    write(path, bytes(body))
