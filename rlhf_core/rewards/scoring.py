"""From responses to one score each: sources that are scaled, weighted and added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf_core.config import RewardConfig
from rlhf_core.data.template import PromptTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.rewards.process import RewardFunctionError, RewardProcess
from rlhf_core.rewards.resolve import resolve_reward_function
from rlhf_core.rewards.sources import (
    REWARD_MODEL,
    VERIFIER,
    AnyRewardModel,
    FunctionScores,
    ScoringBatch,
    Source,
    Verifier,
    model_source,
)
from rlhf_core.rewards.structure import answer_tags

__all__ = ["REWARD_MODEL", "VERIFIER", "Scorer", "Scores", "ScoringBatch", "WeightedScorer", "build_scorer"]


class Scores(NamedTuple):
    """What the sources say together and each for itself, in float32 on the CPU."""

    total: Tensor
    """[B]"""
    raw: dict[str, Tensor]
    """[B] by source, neither scaled nor weighted."""


class Scorer(Protocol):
    """Whatever turns responses into scores."""

    def score(self, batch: ScoringBatch) -> Scores:
        """Return the score of each response."""
        ...

    def close(self) -> None:
        """End what the scorer has running."""
        ...


class WeightedScorer:
    """Adds sources, each scaled by itself and then weighted: no hidden normalisation over the batch.

    Args:
        sources: weight and source, in the order in which they are added.
        scaled: False adds what the sources say unscaled, as upstream does.
    """

    def __init__(self, sources: Sequence[tuple[float, Source]], *, scaled: bool = True) -> None:
        self._sources, self._scaled = tuple(sources), scaled

    def score(self, batch: ScoringBatch) -> Scores:
        """Return the weighted sum of the scaled sources, and every raw value."""
        total = torch.zeros(len(batch.prompts))
        raw: dict[str, Tensor] = {}
        for weight, source in self._sources:
            judged = source(batch)
            raw |= judged.raw
            if weight:
                total = total + weight * (judged.scaled if self._scaled else sum(judged.raw.values()))
        return Scores(total, raw)

    def close(self) -> None:
        """End the sources' processes."""
        for _, source in self._sources:
            close = getattr(source, "close", None)
            if close is not None:
                close()


def build_scorer(
    config: RewardConfig,
    reward_model: AnyRewardModel | None,
    *,
    template: PromptTemplate,
    allowed_modules: Sequence[str] = (),
    scaled: bool = True,
) -> WeightedScorer:
    """Return the scorer of a configuration; reward functions are imported, so that what is wrong with one shows here.

    Args:
        config: weights of the sources, and the functions' time limit.
        reward_model: trained, verifiable, or whatever is called like one; None if its weight is 0.
        template: names the form of a response.
        allowed_modules: from which reward functions may be taken by path.
        scaled: False for upstream's numbers, which take every source as it comes.

    Raises:
        ConfigError: if a source is weighted and not there, or a function cannot be imported.
    """
    if reward_model is None and config.reward_model > 0:
        raise ConfigError(
            f"ppo.reward.reward_model is {config.reward_model}, but there is no reward model; "
            "give one, or set the weight to 0"
        )
    sources: list[tuple[float, Source]] = [(config.verifier, Verifier(template.answer_tag))]
    if reward_model is not None:
        sources.append((config.reward_model, model_source(reward_model)))
    tags = template.tags or answer_tags(template.answer_tag)
    weighted = {name: weight for name, weight in config.functions.items() if weight}
    resolved = {name: resolve_reward_function(name, allowed_modules=allowed_modules, tags=tags) for name in weighted}
    process = RewardProcess(config.timeout_s)
    for name, function in resolved.items():
        try:
            process.load(function)
        except RewardFunctionError as error:
            process.close()
            raise ConfigError(f"reward function {name!r} cannot be imported: {error}") from None
        sources.append((weighted[name], FunctionScores(function, process)))
    return WeightedScorer(sources, scaled=scaled)
