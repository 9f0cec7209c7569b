"""Processes that use a store, of which some end themselves with SIGKILL in the midst of a chosen request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from infra.artifacts import ArtifactStore, S3Options, deletion, leases, open_store
from infra.artifacts.deletion import Retention
from infra.errors import StoreError
from tests.forked import FORKED

END_TIMEOUT_S = 120.0
LIMIT_S, LIFE = 2.0, timedelta(seconds=4)
"""In place of minutes: a deleter's limit, and how long others wait for one that was killed."""
MID_REQUEST_S = 0.002
"""How long after its beginning a request is cut off; a local one takes about as long."""


@dataclass(frozen=True)
class Part:
    """What one process does, and where it ends."""

    role: str
    number: int
    killed_at: int | None = None
    """The request, counted from 1, in which it ends itself; None: it goes on to its end."""
    when: str = "before"
    """Whether that is before, after or in the midst of it."""


class DeadlyBackend:
    """A backend that ends its process in one of its requests."""

    def __init__(self, backend: Any, part: Part) -> None:
        self._backend = backend
        self._part = part
        self._count = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def request(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self._count += 1
                is_last = self._count == self._part.killed_at
            if is_last and self._part.when == "midst":
                threading.Timer(MID_REQUEST_S, _end).start()
            elif is_last and self._part.when == "before":
                _end()
            result = found(*arguments, **named)
            if is_last:
                _end()
            return result

        return request


def play(url: str, options: S3Options | None, directory: Path, parts: Sequence[Part]) -> dict[Part, list[str]]:
    """Run all parts at once, and return the references that each said it had committed."""
    opened = FORKED.Barrier(len(parts))  # with no grace time, a collector takes what others try the place with
    running = []
    for part in parts:
        ours, theirs = FORKED.Pipe(duplex=False)
        process = FORKED.Process(target=_act, args=(url, options, directory, part, opened, theirs))
        process.start()
        theirs.close()
        running.append((part, process, ours))
    said: dict[Part, list[str]] = {}
    for part, process, ours in running:
        said[part] = []
        try:
            while ours.poll(END_TIMEOUT_S):
                said[part].append(ours.recv())
        except EOFError:
            pass
        process.join(END_TIMEOUT_S)
        assert process.exitcode in {0, -signal.SIGKILL}, f"{part} ended with {process.exitcode}"
    return said


@contextmanager
def short_lives() -> Iterator[None]:
    """Let whoever deletes be taken for dead after seconds."""
    before = deletion.DELETE_LIMIT_S, leases.DELETION_LIFE
    deletion.DELETE_LIMIT_S, leases.DELETION_LIFE = LIMIT_S, LIFE
    try:
        yield
    finally:
        deletion.DELETE_LIMIT_S, leases.DELETION_LIFE = before


def commit_all(store: ArtifactStore, number: int) -> Iterator[str]:
    """Commit three versions of a name that all share, with blobs that they share too, and three of an own name."""
    for step in range(3):
        shared = {"shared": b"%d" % step, "own": b"%d-%d" % (number, step)}
        yield store.commit("policy", "p", shared, config={"writer": number}).uri
        yield store.commit("ppo-state", f"r{number}", {"shared": b"%d" % (2 - step)}, version=step).uri


def _act(url: str, options: S3Options | None, directory: Path, part: Part, opened: Barrier, said: Connection) -> None:
    backend = open_store(url, cache_dir=directory, s3=options)._backend
    opened.wait(END_TIMEOUT_S)
    store = ArtifactStore(DeadlyBackend(backend, part), directory)
    with short_lives():
        if part.role == "writer":
            for uri in commit_all(store, part.number):
                said.send(uri)
            return
        for _ in range(4):
            try:
                _keep_in_order(store, part.role)
            except StoreError as error:
                if not any(words in str(error) for words in ("its move to", "the store has no", "has been removed")):
                    raise


def _keep_in_order(store: ArtifactStore, role: str) -> None:
    if role == "promoter":
        versions = store.list("policy", "p")
        if versions:
            store.promote(versions[0].ref, why="the oldest: soon it will be deleted", who="test")
    elif role == "pruner":
        store.prune("policy", "p", keep=2)
    else:
        rules = Retention({"policy": 2, "ppo-state": 1})
        store.collect(rules, delete=True, grace=timedelta(), least_grace=timedelta())


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
