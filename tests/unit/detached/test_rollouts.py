"""What a run leases, and what a training state keeps of it: without makers, whose part the test plays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_core.config import PPOConfig
from rlhf_core.data import Problem
from rlhf_core.detached.rollouts import Rollouts
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.state import RolloutState
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import EpisodeControls, Sample

PROBLEMS = [Problem(f"{number} plus 1") for number in range(8)]
CONFIG = PPOConfig(
    episodes=4, prompts_per_episode=8, chunk_size=4, train_batch_size=4, micro_batch_size=4, max_staleness=1,
    kl_target=0.5, kl_coef=0.1, kl_horizon=100,
)  # fmt: skip


def rollouts(
    controls: RewardControls, completed: int = 0, kept: RolloutState | None = None, **changes: Any
) -> Rollouts:
    return Rollouts(
        PROBLEMS, CONFIG.model_copy(update=changes), seed=3, controls=controls, completed=completed,
        kept=kept or RolloutState(), on_trouble=lambda _: None,
    )  # fmt: skip


def make(ours: Rollouts, version: int, samples: Sequence[Sample] = ()) -> MadeChunk:
    lease = ours.queue.lease("maker-0")
    assert lease is not None
    chunk = MadeChunk(
        lease.unit.index, "maker-0", {}, list(samples), {"generate": 3.0, "score": 1.0}, lease.unit.episode, version
    )  # fmt: skip
    assert ours.queue.made(lease, chunk, version=version)
    return chunk


def learn(ours: Rollouts, controls: RewardControls, episode: int) -> None:
    ours.collect(episode, lambda *_: None)
    controls.update(kl_per_sample=torch.full((8,), 5.0), scores=torch.zeros(8))
    ours._controls.open(episode + 1)
    ours.queue.learnt(episode)


def test_an_episodes_controls_are_those_of_when_makers_may_first_begin_it() -> None:
    controls = RewardControls(CONFIG, ALONE)
    ours = rollouts(controls)
    make(ours, 0), make(ours, 0), make(ours, 0)
    learn(ours, controls, 0)
    later = controls.current()
    assert later.kl_coef > 0.1
    assert ours.controls_of(1) == EpisodeControls(0.1)  # begun beside episode 0, and the same for all its chunks
    assert ours.controls_of(2) == later
    make(ours, 1)
    learn(ours, controls, 1)
    assert controls.current() != later
    assert ours.controls_of(2) == later


def test_in_lockstep_an_episode_has_the_controls_of_all_before_it() -> None:
    controls = RewardControls(CONFIG, ALONE)
    ours = rollouts(controls, max_staleness=0)
    make(ours, 0), make(ours, 0)
    learn(ours, controls, 0)
    assert ours.controls_of(1) == controls.current() != EpisodeControls(0.1)


def test_what_waits_is_learnt_after_a_restart_and_what_was_out_is_leased_again_under_the_same_controls() -> None:
    controls = RewardControls(CONFIG, ALONE)
    ours = rollouts(controls)
    make(ours, 0), make(ours, 0)
    waiting = make(ours, 0)
    learn(ours, controls, 0)
    assert ours.queue.lease("maker-1") is not None  # is out when the state is taken
    state = ours.state()
    assert state.waiting == (waiting,)
    assert state.counts == {"issued": 4, "learnt": 2, "dropped": 0, "lost": 1, "out": 0, "waiting": 1}

    fresh = RewardControls(CONFIG, ALONE)
    fresh.load_state(controls.state())
    again = rollouts(fresh, completed=1, kept=state)
    assert again.controls_of(1) == EpisodeControls(0.1)
    assert again.controls_of(2) == controls.current()
    assert make(again, 1).index == 1
    found, seconds = again.collect(1, lambda *_: None)
    assert [(chunk.index, chunk.version) for chunk in found] == [(0, 0), (1, 1)]
    assert seconds["generate"] == 3 * seconds["score"]  # the wait is shared out in proportion to the makers' work


def test_figures_are_of_the_time_since_the_last_look() -> None:
    ours = rollouts(RewardControls(CONFIG, ALONE))
    make(ours, 0), make(ours, 0)
    ours.collect(0, lambda *_: None)
    figures = ours.figures(busy_s=0.0)
    assert figures["idle_trainer"] == 1.0
    assert (figures["queue_depth"], figures["makers"], figures["chunks_issued"]) == (8.0, 1.0, 2.0)
    assert ours.figures(busy_s=1000.0)["idle_trainer"] == 0.0


def test_a_chunk_at_which_a_judge_failed_is_in_no_state_and_made_again_after_a_restart() -> None:
    controls = RewardControls(CONFIG, ALONE)
    ours = rollouts(controls)
    make(ours, 0), make(ours, 0)
    failed = Sample(
        prompt="p", answer="", response="r", key="k", score=0.0, verifier=0.0, well_formed=False, rm_score=None, kl=0.0,
        length=1, ended=True, failures={"verifier": "timed_out: it took longer than 10 s"}, abstains=True,
    )  # fmt: skip
    make(ours, 0, [failed])
    judged = make(ours, 0)
    learn(ours, controls, 0)
    state = ours.state()
    assert state.waiting == (judged,)
    again = rollouts(controls, completed=1, kept=state)
    assert make(again, 1).index == 0  # of episode 1, the chunk that failed
