"""Locks in the store: one holder at a time, wherever it runs, and whatever ends it.

A holder says who it is and, every few seconds, that it lives. On the holder's own machine its process alone decides
whether it lives, so that one which is stopped, or asleep with the machine, is never taken for dead. From elsewhere it
counts as dead once nobody has heard of it for a while by the listener's own clock; clocks are never compared. A holder
that was silent for so long finds its lock in other hands, and has to stop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.artifacts import clock
from infra.artifacts.backend import Backend
from infra.artifacts.layout import lock_key
from infra.artifacts.manifest import SCHEMA_VERSION, SchemaVersion, first_complaint
from infra.errors import StoreError
from infra.process_record import ProcessRecord

RENEW_S = 20.0
"""How often a holder says that it lives."""
SILENCE_S = 180.0
"""After so long without a word, a holder on another machine counts as dead."""
POLL_S = 2.0
"""How often others look."""


def this_machine() -> str:
    """Return what tells apart the places where a process id means something: the kernel's boot, the pid namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return os.uname().nodename


class Holder(BaseModel):
    """Who holds a lock."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    who: str
    """For people and for whoever asks after it: a flow run's id."""
    id: str
    """A random one: tells a holder whose answer was lost that the lock it finds is its own."""
    machine: str
    process: ProcessRecord
    since: datetime

    @classmethod
    def this_process(cls, who: str) -> Holder:
        """Return this process as a holder."""
        record = ProcessRecord.of(os.getpid())
        return cls(who=who, id=uuid4().hex, machine=this_machine(), process=record, since=clock.now())

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine, which can be looked at."""
        return self.machine == this_machine()

    @property
    def is_running_here(self) -> bool:
        """Whether it is another process of this machine, and has not ended; it may be stopped."""
        return self.is_here and self.process.pid != os.getpid() and self.process.process() is not None


class Lock(BaseModel):
    """A lock as it is stored."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    schema_version: SchemaVersion = SCHEMA_VERSION
    holder: Holder
    beats: int = 0
    """How often the holder has said that it lives."""
    outcome: str | None = None
    """What the holder has to say to who comes after it, once it has done its work."""


class ExclusiveLock:
    """One lock, as one process sees it.

    Args:
        backend: where.
        name: of the lock.
        who: on whose behalf it is taken, such as a flow run's id.
    """

    def __init__(self, backend: Backend, name: str, who: str) -> None:
        self._backend = backend
        self._key = lock_key(name)
        self._me = Holder.this_process(who)
        self._guard = threading.RLock()
        self._held: Lock | None = None
        self._tag = ""
        self._ended = threading.Event()
        self._seen: Lock | None = None
        self._seen_at = 0.0
        self._silent_s = 0.0

    def look(self) -> Lock | None:
        """Return the lock as it is now; None if nobody has ever held it.

        Raises:
            StoreError: if the store is away, or what lies there is no lock.
        """
        return self._read()[0]

    def take(self, is_free: Callable[[Lock], bool] | None = None) -> Lock | None:
        """Take the lock, and return what its former holder left, or whoever holds it in our place: see `is_held`.

        Args:
            is_free: whether a lock may be taken from its holder; None: if the holder's process has ended.

        Raises:
            StoreError: if the store is away, or what lies there is no lock.
        """
        with self._guard:
            former, tag = self._read()
            if former is None:
                self._write(Lock(holder=self._me), None)
            elif former.holder.id == self._me.id:  # the answer to an earlier attempt was lost
                self._held, self._tag = former, tag
            elif (is_free or self._has_ended)(former):
                self._write(Lock(holder=self._me), tag)
            return former if self.is_held else self.look()

    @property
    def is_held(self) -> bool:
        """Whether this process holds it, as far as it knows."""
        return self._held is not None

    def renew(self) -> None:
        """Say that this process lives.

        Raises:
            LockLostError: if another holds the lock by now.
            StoreError: if the store is away; nothing is lost by it yet.
        """
        with self._guard:
            if self._held is not None:
                self._update(beats=self._held.beats + 1)

    def check(self) -> None:
        """Raise LockLostError if another holds the lock by now: to be called before what only its holder may do."""
        with self._guard:
            found, _ = self._read()
            if self._held is not None and (found is None or found.holder.id != self._me.id):
                self._lose(found)

    def leave(self, outcome: str) -> None:
        """Say what has become of the holder's work. The lock stays its own until the process ends."""
        with self._guard:
            if self._held is not None:
                self._update(outcome=outcome)

    def keep(self, lost: Callable[[LockLostError], None]) -> None:
        """Renew the lock beside what this process does, until it ends.

        Args:
            lost: is called, in another thread, when another has taken the lock.
        """

        def beat() -> None:
            while not self._ended.wait(RENEW_S):
                try:
                    self.renew()
                except LockLostError as error:
                    lost(error)
                    return
                except StoreError:
                    continue  # away; others do not hear of us meanwhile, nor of anything else

        threading.Thread(target=beat, name=f"lock {self._key}", daemon=True).start()

    def end(self) -> None:
        """Renew it no more."""
        self._ended.set()

    def _has_ended(self, lock: Lock) -> bool:
        """Whether a holder's process is gone; if it was elsewhere, that is known after looking for a while."""
        if lock.holder.is_here:  # what this very process held, it has done with
            return not lock.holder.is_running_here
        now = clock.boottime()
        if lock == self._seen:  # time between two looks counts, but for what this process slept or waited for the store
            self._silent_s += min(now - self._seen_at, 3 * POLL_S)
        else:
            self._seen, self._silent_s = lock, 0.0
        self._seen_at = now
        return self._silent_s >= SILENCE_S

    def _update(self, **changes: object) -> None:
        assert self._held is not None
        wanted = self._held.model_copy(update=changes)
        if self._write(wanted, self._tag):
            return
        found, tag = self._read()
        if found is None or found.holder.id != self._me.id:
            self._lose(found)
        self._held, self._tag = found, tag  # the answer to an earlier write was lost
        if found != wanted and not self._write(wanted, tag):
            self._lose(self._read()[0])

    def _write(self, lock: Lock, tag: str | None) -> bool:
        """Write the lock if it is as it was; whether it is ours now is seen by reading it again."""
        data = lock.model_dump_json(indent=1).encode()
        written = self._backend.create(self._key, data) if tag is None else self._backend.replace(self._key, data, tag)
        found, now = self._read()
        if found is None or found.holder.id != self._me.id or not (written or found == lock):
            return False
        self._held, self._tag = found, now
        return True

    def _lose(self, found: Lock | None) -> None:
        self._held = None
        self.end()
        who = "nobody" if found is None else f"process {found.holder.process.pid}, for {found.holder.who},"
        raise LockLostError(
            f"this process was silent for so long that its lock {self._key} was taken over: {who} holds it now"
        )

    def _read(self) -> tuple[Lock | None, str]:
        stored = self._backend.read(self._key)
        if stored is None:
            return None, ""
        try:
            return Lock.model_validate_json(stored.data), stored.tag
        except ValidationError as error:
            raise StoreError(
                f"the lock {self._key} cannot be read: {first_complaint(error)}; remove it if nothing is running"
            ) from None


class LockLostError(StoreError):
    """Another process has taken over what this one holds: it must stop."""
