"""From responses to one score each: sources that are scaled, weighted and added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf_core.config import RewardConfig
from rlhf_core.data.template import PromptTemplate
from rlhf_core.data.verifiers import verify
from rlhf_core.errors import ConfigError
from rlhf_core.models.device import device_of
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.types import Prompt

VERIFIER = "verifier"
REWARD_MODEL = "reward_model"


class ScoringBatch(NamedTuple):
    """Responses as text and as token ids, on the CPU; rows are the same throughout."""

    prompts: Sequence[Prompt]
    responses: Sequence[str]
    """Decoded, without the stop token."""
    ended: Tensor
    """[B], True where a stop token ended the response."""
    sequences: Tensor
    """[B S], prompt and response."""
    attention_mask: Tensor
    """[B S], True on tokens."""
    action_mask: Tensor
    """[B A], True on response tokens."""


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


class Judged(NamedTuple):
    """One source's opinion."""

    scaled: Tensor
    """[B], of order one."""
    raw: Mapping[str, Tensor]
    """[B] each, as they came."""


Source = Callable[[ScoringBatch], Judged]


class WeightedScorer:
    """Adds sources, each scaled by itself and then weighted: no hidden normalisation over the batch.

    Args:
        sources: weight and source, in the order in which they are added.
    """

    def __init__(self, sources: Sequence[tuple[float, Source]]) -> None:
        self._sources = tuple(sources)

    def score(self, batch: ScoringBatch) -> Scores:
        """Return the weighted sum of the scaled sources, and every raw value."""
        total = torch.zeros(len(batch.prompts))
        raw: dict[str, Tensor] = {}
        for weight, source in self._sources:
            judged = source(batch)
            raw |= judged.raw
            if weight:
                total = total + weight * judged.scaled
        return Scores(total, raw)

    def close(self) -> None:
        """End the sources' processes."""
        for _, source in self._sources:
            close = getattr(source, "close", None)
            if close is not None:
                close()


class Verifier:
    """The exact answer in its tags: 0 or 1.

    Args:
        answer_tag: name of the tags.
    """

    def __init__(self, answer_tag: str) -> None:
        self._tag = answer_tag

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return 1 for each right answer; a prompt without reference answer has none."""
        rows = zip(batch.prompts, batch.responses, batch.ended.tolist(), strict=True)
        found = torch.tensor(
            [
                0.0 if prompt.answer is None else verify(text, prompt.answer, ended=ended, tag=self._tag).score
                for prompt, text, ended in rows
            ]
        )
        return Judged(found, {VERIFIER: found})


class TrainedScores:
    """A trained reward model: its scores in standard deviations of its held-out samples'.

    Args:
        model: in evaluation mode from here on.
    """

    def __init__(self, model: RewardModel) -> None:
        self._model = model.eval()

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return raw and standardised scores, computed where the model is."""
        device = device_of(self._model)
        with torch.no_grad():
            raw: Tensor = self._model(batch.sequences.to(device), batch.attention_mask.to(device))
            scaled = self._model.standardise(raw)
        return Judged(scaled.cpu(), {REWARD_MODEL: raw.cpu()})


def build_scorer(
    config: RewardConfig,
    reward_model: RewardModel | None,
    *,
    template: PromptTemplate,
    allowed_modules: Sequence[str] = (),
) -> WeightedScorer:
    """Return the scorer of a configuration.

    Args:
        config: weights of the sources.
        reward_model: None if its weight is 0.
        template: names the answer's tags.
        allowed_modules: from which reward functions may be taken by path.

    Raises:
        ConfigError: if a source is weighted and not there.
    """
    del allowed_modules
    if reward_model is None and config.reward_model > 0:
        raise ConfigError(
            f"ppo.reward.reward_model is {config.reward_model}, but there is no reward model; "
            "give one, or set the weight to 0"
        )
    sources: list[tuple[float, Source]] = [(config.verifier, Verifier(template.answer_tag))]
    if reward_model is not None:
        sources.append((config.reward_model, TrainedScores(reward_model)))
    return WeightedScorer(sources)
