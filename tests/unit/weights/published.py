"""Small models and weights, and a maker and a trainer that are not in one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.weights import Publication, Subscriber
from tests.forked import FORKED

WAIT_S = 60.0


def models(width: int = 3) -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        critic = nn.ModuleDict({"trunk": nn.Linear(3, 3), "head": nn.Linear(3, 1)})
        return {"actor": nn.Linear(width, 4), "critic": critic}


def weights(seed: int = 0, width: int = 3) -> dict[str, Tensor]:
    """Values for all weights of `models`, none of which bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    own = {f"{role}.{name}": p for role, model in models(width).items() for name, p in model.named_parameters()}
    return {name: torch.randn(p.shape, generator=generator) for name, p in own.items()}


def update(seed: int = 0) -> dict[str, Tensor]:
    """Values for what is trained: an update that leaves out the rest."""
    return {name: value for name, value in weights(seed).items() if name != "actor.bias"}


def held(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{role}.{n}": p.detach().clone() for role, model in models.items() for n, p in model.named_parameters()}


def assert_holds(models: Mapping[str, nn.Module], expected: Mapping[str, Tensor]) -> None:
    found = held(models)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class Maker:
    """A maker's process: takes what it is told, and says what it then holds."""

    def __init__(self, *, device: str | None = None, name: str | None = None) -> None:
        self._pipe, theirs = FORKED.Pipe()
        self.process: BaseProcess = FORKED.Process(target=_make, args=(theirs, device, name), daemon=True)
        self.process.start()
        theirs.close()

    def take(self, publication: Publication, timeout_s: float = WAIT_S) -> Any:
        """Return the version and the weights that it holds afterwards, or what it failed with."""
        self.begin(publication, timeout_s)
        return self.answer()

    def begin(self, publication: Publication, timeout_s: float = WAIT_S) -> None:
        self._pipe.send((publication, timeout_s))

    def answer(self) -> Any:
        assert self._pipe.poll(WAIT_S), "the maker's process gave no answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _make(pipe: Connection, device: str | None, name: str | None) -> None:
    own = models()
    if device is not None:
        _work_on(device, name)
        own = {role: model.to(device) for role, model in own.items()}
    subscriber = Subscriber(lambda: own)
    while True:
        try:
            publication, timeout_s = pipe.recv()
        except EOFError:
            sys.exit()
        try:
            subscriber.take(publication, timeout_s)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send((subscriber.version, {name: tensor.cpu().numpy() for name, tensor in held(own).items()}))


def _work_on(device: str, name: str | None) -> None:
    """Have connections work on a device, under the name of an actor; on a CPU all but NCCL itself is the same."""
    from rlhf_core.weights import nccl

    nccl.own_device = lambda: torch.device(device)  # type: ignore[assignment]
    if name is not None:
        nccl._own_name = lambda: name  # type: ignore[assignment]
