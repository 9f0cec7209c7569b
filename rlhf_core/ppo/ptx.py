"""Demonstrations that are learnt beside PPO, so that the policy does not forget how to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rlhf_core.errors import DataError
from rlhf_core.strategy.ranks import Ranks, current_ranks
from rlhf_core.supervised.batches import Demonstration, as_masked
from rlhf_core.training.padding import PaddedBatch, pad_examples, pad_right


class PtxSource(Protocol):
    """Demonstrations by the number of the optimizer step: a resumed run needs no cursor."""

    def batch(self, step: int) -> PaddedBatch:
        """Return this rank's demonstrations of one step; the same number always gives the same ones."""


class Demonstrations:
    """Passes over demonstrations in seeded orders, shared out over the ranks without overlap.

    Args:
        examples: token ids of prompt and response, the stop token included; or all ids with the mask of what is learnt.
        batch_size: demonstrations of a step on one rank.
        seed: of the order of each pass.
        device: of the batches.
        ranks: who shares a step; None takes torch.distributed's default group.

    Raises:
        DataError: if there is no demonstration, or one has an empty part.
    """

    def __init__(
        self,
        examples: Sequence[Demonstration],
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
        self._examples = [as_masked(example) for example in examples]
        for row, (example, masked) in enumerate(zip(examples, self._examples, strict=True), start=1):
            if not all(example) or not any(masked.loss_mask[1:]):  # nothing predicts the first token
                raise DataError(f"demonstration {row} of {len(examples)} has an empty prompt or response")
        self._batch_size = batch_size
        self._seed = seed
        self._device = torch.device(device)
        self._ranks = current_ranks() if ranks is None else ranks
        self._order = (-1, np.empty(0, dtype=np.int64))  # of the last pass that was asked for

    def batch(self, step: int) -> PaddedBatch:
        """Return this rank's demonstrations of one step, from 0."""
        start = (step * self._ranks.world_size + self._ranks.rank) * self._batch_size
        rows = [self._row(position) for position in range(start, start + self._batch_size)]
        examples = [self._examples[row] for row in rows]
        starts = [example.loss_mask.index(True, 1) for example in examples]  # what is before needs no logits
        parts = list(zip(examples, starts, strict=True))
        padded = pad_examples([(example.ids[:start], example.ids[start:]) for example, start in parts], self._device)
        learnt, _ = pad_right([example.loss_mask[start:] for example, start in parts], self._device)
        return padded._replace(action_mask=padded.action_mask & learnt.bool())

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, len(self._examples))
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._examples))
        return int(self._order[1][place])
