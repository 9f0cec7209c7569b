"""What a failed episode leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.errors import TrainingError
from rlhf_core.models.lora import trainable_state
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.types import Sample
from tests.unit.ppo.experience import tiny_experience
from tests.unit.ppo.test_learner import learner

torch.set_num_threads(1)


class Keeper:
    """Keeps failed batches in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, write: Callable[[Path], None]) -> str:
        write(self.directory / "kept")
        return "the batch is kept in the place"


class Full(Keeper):
    def keep(self, write: Callable[[Path], None]) -> str:  # noqa: ARG002
        raise OSError(28, "No space left on device")


def samples() -> list[Sample]:
    made = [
        Sample(
            prompt=f"p{row}", answer="a", response=f"r{row}", key=f"k{row}", score=0.0, verifier=0.0, well_formed=True,
            rm_score=None, kl=0.0, length=1, ended=True,
        )
        for row in range(8)
    ]  # fmt: skip
    return made[::-1]  # as they came


def fail(keeper: Any) -> tuple[str, bool]:
    """The sentence of an episode with one infinite reward, and whether it changed a weight."""
    ours, experience = learner(), tiny_experience()
    experience.reward[3, 0] = float("inf")
    before = trainable_state(ours.actor)
    with pytest.raises(TrainingError) as caught:
        learn_episode(ours, experience, samples(), seed=0, episode=0, keep=keeper.keep)
    moved = any(not torch.equal(tensor, before[name]) for name, tensor in trainable_state(ours.actor).items())
    return str(caught.value), moved


def test_a_reward_that_is_no_number_ends_the_episode_before_the_first_step_and_its_batch_is_kept(
    tmp_path: Path,
) -> None:
    sentence, moved = fail(Keeper(tmp_path))
    assert not moved
    assert sentence.startswith("the reward of 1 of 8 responses is not a finite number (rows 3)")
    assert sentence.endswith("the batch is kept in the place")
    assert load_file(tmp_path / "kept" / "experience.safetensors")["reward"][3, 0] == float("inf")
    rows = json.loads((tmp_path / "kept" / "batch.json").read_text())["rows"]
    assert [row["prompt"] for row in rows] == [f"p{row}" for row in range(8)]  # the experience is in order of keys


def test_where_nothing_can_be_kept_the_reason_is_still_told() -> None:
    sentence, _ = fail(Full(Path()))
    assert "the reward of 1 of 8" in sentence
    assert "could not be kept ([Errno 28] No space left" in sentence


def test_a_loss_that_is_no_number_keeps_its_batch_too(tmp_path: Path) -> None:
    ours = learner()
    with torch.no_grad():
        next(iter(ours.critic.parameters())).fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"the critic's loss is nan.*; the batch is kept in the place"):
        learn_episode(ours, tiny_experience(), samples(), seed=0, episode=0, keep=Keeper(tmp_path).keep)
    assert (tmp_path / "kept" / "batch.json").exists()
