"""What trainers do with a model that a booster has wrapped or sharded, whether the booster is ours or another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from rlhf_core.config.strategy import StrategyName, TrainersConfig
from rlhf_core.models.token_tree import can_branch
from rlhf_core.models.trunk import unwrapped
from rlhf_core.strategy import plain
from rlhf_core.strategy.booster import Booster, OwnBooster, Precision, TrainedState
from rlhf_core.strategy.factory import check_strategy, make_booster
from rlhf_core.strategy.ranks import ALONE, Ranks, current_ranks, together
from rlhf_core.training.micro_batches import FEW_PASSES, PassCost, cost_on

T = TypeVar("T")
PRECISIONS: dict[torch.dtype, Precision] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def strategy_booster(
    strategy: StrategyName,
    *,
    dtype: torch.dtype,
    max_norm: float,
    device: torch.device | str,
    ranks: Ranks | None,
    accumulates: bool,
) -> OwnBooster:
    """Return a new booster, for one model.

    Args:
        strategy: by name.
        dtype: arithmetic of forward passes.
        max_norm: gradients are clipped to it, over all weights and ranks.
        device: of the model.
        ranks: who trains together; None takes torch.distributed's default group.
        accumulates: whether a step has several backward passes.

    Raises:
        ConfigError: if the strategy cannot be had here.
    """
    precision, device = PRECISIONS[dtype], torch.device(device)
    check_strategy(strategy, precision=precision, cuda=device.type == "cuda", accumulates=accumulates)
    return make_booster(strategy, precision=precision, max_norm=max_norm, ranks=ranks, device=device)


def ranks_of(trainers: TrainersConfig, ranks: Ranks | None) -> Ranks:
    """Return the processes of a configuration, laid out as it says; None takes torch.distributed's default group.

    Raises:
        ConfigError: if they cannot be.
    """
    return (current_ranks() if ranks is None else ranks).laid_out(trainers.parts)


def own(booster: Booster) -> OwnBooster | None:
    """Return the booster if it is one of ours; None if it has only what ColossalAI's has."""
    return cast("OwnBooster", booster) if hasattr(booster, "equal_passes") else None


def plain_model(booster: Booster, model: Any) -> Any:
    """Return the model of transformers or of ours inside a boosted one; its weights are there while it is `awake`."""
    ours = own(booster)
    return unwrapped(model) if ours is None else ours.plain(model)


@contextmanager
def awake(models: Iterable[tuple[Booster, nn.Module]]) -> Iterator[None]:
    """Run the block with all weights of these models there, in `plain_model`; called by all ranks."""
    with ExitStack() as stack:
        for booster, model in models:
            if (ours := own(booster)) is not None:
                stack.enter_context(ours.awake(model))
        yield


def exact(booster: Booster, model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context of a plain model with the exact weights on the first rank, of None on the others."""
    ours = own(booster)
    return nullcontext(unwrapped(model)) if ours is None else ours.exact(model)


def weights(booster: Booster, model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return copies of trainable weights by the plain model's names, in host memory, the same on every rank."""
    ours = own(booster)
    return plain.weights(unwrapped(model), names, ALONE) if ours is None else ours.weights(model, names)


def trained_on_first(booster: Booster, model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Return copies of all trainable weights by the plain model's names, in host memory, on the first rank alone."""
    ours = own(booster)
    return plain.weights(unwrapped(model), None, ranks) if ours is None else ours.weights(model, None)


def load_weights(booster: Booster, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite weights by the plain model's names, wherever the booster keeps them; the same on every rank."""
    ours = own(booster)
    if ours is None:
        plain.load_weights(unwrapped(model), tensors)
    else:
        ours.load_weights(model, tensors)


def held_state(
    booster: Booster, model: nn.Module, optimizer: Any, ranks: Ranks, *, copied: bool = True
) -> TrainedState:
    """Return all trainable weights and moments on the first rank, an empty state on the others.

    Args:
        booster: of the model.
        model: as it was boosted.
        optimizer: as it was boosted.
        ranks: who trains together.
        copied: as for `plain.weights`; what a strategy gathers is a copy in any case.
    """
    ours = own(booster)
    if ours is not None and (copied or not isinstance(ours, plain.PlainBooster)):
        return ours.state(model, optimizer)
    inner = unwrapped(model)
    held = plain.moments(inner, optimizer, copied=copied) if ranks.is_first else {}
    return TrainedState(plain.weights(inner, None, ranks, copied=copied), held)


def load_held_state(booster: Booster, model: nn.Module, optimizer: Any, state: TrainedState) -> None:
    """Put back what `held_state` returned; the same on every rank, and known to fit."""
    ours = own(booster)
    if ours is not None:
        ours.load_state(model, optimizer, state)
        return
    inner = unwrapped(model)
    plain.load_weights(inner, state.weights)
    plain.load_moments(inner, optimizer, state.moments)


def equal_passes(booster: Booster) -> bool:
    """Return whether passes through the boosted model wait for all ranks; of another's booster it is not known."""
    ours = own(booster)
    return ours is not None and ours.equal_passes


def passes(booster: Booster, mine: int, ranks: Ranks) -> int:
    """Return how many passes this rank has to make, which has work for `mine`: what is above that is idle.

    Called by all ranks.
    """
    return int(ranks.max(torch.tensor(mine)).item()) if equal_passes(booster) else mine


def pass_cost(booster: Booster, model: Any, device: torch.device) -> PassCost:
    """Return what passes through a boosted model cost.

    Few passes are wanted where they wait for all ranks, and of another's booster, which may not accumulate gradients.
    """
    ours, cost = own(booster), cost_on(device, model)
    if ours is None or ours.equal_passes:
        cost = PassCost(FEW_PASSES, cost.is_tree)
    return cost._replace(is_tree=cost.is_tree and can_branch(model))


def keeps_layers(booster: Booster) -> bool:
    """Return whether a booster leaves a model's layers as they were; of another's booster nobody knows."""
    ours = own(booster)
    return ours is not None and ours.keeps_layers


def rounds(booster: Booster, items: Iterable[T], ranks: Ranks, *, what: str) -> Iterator[T | None]:
    """Yield what is to go through the model; None for an idle pass, where passes wait for ranks that have more.

    Args:
        booster: of the model.
        items: this rank's; getting one may raise, and then all ranks end.
        ranks: who trains together.
        what: as for `together`.
    """
    if not equal_passes(booster):
        yield from items
        return
    iterator = iter(items)
    while True:
        item = together(ranks, lambda: next(iterator, None), what=what)
        if not ranks.any(item is not None):
            return
        yield item


def held_back(booster: Booster, model: nn.Module, optimizer: Any, *, is_last: bool) -> AbstractContextManager[Any]:
    """Return the context of a micro-batch, forward and backward: gradients travel with a step's last one, if they can.

    Args:
        booster: some cannot wait, and average in every pass.
        model: as it was boosted.
        optimizer: as it was boosted.
        is_last: whether the gradients are complete with this micro-batch.
    """
    plugin = getattr(booster, "plugin", None)  # ColossalAI's booster asserts that it has one that can
    if is_last or (own(booster) is None and plugin is not None and not plugin.support_no_sync()):
        return nullcontext()
    return booster.no_sync(model, optimizer)
