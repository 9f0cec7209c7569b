"""Which process of a group is gone: a collective that fails says only that something broke.

Every rank sends heartbeats: twice a second a thread counts up a number in the group's store, and reads the numbers of
the others. When a collective fails, the rank waits for the next heartbeat of each other one: a rank that sends none is
lost. The first to find out tells the others, so that none of them is taken for lost because it gave up sooner. A rank
that knows closes its connections, so that no other waits for it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import psutil
import torch.distributed as dist

from rlhf_core.errors import LostRankError
from rlhf_core.strategy.rendezvous import GroupStore

logger = logging.getLogger(__name__)
BEAT_S = 0.5
PATIENCE_S = 5.0
"""Longest wait for the heartbeats that should come every `BEAT_S`."""
_ENDED, _STOPPED, _SILENT = "has ended", "is stopped", "shows no sign of life"


class _Process(NamedTuple):
    machine: str
    pid: int

    @classmethod
    def own(cls) -> _Process:
        with suppress(OSError):  # Linux's; the name of a machine is not enough where containers share it
            return cls(f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}", os.getpid())
        return cls(socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.partition(' ')[0]}"


class _Sign(NamedTuple):
    """What another rank said last."""

    beat: str
    knows: bool
    """That a rank is lost."""
    left: str
    """Why it left the group; empty while it is there."""


class Liveness:
    """This rank's heartbeats, and those of the others.

    Args:
        group: the group's store. Which process this rank is, is written there at once; heartbeats begin with `begin`.
    """

    def __init__(self, group: GroupStore) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.has_hung_up = False
        self._kept_by_first = group.kept_by_first
        self._held = group.store  # the first rank's serves all others: it must outlive the group
        # On a connection of its own: on the common one a wait for a key keeps all others waiting.
        self._store = group._replace(store=group.store.clone()).under("liveness")
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._own = _Process.own()
        self._who: dict[int, _Process] = {}
        self._signs: dict[int, _Sign] = {}
        self._rounds = 0
        self._same: dict[int, int] = dict.fromkeys(self._others, 0)
        self._lost = ""
        self._told = False
        self._reason = ""
        self._unreachable = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="liveness", daemon=True)
        self._store.set(f"who/{self.rank}", json.dumps(self._own))
        for key in (f"beat/{self.rank}", f"left/{self.rank}", *(["lost"] if self.rank == 0 else [])):
            self._store.set(key, "")

    def begin(self) -> None:
        """Send heartbeats from now on; every rank has said by now who it is."""
        self._thread.start()

    def end(self) -> None:
        """Say that this rank leaves, and be silent."""
        if self._reason and self._kept_by_first and self.rank == 0:
            time.sleep(2 * BEAT_S)  # the store goes with this rank: let the others read its reason
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE_S)  # not for ever: whoever keeps the store may be stopped

    def gives_up_because(self, error: BaseException) -> None:
        """Tell the ranks that may wait for this one that it takes part no more, and why."""
        self._reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

    def close_connections(self, error: BaseException) -> None:
        """Close gloo's connections, so that nobody waits until the deadline for this rank, which takes part no more.

        gloo fails only the rank that waits for the other end of a broken connection, and cannot break off a wait.
        What else holds the group, as a wrapper of the model does, keeps its connections until the process ends.

        Args:
            error: that ended this rank's part; what its frames hold is let go.
        """
        if not (dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO):
            return
        self.has_hung_up = True
        for let_go in before_closing:
            let_go()
        traceback.clear_frames(error.__traceback__)
        with suppress(RuntimeError):  # it is broken already
            dist.destroy_process_group()

    def who_is_lost(self) -> str:
        """Return a sentence on who the others cannot go on without; takes seconds, as heartbeats are waited for."""
        rounds, first, deadline = self._rounds, dict[int, _Sign](), time.monotonic() + PATIENCE_S
        gone: dict[int, str] = {}
        while not self._lost:
            if not first and self._rounds > rounds + 1:  # a whole round was made since: it shows too who has left
                first = dict(self._signs)
            gone = self._gone(first)
            store_is_gone = self._unreachable or (self._kept_by_first and 0 in gone)
            all_there = bool(first) and all(self._is_there(rank, first) or self._left(rank) for rank in self._others)
            if (first and gone) or all_there or store_is_gone or time.monotonic() > deadline:
                break
            time.sleep(BEAT_S / 10)
        if not self._lost:
            if self._kept_by_first and (0 in gone or (self._unreachable and self.rank != 0 and not self._all_left())):
                gone = {0: gone.get(0, _SILENT)}  # nobody could say more: whoever else has ended may have ended over it
            gone = gone or self._all_left() or self._silent(first)
            self._lost = self._sentence(gone)
        if not (self._kept_by_first and 0 in gone):
            self._wait_until_told()
        return self._lost

    def _is_there(self, rank: int, first: dict[int, _Sign]) -> bool:
        return rank in first and self._signs[rank].beat != first[rank].beat

    def _left(self, rank: int) -> str:
        return self._signs[rank].left if rank in self._signs else ""

    def _gone(self, first: dict[int, _Sign]) -> dict[int, str]:
        """Return the ranks of this machine whose processes do not run, though they have neither counted on nor left."""
        missing = [rank for rank in self._others if not self._is_there(rank, first) and not self._left(rank)]
        return {rank: state for rank in missing if (state := self._state(rank))}

    def _all_left(self) -> dict[int, str]:
        return {rank: f"has left ({reason})" for rank in self._others if (reason := self._left(rank))}

    def _silent(self, first: dict[int, _Sign]) -> dict[int, str]:
        """Return the ranks whose signs did not come in time: that which keeps the store, if nobody's came."""
        if first and not self._unreachable:
            return {rank: _SILENT for rank in self._others if not self._is_there(rank, first)}
        return {0: _SILENT} if self._kept_by_first and self.rank != 0 else {}

    def _state(self, rank: int) -> str:
        """Return what the system says of a process of this machine that is not running; else nothing."""
        process = self._who.get(rank)
        if process is None or process.machine != self._own.machine:
            return ""
        try:
            status = psutil.Process(process.pid).status()
        except psutil.NoSuchProcess:
            return _ENDED
        except psutil.Error:  # another user's
            return ""
        if status in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            return _ENDED
        return _STOPPED if status == psutil.STATUS_STOPPED else ""

    def _sentence(self, fates: dict[int, str]) -> str:
        if not fates:
            return (
                f"the {self.world_size} ranks lost each other though all of them live: one was slower than the longest "
                "wait, or the network between them broke; begin again, with a longer wait if it was slow"
            )
        named = " and ".join(
            f"rank {rank} of {self.world_size} {fate}" + (f" ({self._who[rank]})" if rank in self._who else "")
            for rank, fate in sorted(fates.items())
        )
        return f"{named}, and the others cannot go on without it; its own log says more"

    def _wait_until_told(self) -> None:
        """Wait until the others can know who is lost, and, for the rank with which the store goes, until they do."""
        deadline = time.monotonic() + PATIENCE_S
        waited_for = self._others if self._kept_by_first and self.rank == 0 else []

        def knows(rank: int) -> bool:
            sign = self._signs.get(rank)
            return (sign is not None and (sign.knows or bool(sign.left))) or bool(self._state(rank))

        while not self._unreachable and time.monotonic() < deadline:
            if self._told and all(map(knows, waited_for)):
                return
            time.sleep(BEAT_S / 10)

    def _send_heartbeats(self) -> None:
        try:
            names = [f"who/{rank}" for rank in self._others]
            said = self._store.multi_get(names)
            self._who = {rank: _Process(*json.loads(who)) for rank, who in zip(self._others, said, strict=True)}
            self._exchange()
            while not self._over.wait(BEAT_S):
                self._exchange()
            self._store.set(f"left/{self.rank}", self._reason or "its work was done")
        except RuntimeError:  # torch's; without the store no rank can tell the others anything
            self._unreachable = True

    def _exchange(self) -> None:
        """Send a heartbeat, and look at the others'."""
        self._store.set(f"beat/{self.rank}", f"{self._rounds + 1} {'knows' if self._lost else ''}")
        if self._reason:
            self._store.set(f"left/{self.rank}", self._reason)
        if self._lost and not self._told:
            self._store.compare_set("lost", "", self._lost)
            self._told = True
        keys = [f"{what}/{rank}" for rank in self._others for what in ("beat", "left")]
        lost, *said = (value.decode() for value in self._store.multi_get(["lost", *keys]))
        before = self._signs
        self._signs = {
            rank: _Sign(beat, beat.endswith("knows"), left)
            for rank, beat, left in zip(self._others, said[0::2], said[1::2], strict=True)
        }
        for rank in self._others:
            same = before.get(rank) == self._signs[rank] and not self._signs[rank].left
            self._same[rank] = self._same[rank] + 1 if same else 0
        self._warn()
        self._lost = self._lost or lost
        self._rounds += 1

    def _warn(self) -> None:
        """Write into the log, once, that a rank is gone: not every backend lets a collective fail."""
        patience = round(PATIENCE_S / BEAT_S)
        for rank, rounds in self._same.items():
            if rounds == patience:
                logger.error("%s", self._sentence({rank: self._state(rank) or _SILENT}))


