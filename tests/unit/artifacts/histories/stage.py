"""Where histories are played: actors that make one request at a time, when they are told to, and a clock of their own.

An actor is a greenlet with a store of its own, as if it were a process. It stops after each request that it made, and
goes on when it is stepped: up to the end of its next request. So it looks at the clock and makes the request that
follows in one step, which is the assumption of `leases.py`. One that is killed makes no further request. All run in
one thread, so that a history is the same each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from greenlet import getcurrent, greenlet

from infra.artifacts import aliases, backend, collect, deletion, leases, local, manifest
from infra.artifacts.backend import Backend, Stored, clock

POLL_S = 20.0
"""In time of the stage; nobody waits in ours."""


class KilledError(BaseException):
    """Ends an actor; no `except Exception` may hold it up."""


class Actor:
    """Somebody who uses the store.

    Args:
        name: for messages.
        body: what he does, given his backend.
        place: the backend that is common to all.
        note: is told of each request: actor, method, key, body, result.
        landmarks: requests (method, beginning of the key) before which he may be told to stop as well.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[Backend], Any],
        place: Backend,
        note: Callable[[Actor, str, str, bytes, Any], None],
        landmarks: list[tuple[str, str]],
    ) -> None:
        self.name = name
        self.keeps = 1
        """Of one who deletes: how many of the newest versions he must leave."""
        self.honours_lineage = False
        """Of one who deletes: whether he must leave what an aliased version came from."""
        self.is_writer = False
        self.in_flight = False
        """Whether time may pass while he has stopped before a manifest, as if that request took its time."""
        self.landmarks = landmarks
        self.halt: tuple[str, str] | None = None
        """The request before which he is to stop."""
        self.is_poised = False
        """Whether he has stopped before a request, not after one."""
        self.poised_s = 0.0
        """When."""
        self.is_writing = False
        """Whether that is the request that writes a manifest."""
        self.is_killed = False
        self.result: Any = None
        self.error: Exception | None = None
        self.body = body
        self._backend = WatchedBackend(self, place, note)
        self._line = greenlet(self._run)
        self._line.actor = self

    @property
    def is_over(self) -> bool:
        return self._line.dead or self.is_killed

    def step(self) -> None:
        """Go on until the next request has been made, or the end."""
        assert not self.is_over
        self._line.switch()

    def finish(self) -> None:
        """Go on to the end."""
        while not self.is_over:
            self.step()

    def kill(self) -> None:
        """End here and now."""
        self.is_killed = True
        if self._line and not self._line.dead:
            self._line.switch()

    def stop(self) -> None:
        """Wait to be stepped; called by the actor himself."""
        self._line.parent.switch()
        self.raise_if_killed()

    def stop_before(self, method: str, key: str) -> None:
        """Wait to be stepped if this is the request to stop before."""
        if self.halt is None or not key.startswith(self.halt[1]):
            return
        if method == self.halt[0] or (self.halt[0] == "write" and method in {"create", "replace"}):
            self.halt = None
            self.is_poised, self.poised_s = True, clock.boottime()
            self.is_writing = method == "create" and key.startswith("versions/")
            self.stop()
            self.is_poised = self.is_writing = False

    def raise_if_killed(self) -> None:
        if self.is_killed:
            raise KilledError

    def _run(self) -> None:
        try:
            self.result = self.body(self._backend)
        except KilledError:
            pass
        except Exception as error:
            self.error = error

    def __repr__(self) -> str:
        return self.name


class WatchedBackend:
    """A backend that notes what is done to it, and stops its actor after each request."""

    def __init__(self, actor: Actor, place: Backend, note: Callable[[Actor, str, str, bytes, Any], None]) -> None:
        self.url = place.url
        self._actor = actor
        self._place = place
        self._note = note

    def probe(self) -> None:
        raise AssertionError("the place is opened once, before the play")

    def read(self, key: str) -> Stored | None:
        found: Stored | None = self._request("read", key)
        return found

    def create(self, key: str, data: bytes) -> bool:
        return bool(self._request("create", key, data))

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        return bool(self._request("replace", key, data, tag))

    def delete(self, key: str) -> None:
        self._request("delete", key)

    def children(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        found: list[str] = self._request("children", prefix, b"", after, most)
        return found

    def tags(self, prefix: str) -> dict[str, str]:
        found: dict[str, str] = self._request("tags", prefix)
        return found

    def size(self, key: str) -> int | None:
        found: int | None = self._request("size", key)
        return found

    def upload(self, key: str, body: bytes) -> None:
        self._request("upload", key, body)

    def download(self, key: str, size: int) -> Iterator[bytes]:
        yield b"".join(self._place.download(key, size))
        self._actor.stop()

    def _request(self, method: str, key: str, data: bytes = b"", *more: Any) -> Any:
        self._actor.raise_if_killed()
        self._actor.stop_before(method, key)
        arguments = (key, data, *more) if method in {"create", "replace", "upload"} else (key, *more)
        result = getattr(self._place, method)(*arguments)
        self._note(self._actor, method, key, data, result)
        self._actor.stop()
        return result


class StageClock:
    """Time that passes when it is told to, or when somebody waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def boottime(self) -> float:
        return self.seconds

    def awake(self) -> float:
        return self.seconds

    def pause(self, seconds: float) -> None:
        self.seconds += seconds
        if actor := getattr(getcurrent(), "actor", None):
            actor.stop()


class SerialExecutor:
    """Does at once, in the caller's thread, what it is given: an actor has one thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> SerialExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)

        class Done:
            def result(self) -> Any:
                return result

        return Done()

    def shutdown(self, **_: Any) -> None:
        pass


class MemoryBackend:
    """A backend that forgets: for controls, and for very many histories."""

    url = "memory:"

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._tags: dict[str, int] = {}

    def probe(self) -> None:
        pass

    def read(self, key: str) -> Stored | None:
        return Stored(self._objects[key], str(self._tags[key])) if key in self._objects else None

    def create(self, key: str, data: bytes) -> bool:
        if key in self._objects:
            return False
        self.upload(key, data)
        return True

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        if key not in self._objects or str(self._tags[key]) != tag:
            return False
        self.upload(key, data)
        return True

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def children(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        found = {key[len(prefix) :].partition("/")[0] for key in self._objects if key.startswith(prefix)}
        return sorted(name for name in found if name > after)[:most]

    def tags(self, prefix: str) -> dict[str, str]:
        return {name: self._md5(f"{prefix}{name}") for name in self.children(prefix)}

    def _md5(self, key: str) -> str:
        return hashlib.md5(self._objects[key]).hexdigest() if key in self._objects else ""

    def size(self, key: str) -> int | None:
        return len(self._objects[key]) if key in self._objects else None

    def upload(self, key: str, body: bytes) -> None:
        self._objects[key] = body
        self._tags[key] = self._tags.get(key, 0) + 1

    def download(self, key: str, size: int) -> Iterator[bytes]:
        del size
        yield self._objects[key]


@contextmanager
def stage() -> Iterator[StageClock]:
    """Make time, randomness and threads the play's own; what is synced to a disk does not matter in it."""
    own = StageClock()
    numbers = iter(range(1 << 60))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("now", "boottime", "pause"):
            patch.setattr(clock, name, getattr(own, name))
        for module in (aliases, collect, deletion, manifest):
            patch.setattr(module, "uuid4", lambda: UUID(int=next(numbers)))
        patch.setattr(backend, "ThreadPoolExecutor", SerialExecutor)
        patch.setattr(leases, "POLL_S", POLL_S)
        patch.setattr(local.os, "fsync", lambda _: None)
        yield own
