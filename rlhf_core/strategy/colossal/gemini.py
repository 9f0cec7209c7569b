"""Gemini, ZeRO's third stage: every rank holds its share of weights, gradients, masters and moments.

With it come the check before its steps, its moments made whole, and HybridAdam, whose kernel is built at first use.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.lora import adapter_config
from rlhf_core.strategy.colossal.booster import ColossalBooster
from rlhf_core.strategy.colossal.chunks import Chunks
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.adam import forget_powers, host_kernel, use_host_kernel
from rlhf_core.strategy.colossal.compat.gemini import ShardedOptimizer, ShardedPlugin, current_device
from rlhf_core.strategy.colossal.compat.loading import quiet
from rlhf_core.strategy.colossal.copies import host_copy
from rlhf_core.strategy.colossal.kernel import KernelError, alone
from rlhf_core.strategy.colossal.optimizer import ColossalOptimizer, Members, Moments
from rlhf_core.strategy.plain import LossScale, Precision
from rlhf_core.strategy.ranks import Ranks, together

_NVCC_S = 1800.0
"""Longest wait for another process that builds kernels for GPUs."""
Groups = Iterable[Mapping[str, Any]]

logger = logging.getLogger(__name__)


def hybrid_adam(groups: Groups, *, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return HybridAdam, with decoupled weight decay, its kernels built at first use.

    Raises:
        KernelError: if they cannot be built here.
    """
    members = [dict(group) for group in groups]
    if torch.cuda.is_available():
        return _with_cuda_kernels(members, betas)
    host_kernel()
    use_host_kernel()
    return _made(members, betas)


def _with_cuda_kernels(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return HybridAdam with upstream's kernels for GPU and host, which nvcc builds at first use."""
    check_nvcc()
    extension = upstream("colossalai.kernel.extensions.base_extension")._Extension
    folder = Path(extension.get_jit_extension_folder_path())
    is_built = any(folder.glob("fused_optim_cuda*.so"))
    if not is_built:
        logger.info("building HybridAdam's kernels with nvcc into %s (once, some minutes)", folder)
    started = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / "ours.lock", _NVCC_S):
            # torch's own lock outlives a build that was killed, and whoever builds next would wait for it for ever
            (folder / "lock").unlink(missing_ok=True)
            made = _made(groups, betas)
    except KernelError:
        raise
    except Exception as error:  # whatever ColossalAI and torch raise where a build fails
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise KernelError(f"its kernels for GPUs cannot be built ({reason})") from error
    if not is_built:
        logger.info("HybridAdam's kernels are there after %.0f s", time.monotonic() - started)
    return made


def _made(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    with quiet():
        made: torch.optim.Optimizer = upstream("colossalai.nn.optimizer").HybridAdam(groups, betas=betas)
    forget_powers(made)
    return made


def check_nvcc() -> None:
    """See that CUDA's compiler is there, of the release that torch was built with.

    Raises:
        KernelError: if not.
    """
    try:
        home = importlib.import_module("torch.utils.cpp_extension").CUDA_HOME
    except ImportError as error:
        raise KernelError(f"its kernels for GPUs need torch's tools for extensions ({error})") from error
    wanted = str(torch.version.cuda).partition(".")[0]
    nvcc = Path(home or "", "bin", "nvcc")
    if home is None or not nvcc.is_file():
        raise KernelError(
            f"its kernels for GPUs need nvcc of CUDA {wanted}, and there is none; CUDA_HOME may tell where it is"
        )
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    release = re.search(r"release (\d+)", told)
    if release is None or release[1] != wanted:
        found = "cannot be asked for its release" if release is None else f"is of CUDA {release[1]}"
        raise KernelError(
            f"its kernels for GPUs need nvcc of CUDA {wanted}, which torch was built with; {nvcc} {found}"
        )


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
