"""Fetching from a bucket of a real S3 server."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from uuid import uuid4

import pytest

from infra.artifacts import open_store
from infra.artifacts.commit import PIECE_BYTES
from tests.integration.seaweed import Seaweed, seaweed_server  # noqa: F401 - a fixture

pytestmark = [pytest.mark.integration, pytest.mark.s3]


def test_memory_does_not_grow_with_the_artifact(seaweed: Seaweed, tmp_path: Path) -> None:
    """Five blobs of the largest size that there is."""
    store = open_store(f"s3://{seaweed.bucket}/{uuid4().hex}", cache_dir=tmp_path / "cache", s3=seaweed.options)
    path = tmp_path / "weights"
    with path.open("wb") as file:
        for _ in range(5):
            file.write(os.urandom(PIECE_BYTES))
    store.commit("policy", "p", {"w": path})
    tracemalloc.start()
    try:
        store.fetch("policy/p", tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * PIECE_BYTES
    assert (tmp_path / "out" / "w").read_bytes() == path.read_bytes()
