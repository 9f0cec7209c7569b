"""A group of processes that train one model: how they come together as Ray actors, and how the first calls the others.

Each is a `GroupMember`. `form_group` makes ranks of them, and `Peers` has the other ranks take part in what the first
does. A `RankActor` is the member of a group that does one piece of work and is done.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError

from rlhf_core.errors import LostRankError
from rlhf_core.ray_tools.calls import find_actor, wait_for
from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import current_ranks, join
from rlhf_core.strategy.rendezvous import Rendezvous, open_rendezvous

logger = logging.getLogger(__name__)
GROUPS = {"status": 2, "compute": 1}
"""Ray's threads for a member's methods: it answers while it works."""
Tell = Callable[[str], None]
"""Takes a line for whoever follows the work."""


class GroupMember:
    """One process of a group; it joins once, and goes with its process."""

    _trouble: Exception | None = None
    _listener: socket.socket | None = None

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return this process's id: the actor lives and answers.

        Raises:
            Exception: what its last work failed with: others may wait for it.
        """
        if self._trouble is not None:
            raise self._trouble
        return os.getpid()

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def node(self) -> tuple[str, str]:
        """Return the id and the address of the machine that this process is on."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def invite(self, address: str) -> int:
        """Open a port on an address of this machine, where the group meets, and return it; the first member's part."""
        return self._open(address)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Join the group.

        Args:
            rendezvous: where, and as which rank.
            timeout_s: longest wait for the others, then and in every collective.

        Raises:
            LostRankError: if one of them does not come.
        """
        with self._working():
            self._join(rendezvous, timeout_s)

    def _open(self, address: str, port: int = 0) -> int:
        """Open a port on an address of this machine, 0 for a free one, and return it; it is held from here on."""
        self._listener = open_rendezvous(address, port)
        opened: int = self._listener.getsockname()[1]
        return opened

    def _join(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        join(timeout_s, rendezvous=rendezvous._replace(listener=self._listener))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Run a block that other members take part in; what it fails with is kept for whoever asks."""
        try:
            with naming_lost_rank(current_ranks()):
                yield
        except Exception as error:
            self._trouble = error
            raise


@ray.remote(concurrency_groups=GROUPS)
class RankActor(GroupMember):
    """Does a piece of work with the other ranks of its group.

    Args:
        work: is given what takes its lines; called once the group is formed. What it returns is small and plain.
    """

    def __init__(self, work: Callable[[Tell], Any]) -> None:
        self._work = work
        self._lines: deque[str] = deque()
        logger.info("process %d begins", os.getpid())

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def run(self) -> Any:
        """Do the work, and return what it returns."""
        with self._working():
            return self._work(self._lines.append)

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def lines(self) -> list[str]:
        """Return the lines that the work has told since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]


def form_group(members: Mapping[str, Any], *, start_timeout_s: float, collective_timeout_s: float) -> None:
    """Let actors, each a `GroupMember` in a process of its own, become the ranks of one group, in their order.

    Args:
        members: handles by name.
        start_timeout_s: longest wait for the actors' answers.
        collective_timeout_s: longest wait of one rank for another, from then on.

    Raises:
        TimeoutError: if one does not answer; it names it.
        LostRankError: if one does not come.
    """
    first = next(iter(members.values()))
    nodes = answers({actor.node.remote(): name for name, actor in members.items()}, start_timeout_s)
    # On one machine nobody else's business: the ranks believe whoever speaks to them.
    address = "127.0.0.1" if len({node for node, _ in nodes}) == 1 else nodes[0][1]
    (port,) = answers({first.invite.remote(address): next(iter(members))}, start_timeout_s)
    places = [Rendezvous(rank, len(members), address, port) for rank in range(len(members))]
    joining = {
        actor.join.remote(rendezvous, collective_timeout_s): name
        for rendezvous, (name, actor) in zip(places, members.items(), strict=True)
    }
    answers(joining, start_timeout_s + collective_timeout_s)


def answers(calls: Mapping[Any, str], timeout_s: float) -> list[Any]:
    """Return what calls of members return, in their order.

    Args:
        calls: reference of each, and whom it was made to.
        timeout_s: longest wait for all together.

    Raises:
        TimeoutError: if some do not answer; it names them.
    """

    def late(names: Sequence[str]) -> Exception:
        return TimeoutError(f"waited {timeout_s:.0f} s for {', '.join(names)} of the trainer group, and no answer came")

    return wait_for(calls, timeout_s, late=late)


class Peers:
    """Has the other ranks take part in what all ranks do together; without any, nothing is called.

    Args:
        names: of their actors, in the order of the ranks, from rank 1.
        timeout_s: longest wait for them once this rank has done its own part.
    """

    def __init__(self, names: Sequence[str], timeout_s: float) -> None:
        self.names = tuple(names)
        self._timeout_s = timeout_s
        self._actors: dict[str, Any] = {}

    @contextmanager
    def taking_part(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Iterator[None]:
        """Run this rank's part of something while the others run theirs; all have done it when the block is left.

        Args:
            method: of `TrainerRank`.
            arguments: of that method.
            timeout_s: longest wait for them once this rank has done its own part; None takes that of all work.

        Raises:
            LostRankError: if one of the ranks ended.
            TimeoutError: if one is not done in time.
        """
        if not self.names:
            yield
            return
        self._actors = self._actors or {name: self._found(rank, name) for rank, name in enumerate(self.names, start=1)}
        calls = {getattr(actor, method).remote(*arguments): name for name, actor in self._actors.items()}
        with naming_lost_rank(current_ranks()):
            yield
        try:
            answers(calls, self._timeout_s if timeout_s is None else timeout_s)
        except RayActorError as error:
            raise LostRankError(f"{self._whose(calls)} has ended: {str(error).splitlines()[0]}") from error

    def put(self, arrays: Callable[[], Any]) -> list[Any]:
        """Return the reference of plain arrays, in a list so that Ray leaves fetching to whoever is given it."""
        return [ray.put(arrays())] if self.names else []

    def _found(self, rank: int, name: str) -> Any:
        found = find_actor(name)
        if found is None:  # it was there when the group was formed
            raise LostRankError(
                f"rank {rank} of {len(self.names) + 1} ({name}) has ended: no actor has its name any more"
            )
        return found

    def _whose(self, calls: Mapping[Any, str]) -> str:
        """Return the rank whose process is gone, in words."""
        for rank, (reference, name) in enumerate(calls.items(), start=1):
            try:
                ray.get(reference, timeout=0)
            except RayActorError:
                return f"rank {rank} of {len(calls) + 1} ({name})"
            except Exception:  # this rank lives; it failed because another one is gone
                continue
        return f"one of {', '.join(self.names)}"
