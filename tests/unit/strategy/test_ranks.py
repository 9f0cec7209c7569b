"""A process that trains alone."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE, choose_backend, current_ranks, join, leave


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
