"""The public trainer where reward functions fail."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from rlhf_core.errors import TrainingError
from rlhf_core.models.lora import trainable_state
from rlhf_core.rewards.abstaining import RAISED, failure
from rlhf_core.rewards.scoring import ScoringBatch, Weighted, WeightedScorer
from rlhf_core.rewards.sources import Judged
from tests.unit.coati.ppo_trainers import metrics, prompts, record_stats, trainer

RAISED_NO_JUDGE = failure(RAISED, "it raised ConnectionError: no judge")
COUNTED = ("episode/abstained", "episode/failed/judge/raised")


def failing(*calls: int) -> WeightedScorer:
    """A judge that fails at these calls, counted from 0."""
    made = count()

    def judge(batch: ScoringBatch) -> Judged:
        failures = [{"judge": RAISED_NO_JUDGE} if next(made) in calls else {} for _ in batch.responses]
        said = torch.tensor([float("nan") if failed else row % 2.0 for row, failed in enumerate(failures)])
        return Judged(said, {"judge": said}, failures=failures)

    return WeightedScorer([Weighted("judge", 1.0, judge)])


def test_a_run_goes_on_where_some_calls_fail_and_its_log_counts_them(tmp_path: Path) -> None:
    judge = failing(1, 4, 6)  # of episode 1 the second sample, of episode 2 the second minibatch
    ours = trainer(scorer=judge)
    stats = record_stats(ours)
    ours.fit(2, 2, 1, prompts(8, shuffle=False), log_dir=tmp_path)
    first, second = stats[:2], stats[2:]
    assert [step.skipped for step in first] == [0, 0]
    assert [step.skipped for step in second] == [0, 1]
    assert {name: [row[name] for row in metrics(tmp_path) if name in row] for name in COUNTED} == {
        "episode/abstained": [0.25, 0.5], "episode/failed/judge/raised": [1, 2],
    }  # fmt: skip


def test_above_the_share_the_run_stops_at_the_last_episode_and_goes_on_once_the_judge_is_back() -> None:
    ours = trainer(scorer=failing(4, 5, 6))
    ours.fit(1, 2, 1, prompts(8))
    before = trainable_state(ours.learner.actor)
    sentence = (
        r"^3 of 4 samples of episode 2 could not be judged, .* judge failed 3 times \(raised 3; first, it raised "
    )
    with pytest.raises(TrainingError, match=sentence):
        ours.fit(2, 2, 1, prompts(8))
    assert (ours.position.episode, ours.position.step) == (1, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainable_state(ours.learner.actor).items())
    ours.fit(2, 2, 1, prompts(8))
    assert (ours.position.episode, ours.position.step) == (2, 4)
