"""How listing, resolving and lineage grow with the number of versions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from infra.artifacts import ArtifactRef, ArtifactStore
from infra.artifacts.backend import Backend, in_parallel
from infra.artifacts.catalog import highest_version
from infra.artifacts.local import LocalBackend
from infra.artifacts.manifest import FileEntry, Manifest
from infra.artifacts.ref import version_key
from infra.artifacts.s3 import S3Backend
from tests.integration.seaweed import Seaweed

KIND, NAME = "policy", "bench"
FILES = tuple(FileEntry(path=f"model-{index:05d}.safetensors", size=1, sha256=f"{index:064x}") for index in range(8))
REPEATS = 15
FEW = 3


def counts_up_to(most: int) -> list[int]:
    """Return 10, 100, ... below the largest, and that.

    Example:
        >>> counts_up_to(2000)
        [10, 100, 1000, 2000]
    """
    return [*(10**power for power in range(1, 9) if 10**power < most), most]


def measure(server: Seaweed, root: Path, most: int) -> dict[str, Any]:
    """Return milliseconds by place, operation and number of versions, and how they grow.

    Args:
        server: for the store in a bucket.
        root: for the store in a directory.
        most: the largest number of versions.
    """
    options = server.options

    def bucket(count: int) -> Backend:
        return S3Backend(f"s3://{server.bucket}/n{count}", server.bucket, f"n{count}", options)

    def directory(count: int) -> Backend:
        return LocalBackend(f"file://{root}/n{count}", root / f"n{count}")

    return {place: _one_place(make, root, most) for place, make in (("s3", bucket), ("file", directory))}


def _one_place(make: Callable[[int], Backend], root: Path, most: int) -> dict[str, Any]:
    times: dict[str, dict[int, float]] = {}
    for count in counts_up_to(most):
        backend = make(count)
        backend.probe()
        _fill(backend, root, count)
        for name, milliseconds in _times(backend, root / "cache", count).items():
            times.setdefault(name, {})[count] = milliseconds
    growth = {name: _growth(by_count) for name, by_count in times.items()}
    rounded = {name: {str(count): round(ms, 1) for count, ms in by_count.items()} for name, by_count in times.items()}
    return {"ms": rounded, "exponent": growth}


def _fill(backend: Backend, root: Path, count: int) -> None:
    """Write manifests, each the child of the one before it; on a disk without waiting for it."""

    def write(number: int) -> None:
        parents = () if number == 1 else (ArtifactRef(f"{KIND}/{NAME}@{number - 1}", ""),)
        draft = Manifest.draft(FILES, kind=KIND, name=NAME, version=number, parents=parents, config={"number": number})
        key = version_key(KIND, NAME, number)
        if isinstance(backend, LocalBackend):
            path = root / f"n{count}" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(draft.to_json())
        else:
            backend.create(key, draft.to_json())

    in_parallel(write, range(1, count + 1))
    highest_version(backend, KIND, NAME, leave_hint=True)  # as a commit does
    store = ArtifactStore(backend, root / "cache")
    store.set_alias(f"{KIND}/{NAME}@{count // 2}", "champion", why="to measure", who="bench")


def _times(backend: Backend, cache: Path, count: int) -> dict[str, float]:
    """Return milliseconds of each operation, by a process that knows nothing of the store yet."""

    def fresh() -> ArtifactStore:
        return ArtifactStore(backend, cache / uuid4().hex)  # nor of its manifests on this machine's disk

    operations: dict[str, tuple[int, Callable[[], object]]] = {
        "resolve_version": (REPEATS, lambda: fresh().resolve(f"{KIND}/{NAME}@{count // 2}")),
        "resolve_alias": (REPEATS, lambda: fresh().resolve(f"{KIND}/{NAME}@champion")),
        "resolve_latest": (REPEATS, lambda: fresh().resolve(f"{KIND}/{NAME}")),
        "list": (FEW, lambda: fresh().list(KIND, NAME)),
        "lineage": (FEW, lambda: fresh().lineage(f"{KIND}/{NAME}@{count}")),
    }
    return {name: _median_ms(function, repeats) for name, (repeats, function) in operations.items()}


def _median_ms(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


def _growth(by_count: dict[int, float]) -> float:
    """Return the power of the number with which the time grows, from a hundred versions to the most: 1 is linear."""
    low, high = min(count for count in by_count if count >= min(100, *by_count)), max(by_count)
    if low == high:
        return 0.0
    return round(math.log(by_count[high] / by_count[low]) / math.log(high / low), 2)
