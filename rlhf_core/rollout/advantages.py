"""From scores to what the learner learns from: rewards, advantages and the critic's targets of one chunk."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhf_core.config import RolloutConfig
from rlhf_core.functional.advantages import (
    clip_scores,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    token_rewards,
)
from rlhf_core.functional.kl import kl
from rlhf_core.functional.legacy import legacy_advantages, legacy_sequence_reward, legacy_token_rewards
from rlhf_core.types import EpisodeControls

LegacyForm = Literal["trainer", "detached"]
WITH_CRITIC = "gae"
_GROUPS = frozenset({"grpo", "dr_grpo", "rloo"})


class Forwards(NamedTuple):
    """What the models say about one chunk, [B A] each; zero on padding."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    """Zero without a critic."""
    mask: Tensor
    """True on response tokens."""


class Estimates(NamedTuple):
    """What is learnt from, [B A] each."""

    kl: Tensor
    rewards: Tensor
    advantages: Tensor
    """Not whitened."""
    returns: Tensor | None
    """Targets of the critic; None without one."""


def compares_groups(config: RolloutConfig) -> bool:
    """Return whether advantages compare the samples of a prompt with each other."""
    return config.advantage_estimator in _GROUPS


def estimate(
    *,
    scores: Tensor,
    abstains: Tensor,
    forwards: Forwards,
    config: RolloutConfig,
    controls: EpisodeControls,
    legacy_form: LegacyForm,
) -> Estimates:
    """Return divergence, rewards, advantages and returns by the configuration's estimator.

    A response that abstains has a divergence, and neither rewards nor advantages; none is compared with it.

    Args:
        scores: [B], the weighted sum of the sources; normalised by the controls and clipped here.
        abstains: [B], True where there is no score.
        forwards: of the chunk's models.
        config: estimator, discount, clipping.
        controls: of the episode.
        legacy_form: which of upstream's trainers `config.legacy` follows.
    """
    divergence = kl(
        logprobs=forwards.logprobs,
        ref_logprobs=forwards.ref_logprobs,
        mask=forwards.mask,
        estimator=config.kl_estimator,
    )
    forwards = forwards._replace(mask=forwards.mask & ~abstains.unsqueeze(1))
    if config.legacy:
        return _legacy(scores, divergence, forwards, config, controls.kl_coef, legacy_form)
    paid = (scores - controls.score_mean) / controls.score_std
    if config.reward_clip is not None:
        paid = clip_scores(paid, config.reward_clip)
    mask = forwards.mask
    rewards = token_rewards(scores=paid, kl=divergence, mask=mask, kl_coef=controls.kl_coef)
    match config.advantage_estimator:
        case "gae":
            return _with_critic(divergence, rewards, forwards, config)
        case "reinforce_pp":
            advantages = reinforce_pp_advantages(rewards=rewards, mask=mask, gamma=config.gamma)
        case name:
            # there is no token's own reward: the penalty of all tokens together belongs to the response
            each = _compare(name, paid, controls.kl_coef * divergence.sum(dim=1), config.samples_per_prompt, ~abstains)
            advantages = torch.where(mask, each.unsqueeze(1), 0.0)
    return Estimates(divergence, rewards, advantages, None)


def _compare(
    name: Literal["grpo", "dr_grpo", "rloo"], scores: Tensor, penalties: Tensor, group_size: int, judged: Tensor
) -> Tensor:
    """Return the advantage of each response over the others of its prompt, of those that were judged."""
    match name:
        case "grpo":
            return grpo_advantages(scores=scores, penalties=penalties, group_size=group_size, mask=judged)
        case "dr_grpo":
            return dr_grpo_advantages(scores=scores - penalties, group_size=group_size, mask=judged)
        case "rloo":
            return rloo_advantages(scores=scores - penalties, group_size=group_size, mask=judged)


def _with_critic(divergence: Tensor, rewards: Tensor, forwards: Forwards, config: RolloutConfig) -> Estimates:
    advantages = gae(rewards=rewards, values=forwards.values, mask=forwards.mask, gamma=config.gamma, lam=config.lam)
    return Estimates(divergence, rewards, advantages, advantages + forwards.values)


def _legacy(
    scores: Tensor, divergence: Tensor, forwards: Forwards, config: RolloutConfig, kl_coef: float, form: LegacyForm
) -> Estimates:
    """Return upstream's numbers: of its trainer in one process, or of its detached one."""
    mask = forwards.mask
    if form == "trainer":
        rewards = legacy_token_rewards(scores=scores, kl=divergence, mask=mask, kl_coef=kl_coef)
        return _with_critic(divergence, rewards, forwards, config)
    paid = legacy_sequence_reward(
        scores=scores, logprobs=forwards.logprobs, ref_logprobs=forwards.ref_logprobs, mask=mask, kl_coef=kl_coef
    )
    advantages = legacy_advantages(rewards=paid, values=forwards.values, mask=mask)
    everywhere = torch.where(mask, paid.unsqueeze(1), 0.0)
    return Estimates(divergence, everywhere, advantages, everywhere)
