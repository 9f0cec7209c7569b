"""A process that trains alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from rlhf_core.errors import LostRankError
from rlhf_core.strategy.ranks import ALONE, choose_backend, current_ranks, join, join_alone, leave
from rlhf_core.strategy.rendezvous import Rendezvous, open_rendezvous
from tests.forked import FORKED


def test_alone_everything_is_as_it_was() -> None:
    tensor = torch.tensor([1.0, 2.0])
    for method in (ALONE.sum, ALONE.max, ALONE.gather):
        assert torch.equal(method(tensor), tensor)
    ALONE.broadcast(tensor)
    ALONE.add_up(tensor)
    assert tensor.tolist() == [1.0, 2.0]
    ALONE.barrier()
    assert (ALONE.any(True), ALONE.any(False), ALONE.is_first) == (True, False, True)
    assert ALONE.broadcast_object({"a": 1}) == {"a": 1}


def test_without_torchrun_there_is_nobody_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert join() is ALONE
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join() is ALONE
    assert current_ranks() is ALONE
    leave()


@pytest.mark.parametrize(
    ("devices", "backend", "reason"),
    [
        (["", ""], "gloo", "no rank has a GPU"),
        (["GPU-a", ""], "gloo", "rank 1 sees no GPU"),
        (["GPU-a", "GPU-b", "GPU-a"], "gloo", "ranks 0 and 2 share a GPU"),
        (["GPU-a", "GPU-b"], "nccl", "of its own"),
    ],
)
def test_the_backend_follows_from_the_gpus_that_the_ranks_see(devices: list[str], backend: str, reason: str) -> None:
    found, why = choose_backend(devices)
    assert found == backend
    assert reason in why


def in_a_process(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a process of its own: a process joins once."""
    with FORKED.Pool(1) as pool:
        return pool.apply_async(work).get(timeout=60)


def _alone() -> dict[str, Any]:
    ranks = join_alone()
    again = join_alone()
    places = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    backend = torch.distributed.get_backend()
    leave()
    return {"ranks": (ranks.rank, ranks.world_size, again.world_size), "places": places, "backend": backend}


@pytest.mark.integration
def test_a_group_of_one_is_open_to_nobody_on_the_network() -> None:
    found = in_a_process(_alone)
    assert found["ranks"] == (0, 1, 1)
    assert found["places"] <= {"127.0.0.1", "::1"}
    assert found["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")


def _in_vain() -> str:
    listener = open_rendezvous("127.0.0.1")
    try:
        join(1.0, rendezvous=Rendezvous(0, 3, "127.0.0.1", listener.getsockname()[1], listener))
    except LostRankError as error:
        return str(error)
    return ""


@pytest.mark.integration
def test_a_rank_that_does_not_come_is_named() -> None:
    assert in_a_process(_in_vain).startswith("waited 1 s for rank 1 of 3, and it did not come")
