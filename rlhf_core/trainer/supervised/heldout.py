"""Prompts that a reward model is measured on, so that none of them is learnt."""

from __future__ import annotations

import hashlib
import logging

import torch

from rlhf_core.errors import DataError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.supervised.batches import PairBatch

logger = logging.getLogger(__name__)


class HeldoutPrompts:
    """Knows the evaluation pairs' prompts, those of all ranks."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._all: frozenset[int] = frozenset()
        self._warned = False

    def begin(self) -> None:
        """Forget this rank's prompts of an earlier fit."""
        self._own.clear()

    def add(self, micro: PairBatch) -> None:
        """Take in a batch of evaluation pairs."""
        self._warn_of_guesses(micro)
        self._own |= {_digest(prompt) for prompt in micro.prompts if prompt}

    def agree(self, ranks: Ranks) -> None:
        """Tell all ranks of each one's prompts; called by all together."""
        digests = torch.tensor(sorted(self._own), dtype=torch.long)
        self._all = frozenset(ranks.gather(digests).tolist())

    def refuse(self, micro: PairBatch) -> None:
        """See that a batch of training pairs has no such prompt.

        Raises:
            DataError: if it has one.
        """
        if not self._all:
            return
        self._warn_of_guesses(micro)
        if any(_digest(prompt) in self._all for prompt in micro.prompts if prompt):
            raise DataError(
                "a training pair has the prompt of an evaluation pair, and a reward model is measured on prompts that "
                "it never saw; leave such prompts out of one of the two"
            )

    def _warn_of_guesses(self, micro: PairBatch) -> None:
        if micro.guessed and not self._warned:
            self._warned = True
            logger.warning(
                "batches of pairs do not say where their prompts end, so what both sequences begin with is taken for "
                "it, and a prompt that is learnt and measured too may go unnoticed; give chosen_loss_mask or "
                "prompt_length, as DataCollatorForPreferenceDataset does"
            )


def _digest(prompt: tuple[int, ...]) -> int:
    """Return a number of 63 bits that stands for a prompt's token ids, the same in every process."""
    body = hashlib.sha256(repr(prompt).encode()).digest()
    return int.from_bytes(body[:8], "big") >> 1
