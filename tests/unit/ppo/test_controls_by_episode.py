"""An episode's controls: set by what was known at its first lease, for all of its chunks, now and after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlhf_core.coati.detached.ppo_trainer import controls_kept
from rlhf_core.config import RolloutConfig
from rlhf_core.ppo.controls import ControlsByEpisode, RewardControls
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.state import RolloutState, TrainingState
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import EpisodeControls


def controls(kept: dict[int, EpisodeControls] | None = None, completed: int = 0) -> ControlsByEpisode:
    current = RewardControls(RolloutConfig(kl_coef=0.1, kl_target=0.5, kl_horizon=10), ALONE)
    return ControlsByEpisode(current, max_staleness=1, completed=completed, kept=kept or {})


def learn(ours: ControlsByEpisode, episode: int) -> None:
    ours.current.update(kl_per_sample=torch.full((4,), 5.0), scores=torch.ones(4))
    ours.open(episode + 1)


def test_chunks_that_are_made_again_agree_with_the_others_of_their_episode() -> None:
    ours = controls()
    early = ours.of(3)  # leased ahead, as where stale experience is dropped
    learn(ours, 0)
    assert ours.of(3) == early
    assert ours.of(2) != early
    again = controls(ours.known(), completed=1)
    assert again.of(3) == early


def test_a_state_of_an_earlier_release_has_the_controls_that_it_began_with() -> None:
    old = TrainingState(
        Position(2), {}, None, rollouts=RolloutState(controls={3: EpisodeControls(0.3)}),
        front={"after": [[1, 0.1, 0.0, 1.0], [2, 0.2, 0.0, 1.0]]},
    )  # fmt: skip
    assert controls_kept(old, completed=2, max_staleness=1) == {
        2: EpisodeControls(0.1), 3: EpisodeControls(0.3)
    }  # fmt: skip
    assert controls_kept(old, completed=2, max_staleness=2)[4] == EpisodeControls(0.2)


class LeasedMeanwhile(dict[int, EpisodeControls]):
    """Controls by episode; whoever has looked through them finds one more afterwards, as if a chunk had been leased."""

    def __init__(self, ours: ControlsByEpisode, episode: int) -> None:
        super().__init__()
        self.ours, self.episode = ours, episode

    def keys(self) -> Any:
        looked_through = list(super().keys())
        self.ours.of(self.episode)
        return looked_through

    def __iter__(self) -> Iterator[int]:
        return iter(self.keys())


def test_an_episode_that_is_leased_while_another_is_learnt_has_one_control() -> None:
    ours = controls()
    ours._of = LeasedMeanwhile(ours, 4)
    learn(ours, 0)
    assert set(dict.keys(ours._of)) == {1, 2, 4}, "what was leased meanwhile is forgotten"
