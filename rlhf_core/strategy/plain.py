"""The booster that needs nothing but torch: data parallelism, loss scaling, and checkpoints without pickle.

Its optimizer averages gradients over ranks, refuses what is not finite, and clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy import files
from rlhf_core.strategy.booster import TrainedState
from rlhf_core.strategy.optimizer import CheckedOptimizer, GradientError
from rlhf_core.strategy.ranks import Ranks, current_ranks, together

BUCKET_ELEMENTS = 1 << 26
"""Gradients that travel together, cut where they pass this: averaging takes 256 MB of memory for float32."""


class LossScale:
    """The factor that keeps float16 gradients from vanishing: halved when they overflow, doubled after a while."""

    GROWTH_INTERVAL = 2000
    SMALLEST = 1.0

    def __init__(self) -> None:
        self.factor = 65536.0
        self.good_steps = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller factor is left to try after an overflow."""
        return self.factor > self.SMALLEST

    def overflowed(self) -> None:
        """Take note of an overflow."""
        self.factor, self.good_steps = self.factor / 2, 0

    def stepped(self) -> None:
        """Take note of a step."""
        self.good_steps += 1
        if self.good_steps == self.GROWTH_INTERVAL:
            self.factor, self.good_steps = self.factor * 2, 0

    def facts(self) -> dict[str, float | int]:
        """Return what a continuation needs, as JSON holds it."""
        return {"factor": self.factor, "good_steps": self.good_steps}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Go on from what `facts` returned."""
        self.factor, self.good_steps = float(facts["factor"]), int(facts["good_steps"])


class PlainOptimizer(CheckedOptimizer):
    """Wraps a torch optimizer; every step is one of all ranks.

    Args:
        optim: the optimizer; its schedule stays attached to it.
        max_norm: gradients are scaled down to this norm, over all weights; None never clips.
        ranks: who trains together.
        scaled: whether losses are scaled for float16.
    """

    def __init__(
        self, optim: torch.optim.Optimizer, *, max_norm: float | None, ranks: Ranks, scaled: bool = False
    ) -> None:
        self.optim = optim
        self.max_norm = max_norm
        self.ranks = ranks
        self.scale: LossScale | None = LossScale() if scaled else None
        self._norm = 0.0
        self._is_ready = False
        """Whether the gradients are those of all ranks already, checked and clipped."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state by parameter."""
        return self.optim.state

    def parameters(self) -> list[nn.Parameter]:
        """Return all that is trained, in the order of the groups."""
        return [member for group in self.optim.param_groups for member in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._is_ready = False
        self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the loss scale where there is one."""
        state: dict[str, Any] = self.optim.state_dict()
        if self.scale is not None:
            state["loss_scale"] = self.scale.facts()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        state = dict(state_dict)
        held = state.pop("loss_scale", None)
        if self.scale is not None and held is not None:
            self.scale.load(held)
        self.optim.load_state_dict(state)

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the model's."""
        torch.autograd.backward(loss if self.scale is None else loss * self.scale.factor)

    def get_grad_norm(self) -> float:
        """Return the norm before clipping of the last step's gradient, over all ranks."""
        return self._norm

    def make_ready(self, max_norm: float | None = None) -> None:
        """Average the gradients over ranks, check and clip them; the next step cannot fail on them any more.

        Changes nothing but the gradients, so that several models can be checked before any of them steps.

        Args:
            max_norm: instead of the optimizer's own.

        Raises:
            GradientError: if the norm is not finite, on all ranks, unless a smaller loss scale is left to try.
        """
        parameters = self.parameters()
        _average(parameters, self.ranks)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.scale is not None:
            for gradient in gradients:
                gradient.div_(self.scale.factor)
        norm = nn.utils.get_total_norm(gradients)
        self._norm = norm.item()  # the one wait for the device
        self.last_step_skipped = not math.isfinite(self._norm)
        limit = self.max_norm if max_norm is None else max_norm
        if self.last_step_skipped:
            if self.scale is None or not self.scale.can_shrink:
                self.zero_grad()
                raise GradientError(self._norm)
        elif limit is not None:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self._is_ready = True

    def step(self, max_norm: float | None = None) -> None:
        """Take one step, the same on every rank, from gradients that `make_ready` has seen; without that, it does now.

        In float16 a gradient that overflowed is forgotten, the loss scale halved, and no step is taken.

        Args:
            max_norm: as for `make_ready`.

        Raises:
            GradientError: as `make_ready` does; no weight was changed.
        """
        if not self._is_ready:
            self.make_ready(max_norm)
        self._is_ready = False
        if self.last_step_skipped:
            self.zero_grad()
            if self.scale is not None:
                self.scale.overflowed()
            return
        self.optim.step()
        if self.scale is not None:
            self.scale.stepped()


def _average(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its mean over ranks; a rank without one counts as zero."""
    if ranks.world_size == 1:
        return
    members = list(parameters)
    # A weight that no rank used keeps no gradient, as on one rank: with one, weight decay would move it.
    used = ranks.max(torch.tensor([int(member.grad is not None) for member in members])).tolist()
    gradients = [_flat_gradient(member) for member, is_used in zip(members, used, strict=True) if is_used]
    for bucket in _buckets(gradients):
        flat = torch.cat(bucket)
        ranks.add_up(flat)
        flat.div_(ranks.world_size)
        for piece, mean in zip(bucket, torch.split(flat, [piece.numel() for piece in bucket]), strict=True):
            piece.copy_(mean)


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a flat view of the weight's gradient, which is given one if it has none."""
    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
    return parameter.grad.view(-1)


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Cut flat gradients into pieces, and group those of one dtype and device, in their order, up to a bounded size."""
    buckets: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for gradient in gradients:
        kind, rest = (gradient.dtype, gradient.device), gradient
        while rest.numel():
            if not room.get(kind):
                buckets.setdefault(kind, []).append([])
                room[kind] = BUCKET_ELEMENTS
            piece, rest = rest[: room[kind]], rest[room[kind] :]
            buckets[kind][-1].append(piece)
            room[kind] -= piece.numel()
    return [bucket for kind in buckets.values() for bucket in kind]


def weights(model: nn.Module, names: Sequence[str] | None, ranks: Ranks) -> dict[str, Tensor]:
    """Return copies, in host memory, of the named trainable weights, or of all of them on the first rank."""
    own = trainable_parameters(model)
    wanted = names if names is not None else own if ranks.is_first else ()
    return {name: own[name].detach().to("cpu", copy=True) for name in wanted}


def load_weights(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Copy whole tensors over the model's parameters and buffers of these names."""
    own: dict[str, Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def moments(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Return copies, in host memory, of an optimizer's tensors by moment and weight."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trainable_parameters(model).items():
        for moment, tensor in optimizer.state[parameter].items():
            found.setdefault(moment, {})[name] = tensor.detach().to("cpu", copy=True)
    return found


def load_moments(model: nn.Module, optimizer: Any, given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give the optimizer its moments, which it knows by number, by name."""
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    members = [member for group in optimizer.param_groups for member in group["params"]]
    covered = {name for held in given.values() for name in held}
    state = {
        # Cloned: the optimizer writes into what it is given.
        number: {moment: held[names[member]].clone() for moment, held in given.items()}
        for number, member in enumerate(members)
        if names[member] in covered
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PlainBooster:
    """Every rank holds the whole model; gradients are averaged once per optimizer step.

    Averaging over ranks means that a loss is its sum / (denominator over all ranks) * world_size.

    Args:
        precision: of the forward pass, for which trainers ask; fp16 also scales the loss. Weights stay float32.
        max_norm: gradients are clipped to this norm; None never clips.
        ranks: who trains together; None takes torch.distributed's default group, if there is one.
    """

    equal_passes = False

    def __init__(self, precision: Precision = "fp32", max_norm: float | None = 1.0, ranks: Ranks | None = None) -> None:
        if precision not in get_args(Precision):
            raise ConfigError(f"expected precision fp32, bf16 or fp16, got {precision!r}")
        self.precision = precision
        self.max_norm = max_norm
        self.ranks = current_ranks() if ranks is None else ranks

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The arithmetic that `precision` names."""
        return _DTYPES[self.precision]

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Callable[..., Any] | None, Any, Any]:
        """Give every rank the weights of rank 0, and return all five as they are, the optimizer wrapped."""
        if self.ranks.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                self.ranks.broadcast(tensor)
        wrapped = None if optimizer is None else self._wrapped(optimizer)
        return model, wrapped, criterion, dataloader, lr_scheduler

    def new_optimizer(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return torch's AdamW, fused: five times as fast as its loop, on a CPU too."""
        return torch.optim.AdamW([dict(group) for group in groups], betas=betas, fused=True)

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Add the loss's gradients to the model's; the optimizer may be a bare one of torch's."""
        if isinstance(optimizer, PlainOptimizer):
            optimizer.backward(loss)
        else:
            torch.autograd.backward(loss)

    def no_sync(
        self,
        model: nn.Module | None = None,  # noqa: ARG002 - the protocol's
        optimizer: Any = None,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Return a context that does nothing: ranks meet only when a step is taken."""
        return nullcontext()

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,  # noqa: ARG002 - ColossalAI's, without a meaning here
        prefix: str | None = None,  # noqa: ARG002
        size_per_shard: int = 1024,
        use_safetensors: bool = True,  # noqa: ARG002 - always: nothing is pickled
    ) -> None:
        """Write the model from rank 0, and wait for it on all: one file, or a directory that transformers loads.

        Args:
            model: stays as it is.
            checkpoint: the file; with `shard` the directory, whose weights have the adapters merged. What an exact
                continuation needs besides, the adapters apart from what they adapt, is in a file beside them.
            shard: a directory of shards instead of one file.
            gather_dtensor: without a meaning here.
            prefix: without a meaning here.
            size_per_shard: megabytes.
            use_safetensors: always.
        """

        def write() -> None:
            if shard:
                files.write_model_directory(model, checkpoint, shard_mb=size_per_shard)
            else:
                files.write_model_file(model, checkpoint)

        self._from_first(write)

    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True) -> nn.Module:  # noqa: ARG002
        """Put back what `save_model` wrote, file or directory, to the bit; return the model.

        Raises:
            ModelError: if it is damaged or belongs to a model of another form; nothing was changed.
        """
        files.read_model(model, checkpoint)
        return model

    def save_optimizer(
        self,
        optimizer: Any,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,  # noqa: ARG002 - ColossalAI's, without a meaning here
        prefix: str | None = None,  # noqa: ARG002
        size_per_shard: int = 1024,  # noqa: ARG002
    ) -> None:
        """Write the optimizer's state from rank 0: one file of tensors with the facts in its header."""
        self._from_first(lambda: files.write_optimizer(optimizer, checkpoint, directory=shard))

    def load_optimizer(self, optimizer: Any, checkpoint: str) -> Any:
        """Put back what `save_optimizer` wrote; return the optimizer.

        Raises:
            ModelError: if it is damaged or belongs to other weights; nothing was changed.
        """
        files.read_optimizer(optimizer, checkpoint)
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Write the schedule's state as JSON, from rank 0."""
        self._from_first(lambda: files.write_scheduler(lr_scheduler, checkpoint))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Put back what `save_lr_scheduler` wrote.

        Raises:
            ModelError: if it is damaged.
        """
        files.read_scheduler(lr_scheduler, checkpoint)

    def plain(self, model: nn.Module) -> nn.Module:
        """Return the model: nothing is around it."""
        return model

    def awake(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Return a context that does nothing: all weights are there."""
        return nullcontext()

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights: all on the first rank, those that are named on every rank."""
        return weights(model, names, self.ranks)

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights that are named."""
        load_weights(model, weights)

    def state(self, model: nn.Module, optimizer: Any) -> TrainedState:
        """Return copies of all trainable weights and their moments, on the first rank."""
        if not self.ranks.is_first:
            return TrainedState({}, {})
        return TrainedState(self.weights(model), moments(model, optimizer))

    def load_state(self, model: nn.Module, optimizer: Any, state: TrainedState) -> None:
        """Put back what `state` returned."""
        self.load_weights(model, state.weights)
        load_moments(model, optimizer, state.moments)

    def exact(self, model: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Return the context of the model itself on the first rank, of None on the others."""
        return nullcontext(model if self.ranks.is_first else None)

    def _from_first(self, write: Callable[[], None]) -> None:
        """Write on the first rank; the others wait for it, and fail if it did."""
        together(self.ranks, write if self.ranks.is_first else lambda: None, what="write the checkpoint")

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> PlainOptimizer:
        return PlainOptimizer(optimizer, max_norm=self.max_norm, ranks=self.ranks, scaled=self.precision == "fp16")
