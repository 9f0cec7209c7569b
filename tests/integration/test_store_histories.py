"""Histories of a store in a bucket, chosen by hypothesis; and real processes that end with SIGKILL at any request."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import seed

from infra.artifacts import S3Options, open_store
from infra.artifacts.backend import Backend
from infra.artifacts.ref import parse_reference
from infra.artifacts.s3 import S3Backend
from infra.errors import VersionExistsError
from tests.integration.killed_processes import Part, commit_all, play, short_lives
from tests.integration.seaweed import Seaweed, seaweed_server  # noqa: F401 - a fixture
from tests.unit.artifacts.histories import machine

pytestmark = pytest.mark.integration

SAMPLE, BATCHES, BATCH = 3, 10, 100
"""Histories; a batch has a time limit of its own, and may be played beside another."""
KILLINGS = range(30)


def machine_in(seaweed: Seaweed, number: int) -> type[machine.StoreMachine]:
    """Return a state machine whose stores are in the bucket, each under a prefix of its own."""
    backends: list[S3Backend] = []

    class MachineInABucket(machine.StoreMachine):
        def open_place(self, curtain: ExitStack) -> Backend:
            del curtain
            prefix = f"history-{uuid4().hex}"
            if not backends:
                backends.append(S3Backend(f"s3://{seaweed.bucket}", seaweed.bucket, prefix, seaweed.options))
            backends[0]._prefix = f"{prefix}/"
            return backends[0]

    return seed(number)(MachineInABucket)


def test_a_sample_of_histories_in_a_bucket(seaweed: Seaweed) -> None:
    assert machine.play(machine_in(seaweed, 0), SAMPLE) >= SAMPLE


@pytest.mark.s3
@pytest.mark.parametrize("number", range(1, BATCHES + 1))
def test_many_histories_in_a_bucket(seaweed: Seaweed, number: int) -> None:
    assert machine.play(machine_in(seaweed, number), BATCH) >= BATCH


@pytest.mark.parametrize("place", ["directory", "bucket"])
def test_processes_that_are_killed_anywhere_lose_nothing(seaweed: Seaweed, tmp_path: Path, place: str) -> None:
    kill_some(seaweed, tmp_path, place, 0)


@pytest.mark.s3
@pytest.mark.parametrize("place", ["directory", "bucket"])
@pytest.mark.parametrize("number", KILLINGS)
def test_many_processes_that_are_killed_anywhere_lose_nothing(
    seaweed: Seaweed, tmp_path: Path, place: str, number: int
) -> None:
    kill_some(seaweed, tmp_path, place, 1 + number)


def kill_some(seaweed: Seaweed, tmp_path: Path, place: str, number: int) -> None:
    """Let writers, a promoter, a pruner and a collector work at once, and kill each at some request, or not."""
    url, options = _place(seaweed, tmp_path, place)
    choose = random.Random(number)
    roles = [("writer", 0), ("writer", 1), ("promoter", 0), ("pruner", 0), ("collector", 0)]
    parts = [
        Part(role, each, choose.choice([None, choose.randint(1, 60)]), choose.choice(["before", "midst", "after"]))
        for role, each in roles
    ]
    said = play(url, options, tmp_path / "cache", parts)

    store = open_store(url, cache_dir=tmp_path / "cache", s3=options)
    assert store.verify().problems == ()
    committed = [uri for uris in said.values() for uri in uris]
    assert len(set(committed)) == len(committed)
    there = {manifest.uri for manifest in store.list()}
    newest: dict[str, int] = {}
    for uri in committed:
        name, _, version = uri.partition("@")
        newest[name] = max(newest.get(name, 0), int(version))
    for name, version in newest.items():
        assert any(uri.startswith(f"{name}@") and int(uri.partition("@")[2]) >= version for uri in there)
    with short_lives():
        for part in parts:
            if part.role == "writer" and part.killed_at:
                _run_again(store, part.number)
    assert store.verify().problems == ()


def _run_again(store: object, number: int) -> None:
    commits = commit_all(store, number)
    while True:
        try:
            parse_reference(next(commits))
        except VersionExistsError:  # its number was deleted since
            return
        except StopIteration:
            return


def _place(seaweed: Seaweed, tmp_path: Path, place: str) -> tuple[str, S3Options | None]:
    if place == "directory":
        return (tmp_path / "store").as_uri(), None
    return f"s3://{seaweed.bucket}/killed-{uuid4().hex}", seaweed.options
