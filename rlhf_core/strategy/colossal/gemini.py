"""Gemini, ZeRO's third stage: every rank holds its share of weights, gradients, masters and moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.lora import adapter_config
from rlhf_core.strategy.agreement import together
from rlhf_core.strategy.colossal.adam import hybrid_adam
from rlhf_core.strategy.colossal.booster import ColossalBooster
from rlhf_core.strategy.colossal.chunks import Chunks
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.gemini import ShardedPlugin, current_device
from rlhf_core.strategy.colossal.copies import host_copy
from rlhf_core.strategy.colossal.gemini_optimizer import GeminiOptimizer
from rlhf_core.strategy.colossal.kernel import KernelError
from rlhf_core.strategy.colossal.optimizer import Members
from rlhf_core.strategy.plain import Precision
from rlhf_core.strategy.ranks import Ranks

Placement = Literal["static", "auto"]


class GeminiBooster(ColossalBooster):
    """Weights, gradients, masters and moments lie in chunks, of which each rank has its share.

    A forward or backward pass gathers a chunk when it comes to one of its weights, and lets it go again. So `plain` is
    not the model that is trained, whose weights are never there together, but a twin that `awake` gives weights.

    In bf16 and fp16 weights and gradients are rounded, and float32 masters are stepped; in fp32 there are no masters.

    Args:
        precision: of weights, gradients and arithmetic.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together; None takes torch.distributed's default group.
        placement: static, all shares on the GPU (or, without one, in host memory); or auto, by the GPU memory that is
            free.
    """

    _twin: nn.Module
    _chunks: Chunks

    def __init__(
        self,
        precision: Precision = "fp32",
        max_norm: float | None = 1.0,
        ranks: Ranks | None = None,
        *,
        placement: Placement = "static",
    ) -> None:
        if placement == "auto" and not torch.cuda.is_available():
            raise ConfigError(
                "strategy gemini_auto places weights by the GPU memory that is free, but there is no GPU; take gemini"
            )
        self._placement = placement
        self._openings = 0
        """How many contexts of `awake` are open."""
        super().__init__(precision, max_norm, ranks)

    def _plugin(self) -> Any:
        return ShardedPlugin(working=self.autocast_dtype, placement=self._placement)

    def new_optimizer(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return ColossalAI's HybridAdam, the one that steps on Gemini's shares.

        Raises:
            ConfigError: if its kernels cannot be built here.
        """
        try:
            return together(self.ranks, lambda: hybrid_adam(groups, betas=betas), what="build HybridAdam's kernels")
        except KernelError as error:
            raise ConfigError(
                f"strategy gemini takes steps with ColossalAI's HybridAdam alone, but {error}; mend that, or take "
                "zero2, ddp or plain"
            ) from error

    def _boosted(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]:
        _check(model, optimizer)
        names = {name for name, _ in model.named_parameters()}
        self._twin = host_copy(model, lambda name, tensor: self._absent(tensor.shape) if name in names else tensor)
        boosted: Any
        boosted, wrapped = super()._boosted(model, optimizer)
        for theirs, own in zip(self._twin.modules(), model.modules(), strict=True):
            theirs._buffers = own._buffers
        self._chunks = Chunks(boosted)
        return boosted, wrapped

    def _adapted(self, optimizer: Any, members: Members) -> GeminiOptimizer:
        return GeminiOptimizer(
            optimizer,
            chunks=self._chunks,
            members=members,
            max_norm=self.max_norm,
            scaled=self.precision == "fp16",
            ranks=self.ranks,
        )

    def plain(self, model: nn.Module) -> nn.Module:  # noqa: ARG002 - the protocol's
        """Return the twin; outside `awake` its weights are not numbers."""
        return self._twin

    @contextmanager
    def awake(self, model: nn.Module) -> Iterator[None]:  # noqa: ARG002
        """Return the context in which the twin has all weights, in the working precision; then they are freed."""
        if not self._openings:
            self._chunks.rest()
            weights = dict(self._twin.named_parameters())
            for name, tensor in self._chunks.working():
                weights[name].data = tensor
        self._openings += 1
        try:
            yield
        finally:
            self._openings -= 1
            if not self._openings:
                self._put_away()

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        """Return copies of weights, of their masters if they are rounded: as `OwnBooster` says."""
        self._chunks.rest()
        found = {}
        for name, tensor in self._chunks.exact(self._chunks.names() if names is None else names):
            if names is not None or self.ranks.is_first:
                found[name] = tensor.to("cpu", copy=True)
        return found

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Overwrite this rank's shares of the weights that are named, and buffers."""
        self._chunks.rest()
        buffers = dict(self._twin.named_buffers())
        for name, tensor in weights.items():
            if name in buffers:
                buffers[name].copy_(tensor)
            else:
                self._chunks.load(name, tensor)

    @contextmanager
    def exact(self, model: nn.Module) -> Iterator[nn.Module | None]:
        """Return the context of a float32 copy in host memory on the first rank, of None on the others."""
        weights = self.weights(model)

        def tensor_for(name: str, tensor: Tensor) -> Tensor:
            return weights[name] if name in weights else tensor.to("cpu", copy=True)

        yield host_copy(self._twin, tensor_for) if self.ranks.is_first else None

    def _put_away(self) -> None:
        for weight in self._twin.parameters():
            weight.data = self._absent(weight.shape)

    def _absent(self, shape: torch.Size) -> Tensor:
        """Return what stands for a weight of the twin that is not there: of its shape, but without its memory."""
        return torch.full((), torch.nan, dtype=self.autocast_dtype, device=current_device()).expand(shape)


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """See that Gemini can train the model.

    Raises:
        ConfigError: if it cannot.
    """
    if adapter_config(model) is not None:
        raise ConfigError(
            "strategy gemini shards all weights and trains no adapters; take zero2, ddp or plain with LoRA"
        )
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    if frozen:
        raise ConfigError(
            f"strategy gemini trains all weights, but {len(frozen)} are frozen, first {frozen[0]}; let them require "
            "gradients, or take zero2, ddp or plain"
        )
    if optimizer is not None and type(optimizer) is not upstream("colossalai.nn.optimizer").HybridAdam:
        raise ConfigError(
            f"strategy gemini takes steps with ColossalAI's HybridAdam alone, not with {type(optimizer).__name__}; let "
            "the booster make the optimizer (new_optimizer)"
        )
