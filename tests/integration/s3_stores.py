"""Stores in SeaweedFS, near and behind a network that misbehaves: import the fixtures that a test asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from infra.artifacts import ArtifactStore, open_store
from infra.artifacts.backend import Backend
from infra.artifacts.s3 import S3Backend
from tests.integration.flaky_proxy import FlakyProxy, flaky_proxy
from tests.integration.seaweed import Seaweed


@pytest.fixture(name="prefix")
def given_prefix() -> str:
    return f"test-{uuid4().hex[:8]}"


@pytest.fixture(name="store")
def given_store(seaweed: Seaweed, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    for name, value in (
        ("TEST_ENDPOINT", seaweed.endpoint_url),
        ("TEST_ACCESS_KEY", seaweed.access_key),
        ("TEST_SECRET_KEY", seaweed.secret_key),
    ):
        monkeypatch.setenv(name, value)
    return open_store(f"s3://{seaweed.bucket}/{prefix}", cache_dir=tmp_path / "cache", s3=seaweed.options, patient=True)


@pytest.fixture(name="backend")
def given_backend(seaweed: Seaweed, prefix: str, store: ArtifactStore) -> Backend:
    return S3Backend(store.url, seaweed.bucket, prefix, seaweed.options)


@pytest.fixture(name="proxy")
def given_proxy(seaweed: Seaweed) -> Iterator[FlakyProxy]:
    with flaky_proxy(seaweed.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(name="far_store")
def given_far_store(seaweed: Seaweed, proxy: FlakyProxy, store: ArtifactStore, tmp_path: Path) -> ArtifactStore:
    """The same place as `store`, seen through the proxy."""
    options = replace(seaweed.options, endpoint_url=proxy.url)
    return open_store(store.url, cache_dir=tmp_path / "cache", s3=options, patient=True)
