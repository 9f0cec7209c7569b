"""A score for a whole response: a transformer and one number at its last token."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.models.heads import apply_head, load_with_head, random_head, save_with_head
from rlhf_core.models.saving import SHARD_SIZE
from rlhf_core.models.trunk import copy_trunk, hidden_states


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
        statistics = {"score_mean": self.score_mean, "score_std": self.score_std}
        save_with_head(self.trunk, self.head, statistics, directory, max_shard_size)

    @classmethod
    def from_pretrained(cls, directory: Path, dtype: torch.dtype) -> Self:
        """Return the reward model that `save_pretrained` wrote, its transformer in `dtype`, head in float32.

        Raises:
            ModelError: if the directory holds no reward model.
        """
        number = torch.zeros(())
        statistics_like = {"score_mean": number, "score_std": number}
        trunk, head, statistics = load_with_head(directory, dtype, kind="reward model", extra=statistics_like)
        model = cls(trunk, head)
        model.score_mean.copy_(statistics["score_mean"])
        model.score_std.copy_(statistics["score_std"])
        return model
