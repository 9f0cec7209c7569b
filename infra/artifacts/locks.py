"""Locks in the store: one process at a time does the work that a name stands for, even if processes stop or die.

A lock is one JSON object under `locks/`. It says who holds it and, when that holder has ended, how. Every change of a
lock is a compare-and-swap: of many that try, one gets it. Its users never delete a lock, because a delete has no
condition: the lock ends, and stays.

On the holder's own machine the system says whether the holder lives, by process id, start time and boot. So a process
that was stopped, or slept with its machine, keeps its lock however long that took. Seen from elsewhere (another
machine, or another container of this one) a holder lives as long as a number in the lock goes up, which a thread of the
holder counts. It counts as dead when that number has stood still for SILENT_S on the observer's own clock, while the
observer read it again and again. Clocks are never compared. A time in which the observer itself read nothing, because
it slept or the store was away, does not count.

A holder that was silent for so long without being dead finds at its next beat or check that another has the lock. It
checks before it commits anything (`Held.check`), and leaves the rest to the other.

A store without conditional writes is for one writer, as its user has promised: there a lock is one read before the
write and one after it, and of two who take it at the same moment one finds out at the next beat.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from enum import Enum
from typing import Literal, NamedTuple
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.artifacts.backend import Backend, clock
from infra.artifacts.manifest import SCHEMA_VERSION, SchemaVersion, first_complaint
from infra.artifacts.ref import LOCKS, lock_key
from infra.errors import LockLostError, StoreError
from infra.process_record import ProcessRecord, here

logger = logging.getLogger(__name__)

BEAT_S = 15.0
"""How often a holder counts."""
SILENT_S = 120.0
"""How long a holder elsewhere is watched before it is taken for dead; several beats, and the longest single request."""
GAP_S = 30.0
"""An observer that saw nothing for longer than this begins again: it cannot tell who else was silent meanwhile."""
RELEASE_S = 10.0
"""How long a process that ends tries to release its lock in a store that is away; later ones find that it is dead."""

OLD = timedelta(days=30)
"""Age at which the lock of a run that has completed may go, and what it began with."""
OLD_UNFINISHED = timedelta(days=365)
"""The same of a run that failed or was stopped. It can go on as long as its server keeps it, which is 90 days unless
RLHF_RUNS_KEPT_DAYS or another server's rules say more; then it must be what it was."""
RUN_LOCK, DEPLOYMENT_LOCK = "run-", "deployment-"
"""What the names of the two sorts of locks begin with; the id follows."""
_TRIES = 8
"""Of one who releases: a beat of its own may be under way, once."""

How = Literal["completed", "failed", "stopped"]


class Life(Enum):
    """What can be known of a holder."""

    ENDED = "ended"
    """It said so, or there is none."""
    LIVES = "lives"
    DEAD = "dead"
    UNKNOWN = "unknown"
    """It is elsewhere, and has not been watched for long enough."""


class _Note(BaseModel):
    """What a later minor version adds is kept when this release writes the lock again."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)


class Process(_Note):
    """The process that holds a lock, and where its id means something."""

    pid: int
    started: float
    boot: str
    place: str
    """As of `infra.process_record.here`."""
    host: str
    """The machine's name, for people."""

    def record(self) -> ProcessRecord:
        """Return the process as it is recognised on its own machine."""
        return ProcessRecord(pid=self.pid, started=self.started, boot=self.boot)


class Ending(_Note):
    """How a holder ended."""

    how: str
    """`completed`, `failed`, or `stopped`: it did not come to an end, and another may go on."""
    said: str | None = None
    """Its last sentence."""
    when: datetime


class Record(_Note):
    """A lock as it is stored."""

    schema_version: SchemaVersion = SCHEMA_VERSION
    """As of manifests."""
    run: str
    """Id of the run that it is held for."""
    run_name: str
    since: datetime
    """When the run first took it; for people."""
    incarnation: str
    """Drawn whenever it is taken: tells a holder from its successor, and a writer whose answer was lost that it won."""
    beats: int = 0
    worked_s: float = 0.0
    """For how long processes of the run have worked in all, as far as it was counted: to a beat."""
    process: Process | None = None
    """Who works; None where the run as such holds it, whichever process works on it."""
    ended: Ending | None = None

    @property
    def holder(self) -> str:
        """Who it is, in words."""
        if self.process is None:
            return f"the run {self.run_name!r}"
        return f"process {self.process.pid} on {self.process.host}"

    def as_ended(self, how: How, said: str | None) -> Record:
        """Return the lock as its holder leaves it."""
        return self.model_copy(update={"ended": Ending(how=how, said=said, when=clock.now())})


class Seen(NamedTuple):
    """A lock as it was read, with the tag of that state."""

    record: Record
    tag: str


