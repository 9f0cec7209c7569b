"""What a rank of a detached trainer learns: its rows of an episode that all are given, and its demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlhf_core.coati.prompt_batches import demonstrations_of
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.supervised.forward import vocabulary_size
from rlhf_core.training.base import PaddedBatch
from rlhf_core.training.loaders import Batches, CycledLoader


def agreed_plan(ranks: Ranks, *numbers: int) -> None:
    """See that all ranks were called with the same numbers, by which each knows when the others do what.

    Raises:
        ConfigError: on all ranks, if they were not.
    """
    plans = ranks.gather(torch.tensor([numbers])).tolist()
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise ConfigError(
                f"fit of rank {rank} has total_steps, update_steps, train_epochs and episode {plan}, that of rank 0 "
                f"{plans[0]}; call it with the same on all ranks"
            )


def demonstrations_loader(dataloader_fn: Callable[[], Batches] | None, ptx_coef: float) -> CycledLoader | None:
    """Return the loader of demonstrations, if any are learnt.

    Raises:
        ConfigError: if they are to be, and there are none.
    """
    if ptx_coef <= 0:
        return None
    if dataloader_fn is None:
        raise ConfigError(f"ptx_coef is {ptx_coef}, but there is no pretrain_dataloader_fn; give one, or set it to 0.0")
    loader: Any = dataloader_fn()
    return CycledLoader(loader, what="the trainer's pretrain_dataloader_fn")


def next_demonstrations(
    loader: CycledLoader | None, learner: PPOLearner, ranks: Ranks, batches: int, *, only_labels: bool
) -> PaddedBatch | None:
    """Return this rank's next demonstrations as one batch; None if none are learnt. Called by all ranks.

    Args:
        loader: of this rank.
        learner: whose model reads them.
        ranks: who learns together.
        batches: of the loader.
        only_labels: learn those tokens that have labels.
    """
    if loader is None:
        return None

    def read() -> PaddedBatch:
        return demonstrations_of(
            [loader.next() for _ in range(batches)],
            device=learner.device,
            only_labels=only_labels,
            vocabulary=vocabulary_size(learner.actor),
        )

    return together(ranks, read, what="read its demonstrations")
