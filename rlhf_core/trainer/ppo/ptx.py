"""Demonstrations that are learnt beside PPO, so that the policy does not forget how to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rlhf_core.errors import DataError
from rlhf_core.strategy.ranks import Ranks, current_ranks
from rlhf_core.trainer.base import PaddedBatch, TokenIds, pad_examples


class PtxSource(Protocol):
    """Demonstrations by the number of the optimizer step: a resumed run needs no cursor."""

    def batch(self, step: int) -> PaddedBatch:
        """Return this rank's demonstrations of one step; the same number always gives the same ones."""


class Demonstrations:
    """Passes over demonstrations in seeded orders, dealt to the ranks without overlap.

    Args:
        examples: token ids of prompt and response, the stop token included.
        batch_size: demonstrations of a step on one rank.
        seed: of the order of each pass.
        device: of the batches.
        ranks: who shares a step; None takes torch.distributed's default group.

    Raises:
        DataError: if there is no demonstration, or one has an empty part.
    """

    def __init__(
        self,
        examples: Sequence[tuple[TokenIds, TokenIds]],
        *,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        ranks: Ranks | None = None,
    ) -> None:
        if not examples:
            raise DataError(
                "ppo.ptx_coef is above 0, but there is no demonstration to learn; give some, or set it to 0"
            )
        for row, (prompt, response) in enumerate(examples, start=1):
            if not prompt or not response:
                raise DataError(f"demonstration {row} of {len(examples)} has an empty prompt or response")
        self._examples = list(examples)
        self._batch_size = batch_size
        self._seed = seed
        self._device = torch.device(device)
        self._ranks = current_ranks() if ranks is None else ranks
        self._order = (-1, np.empty(0, dtype=np.int64))  # of the last pass that was asked for

    def batch(self, step: int) -> PaddedBatch:
        """Return this rank's demonstrations of one step, from 0."""
        start = (step * self._ranks.world_size + self._ranks.rank) * self._batch_size
        rows = [self._row(position) for position in range(start, start + self._batch_size)]
        return pad_examples([self._examples[row] for row in rows], self._device)

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, len(self._examples))
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._examples))
        return int(self._order[1][place])
