"""ZeRO's optimizer on any device, with gradients reduced in an order that all ranks share, and checked before the step.

What differs from ColossalAI's `LowLevelZeroOptimizer`, and why:

    on a CPU             its sanity check takes no device but a GPU or an NPU
    the order            its buckets fill in the order in which a backward pass reaches the weights. Where two ranks use
                         different weights, it would add up gradients of one with those of another, or wait for ever.
                         Here the order is fixed, and a weight that this rank did not use is there with zeros.
    groups               its bucket is sent off whenever the next weight is in another group of the optimizer: norms
                         and matrices, which have their own weight decay, alternate, several times in each layer
    norm and clipping    its step computes, unscales and clips in one go, too late to refuse a gradient that is not
                         finite; the adapter has done that before, and says by what to multiply
    copies               on a CPU, weights that are gathered through a bucket cost more time than sending them

What gloo is slow at is done by what it is fast at. Of twelve million float32 numbers between two processes of one
machine, its reduce-scatter takes 0.12 s where its all-reduce takes 0.06, and its all-gather 0.18 s where a broadcast of
each rank's part takes 0.03 altogether. NCCL is at its best as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.strategy.colossal.compat.loading import upstream


class GlooCollectives:
    """Stands for torch.distributed in a module of ColossalAI's, with two functions of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def reduce_scatter_tensor(output: Tensor, input: Tensor, *, group: Any = None) -> None:
        """Write this rank's part of the sum over ranks to `output`; what is in `input` is lost."""
        dist.all_reduce(input, group=group)
        output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    @staticmethod
    def all_gather_into_tensor(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
        """Write the parts of all ranks to `output`, one after the other."""
        assert not async_op  # which only overlap_allgather asks for
        parts = output.chunk(dist.get_world_size(group))
        parts[dist.get_rank(group)].copy_(input)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)


def use_gloo_well() -> None:
    """Let ZeRO's optimizer sum and gather so."""
    for name in ("low_level_optim", "_utils"):
        upstream(f"colossalai.zero.low_level.{name}").dist = GlooCollectives()


GATHERED_TOGETHER = 1 << 14
"""Largest shard of a weight, in elements, that a CPU gathers with others after a step, which copies it three times."""

if not torch.cuda.is_available():
    use_gloo_well()
# Any: ColossalAI is untyped.
_Optimizer: Any = upstream("colossalai.zero.low_level.low_level_optim").LowLevelZeroOptimizer
_Plugin: Any = upstream("colossalai.booster.plugin").LowLevelZeroPlugin


class OrderedZero(_Optimizer):  # type: ignore[misc]
    """ColossalAI's optimizer of ZeRO-2 with these differences.

    A backward pass reduces all weights, in all ranks' one order; `drop` takes out those that no rank used.
    """

    grad_handles: list[Any] = []  # noqa: RUF012 - for the end of one whose creation failed; each has its own

    def __init__(self, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        if not torch.cuda.is_available():
            for bucket in self.pg_to_bucket_store.values():
                bucket.reduce_bucket_size = GATHERED_TOGETHER  # of the step's gathering; passes have their own
        self.mixed_precision_mixin = None  # the adapter scales losses, as with the other strategies
        self.multiplier = 1.0
        """What the gradients of the next step are multiplied by."""

    @property
    def working(self) -> list[nn.Parameter]:
        """The model's weights, group by group."""
        return [parameter for group in self._working_param_groups.values() for parameter in group]

    @property
    def masters(self) -> list[Tensor]:
        """This rank's float32 shards of them, in the same order; their moments are by these in `optim.state`."""
        return [shard for group in self._master_param_groups_of_current_rank.values() for shard in group]

    @property
    def used(self) -> list[bool]:
        """Whether this rank has used each of the weights, group by group, since gradients were last forgotten."""
        return [id(parameter) in self._used for parameter in self.working]

    def drop(self, unused: list[bool]) -> None:
        """Forget the gradients of these weights, group by group, so that the next step leaves them alone."""
        flags = iter(unused)
        for number, group in self._working_param_groups.items():
            for parameter in group:
                if next(flags):
                    self.pid_to_grad_store[id(parameter)]._grads_of_params.get(number, {}).pop(id(parameter), None)

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of all gradients."""
        return [
            gradient for number in self._working_param_groups for gradient in self.get_working_grads_by_group_id(number)
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also of a backward pass that an error ended."""
        super().zero_grad(set_to_none)
        self._begin_pass()
        self._used.clear()

    def _sanity_checks(self) -> None:
        for group in self.optim.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != self._dtype:
                    raise ConfigError(
                        f"ZeRO trains weights of one dtype, got {self._dtype} and {parameter.dtype}; load the model in "
                        "float32"
                    )

    def _attach_reduction_hook(self) -> None:
        # The largest group first: the others' gradients then wait for the end of the pass, the fewest altogether.
        groups = sorted(self._working_param_groups.items(), key=lambda group: -sum(p.numel() for p in group[1]))
        self._order: list[tuple[nn.Parameter, int]] = [
            (parameter, number) for number, members in groups for parameter in reversed(members)
        ]
        self._used: set[int] = set()
        self._begin_pass()
        own = proxy(self)  # the hook must not keep the optimizer, which holds the hook

        def arrived(parameter: nn.Parameter) -> None:
            own._arrived(parameter)

        for parameter, _ in self._order:
            self.grad_handles.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    def _begin_pass(self) -> None:
        self._next = 0
        self._here: set[int] = set()

    def _arrived(self, parameter: nn.Parameter) -> None:
        """Put what is complete in the order into buckets, which are sent off as they fill."""
        self._here.add(id(parameter))
        while self._next < len(self._order) and id(self._order[self._next][0]) in self._here:
            self._add_to_bucket(*self._order[self._next])
            self._next += 1

    def _reduce_grad(self, partition_grad: bool) -> None:
        for parameter, _ in self._order:
            if id(parameter) not in self._here:
                parameter.grad = torch.zeros_like(parameter)
        for parameter, number in self._order[self._next :]:
            self._add_to_bucket(parameter, number)
        super()._reduce_grad(partition_grad)
        # Reentrant checkpoints that share a weight reach it once each; the bucket with the first may be gone by then.
        if late := [each for each in self._order if each[0].grad is not None]:
            for parameter, number in late:
                self._add_to_bucket(parameter, number)
            super()._reduce_grad(partition_grad)
        self._used |= self._here
        self._begin_pass()

    def _compute_grad_norm(self, *_: Any, **__: Any) -> float:
        return 0.0

    def _unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: float) -> None:  # noqa: ARG002
        if self.multiplier != 1.0 and grad_groups_flat:
            torch._foreach_mul_(grad_groups_flat, self.multiplier)


class OrderedZeroPlugin(_Plugin):  # type: ignore[misc]
    """ColossalAI's plugin, with `OrderedZero` as its optimizer."""

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Any, Any, Any]:
        """Wrap the model as ColossalAI does, then the optimizer."""
        wrapped, _, *others = super().configure(model, None, criterion, dataloader, lr_scheduler)
        if optimizer is None:
            return (wrapped, None, *others)
        zero = OrderedZero(optimizer, **self.zero_optim_kwargs, backward_context=wrapped._hook_context)
        return (wrapped, zero, *others)