def new_record(
    run: str, run_name: str, *, by_process: bool = True, since: datetime | None = None, worked_s: float = 0.0
) -> Record:
    """Return the record with which a lock is taken.

    Args:
        run: id of the run that it is taken for.
        run_name: its name, for people.
        by_process: whether this process holds it; else the run does, whichever process works on it.
        since: when the run first took it; None: now.
        worked_s: for how long earlier processes of the run have worked.
    """
    process = None
    if by_process:
        me = ProcessRecord.of(os.getpid())
        process = Process(pid=me.pid, started=me.started, boot=me.boot, place=here(), host=platform.node())
    taken = clock.now() if since is None else since
    return Record(run=run, run_name=run_name, since=taken, incarnation=uuid4().hex, process=process, worked_s=worked_s)


class Lock:
    """A lock of a name, as anybody sees it.

    Args:
        backend: where.
        name: lower case letters, digits and dashes.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self.name = name
        self._backend = backend
        self._key = lock_key(name)

    def look(self) -> Seen | None:
        """Return the lock as it is now; None if nobody ever took it.

        Raises:
            StoreError: if the store cannot be read, or the lock is damaged or of a later major version.
        """
        stored = self._backend.read(self._key)
        if stored is None:
            return None
        try:
            return Seen(Record.model_validate_json(stored.data), stored.tag)
        except ValidationError as error:
            raise StoreError(
                f"the lock {self._key} in the artifact store cannot be read ({first_complaint(error)}); upgrade "
                "rlhf-flows, or remove it if nothing is running"
            ) from None

    def swap(self, seen: Seen | None, record: Record) -> bool:
        """Put a record in the place of what was seen; return whether it stands there.

        Where the answer to the write was lost, what stands there says whether it was ours.

        Args:
            seen: the lock as it was read; None: there was none.
            record: what it is to be.
        """
        data = record.model_dump_json(indent=1, exclude_none=True).encode()
        if seen is None:
            self._backend.create(self._key, data)
        else:
            self._backend.replace(self._key, data, seen.tag)
        now = self.look()
        if now is None:
            return False
        ours = now.record.incarnation == record.incarnation
        return ours and now.record.beats == record.beats and (now.record.ended is None) == (record.ended is None)

    def take(self, seen: Seen | None, record: Record, *, beat_s: float | None = BEAT_S) -> Held | None:
        """Take the lock in place of what was seen; None if another was faster.

        The caller knows whether the holder that was seen may be passed over (`Observer`).

        Args:
            seen: the lock as it was read.
            record: who takes it.
            beat_s: how often its thread counts; None: there is no thread, and the holder calls `Held.beat`.
        """
        _HELD_HERE.add(record.incarnation)  # first: to another thread that reads it, it must not look dead
        if self.swap(seen, record):
            return Held(self, record, beat_s)
        _HELD_HERE.discard(record.incarnation)
        return None


class Held:
    """A lock that this process holds, until it is released or lost; a thread counts meanwhile."""

    def __init__(self, lock: Lock, record: Record, beat_s: float | None) -> None:
        self.record = record
        self._lock = lock
        self._began = clock.awake()
        self._ended = threading.Event()
        self._successor: Record | None = None
        if beat_s is not None:
            threading.Thread(target=self._count, args=(beat_s,), name=f"lock-{lock.name}", daemon=True).start()

    @property
    def is_lost(self) -> bool:
        """Whether another is known to have the lock; the store is not asked."""
        return self._successor is not None

    @property
    def worked_s(self) -> float:
        """For how long processes of the run have worked, this one included; neither sleep nor what lies between."""
        return self.record.worked_s + clock.awake() - self._began

    def check(self) -> None:
        """Make sure that the lock is still ours: to be called right before anything that another must not do too.

        A process that stands still for two minutes just between the two does it all the same.

        Raises:
            LockLostError: if another has taken it over.
            StoreError: if the store does not answer.
        """
        if self._successor is None:
            seen = self._lock.look()
            if seen is None:
                self.beat()
            else:
                self._recognise(seen.record)
        if self._successor is not None:
            raise LockLostError(
                f"this process was silent for so long that {self._successor.holder} has gone on with the run; it "
                "leaves the rest to that one"
            )

    def beat(self) -> None:
        """Count one further.

        A lock that somebody removed by hand is taken again, unless another was faster.

        Raises:
            StoreError: if the store does not answer; then it is to be tried again.
        """
        seen = self._lock.look()
        if seen is not None and not self._recognise(seen.record):
            return
        beats = (seen.record if seen else self.record).beats + 1
        former = seen.record if seen else self.record
        if not self._ended.is_set() and not self._lock.swap(seen, self._counted(former, beats)):
            after = self._lock.look()
            if after is not None:
                self._recognise(after.record)

    def release(self, how: How, said: str | None = None, *, timeout_s: float | None = RELEASE_S) -> None:
        """Release the lock, and say how its holder ended.

        Args:
            how: as of `Ending`.
            said: its last sentence.
            timeout_s: how long a store that is away is waited for: who comes later finds that this process is gone.
                None: as long as any request takes.
        """
        self._ended.set()
        if timeout_s is None:
            self._tell(how, said)
        else:  # in a thread, since a request to a store that is away cannot be called off
            teller = threading.Thread(target=self._tell, args=(how, said), name="release", daemon=True)
            teller.start()
            teller.join(timeout_s)
        _HELD_HERE.discard(self.record.incarnation)

    def _tell(self, how: How, said: str | None) -> None:
        try:
            for _ in range(_TRIES):
                seen = self._lock.look()
                if seen is None or not self._recognise(seen.record):
                    return
                now = self._counted(seen.record, seen.record.beats)
                if self._lock.swap(seen, now.as_ended(how, said)):
                    return
        except StoreError as error:
            logger.warning("the lock %s could not be released: %s", self._lock.name, error)

    def _counted(self, record: Record, beats: int) -> Record:
        return record.model_copy(update={"beats": beats, "worked_s": self.worked_s})

    def _recognise(self, record: Record) -> bool:
        """Return whether a record is ours; remember another's."""
        if record.incarnation != self.record.incarnation:
            self._successor = record
        return self._successor is None

    def _count(self, beat_s: float) -> None:
        """Beat until the lock is released or lost; a store that is away is asked again."""
        while not self._ended.wait(beat_s) and not self.is_lost:
            try:
                self.beat()
            except Exception as error:  # whatever it is: a thread that ended would look like a dead process
                logger.warning("the lock %s could not be renewed, and is tried again: %s", self._lock.name, error)
        if self.is_lost:
            logger.warning("the lock %s was taken by another: this process was silent for too long", self._lock.name)


