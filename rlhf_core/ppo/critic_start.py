"""A critic that starts as a reward model: its head is fitted to the first batch's returns.

A reward model's score and a value are both "how good is this", in different units. One line fits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from rlhf_core.config import LearningConfig
from rlhf_core.errors import ConfigError
from rlhf_core.functional.advantages import gae
from rlhf_core.functional.moments import masked_sum, varies
from rlhf_core.ppo.minibatch import agreed_moments
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.boosted import load_weights, plain_model, weights
from rlhf_core.training.optim import Trained
from rlhf_core.types import Experience


class ValueLine(NamedTuple):
    """value' = slope * value + intercept."""

    slope: float
    intercept: float

    def facts(self) -> dict[str, float]:
        """Return the line as JSON holds it."""
        return self._asdict()

    @staticmethod
    def from_facts(facts: Mapping[str, Any]) -> ValueLine:
        """Return the line that `facts` described."""
        return ValueLine(float(facts["slope"]), float(facts["intercept"]))


class Started(NamedTuple):
    """A critic that was fitted to returns."""

    line: ValueLine
    """What was folded into its head."""
    experience: Experience
    """As the critic judges it now."""


def start_critic(
    critic: Trained, experience: Experience, config: LearningConfig, *, sharing: Ranks, ranks: Ranks
) -> Started:
    """Fit the critic's head to the returns of its experience; called by all ranks.

    Args:
        critic: made the experience's values.
        experience: this rank's.
        config: discount and lambda.
        sharing: who has other rows; alone, if every rank has all of them.
        ranks: who trains together.
    """
    line = fit_line(experience, gamma=config.gamma, ranks=sharing)
    # All ranks fold in the same line, whatever their last bits say.
    line = ValueLine.from_facts(ranks.broadcast_object(line.facts()))
    rescale_head(critic, line)
    return Started(line, rescale_experience(experience, line, config))


def fit_line(experience: Experience, *, gamma: float, ranks: Ranks) -> ValueLine:
    """Regress Monte Carlo returns on the critic's values, by least squares over the tokens of all ranks.

        G_t       = r_t + gamma * G_{t+1}
        slope     = cov(V, G) / var(V),    intercept = mean(G) - slope * mean(V)

    Monte Carlo, as returns that lean on the critic's own values would carry its old scale.

    Args:
        experience: of the critic that is to be rescaled, on all ranks.
        gamma: discount per token.
        ranks: who shares the batch.

    Returns:
        The line; slope 0 if the values are all equal up to rounding.
    """
    mask = experience.action_mask
    targets = gae(
        rewards=experience.reward, values=torch.zeros_like(experience.values), mask=mask, gamma=gamma, lam=1.0
    )
    value, target = agreed_moments([experience.values, targets], mask, ranks)
    centred = (experience.values.double() - value.mean) * (targets.double() - target.mean)
    covariance = ranks.sum(masked_sum(centred, mask)) / value.count.clamp(min=1)
    has_slope = varies(variance=value.variance, square=value.variance + value.mean.square())
    slope = (covariance / value.variance).item() if has_slope else 0.0
    return ValueLine(slope, target.mean.item() - slope * value.mean.item())


def rescale_head(critic: Trained, line: ValueLine) -> None:
    """Fold the line into the critic's head, wherever the booster keeps its weights; called by all ranks.

    Raises:
        ConfigError: if the critic has no linear head that is trained.
    """
    booster, plain = critic.booster, plain_model(critic.booster, critic.model)
    name, head = next((each for each in plain.named_modules() if each[0].split(".")[-1] == "head"), ("", None))
    if not isinstance(head, nn.Linear) or head.bias is None or not head.weight.requires_grad:
        raise ConfigError(
            f"ppo.critic_init reward_model rescales the critic's linear head, but {type(plain).__name__} trains none; "
            "give a Critic, or set it to policy"
        )
    weight, bias = f"{name}.weight", f"{name}.bias"
    held = weights(booster, critic.model, [weight, bias])
    rescaled = {weight: held[weight] * line.slope, bias: held[bias] * line.slope + line.intercept}
    load_weights(booster, critic.model, rescaled)


def rescale_experience(experience: Experience, line: ValueLine, config: LearningConfig) -> Experience:
    """Return the experience as the rescaled critic would have judged it: values, advantages and returns.

    The head is linear, so no second forward pass is needed. Only for the experience that the line was fitted to: what
    is made later comes from the rescaled critic.

    Args:
        experience: judged by the critic before its head was rescaled; with returns.
        line: that was folded into the head.
        config: discount and lambda.
    """
    mask = experience.action_mask
    values = torch.where(mask, line.slope * experience.values + line.intercept, 0.0)
    advantages = gae(rewards=experience.reward, values=values, mask=mask, gamma=config.gamma, lam=config.lam)
    return experience.replace(values=values, advantages=advantages, returns=advantages + values)
