"""Gemini, ZeRO's third stage: every rank holds its shard of weights, gradients, masters and moments."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.kernels.building import KernelError
from rlhf_core.models.lora import adapter_config
from rlhf_core.strategy.booster import Moments, Precision
from rlhf_core.strategy.colossal.booster import ColossalBooster, ColossalOptimizer, Members
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.adam import hybrid_adam
from rlhf_core.strategy.colossal.compat.gemini import (
    ShardedModel,
    ShardedOptimizer,
    ShardedPlugin,
    chunks_of,
    current_device,
    rest,
)
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.strategy.twin import Twin, host_copy


class Place(NamedTuple):
    """Where this rank's part of a weight is."""

    in_shard: slice
    """Of this rank's shard of the chunk."""
    in_weight: slice
    """Of the flat weight; empty if all of it is on other ranks."""


class Chunks:
    """The chunks of one model: of working weights, and where there are any, the masters' in pairs with them.

    Args:
        model: at rest where its chunks are read or written; every method that gathers is called by all ranks.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._name_of: Mapping[Any, str] = model.param2name
        self._weight_of = {name: weight for weight, name in self._name_of.items()}
        self.device = current_device()

    def rest(self) -> None:
        """Let each rank have its shards alone, whatever pass was made or broken off."""
        rest(self._model)

    def of(self, name: str) -> Any:
        """Return the chunk that a weight lies in."""
        return self._model.chunk_manager.get_chunk(self._weight_of[name])

    def names(self) -> list[str]:
        """Return the names of all weights, tied ones once."""
        return list(self._weight_of)

    def place(self, name: str) -> Place:
        """Return where this rank's part of a weight is, in chunks of any kind."""
        chunk = self.of(name)
        whole = chunk.tensors_info[self._weight_of[name]]
        start, end = max(whole.offset, chunk.shard_begin), min(whole.end, chunk.shard_end)
        end = max(start, end)
        return Place(
            slice(start - chunk.shard_begin, end - chunk.shard_begin), slice(start - whole.offset, end - whole.offset)
        )

    def empty_shard(self, chunk: Any) -> Tensor:
        """Return zeros, of float32, in the shape of a rank's shard."""
        return torch.zeros(chunk.shard_size, device=self.device)

    def gathered(self, chunk: Any, shard: Tensor) -> dict[str, Tensor]:
        """Return, on the device, whole tensors by the names of a chunk's weights: views of what all shards make up.

        Args:
            chunk: says what is where.
            shard: this rank's.
        """
        everything = torch.empty(chunk.chunk_size, dtype=shard.dtype, device=self.device)
        dist.all_gather_single(everything, shard.to(self.device), group=chunk.torch_pg)
        return {
            self._name_of[weight]: everything[place.offset : place.end].view(weight.shape)
            for weight, place in chunk.tensors_info.items()
        }

    def working(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that passes use, gathered chunk by chunk."""
        self.rest()
        for chunk in chunks_of(self._model):
            # An offloaded shard may be older than its master, from which the next pass would take it.
            source = chunk if chunk.optim_sync_flag else chunk.paired_chunk
            yield from self.gathered(chunk, source.payload.to(chunk.dtype)).items()

    def exact(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of these names in float32, gathered chunk by chunk."""
        for chunk in dict.fromkeys(self.of(name) for name in names):
            source = chunk if chunk.paired_chunk is None else chunk.paired_chunk
            whole = self.gathered(chunk, source.payload)
            yield from ((name, tensor) for name, tensor in whole.items() if name in names)

    def load(self, name: str, weight: Tensor) -> None:
        """Take this rank's part of a whole weight, as it is used and as it is kept."""
        chunk, place = self.of(name), self.place(name)
        for target in (chunk, chunk.paired_chunk):
            if target is not None:
                target.payload[place.in_shard].copy_(weight.reshape(-1)[place.in_weight])


_MOMENTS = ("exp_avg", "exp_avg_sq")


class GeminiOptimizer(ColossalOptimizer):
    """Checks the gradients in all ranks' shards, and steps on this rank's.

    Its arguments are `ColossalOptimizer`'s, and the chunks of its model; `inner` is Gemini's optimizer.
    """

    inner: ShardedOptimizer

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
        super().__init__(inner, members=members, max_norm=max_norm, scaled=scaled, ranks=ranks)
        self._chunks = chunks

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
        """Put this rank's part in the place of the present moments."""
        counts = moments.get("step", {})
        self._check_steps(counts)
        state = self.inner.optim.state
        state.clear()
        for number, held in self.inner.id_to_fake_params.items():
            name = self.names[number]
            if name in counts:
                own = self._chunks.place(name).in_weight
                state[held] = {"step": int(counts[name])} | {
                    moment: moments[moment][name].reshape(-1)[own].to(held.device, torch.float32, copy=True)
                    for moment in _MOMENTS
                }

    def _steps(self) -> list[int]:
        """Return how many steps each weight has taken, in the order of `names`; a rank knows its own shards alone."""
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
                found[self._chunks.place(name).in_shard].copy_(self.inner.optim.state[held][moment])
        return found

    def _check_steps(self, counts: Mapping[str, Tensor]) -> None:
        """Check that HybridAdam can go on from these counts: on a GPU it has one for each group.

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

    def _step(self) -> None:
        if self.inner.gradients():
            self.inner.step()


Placement = Literal["static", "auto"]


class GeminiBooster(ColossalBooster):
    """Weights, gradients, masters and moments lie in chunks, of which each rank has its shard.

    A forward or backward pass gathers a chunk when it comes to one of its weights, and lets it go again. So `plain` is
    not the model that is trained, whose weights are never there together, but a twin that `awake` gives weights.

    In bf16 and fp16 weights and gradients are rounded, and float32 masters are stepped; in fp32 there are no masters.

    Args:
        precision: of weights, gradients and arithmetic.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together; None takes torch.distributed's default group.
        placement: static, all shards on the GPU (or, without one, in host memory); or auto, by the GPU memory that is
            free.
    """

    _twin: Twin
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
        super().__init__(precision, max_norm, ranks)

    def _plugin(self) -> Any:
        return ShardedPlugin(working=self.autocast_dtype, placement=self._placement)

    def new_optimizer(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return ColossalAI's HybridAdam, the one that steps on Gemini's shards.

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
        self._twin = Twin(model, dict(model.named_parameters()), dtype=self.autocast_dtype, device=current_device())
        boosted: Any
        boosted, wrapped = super()._boosted(model, optimizer)
        for theirs, own in zip(self._twin.model.modules(), model.modules(), strict=True):
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
        return self._twin.model

    def awake(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context in which the twin has all weights, in the working precision; then they are freed."""
        return self._twin.awake(self._chunks.working)

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:  # noqa: ARG002
        """Return copies of weights, of their masters if they are rounded: as `OwnBooster` says."""
        self._chunks.rest()
        found = {}
        for name, tensor in self._chunks.exact(self._chunks.names() if names is None else names):
            if names is not None or self.ranks.is_first:
                found[name] = tensor.to("cpu", copy=True)
        return found

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        """Overwrite this rank's parts of the weights that are named, and buffers."""
        self._chunks.rest()
        buffers = dict(self._twin.model.named_buffers())
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

        yield host_copy(self._twin.model, tensor_for) if self.ranks.is_first else None


def _check(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that Gemini can train the model.

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
