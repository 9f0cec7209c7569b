"""Data parallelism by torch's DDP: gradients are averaged while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlhf_core.models.base import is_shared
from rlhf_core.strategy import plain
from rlhf_core.strategy.booster import Moments
from rlhf_core.strategy.colossal.booster import ColossalBooster, ColossalOptimizer, Members
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.ranks import Ranks


class DDPBooster(ColossalBooster):
    """Every rank holds all of the model, in float32; forward passes are in autocast, as with `PlainBooster`.

    A weight that some rank used gets its mean over ranks, zero where it was not used; one that no rank used keeps no
    gradient, so that weight decay does not move it.
    """

    keeps_layers = True

    def _plugin(self) -> Any:
        return upstream("colossalai.booster.plugin").TorchDDPPlugin(
            # Rank 0's buffers went round in boost. Sent at every forward pass, they would make ranks wait for each
            # other in passes without gradients too, of which they may have different numbers.
            broadcast_buffers=False,
            # It would search every graph, warn where all weights are used, and copy all that the model returns:
            # `DDPOptimizer.backward` does without.
            find_unused_parameters=False,
            gradient_as_bucket_view=True,  # else each gradient is held twice
        )

    def _boosted(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]:
        # else the first rank's base would be written over that of the others, which is theirs alone from then on
        shared = [name for name, parameter in model.named_parameters() if is_shared(parameter)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, shared
        )
        return super()._boosted(model, optimizer)

    def _adapted(self, optimizer: Any, members: Members) -> DDPOptimizer:
        return DDPOptimizer(
            optimizer, members=members, max_norm=self.max_norm, scaled=self.precision == "fp16", ranks=self.ranks
        )

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[Any]:
        """Return the context of passes, forward and backward, whose gradients stay this rank's until the next pass.

        Without the forward pass in it, it changes nothing: gradients are averaged in every pass, which adds up to the
        same.
        """
        context: AbstractContextManager[Any] = self.upstream.no_sync(model, optimizer)
        return context

    def plain(self, model: nn.Module) -> nn.Module:
        """Return the model inside DDP, whose weights are this rank's own."""
        wrapper: Any = model
        inner: nn.Module = wrapper.module.module  # ColossalAI's wrapper around torch's
        return inner

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights: all on the first rank, those that are named on every rank."""
        return plain.weights(self.plain(model), names, self.ranks)

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights and buffers that are named."""
        plain.load_weights(self.plain(model), weights)

    def exact(self, model: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Return the context of the model inside on the first rank, of None on the others."""
        return nullcontext(self.plain(model) if self.ranks.is_first else None)


class DDPOptimizer(ColossalOptimizer):
    """Checks and clips gradients that DDP has averaged: they are the same on every rank, and so is all that follows.

    Args:
        inner: the plugin's wrapper of a torch optimizer.
        members: of its groups.
        max_norm: gradients are clipped to this norm; None never clips.
        scaled: whether losses are scaled for float16.
        ranks: who trains together.
    """

    def __init__(self, inner: Any, *, members: Members, max_norm: float | None, scaled: bool, ranks: Ranks) -> None:
        super().__init__(inner, members=members, max_norm=max_norm, scaled=scaled, ranks=ranks)
        self._reached: set[nn.Parameter] = set()
        """By the present backward pass."""
        self._used: set[nn.Parameter] = set()
        """By any pass since gradients were last forgotten."""
        for parameter in self._parameters():
            parameter.register_post_accumulate_grad_hook(self._reached.add)  # type: ignore[no-untyped-call]

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the model's; zeros for weights that it does not depend on.

        DDP sends gradients off when it has all of a bucket's: without zeros it would wait for the unused for ever.
        """
        self._reached.clear()
        super().backward(loss)
        self._used |= self._reached
        unused = [parameter for parameter in self._parameters() if parameter not in self._reached]
        if unused:
            torch.autograd.backward(unused, [torch.zeros_like(parameter) for parameter in unused])
        self._reached.clear()  # the weights' hooks hold it: with the weights in it, none would ever be freed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none)
        self._used.clear()

    def moments(self) -> Moments:
        """Return copies of all moments on the first rank."""
        found: Moments = {}
        if self.ranks.is_first:
            for name, parameter in zip(self.names, self._parameters(), strict=True):
                for moment, tensor in self.inner.optim.state[parameter].items():
                    found.setdefault(moment, {})[name] = tensor.detach().to("cpu", copy=True)
        return found

    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take the place of the present moments."""
        self._load_into(self.inner.optim, moments)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _global_norm(self) -> float:
        self._drop_unused()
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        if self.scale is not None:
            for gradient in gradients:
                gradient.div_(self.scale.factor)
        self._total = nn.utils.get_total_norm(gradients)
        return self._total.item()

    def _drop_unused(self) -> None:
        """Take away the zeros of weights that no rank has used, which weight decay would move."""
        parameters = self._parameters()
        used = self.ranks.max(torch.tensor([int(parameter in self._used) for parameter in parameters])).tolist()
        for parameter, is_used in zip(parameters, used, strict=True):
            if not is_used:
                parameter.grad = None

    def _clip(self, limit: float | None) -> None:
        if limit is not None:
            nn.utils.clip_grads_with_norm_(self._parameters(), limit, self._total)
