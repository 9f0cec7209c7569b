"""ZeRO-2: every rank holds all weights, and its shard of gradients, float32 masters and moments.

Buffers keep their precision: ColossalAI casts a model whole, and in bfloat16 the rotary frequencies are off by up to
0.4 %: at the thousandth token an angle is off by radians. transformers itself keeps them in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.strategy import plain
from rlhf_core.strategy.booster import Moments, Precision
from rlhf_core.strategy.colossal.booster import ColossalBooster, ColossalOptimizer, Members
from rlhf_core.strategy.colossal.compat.zero import OrderedZero, OrderedZeroPlugin
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.strategy.twin import host_copy


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Give the model its floating-point buffers back, on the device that they are on after the block."""
    held = {name: buffer.detach().clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    yield
    for name, tensor in held.items():
        owner, _, leaf = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        now = buffers[leaf]
        buffers[leaf] = tensor if now is None else tensor.to(now.device)


class ZeroBooster(ColossalBooster):
    """Weights are whole, in `precision`; of gradients, float32 masters and moments each rank has its shard.

    Args:
        precision: of weights, gradients and arithmetic.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together; None takes torch.distributed's default group.
        cpu_offload: whether masters and moments are in host memory, where the step is then taken.
    """

    def __init__(
        self,
        precision: Precision = "fp32",
        max_norm: float | None = 1.0,
        ranks: Ranks | None = None,
        *,
        cpu_offload: bool = False,
    ) -> None:
        self.cpu_offload = cpu_offload
        self._optimizer: ZeroOptimizer | None = None
        super().__init__(precision, max_norm, ranks)

    def _plugin(self) -> Any:
        return OrderedZeroPlugin(
            stage=2,
            precision=self.precision,
            overlap_communication=torch.cuda.is_available(),  # by streams, which a CPU has not
            # Of what is larger than 32 MB, libc asks the system for new pages each time, which it has to clear.
            reduce_bucket_size_in_m=12 if torch.cuda.is_available() else 4,
            cpu_offload=self.cpu_offload,
        )

    def _boosted(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]:
        members = (
            [] if optimizer is None else [member for group in optimizer.param_groups for member in group["params"]]
        )
        # ColossalAI makes masters of weights that it has rounded already: this is what they were.
        shards = [_shard_of(member.detach(), self.ranks).clone() for member in members] if self._is_rounded else []
        with buffers_kept(model):
            boosted, wrapped = super()._boosted(model, optimizer)
        if shards:
            for master, shard in zip(wrapped.masters, shards, strict=True):
                master.copy_(shard)
        return boosted, wrapped

    def _adapted(self, optimizer: Any, members: Members) -> ZeroOptimizer:
        self._optimizer = ZeroOptimizer(
            optimizer, members=members, max_norm=self.max_norm, scaled=self.precision == "fp16", ranks=self.ranks
        )
        return self._optimizer

    def plain(self, model: nn.Module) -> nn.Module:
        """Return the model that ColossalAI wrapped; its weights are whole, in the working precision."""
        wrapper: Any = model
        inner: nn.Module = wrapper.module
        return inner

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights, of their masters if they are rounded: as `OwnBooster` says."""
        if self._optimizer is None or not self._is_rounded:
            return plain.weights(self.plain(model), names, self.ranks)
        return self._optimizer.masters(names)

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights and buffers that are named, and this rank's shard of their masters."""
        plain.load_weights(self.plain(model), weights)
        if self._optimizer is not None:
            self._optimizer.load_masters(weights)

    @contextmanager
    def exact(self, model: nn.Module) -> Iterator[nn.Module | None]:
        """Return the context of a plain model on the first rank, of None on the others.

        With rounded weights it is a float32 copy in host memory, of the masters; what is not trained has none, and is
        as it is in the working precision.
        """
        plain = self.plain(model)
        if self._optimizer is None or not self._is_rounded:
            yield plain if self.ranks.is_first else None
            return
        masters = self._optimizer.masters()

        def tensor_for(name: str, tensor: Tensor) -> Tensor:
            if name in masters:
                return masters[name]
            return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)

        yield host_copy(plain, tensor_for) if self.ranks.is_first else None

    @property
    def _is_rounded(self) -> bool:
        """Whether the masters are more exact than the weights."""
        return self.precision != "fp32"


class ZeroOptimizer(ColossalOptimizer):
    """Checks the gradients in all ranks' shards, and steps on this rank's.

    Its arguments are `ColossalOptimizer`'s; `inner` is ZeRO's optimizer, which averages gradients into the shards.
    """

    inner: OrderedZero

    def masters(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return whole weights in float32 and host memory: those that are named, or on the first rank all."""
        found = {}
        wanted = set(self.names if names is None else names)
        for name, working, master in zip(self.names, self.inner.working, self.inner.masters, strict=True):
            if name in wanted:
                tensor = self._gathered(master, working)
                if names is not None or self.ranks.is_first:
                    found[name] = tensor.cpu()
        return found

    def load_masters(self, weights: Mapping[str, Tensor]) -> None:
        """Take this rank's shard of whole weights, of those that are named."""
        for name, master in zip(self.names, self.inner.masters, strict=True):
            if name in weights:
                master.copy_(_shard_of(weights[name].detach(), self.ranks))

    def moments(self) -> Moments:
        """Return all moments, whole and in host memory, on the first rank."""
        found: Moments = {}
        for name, working, master in zip(self.names, self.inner.working, self.inner.masters, strict=True):
            for moment, tensor in sorted(self.inner.optim.state[master].items()):
                held = tensor if moment == "step" else self._gathered(tensor, working)
                if self.ranks.is_first:
                    found.setdefault(moment, {})[name] = held.to("cpu", copy=True)
        return found

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put this rank's shard in the place of the present moments."""
        self._load_into(self.inner.optim, moments, lambda tensor: _shard_of(tensor, self.ranks))

    def _gathered(self, shard: Tensor, working: Tensor) -> Tensor:
        """Return what all ranks' shards make up, on the device where the weights are."""
        everything = torch.empty(shard.numel() * self.ranks.world_size, dtype=shard.dtype, device=working.device)
        dist.all_gather_single(everything, shard.to(working.device))
        return everything[: working.numel()].view(working.shape)

    def _global_norm(self) -> float:
        """Add up squares over ranks; learn, in the same message, which weights no rank has used."""
        used = self.inner.used
        found = torch.zeros(1 + len(used), dtype=torch.float64)
        found[1:] = torch.tensor(used)
        if gradients := self.inner.gradients():
            norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
            found = found.to(norms.device)
            found[0] = norms.double().square().sum()
        squares, *users = self.ranks.sum(found).tolist()  # the one wait for the device
        self.inner.drop([count == 0 for count in users])
        return math.sqrt(squares) / self._factor

    def _clip(self, limit: float | None) -> None:
        clipping = 1.0 if limit is None else min(1.0, limit / (self._norm + 1e-6))
        self.inner.multiplier = clipping / self._factor


def _shard_of(tensor: Tensor, ranks: Ranks) -> Tensor:
    """Return a rank's shard of a tensor, as ColossalAI cuts it: all of one size, the last filled up with zeros."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // ranks.world_size)
    own = flat[ranks.rank * size : (ranks.rank + 1) * size]
    return nn.functional.pad(own, (0, size - own.numel()))
