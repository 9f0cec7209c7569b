"""What a policy must not lose while it gains: the gate's side conditions, and what is measured for them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.config.base import Config

Share = Annotated[float, Field(ge=0, le=1)]


class ForgettingConfig(Config):
    """What is measured of each policy beside the task, to see what it forgets."""

    passages: int = Field(24, ge=0)
    """How many of the packaged passages (prose of several kinds, seven languages, code, arithmetic) a policy reads,
    for its cross-entropy; 0: none."""
    passage_tokens: int = Field(40, ge=2)
    """Tokens of each passage that are read at most."""
    suites: tuple[str, ...] = ()
    """Further measures: `questions` (packaged: 100 with four options each), `lm_eval:<task>` where
    lm-evaluation-harness is installed, or `package.module:function` of your own, called as f(model, tokenizer), which
    returns a number for each item by its name, more being better."""
    task_directory: str | None = None
    """Where lm-evaluation-harness finds tasks of your own, as YAML."""
    limit: int | None = Field(None, ge=1)
    """Items that a task of lm-evaluation-harness is asked at most."""


class ConditionsConfig(Config):
    """Side conditions of a promotion, against the policy that the gate compares with; null switches one off.

    One breaks if its figure is beyond its threshold, and chance alone would hardly do that between equal policies.
    """

    level: float = Field(0.05, gt=0, lt=1)
    """Chance, at most, that a policy equal to the incumbent breaks any of them."""
    kl_per_token: float | None = Field(1.0, gt=0)
    """Mean KL from the policy that PPO started from, at its last episode, in nats per response token."""
    length_ratio: float | None = Field(1.5, ge=1)
    """Mean length of the answers over the incumbent's, in tokens."""
    empty: Share | None = 0.01
    """By how much the share of empty answers may rise, as are the five that follow."""
    loops: Share | None = 0.02
    """Of answers that go round in a loop."""
    copies_prompt: Share | None = 0.02
    """Of answers that begin with what was asked."""
    same_answer: Share | None = 0.05
    """Of answers that are the most common one, where it is wrong."""
    cut_off: Share | None = 0.02
    """Of answers that did not end within `evaluation.max_new_tokens`."""
    malformed: Share | None = 0.02
    """Of answers without the form that the verifier wants."""
    category_loss: float | None = Field(0.05, ge=0)
    """How much any category may lose: share of right answers, or the reward model's standard deviations."""
    reward_model_accuracy: Share | None = 0.5
    """Held-out accuracy, at least, of a reward model that paid or judged."""
    verified_loss: Share | None = 0.05
    """How much the verifier's mean score may fall from PPO's first to its last episode while what was paid rises."""
    text_loss: float | None = Field(0.2, ge=0)
    """By how much the cross-entropy of the packaged passages may rise, in nats per token."""
    text_loss_from_base: float | None = Field(None, ge=0)
    """The same against the base model: what many nights forget together."""
    suite_loss: float | None = Field(0.05, ge=0)
    """How much the mean of any of `evaluation.forgetting.suites` may fall."""
