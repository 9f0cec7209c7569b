"""A score for a whole response: a transformer and one number at its last token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.models.adapters import load_adapters, save_adapters
from rlhf_core.models.heads import apply_head, load_head, load_with_head, random_head, save_head, save_with_head
from rlhf_core.models.saving import SHARD_SIZE
from rlhf_core.models.token_tree import hidden_states
from rlhf_core.models.trunk import copy_trunk


class RewardModel(nn.Module):
    """Scores a prompt with its response.

    Args:
        trunk: a transformer without language-model head; kept, not copied.
        head: linear map from hidden size to one number; None draws a small random one.
    """

    score_mean: Tensor
    """Mean score of held-out samples; 0 until measured."""
    score_std: Tensor
    """Standard deviation of their scores; 1 until measured."""

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head if head is not None else random_head(trunk)
        self.register_buffer("score_mean", torch.zeros((), device=trunk.device))
        self.register_buffer("score_std", torch.ones((), device=trunk.device))

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> Self:
        """Return a reward model on a copy of the model's transformer, with a new random head."""
        return cls(copy_trunk(model))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one raw score per sequence, [B], read at the last attended token, in float32.

        Args:
            input_ids: [B S], padded on either side.
            attention_mask: [B S], True on tokens; at least one per row.
        """
        hidden = hidden_states(self.trunk, input_ids, attention_mask)
        places = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        last = torch.where(attention_mask.bool(), places, -1).amax(dim=1)  # [B]
        rows = torch.arange(len(last), device=last.device)
        return apply_head(self.head, hidden[rows, last])

    def standardise(self, scores: Tensor) -> Tensor:
        """Return raw scores in standard deviations from the mean of the held-out samples."""
        return (scores - self.score_mean) / self.score_std

    def save_pretrained(self, directory: Path, *, max_shard_size: str = SHARD_SIZE) -> None:
        """Write the transformer (adapters merged) as its own library does, and the head beside it."""
        save_with_head(self.trunk, self.head, self._statistics, directory, max_shard_size)

    def save_adapters(self, directory: Path, *, base: str | None = None) -> None:
        """Write the transformer's adapters in peft's format, and the head beside them.

        Args:
            directory: made if absent.
            base: path or name of what they are over.
        """
        save_adapters(self.trunk, directory, base=base)
        save_head(self.head, self._statistics, directory)

    @classmethod
    def over(cls, trunk: PreTrainedModel, directory: Path) -> Self:
        """Return the reward model whose adapters and head `save_adapters` wrote.

        Args:
            trunk: the transformer that they are over; it gets the adapters, which stay trainable.
            directory: of the adapters and the head.

        Raises:
            ModelError: if they are not a reward model's, or not for this transformer.
        """
        load_adapters(trunk, directory)
        head, statistics = load_head(directory, trunk, kind="reward model", extra=_STATISTICS)
        return cls(trunk, head)._with(statistics)

    @property
    def _statistics(self) -> dict[str, Tensor]:
        return {"score_mean": self.score_mean, "score_std": self.score_std}

    def _with(self, statistics: Mapping[str, Tensor]) -> Self:
        self.score_mean.copy_(statistics["score_mean"])
        self.score_std.copy_(statistics["score_std"])
        return self

    @classmethod
    def from_pretrained(cls, directory: Path, dtype: torch.dtype) -> Self:
        """Return the reward model that `save_pretrained` wrote, its transformer in `dtype`, head in float32.

        Raises:
            ModelError: if the directory holds no reward model.
        """
        trunk, head, statistics = load_with_head(directory, dtype, kind="reward model", extra=_STATISTICS)
        return cls(trunk, head)._with(statistics)


_STATISTICS = MappingProxyType({"score_mean": torch.zeros(()), "score_std": torch.zeros(())})
"""What stands beside a reward model's head, to tell the shapes."""
