"""What a rank of a detached trainer learns: its rows of an episode that all are given, and its demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_core.coati.prompt_batches import demonstrations_of
from rlhf_core.errors import ConfigError
from rlhf_core.models.compatibility import vocabulary_size
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.order import Rows, minibatch_order
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.loaders import Batches, CycledLoader
from rlhf_core.training.padding import PaddedBatch
from rlhf_core.types import Experience

_RESTATED = ("action_log_probs", "values", "advantages", "returns")
"""What `PPOLearner.recompute` may change."""


class RankShare(NamedTuple):
    """A step learns from a batch of each rank: what one trainer learns from batches of that many times the size."""

    ranks: Ranks
    train_batch_size: int
    """Of one rank."""

    @property
    def batch_size(self) -> int:
        """Rows of a batch of all ranks."""
        return self.train_batch_size * self.ranks.world_size

    def of(self, rows: Rows, rank: int | None = None) -> Rows:
        """Return a rank's part of the rows of a step; None takes this one's."""
        return rows[self.ranks.rank if rank is None else rank :: self.ranks.world_size]

    def restated(self, learner: PPOLearner, whole: Experience) -> Experience:
        """Return an episode as the learner's weights restate it: each rank does its part, and all get all of it."""
        batches = minibatch_order(seed=0, episode=0, epoch=0, samples=len(whole), batch_size=self.batch_size)
        shares = [np.concatenate([self.of(rows, rank) for rows in batches]) for rank in range(self.ranks.world_size)]
        own = learner.recompute(whole.select(shares[self.ranks.rank]))
        if self.ranks.world_size == 1:
            return own
        places = torch.as_tensor(np.concatenate(shares), device=own.sequences.device)
        whole = whole.replace()
        whole.to_device(own.sequences.device)
        changes = {}
        for name in _RESTATED:
            part = getattr(own, name)
            if part is not None:
                gathered = self.ranks.gather(part)
                changes[name] = torch.empty_like(gathered).index_copy_(0, places, gathered)
        return whole.replace(**changes)


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
