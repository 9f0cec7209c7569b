"""The value of the state before each response token: a transformer and one number per token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.models.heads import apply_head, load_with_head, save_with_head, zero_head
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.saving import SHARD_SIZE
from rlhf_core.models.token_tree import hidden_states
from rlhf_core.models.trunk import copy_trunk


class Critic(nn.Module):
    """Predicts the return from each state.

    Args:
        trunk: a transformer without language-model head; kept, not copied.
        head: linear map from hidden size to one number; None starts at zero, so that first values are 0.
    """

    def __init__(self, trunk: PreTrainedModel, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head if head is not None else zero_head(trunk)

    @classmethod
    def from_causal_lm(cls, model: PreTrainedModel) -> Self:
        """Return a critic on a copy of the model's transformer, with a zero head."""
        return cls(copy_trunk(model))

    @classmethod
    def from_reward_model(cls, model: RewardModel, *, keep_head: bool = False) -> Self:
        """Return a critic on a copy of the reward model's transformer.

        Args:
            model: stays apart from the critic.
            keep_head: start from the reward model's head, which is scaled to scores, where a value is a return: the
                learner then fits it to the first batch's returns. Else the head starts at zero.
        """
        return cls(copy.deepcopy(model.trunk), copy.deepcopy(model.head) if keep_head else None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the value after reading each token, [B S], in float32.

        Args:
            input_ids: [B S], padded on either side.
            attention_mask: [B S], True on tokens.
        """
        return apply_head(self.head, hidden_states(self.trunk, input_ids, attention_mask))

    def response_values(self, *, sequences: Tensor, attention_mask: Tensor, num_actions: int) -> Tensor:
        """Return the value of the state before each response token, [B A].

        Args:
            sequences: [B S], prompts padded left, responses right.
            attention_mask: [B S], True on tokens.
            num_actions: width of the response part, A; below S.
        """
        return response_values(self, sequences=sequences, attention_mask=attention_mask, num_actions=num_actions)

    def save_pretrained(self, directory: Path, *, max_shard_size: str = SHARD_SIZE) -> None:
        """Write the transformer (adapters merged) as its own library does, and the head beside it."""
        save_with_head(self.trunk, self.head, {}, directory, max_shard_size)

    @classmethod
    def from_pretrained(cls, directory: Path, dtype: torch.dtype) -> Self:
        """Return the critic that `save_pretrained` wrote, its transformer in `dtype`, its head in float32.

        Raises:
            ModelError: if the directory holds no critic.
        """
        trunk, head, _ = load_with_head(directory, dtype, kind="critic")
        return cls(trunk, head)


def response_values(critic: nn.Module, *, sequences: Tensor, attention_mask: Tensor, num_actions: int) -> Tensor:
    """Return the value of the state before each response token, [B A], of a critic that a booster may have wrapped.

    Args:
        critic: is called as `critic(sequences, attention_mask)`.
        sequences: [B S], prompts padded left, responses right.
        attention_mask: [B S], True on tokens.
        num_actions: width of the response part, A; below S.
    """
    values: Tensor = critic(sequences, attention_mask)
    return values[:, -num_actions - 1 : -1]  # the state before token t is what was read up to t - 1
