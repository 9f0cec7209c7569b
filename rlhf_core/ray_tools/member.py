"""What every process of a group of trainers can do as a Ray actor: come together with the others, and say how it is."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import current_ranks, join
from rlhf_core.strategy.rendezvous import Rendezvous, open_rendezvous

GROUPS = {"status": 2, "compute": 1}
"""Ray's threads for a member's methods: it answers while it works."""


class GroupMember:
    """One process of a group; it joins once, and goes with its process."""

    _trouble: Exception | None = None
    _listener: socket.socket | None = None

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return this process's id: the actor lives and answers.

        Raises:
            Exception: what its last work failed with: others may wait for it in vain.
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
        self._listener = open_rendezvous(address)
        port: int = self._listener.getsockname()[1]
        return port

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


def answers(calls: Mapping[Any, str], timeout_s: float) -> Sequence[Any]:
    """Return what calls of actors return, in their order.

    Args:
        calls: reference of each, and whom it was made to.
        timeout_s: longest wait for all together.

    Raises:
        TimeoutError: if some do not answer; it names them.
    """
    late, deadline = list(calls), time.monotonic() + timeout_s
    while late:
        ready, late = ray.wait(late, timeout=max(0.0, deadline - time.monotonic()))
        ray.get(ready)  # one that failed says why, and the others, who may wait for it, are not waited for
        if not ready:
            names = ", ".join(calls[reference] for reference in late)
            raise TimeoutError(f"waited {timeout_s:.0f} s for {names} of the trainer group, and no answer came")
    found: Sequence[Any] = ray.get(list(calls))
    return found