class _Group(Protocol):
    world_size: int

    @property
    def everyone(self) -> _Group: ...


_current: Liveness | None = None


before_closing: list[Callable[[], None]] = []
"""Called before connections are closed: whoever else holds them lets them go."""


def begin(monitor: Liveness) -> None:
    """Send heartbeats until `end` is called or the process ends."""
    global _current  # noqa: PLW0603 - as torch.distributed's group is
    _current = monitor
    monitor.begin()
    atexit.register(end)  # a thread that is in torch when Python ends would take the process down


def end() -> None:
    """End this process's heartbeats; nothing where there are none."""
    global _current  # noqa: PLW0603
    if _current is not None:
        _current.end()
        _current = None


def is_connection_error(error: BaseException) -> bool:
    """Whether gloo or NCCL raised it: this rank does not reach another any more."""
    said = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in said for word in ("gloo", "NCCL", "caused pair closure"))
    )


def former_place() -> tuple[int, int] | None:
    """Return the rank and world size that this process had in the group whose connections it closed; None if none."""
    return (_current.rank, _current.world_size) if _current is not None and _current.has_hung_up else None


def _misses_group(error: BaseException) -> bool:
    """Whether PyTorch raised it because this rank has closed its connections."""
    return former_place() is not None and isinstance(error, ValueError) and "group" in str(error).lower()


@contextmanager
def naming_lost_rank(ranks: _Group) -> Iterator[None]:
    """Let what gloo or NCCL raises in the block end it with the name of the rank that is gone.

    Args:
        ranks: who works together in the block; nothing is done for one alone.

    Raises:
        LostRankError: in place of such an error, and of those for want of the group later on; every other passes
            through.
    """
    try:
        yield
    except Exception as error:
        if ranks.everyone.world_size == 1 or isinstance(error, LostRankError):
            raise
        if _current is not None and (is_connection_error(error) or _misses_group(error)):
            sentence = _current.who_is_lost()
            _current.close_connections(error)
            raise LostRankError(sentence) from error
        if not is_connection_error(error):
            if _current is not None:
                _current.gives_up_because(error)
            raise
        first = (str(error).splitlines() or [""])[0]
        number = ranks.everyone.world_size
        raise LostRankError(f"a rank of {number} is lost ({first}); the others' logs say more") from error
