"""The other ranks of a trainer group, as its first rank calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayActorError
from torch import Tensor

from rlhf_core.errors import LostRankError
from rlhf_core.ray_tools.member import answers
from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import Ranks, current_ranks


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
        try:
            return ray.get_actor(name)
        except ValueError as error:  # it was there when the group was formed
            raise LostRankError(
                f"rank {rank} of {len(self.names) + 1} ({name}) has ended: no actor has its name any more"
            ) from error

    def _whose(self, calls: Mapping[Any, str]) -> str:
        """Return the rank whose process is gone, in words."""
        for rank, (reference, name) in enumerate(calls.items(), start=1):
            try:
                ray.get(reference, timeout=0)
            except RayActorError:
                return f"rank {rank} of {len(calls) + 1} ({name})"
            except Exception:  # another one's trouble
                continue
        return f"one of {', '.join(self.names)}"


class SharedState(NamedTuple):
    """What a learner is restored from."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def share_state(state: SharedState | None, ranks: Ranks) -> SharedState | None:
    """Return the first rank's state on every rank; None if it has none.

    Args:
        state: of the first rank; not looked at on the others.
        ranks: who shares it; called by all of them.
    """
    if ranks.world_size == 1:
        return state
    forms = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in state.tensors.items()} if state else {}
    found = ranks.broadcast_object(None if state is None else {"forms": forms, "facts": dict(state.facts)})
    if found is None:
        return None
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in found["forms"].items():
        if state is not None and ranks.is_first:
            tensor = state.tensors[name].contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        ranks.broadcast(tensor.reshape(-1).view(torch.uint8))  # as bytes: not every backend takes every dtype
        tensors[name] = tensor
    return SharedState(tensors, found["facts"])
