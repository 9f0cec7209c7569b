"""The KL coefficient and the scale of scores: changed after each episode, and the same for all chunks of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_core.config import RolloutConfig
from rlhf_core.errors import ModelError, TrainingError
from rlhf_core.functional.kl import SMALLEST_KL_COEF, adaptive_kl_coef
from rlhf_core.functional.moments import RunningMoments
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.types import EpisodeControls


class RewardControls:
    """Steers the KL coefficient to its target, and knows the deviation of all earlier episodes' scores.

    An episode's rewards are set before it begins, from what is known then: chunks of one episode agree, whoever makes
    them and whenever.

    Args:
        config: the coefficient to start from, the target, and whether scores are normalised.
        ranks: who shares an episode: each has samples of its own. `ALONE` where one process has all of them.
    """

    def __init__(self, config: RolloutConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._known = (config.kl_coef, RunningMoments())
        """The coefficient and the scores: replaced together, for threads that lease chunks read them meanwhile."""

    def current(self) -> EpisodeControls:
        """Return what the next episode's rewards are made with."""
        kl_coef, scores = self._known
        std = scores.std if self._config.normalise_rewards else 1.0
        return EpisodeControls(kl_coef, score_mean=0.0, score_std=std)  # not shifted: the mean is the critic's to learn

    def update(self, *, kl_per_sample: Tensor, scores: Tensor) -> None:
        """Take note of an episode, on all ranks.

        Args:
            kl_per_sample: [B], of each response, summed over its tokens, in nats.
            scores: [B], before clipping and normalisation.

        Raises:
            TrainingError: on all ranks, if a number of any is not finite.
        """
        divergences, every = self._ranks.gather(kl_per_sample), self._ranks.gather(scores)
        if not (divergences.isfinite().all() and every.isfinite().all()):
            raise TrainingError(
                "a score or divergence of the episode is not finite, so that no later reward could be set by it; look "
                "at the reward functions and the policy"
            )
        kl_coef, moments = self._known
        if self._config.kl_target is not None and len(divergences):
            kl_coef = adaptive_kl_coef(
                kl_coef,
                observed_kl=divergences.double().mean().item(),
                target=self._config.kl_target,
                samples=len(divergences),
                horizon=self._config.kl_horizon,
            )
        self._known = (kl_coef, moments.updated(every))

    def state(self) -> dict[str, Any]:
        """Return the facts that a continuation needs, as JSON holds them."""
        kl_coef, scores = self._known
        return {"kl_coef": kl_coef, "scores": list(scores)}

    def load_state(self, facts: Mapping[str, Any]) -> None:
        """Go on from a state that `state` returned.

        A coefficient of 0, of a run without a target, could not be steered: with one it begins at the smallest.

        Raises:
            ModelError: if it is damaged; nothing was changed.
        """
        damaged = f"the stored state of the reward's controls is damaged: {dict(facts)}"
        try:
            kl_coef, (count, mean, m2) = float(facts["kl_coef"]), facts["scores"]
            scores = RunningMoments(int(count), float(mean), float(m2))
        except (LookupError, TypeError, ValueError) as error:
            raise ModelError(damaged) from error
        if not 0 <= kl_coef < math.inf:
            raise ModelError(damaged)
        if self._config.kl_target is not None:
            kl_coef = max(kl_coef, SMALLEST_KL_COEF)
        self._known = (kl_coef, scores)


class ControlsByEpisode:
    """The controls of each episode, where makers may be ahead of what is learnt: from its first lease on the same.

    An episode's controls are the current ones when makers may first begin it: once `episode - max_staleness` episodes
    are learnt, whatever the makers' speed; where a chunk is leased even earlier, those of that moment.

    Args:
        current: what the next episode's rewards are made with; its owner updates it.
        max_staleness: episodes that makers may be ahead.
        completed: episodes that are learnt.
        kept: of a training state, as `known` returned them.
    """

    def __init__(
        self,
        current: RewardControls,
        *,
        max_staleness: int,
        completed: int,
        kept: Mapping[int, EpisodeControls],
    ) -> None:
        self.current, self._max_staleness = current, max_staleness
        self._of = dict(kept)
        self.open(completed)

    def of(self, episode: int) -> EpisodeControls:
        """Return what an episode's rewards are made with; called by any thread."""
        return self._of.setdefault(episode, self.current.current())

    def open(self, completed: int) -> None:
        """Set the controls of the episodes that makers may begin once so many are learnt; forget those before."""
        for done in [episode for episode in list(self._of) if episode < completed]:
            del self._of[done]  # in place: a chunk that is leased at this moment keeps its controls
        for episode in range(completed, completed + self._max_staleness + 1):
            self.of(episode)

    def known(self) -> dict[int, EpisodeControls]:
        """Return the controls of all episodes that have some."""
        return dict(self._of)
