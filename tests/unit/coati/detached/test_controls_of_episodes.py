"""An episode's controls: set by what was known at its first lease, for all of its chunks, now and after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_core.coati.detached.controls_of_episodes import EpisodesControls
from rlhf_core.config import PPOOptions
from rlhf_core.generation import GenerationSettings
from rlhf_core.types import EpisodeControls, Sample

SAMPLE = Sample(
    prompt="", answer="", response="", key="", score=1.0, verifier=0.0, well_formed=True, rm_score=None, kl=5.0,
    length=1, ended=True,
)  # fmt: skip


def controls() -> EpisodesControls:
    options = PPOOptions(kl_target=0.5, kl_horizon=10)
    return EpisodesControls(options, GenerationSettings(max_new_tokens=4, stop_ids=(2,), pad_id=0), max_staleness=1)


def test_chunks_that_are_made_again_agree_with_the_others_of_their_episode() -> None:
    ours = controls()
    ours.begin(kl_coef=0.1, completed=0)
    early = ours.of(3)  # leased ahead, as where stale experience is dropped
    ours.learnt(0, [SAMPLE] * 4)
    assert ours.of(3) == early
    assert ours.of(2) != early
    again = controls()
    again.load_state(ours.state())
    again.begin(kl_coef=0.1, completed=1)
    assert again.of(3) == early


class LeasedMeanwhile(dict[int, EpisodeControls]):
    """Controls by episode; whoever has looked through them finds one more afterwards, as if a chunk had been leased."""

    def __init__(self, ours: EpisodesControls, episode: int) -> None:
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
    ours.begin(kl_coef=0.1, completed=0)
    ours._of = LeasedMeanwhile(ours, 4)
    ours.learnt(0, [SAMPLE] * 4)
    assert dict.keys(ours._of) == {4}, "what was leased meanwhile is forgotten"
