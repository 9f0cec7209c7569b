"""coati's losses as modules, for code that knows coati; the arithmetic is that of `functional/losses.py`.

They average over the batch at hand, as coati's do: code that accumulates gradients or has several ranks takes the
functions, to which the denominator is handed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.functional.logprobs import logprobs_from_logits
from rlhf_core.functional.losses import IGNORED, lm_loss, pairwise_loss, policy_loss, value_loss
from rlhf_core.functional.weights import aggregation_count, aggregation_weights


class PolicyLossOutput(NamedTuple):
    """What coati's `PolicyLoss` returns, in its order."""

    loss: Tensor
    skip: bool
    """Whether the ratio exploded; the caller leaves the step out, on all ranks or on none."""
    max_ratio: Tensor


class PolicyLoss(nn.Module):
    """PPO's clipped surrogate, first averaged over each response and then over responses, as coati does.

    Args:
        clip_eps: half-width of the interval around ratio 1.
        skip_threshold: largest ratio of a token's new to its old probability that is learnt from. coati compares the
            mean over all tokens, padding included, which one wild token among many never moves.
    """

    def __init__(self, clip_eps: float = 0.2, skip_threshold: float = 20.0) -> None:
        super().__init__()
        self.clip_eps = clip_eps
        self.skip_threshold = skip_threshold

    def forward(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, action_mask: Tensor | None = None
    ) -> PolicyLossOutput:
        """Return loss, whether to skip the step, and the largest ratio.

        Args:
            log_probs: [B, A] of the policy being trained.
            old_log_probs: [B, A] of the policy that drew the tokens.
            advantages: [B, A], or [B, 1] for one number per response.
            action_mask: [B, A], true or not zero on response tokens; None counts all.
        """
        mask = _as_mask(action_mask, log_probs)
        terms = policy_loss(
            logprobs=log_probs,
            old_logprobs=old_log_probs,
            advantages=advantages.expand_as(log_probs),
            mask=mask,
            denominator=aggregation_count(mask, aggregation="sequence_mean").clamp(min=1),
            clip_eps=self.clip_eps,
            weights=aggregation_weights(
                mask,
                aggregation="sequence_mean",
                max_tokens=1,
                dtype=torch.promote_types(log_probs.dtype, torch.float32),
            ),
        )
        return PolicyLossOutput(terms.loss, bool(terms.max_ratio > self.skip_threshold), terms.max_ratio)


class ValueLoss(nn.Module):
    """Half the clipped squared error of the critic, averaged over response tokens.

    Args:
        clip_eps: half-width of the interval around the old value, in the unit of the returns.
    """

    def __init__(self, clip_eps: float = 0.2) -> None:
        super().__init__()
        self.clip_eps = clip_eps

    def forward(
        self, values: Tensor, old_values: Tensor, advantage: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """Return the loss; the target is `advantage + old_values`, so the advantages must not be whitened.

        Args:
            values: [B, A] of the critic being trained.
            old_values: [B, A] of the critic that the experience came from.
            advantage: [B, A].
            action_mask: [B, A], true or not zero on response tokens; None counts all.
        """
        mask = _as_mask(action_mask, values)
        return value_loss(
            values=values,
            old_values=old_values,
            returns=advantage + old_values,
            mask=mask,
            denominator=mask.sum().clamp(min=1),
            clip_eps=self.clip_eps,
        ).loss


class GPTLMLoss(nn.Module):
    """Mean negative log-likelihood of the next token."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over labels that are not -100; zero if all are.

        Args:
            logits: [B, S, V]; those at position t predict the label at t + 1, as this shifts them.
            labels: [B, S] token ids, -100 where nothing is to be learnt.
        """
        targets = labels[:, 1:]
        mask = targets != IGNORED
        logprobs = logprobs_from_logits(logits[:, :-1], torch.where(mask, targets, 0), temperature=1.0)
        return lm_loss(logprobs=logprobs, mask=mask, denominator=mask.sum().clamp(min=1))


class LogSigLoss(nn.Module):
    """Bradley-Terry loss of a reward model, -log sigmoid of the difference."""

    def forward(self, chosen_reward: Tensor, reject_reward: Tensor) -> Tensor:
        """Return the mean over pairs; scores are [B] or [B, 1]."""
        chosen, rejected = chosen_reward.flatten(), reject_reward.flatten()
        return pairwise_loss(chosen=chosen, rejected=rejected, denominator=max(1, chosen.numel()))


class LogExpLoss(nn.Module):
    """The same loss as log(1 + exp(-difference)), which here does not overflow in half precision."""

    def forward(self, chosen_reward: Tensor, reject_reward: Tensor) -> Tensor:
        """Return the mean over pairs; scores are [B] or [B, 1]."""
        chosen, rejected = chosen_reward.flatten(), reject_reward.flatten()
        return pairwise_loss(chosen=chosen, rejected=rejected, denominator=max(1, chosen.numel()), form="log_exp")


def _as_mask(action_mask: Tensor | None, like: Tensor) -> Tensor:
    if action_mask is None:
        return torch.ones(like.shape, dtype=torch.bool, device=like.device)
    return action_mask.bool()
