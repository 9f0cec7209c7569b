"""The check before Gemini's steps, and its moments, whole."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_core.errors import ModelError
from rlhf_core.strategy.colossal.chunks import Chunks
from rlhf_core.strategy.colossal.compat.gemini import ShardedOptimizer
from rlhf_core.strategy.colossal.optimizer import ColossalOptimizer, Members, Moments
from rlhf_core.strategy.plain_optimizer import LossScale
from rlhf_core.strategy.ranks import Ranks

_MOMENTS = ("exp_avg", "exp_avg_sq")


class GeminiOptimizer(ColossalOptimizer):
    """Checks the gradients of all ranks' shares, and steps on this rank's.

    Args:
        inner: Gemini's optimizer.
        chunks: of its model.
        members: of its groups.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        scaled: whether losses are scaled for float16.
        ranks: who trains together.
    """

    def __init__(
        self,
        inner: ShardedOptimizer,
        *,
        chunks: Chunks,
        members: Members,
        max_norm: float | None,
        scaled: bool,
        ranks: Ranks,
    ) -> None:
        super().__init__(inner, members=members, max_norm=max_norm)
        self.scale: LossScale | None = LossScale() if scaled else None
        self.ranks = ranks
        self._chunks = chunks

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients, averaged over ranks, to each rank's share of them."""
        super().backward(loss if self.scale is None else loss * self.scale.factor)

    def moments(self) -> Moments:
        """Return all moments, whole and in host memory, on the first rank."""
        steps = self._steps()
        started = {name: step for name, step in zip(self.names, steps, strict=True) if step}
        found: Moments = {"step": {name: torch.tensor(float(step)) for name, step in started.items()}}
        for moment in _MOMENTS:
            found[moment] = {}
            for chunk in dict.fromkeys(self._chunks.of(name) for name in started):
                for name, tensor in self._chunks.gathered(chunk, self._shard(chunk, moment)).items():
                    if self.ranks.is_first and name in started:
                        found[moment][name] = tensor.to("cpu", copy=True)
        return found if self.ranks.is_first and started else {}

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take this rank's share in the place of the present moments."""
        counts = moments.get("step", {})
        self._check_steps(counts)
        state = self.inner.optim.state
        state.clear()
        for number, held in self.inner.id_to_fake_params.items():
            name = self.names[number]
            if name in counts:
                own = self._chunks.share(name).in_weight
                state[held] = {"step": int(counts[name])} | {
                    moment: moments[moment][name].reshape(-1)[own].to(held.device, torch.float32, copy=True)
                    for moment in _MOMENTS
                }

    def _steps(self) -> list[int]:
        """Return how many steps each weight has taken, in the order of `names`; a rank knows of its shares alone."""
        state, held = self.inner.optim.state, self.inner.id_to_fake_params
        own = [state[held[number]].get("step", 0) if number in held else 0 for number in range(len(self.names))]
        steps: list[int] = self.ranks.max(torch.tensor(own)).tolist()
        return steps

    def _shard(self, chunk: object, moment: str) -> Tensor:
        """Return this rank's shard of what a chunk's weights have of a moment; zeros where they have none."""
        found = self._chunks.empty_shard(chunk)
        for number, held in self.inner.id_to_fake_params.items():
            name = self.names[number]
            if self._chunks.of(name) is chunk and moment in self.inner.optim.state[held]:
                found[self._chunks.share(name).in_shard].copy_(self.inner.optim.state[held][moment])
        return found

    def _check_steps(self, counts: Mapping[str, Tensor]) -> None:
        """See that HybridAdam can go on from these counts: on a GPU it has one for each group.

        Raises:
            ModelError: if not.
        """
        for group in self.by_group(self.names):
            found = {int(counts[name]) if name in counts else 0 for name in group}
            if self._chunks.device.type == "cuda" and len(found) > 1:
                raise ModelError(
                    f"under gemini on a GPU, weights of one group take their steps together, but here some have taken "
                    f"{min(found)} and some {max(found)}; continue with zero2, ddp or plain, or without the moments"
                )

    def _global_norm(self) -> float:
        squares = torch.zeros((), dtype=torch.float64)
        if gradients := self.inner.gradients():
            squares = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)).double().square().sum()
        return math.sqrt(self.ranks.sum(squares).item()) / self._factor  # the one wait for the device

    def _clip(self, limit: float | None) -> None:
        excess = 1.0 if limit is None else max(1.0, (self._norm + 1e-6) / limit)
        self.inner.div_scale = excess * self._factor

    def _can_shrink(self) -> bool:
        return self.scale is not None and self.scale.can_shrink

    def _take(self) -> None:
        if self.last_step_skipped:
            self.zero_grad()
            if self.scale is not None:
                self.scale.overflowed()
            return
        if self.inner.gradients():
            self.inner.step()
        if self.scale is not None:
            self.scale.stepped()

    @property
    def _factor(self) -> float:
        return 1.0 if self.scale is None else self.scale.factor
