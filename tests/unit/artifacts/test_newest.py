"""Finding the newest of many versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from infra.artifacts import ArtifactStore, open_store
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import FEW, highest_version
from infra.artifacts.local import LocalBackend
from infra.artifacts.ref import hint_key, version_key
from tests.unit.artifacts.histories.stage import MemoryBackend
from tests.unit.artifacts.newest_contract import Counting, NewestContract

HINT = hint_key("policy", "p")


class TestNewestInADirectory(NewestContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ArtifactStore:
        return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")

    @pytest.fixture
    def backend(self, store: ArtifactStore, tmp_path: Path) -> Backend:
        return LocalBackend(store.url, tmp_path / "store")


class TestNewestPageByPage(NewestContract):
    """A place that gives no more names than it is asked for."""

    @pytest.fixture
    def backend(self) -> Backend:
        return MemoryBackend()

    @pytest.fixture
    def store(self, backend: Backend, tmp_path: Path) -> ArtifactStore:
        return ArtifactStore(backend, tmp_path / "cache")

    @pytest.mark.parametrize("numbered", [False, True])
    def test_commits_leave_hints(self, store: ArtifactStore, backend: Backend, *, numbered: bool) -> None:
        for number in range(1, 10):
            store.commit("policy", "p", {"f": bytes([number])}, version=number if numbered else None)
        stored = backend.read(HINT)
        assert stored is not None
        assert json.loads(stored.data) == {"version": 7}  # once there are more than three after the third


def filled(count: int, *, hint: int | None = None) -> Counting:
    backend = MemoryBackend()
    for number in range(1, count + 1):
        backend.create(version_key("policy", "p", number), b"")
    if hint is not None:
        backend.create(HINT, json.dumps({"version": hint}).encode())
    return Counting(backend)


@pytest.mark.parametrize(("count", "listings"), [(0, 1), (10, 1), (FEW - 1, 1), (FEW + 1, 2), (2000, 2), (10_000, 2)])
def test_the_requests_do_not_grow_with_the_number_of_versions(count: int, listings: int) -> None:
    backend = filled(count, hint=count - FEW if count > 2 * FEW else None)
    assert highest_version(cast(Backend, backend), "policy", "p") == count
    assert backend.requests == {"children": listings} | ({"read": 1} if count > FEW else {})
    assert backend.names <= 2 * FEW + 1


def test_those_who_commit_keep_the_hint_near() -> None:
    backend = filled(4 * FEW)
    beginning = cast(Backend, backend)
    for number in range(4 * FEW + 1, 8 * FEW):
        assert highest_version(beginning, "policy", "p", leave_hint=True) == number - 1
        beginning.create(version_key("policy", "p", number), b"")
        reached = json.loads(stored.data)["version"] if (stored := beginning.read(HINT)) else 0
        assert 0 <= number - reached <= FEW + 1
    assert backend.requests["replace"] <= 4  # and seldom write it


def test_who_only_reads_leaves_no_hint() -> None:
    backend = filled(1000)
    assert highest_version(cast(Backend, backend), "policy", "p") == 1000
    assert "create" not in backend.requests


@pytest.mark.parametrize(("hint", "after"), [(b"[]", 1000), (b'{"version": 2000}', 1000), (b'{"version": 1}', 1000)])
def test_a_hint_that_is_of_no_use_is_mended(hint: bytes, after: int) -> None:
    backend = cast(Backend, filled(1000))
    backend.create(HINT, hint)
    highest_version(backend, "policy", "p", leave_hint=True)
    stored = backend.read(HINT)
    assert stored is not None
    assert json.loads(stored.data) == {"version": after}


def test_a_hint_that_another_has_just_written_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = cast(Backend, filled(1000, hint=10))
    replace = backend.replace

    def be_late(key: str, *what: Any) -> bool:
        backend.delete(key)
        backend.create(key, b'{"version": 999}')
        return replace(key, *what)

    monkeypatch.setattr(backend, "replace", be_late, raising=False)
    assert highest_version(backend, "policy", "p", leave_hint=True) == 1000
    stored = backend.read(HINT)
    assert stored is not None
    assert stored.data == b'{"version": 999}'


def test_a_hint_that_cannot_be_read_or_written_does_no_harm(tmp_path: Path) -> None:
    backend = LocalBackend((tmp_path / "store").as_uri(), tmp_path / "store")
    for number in range(FEW):
        path = tmp_path / "store" / version_key("policy", "p", number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "store" / HINT).mkdir(parents=True)
    assert highest_version(backend, "policy", "p", leave_hint=True) == FEW - 1
