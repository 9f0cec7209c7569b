"""Ranks of a group, of which one ends, stops or leaves in the midst of a collective; each a process of its own."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist

from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import join
from rlhf_core.strategy.rendezvous import Rendezvous, open_rendezvous
from tests.forked import FORKED

END_S = 60.0


class Fate(NamedTuple):
    """What becomes of one rank."""

    rank: int
    how: str
    """A signal, or `raises`."""


class Told(NamedTuple):
    """What a survivor said, and when."""

    rank: int
    sentence: str
    after_s: float
    """Since the fate of the other."""


def play(fate: Fate, *, world_size: int, deadline_s: float, agent: bool = False, in_a_row: bool = False) -> list[Told]:
    """Return what the survivors say; nothing of any rank is left behind.

    Args:
        fate: of one of them.
        world_size: number of ranks.
        deadline_s: longest wait in a collective.
        agent: whether somebody else than the first rank keeps the store, as torchrun does.
        in_a_row: whether each rank waits for the one before it alone, instead of all for all.
    """
    listener = open_rendezvous("127.0.0.1")
    port = listener.getsockname()[1]
    store = None
    if agent:
        wait = timedelta(seconds=END_S)
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, timeout=wait, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    listener.close()
    ours, theirs = FORKED.Pipe(duplex=False)
    when = FORKED.Value("d", 0.0)
    processes = [
        FORKED.Process(
            target=_rank, args=(rank, world_size, port, deadline_s, fate, when, theirs, agent, in_a_row), daemon=True
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        told = []
        for _ in range(world_size - 1):
            assert ours.poll(END_S), f"only {told} came within {END_S:g} s"
            rank, sentence, at = ours.recv()
            told.append(Told(rank, sentence, at - when.value))
        return sorted(told)
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _rank(
    rank: int,
    world_size: int,
    port: int,
    deadline_s: float,
    fate: Fate,
    when: object,
    said: Connection,
    agent: bool,
    in_a_row: bool,
) -> None:
    torch.set_num_threads(1)
    if agent:
        os.environ |= {
            "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": str(rank), "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    ranks = join(deadline_s, rendezvous=None if agent else Rendezvous(rank, world_size, "127.0.0.1", port))
    tensor = torch.ones(1 << 20)
    ranks.sum(tensor)
    if rank == fate.rank and fate.how != "raises":
        threading.Thread(target=_end, args=(fate.how, when), daemon=True).start()
    try:
        with naming_lost_rank(ranks):
            if in_a_row and rank:
                dist.recv(tensor, src=rank - 1)
            for _ in range(0 if in_a_row else 1000):
                ranks.sum(tensor)
                if rank == fate.rank and fate.how == "raises":
                    when.value = time.monotonic()  # type: ignore[attr-defined]
                    _fail()
            time.sleep(END_S)
    except Exception as error:
        if rank == fate.rank:
            atexit._run_exitfuncs()  # as Python does where a process ends that multiprocessing has not started
            return
        said.send((rank, f"{type(error).__name__}: {error}", time.monotonic()))
    time.sleep(END_S if rank else 0)  # whoever keeps the store is the first to go


def _fail() -> None:
    raise ValueError("a shape\nand more")


def _end(how: str, when: object) -> None:
    time.sleep(0.3)
    when.value = time.monotonic()  # type: ignore[attr-defined]
    os.kill(os.getpid(), getattr(signal, how))
