"""An episode's controls: set by what was known at its first lease, for all of its chunks, now and after a restart."""

from __future__ import annotations

from rlhf_core.config import PPOOptions
from rlhf_core.detached.coati.controls_of_episodes import EpisodesControls
from rlhf_core.generation import GenerationSettings
from rlhf_core.types import Sample

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
