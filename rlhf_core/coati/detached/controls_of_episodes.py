"""What each episode's rewards are made with, when makers may be ahead of what is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_core.coati.ppo_setup import rollout_config
from rlhf_core.config import PPOOptions
from rlhf_core.generation import GenerationSettings
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import EpisodeControls, Sample


class EpisodesControls:
    """Sets an episode's controls from what was known when makers were first allowed to begin it, however fast they are.

    Args:
        options: the target of the KL coefficient, and whether scores are normalised.
        generation: how responses are drawn.
        max_staleness: episodes that makers may be ahead.
    """

    def __init__(self, options: PPOOptions, generation: GenerationSettings, max_staleness: int) -> None:
        self._options, self._generation, self._max_staleness = options, generation, max_staleness
        self._controls: RewardControls | None = None
        self._stored: Mapping[str, Any] | None = None
        self._after: dict[int, EpisodeControls] = {}
        """By the number of episodes that were learnt."""
        self._of: dict[int, EpisodeControls] = {}
        """By episode, from its first lease until it is learnt: chunks that are made again agree with the others."""

    def begin(self, *, kl_coef: float, completed: int) -> None:
        """Begin a fit.

        Args:
            kl_coef: that the makers start from; a coefficient that was steered since is kept.
            completed: episodes that are learnt.
        """
        if self._controls is None:
            self._controls = RewardControls(rollout_config(self._options, self._generation, kl_coef=kl_coef), ALONE)
            if self._stored is not None:
                self._controls.load_state(self._stored)
        self._after = {
            known: held for known, held in self._after.items() if completed - self._max_staleness <= known <= completed
        }
        self._after.setdefault(completed, self._controls.current())

    def of(self, episode: int) -> EpisodeControls | None:
        """Return what an episode's rewards are made with: from its first lease on, always the same."""
        known = dict(self._after)
        if not known:
            return None
        due = episode - self._max_staleness
        before = [number for number in known if number <= due]
        return self._of.setdefault(episode, known[max(before) if before else min(known)])

    def learnt(self, episode: int, samples: Sequence[Sample]) -> None:
        """Let an episode's samples set what later ones are made with.

        Raises:
            TrainingError: if a score or divergence is not finite.
        """
        if self._controls is None:
            return
        self._controls.update(
            kl_per_sample=torch.tensor([sample.kl for sample in samples]),
            scores=torch.tensor([sample.score for sample in samples]),
        )
        kept = {known: held for known, held in self._after.items() if known >= episode - self._max_staleness}
        self._after = kept | {episode + 1: self._controls.current()}
        for done in [number for number in list(self._of) if number <= episode]:
            del self._of[done]  # in place: a lease at this moment must not get lost, and other controls later

    def state(self) -> dict[str, Any]:
        """Return the facts that a continuation needs, as JSON holds them."""
        held = self._stored if self._controls is None else self._controls.state()
        after, of = ([[key, *values] for key, values in dict(each).items()] for each in (self._after, self._of))
        return {"now": None if held is None else dict(held), "after": after, "of": of}

    def load_state(self, facts: Mapping[str, Any]) -> None:
        """Go on from a state that `state` returned."""
        self._controls, self._stored = None, facts["now"]
        self._after, self._of = (
            {int(key): EpisodeControls(*values) for key, *values in facts[name]} for name in ("after", "of")
        )
