"""Processes that fetch, evict and are killed at once: a script, so that they are forked from a small one.

Prints what became of them as JSON. Each process looks again, at its end, at all that it was given: nobody may have
taken it away.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from infra.artifacts import ArtifactStore, commit, open_store
from infra.artifacts.ref import blob_key

PIECE = 4096
AT_ONCE = 6
LIMIT_BYTES = 60_000
"""About half of what there is."""
SYSTEM_CALLS = (
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "fchmod",
    "link",
    "replace",
    "rename",
    "unlink",
    "rmdir",
    "mkdir",
)


def bodies_of(number: int) -> dict[str, bytes]:
    """Return the files of an artifact; it shares one with all others."""
    own = {f"own{part}": bytes([number, part]) * 2 * PIECE for part in range(2)}
    return {"shared/w": b"".join(bytes([part]) * PIECE for part in range(3)), "c": b"%d" % number} | own


def open_one(root: Path, limit_bytes: int) -> ArtifactStore:
    return open_store((root / "store").as_uri(), cache_dir=root / "cache", cache_limit_gb=limit_bytes / 1e9)


def die_at(fatal: int, *, after: bool) -> None:
    """Kill this process at one of its system calls, before or after it."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fatal and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)


def check(directory: Path, number: int) -> None:
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    assert {name: path.read_bytes() for name, path in found.items()} == bodies_of(number), directory


def work(root: Path, seed: int) -> None:
    """Fetch a few artifacts, and evict what others may have wanted."""
    random = Random(seed)
    store = open_one(root, LIMIT_BYTES)
    if random.random() < 0.6:
        die_at(random.randrange(1, 100), after=random.random() < 0.5)
    given: dict[Path, int] = {}
    for turn in range(3):
        number = random.randrange(4)
        if random.random() < 0.5:
            directory = store.cached(f"policy/p{number}")
            given[directory] = number
        else:
            directory = store.fetch(f"policy/p{number}", root / "out" / f"{seed}-{turn}")
        check(directory, number)
        for known, what in given.items():
            check(known, what)


def crowd(root: Path, processes: int) -> dict[str, Any]:
    """Let processes loose on one cache; return how they ended, and what is left when all are gone."""
    ends: dict[str, int] = {"finished": 0, "killed": 0, "failed": 0}
    running: set[int] = set()
    for seed in range(processes):
        if len(running) == AT_ONCE:
            wait_for_one(running, ends)
        running.add(in_child(lambda seed=seed: work(root, seed)))
    while running:
        wait_for_one(running, ends)
    store = open_one(root, LIMIT_BYTES)
    store.fetch("policy/p0", root / "last")
    shutil.rmtree(root / "out")
    store._cache.evict()
    cache = root / "cache" / "artifacts"
    sizes = {path.stat().st_ino: path.stat().st_size for path in cache.rglob("*") if path.is_file()}
    leftovers = [str(path) for path in cache.glob("holds/*")]
    open_one(root, 0)._cache.evict()
    rest = [path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()]
    return ends | {"bytes": sum(sizes.values()), "leftovers": leftovers, "rest": rest}


def resumption(root: Path) -> list[str]:
    """Return what is downloaded by whoever comes after a process that was killed with two blobs of five in place."""
    blobs = [bytes([part]) * PIECE for part in range(1, 6)]
    store = open_one(root / "resumption", LIMIT_BYTES)
    store.commit("policy", "p", {"w": b"".join(blobs)})
    early = {blob_key(hashlib.sha256(blob).hexdigest()) for blob in blobs[:2]}
    real, asked, parent = store._backend.download, [], os.getpid()

    def download(key: str, size: int) -> Iterator[bytes]:
        asked.append(key)
        if os.getpid() != parent and key not in early:
            [part] = (root / "resumption").rglob("parts/*")
            while not part.read_bytes().startswith(b"".join(blobs[:2])):
                pass  # they are on their way, in other threads
            os.kill(os.getpid(), signal.SIGKILL)
        return real(key, size)

    store._backend.download = download  # type: ignore[method-assign]
    _, status = os.waitpid(in_child(lambda: store.cached("policy/p")), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    store.cached("policy/p")
    return asked


def in_child(function: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def wait_for_one(running: set[int], ends: dict[str, int]) -> None:
    child, status = os.wait()
    running.discard(child)
    ends["killed" if os.WIFSIGNALED(status) else "failed" if status else "finished"] += 1


def main(root: Path, processes: int) -> None:
    commit.PIECE_BYTES = PIECE
    store = open_one(root, LIMIT_BYTES)
    for number in range(4):
        store.commit("policy", f"p{number}", bodies_of(number))
    json.dump({"crowd": crowd(root, processes), "asked": len(resumption(root))}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
