"""A preset: one whole chain."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_core.config.base import Config, Positive
from rlhf_core.config.budget import BudgetConfig
from rlhf_core.config.conditions import ConditionsConfig, ForgettingConfig
from rlhf_core.config.data import DataConfig, TemplateConfig
from rlhf_core.config.model import ModelConfig
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.config.supervised import RewardModelConfig, SFTConfig


class EvaluationConfig(Config):
    """Greedy answers on held-out problems."""

    max_new_tokens: Positive = 24
    """At least two more than the longest reference answer."""
    batch_size: Positive = 50
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the answers."""
    judge: Literal["verifier", "reward_model"] = "verifier"
    """Who scores the answers: the verifier of `data.verifier`, or, where prompts have no answers, the reward model."""
    forgetting: ForgettingConfig = ForgettingConfig()


class GateConfig(Config):
    """When a policy replaces the champion: an exact paired test, within a year's budget of errors (docs/gate.md)."""

    year_error: float = Field(0.05, gt=0, lt=1)
    """Probability, at most, that any promotion of a year is due to chance."""
    nights_a_year: Positive = 365
    """Comparisons that share it evenly; beyond them each has half of what the last 365 days have left."""
    min_gain: float = 0.0
    """The gain over the champion (or, without one, over what PPO started from) must be shown to exceed this: share of
    right answers. Where the reward model scores, in its standard deviations: on more problems than not, and on
    average."""
    challenger_nights: Positive = 3
    """Nights whose problems a promising candidate may have in all; 1 keeps no challenger. Needs
    `data.rotate_evaluation`."""
    conditions: ConditionsConfig = ConditionsConfig()
    approval: bool = False
    """Whether a person is asked before a promotion: the run is suspended, and its page in Prefect takes the answer."""
    approval_days: float = Field(3.0, gt=0, le=365)
    """How long the answer is waited for; then the policy is kept from promotion as not approved."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_release(cls, values: Any) -> Any:
        """Leave out `confidence`, which every configuration stored by an earlier release has."""
        return (
            {key: value for key, value in values.items() if key != "confidence"} if isinstance(values, dict) else values
        )


class PipelineConfig(Config):
    """A preset: one whole chain."""

    name: str
    """The project, after which artifacts are named: `policy/<name>`. 1 to 63 lower-case letters, digits and dashes."""
    preset: str | None = None
    """Name of the preset that the run began from; the run sets it. None in what earlier releases stored: there `name`
    is the preset's."""
    bootstrap: bool = False
    """Take the base model where a stage's parent does not exist yet."""
    seed: int = Field(0, ge=0, lt=2**32)
    model: ModelConfig = ModelConfig()
    template: TemplateConfig = TemplateConfig()
    data: DataConfig
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    ppo: PPOConfig = PPOConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    budget: BudgetConfig = BudgetConfig()

    @field_validator("name")
    @classmethod
    def _a_name_of_artifacts(cls, name: str) -> str:
        if re.fullmatch("[a-z0-9][a-z0-9-]{0,62}", name) is None:
            raise ValueError(
                "name must be 1 to 63 lower-case letters, digits and dashes, of which the first is no dash, but it is "
                f"{name!r:.200}"
            )
        return name

    @model_validator(mode="after")
    def _a_split_to_measure_on(self) -> Self:
        if self.ppo.evaluate_every and not self.data.splits.development:
            raise ValueError(
                f"ppo.evaluate_every is {self.ppo.evaluate_every}, but data.splits.development is 0; give it problems, "
                "such as 200"
            )
        return self

    @model_validator(mode="after")
    def _an_episode_has_enough_prompts(self) -> Self:
        if self.ppo.prompts_per_episode > self.data.splits.ppo > 0:
            raise ValueError(
                f"ppo.prompts_per_episode is {self.ppo.prompts_per_episode}, but data.splits.ppo has only "
                f"{self.data.splits.ppo} problems; lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _a_judge_of_episodes(self) -> Self:
        if self.ppo.evaluate_every and self.evaluation.judge == "reward_model" and not self.ppo.reward.reward_model:
            raise ValueError(
                f"ppo.evaluate_every is {self.ppo.evaluate_every} and evaluation.judge is reward_model, but no "
                "reward model pays; give ppo.reward.reward_model a weight, or set evaluation.judge to verifier"
            )
        return self