_HELD_HERE: set[str] = set()
"""Incarnations that live in this process: it may have dropped others without a release, and nobody waits for those."""


class Observer:
    """Finds out, from look to look, whether the holder of one lock lives.

    Args:
        silent_s: how long a holder elsewhere is watched before it is taken for dead.
        lives_here: whether a process of this machine lives; None where that cannot be known from here.
    """

    def __init__(self, silent_s: float = SILENT_S, lives_here: Callable[[Record], bool | None] | None = None) -> None:
        self._silent_s = silent_s
        self._lives_here = lives_here or process_lives
        self._counted: tuple[str, int] | None = None
        self._since = self._looked = 0.0

    def judge(self, seen: Seen | None) -> Life:
        """Return what is known by now; to be called right after each look, every few seconds."""
        if seen is None or seen.record.ended is not None:
            return Life.ENDED
        lives = self._lives_here(seen.record)
        if lives is not None:
            return Life.LIVES if lives else Life.DEAD
        return self._judge_count((seen.record.incarnation, seen.record.beats))

    def _judge_count(self, counted: tuple[str, int]) -> Life:
        now, former = clock.boottime(), self._counted
        blind = now - self._looked > GAP_S
        self._looked, self._counted = now, counted
        if counted != former or blind:
            self._since = now
            moved = former is not None and counted[0] == former[0] and counted[1] > former[1]
            return Life.LIVES if moved else Life.UNKNOWN
        return Life.DEAD if now - self._since >= self._silent_s else Life.UNKNOWN


def process_lives(record: Record) -> bool | None:
    """Return whether the process of a record lives; None where its id means nothing here, or it names none."""
    process = record.process
    if process is None or process.place != here():
        return None
    if process.pid == os.getpid() and process.record().process() is not None:
        return record.incarnation in _HELD_HERE
    return process.record().process() is not None


def old_run_locks(backend: Backend) -> list[str]:
    """Return the keys of the locks of runs that completed at least OLD ago, or ended otherwise OLD_UNFINISHED ago.

    Those of deployments stay. A run that somebody starts again after all, just when its lock is deleted, takes the lock
    again at its next beat.
    """
    names = [file.removesuffix(".json") for file in backend.children(LOCKS) if file.startswith(RUN_LOCK)]
    old = []
    for name in names:
        with suppress(StoreError):  # one that is damaged is for `verify` to name
            seen = Lock(backend, name).look()
            if seen is not None and (ended := seen.record.ended) is not None:
                kept = OLD if ended.how == "completed" else OLD_UNFINISHED
                if clock.now() - ended.when > kept:
                    old.append(lock_key(name))
    return old


def damaged_locks(backend: Backend) -> list[str]:
    """Return a sentence for each lock that cannot be read."""
    problems = []
    for file in backend.children(LOCKS):
        try:
            Lock(backend, file.removesuffix(".json")).look()
        except StoreError as error:
            problems.append(str(error))
    return problems
