"""From responses to one score each: sources that are scaled, weighted and added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from rlhf_core.rewards.structure import Tags, answer_tags
from rlhf_core.rewards.verifying import ExactJudge, Judge

__all__ = ["REWARD_MODEL", "VERIFIER", "Scorer", "Scores", "ScoringBatch", "Weighted", "WeightedScorer", "build_scorer"]


class Scores(NamedTuple):
    """What the sources say together and each for itself, in float32 on the CPU."""

    total: Tensor
    """[B]"""
    raw: dict[str, Tensor]
    """[B] by source, neither scaled nor weighted."""
    parts: dict[str, Tensor]
    """[B] by source, scaled and weighted: they sum to the total; zero where a source has no weight."""
    well_formed: Tensor | None
    """[B], True where a response has the form of an answer; None if no source looks at it."""
    abstains: Tensor
    """[B], True where a source that has a weight failed: then nothing is paid, and total and parts are 0."""
    failures: list[dict[str, str]]
    """Of each response, by source that failed, why; one without a weight is among them."""


class Weighted(NamedTuple):
    """One term of the score."""

    name: str
    weight: float
    source: Source


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
        sources: in the order in which they are added.
        scaled: False adds what the sources say unscaled, as upstream does.
    """

    def __init__(self, sources: Sequence[Weighted], *, scaled: bool = True) -> None:
        self._sources, self._scaled = tuple(sources), scaled

    def score(self, batch: ScoringBatch) -> Scores:
        """Return the weighted sum of the scaled sources, its parts, every raw value, and what failed."""
        total = torch.zeros(len(batch.prompts))
        abstains = torch.zeros(len(batch.prompts), dtype=torch.bool)
        failures: list[dict[str, str]] = [{} for _ in batch.prompts]
        raw: dict[str, Tensor] = {}
        parts: dict[str, Tensor] = {}
        well_formed = None
        for name, weight, source in self._sources:
            judged = source(batch)
            raw |= judged.raw
            parts[name] = torch.zeros(len(batch.prompts))
            if weight:
                parts[name] = weight * (judged.scaled if self._scaled else _sum(judged.raw))
                total = total + parts[name]
            for row, failed in enumerate(judged.failures):
                failures[row] |= failed
                abstains[row] |= bool(weight and failed)
            well_formed = well_formed if judged.well_formed is None else judged.well_formed
        total, *paid = (torch.where(abstains, 0.0, each) for each in (total, *parts.values()))
        return Scores(total, raw, dict(zip(parts, paid, strict=True)), well_formed, abstains, failures)

    def close(self) -> None:
        """End the sources' processes."""
        for each in self._sources:
            close = getattr(each.source, "close", None)
            if close is not None:
                close()


def _sum(raw: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(raw.values())).sum(dim=0)


def build_scorer(
    config: RewardConfig,
    reward_model: AnyRewardModel | None,
    *,
    template: PromptTemplate,
    judge: Judge | None = None,
    allowed_modules: Sequence[str] = (),
    scaled: bool = True,
) -> WeightedScorer:
    """Return the scorer of a configuration; reward functions are imported, so that what is wrong with one shows here.

    Args:
        config: weights of the sources, and the functions' time limit.
        reward_model: trained, verifiable, or whatever is called like one; None if its weight is 0.
        template: names the form of a response.
        judge: the data's verifier (`judge_of`), closed with the scorer, or at once if none comes of it; None compares
            with the answer (`exact`) where the verifier has a weight, and else asks none. A prompt that it has nothing
            to judge by is refused where the verifier has a weight, else counts as wrong.
        allowed_modules: from which reward functions may be taken by path.
        scaled: False for upstream's numbers, which take every source as it comes.

    Raises:
        ConfigError: if a source is weighted and not there, or a function cannot be imported.
    """
    sources: list[Weighted] = []
    if judge is not None or config.verifier > 0:
        verifier = Verifier(judge or ExactJudge(template.answer_tag), required=config.verifier > 0)
        sources.append(Weighted(VERIFIER, config.verifier, verifier))
    if reward_model is not None:
        sources.append(Weighted(REWARD_MODEL, config.reward_model, model_source(reward_model)))
    with ExitStack() as undo:
        if judge is not None:
            undo.callback(judge.close)
        if reward_model is None and config.reward_model > 0:
            raise ConfigError(
                f"ppo.reward.reward_model is {config.reward_model}, but there is no reward model; "
                "give one, or set the weight to 0"
            )
        sources += _functions(config, template.tags or answer_tags(template.answer_tag), allowed_modules)
        undo.pop_all()
    return WeightedScorer(sources, scaled=scaled)


def _functions(config: RewardConfig, tags: Tags, allowed_modules: Sequence[str]) -> list[Weighted]:
    """Return the reward functions that have a weight, imported in one process."""
    weighted = {name: weight for name, weight in config.functions.items() if weight}
    resolved = {name: resolve_reward_function(name, allowed_modules=allowed_modules, tags=tags) for name in weighted}
    process = RewardProcess(config.timeout_s)
    for name, function in resolved.items():
        try:
            process.load(function)
        except RewardFunctionError as error:
            process.close()
            raise ConfigError(f"reward function {name!r} cannot be imported: {error}") from None
    return [Weighted(name, weighted[name], FunctionScores(each, process)) for name, each in resolved.items()]
