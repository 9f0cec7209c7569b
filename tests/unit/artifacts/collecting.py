"""A store that is collected: what its tests share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from infra.artifacts import ArtifactStore, Collection, Retention, open_store
from infra.artifacts.backend import Backend, clock
from infra.artifacts.local import LocalBackend

KEEP_TWO = Retention.parse("policy=2")
DAY = timedelta(hours=24)


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> ArtifactStore:
    return open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")


@pytest.fixture(name="backend")
def backend_fixture(tmp_path: Path, store: ArtifactStore) -> Backend:
    return LocalBackend(store.url, tmp_path / "store")


@pytest.fixture(name="let_pass")
def let_pass_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Let time pass on the clock that leases and lists are dated by."""
    ahead = timedelta()
    real = clock.now

    def now() -> datetime:
        return real() + ahead

    def wait(time: timedelta) -> None:
        nonlocal ahead
        ahead += time

    monkeypatch.setattr(clock, "now", now)
    return wait


def at_once(store: ArtifactStore, retention: Retention = KEEP_TWO) -> Collection:
    return store.collect(retention, delete=True, grace=timedelta(), least_grace=timedelta())


def uris(store: ArtifactStore) -> list[str]:
    return [manifest.uri for manifest in store.list()]


def lists(backend: Backend) -> list[str]:
    return [name for name in backend.children("trash/") if name.endswith(".json")]
