"""The detached trainer of PPO, without any actor: it learns what is pushed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.coati.detached.building import LearningOptions
from rlhf_core.coati.detached.ppo_trainer import DetachedPPOTrainer
from rlhf_core.coati.detached.scheduled_fit import DealingOptions
from rlhf_core.coati.strategy import make_strategy
from rlhf_core.config import PPOOptions
from rlhf_core.errors import TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.types import Experience
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.experience import tiny_experience


def models() -> tuple[Any, Any]:
    actor = tiny_llama()
    return actor, Critic.from_causal_lm(actor)


def trainer(**changes: Any) -> Any:
    made = DetachedPPOTrainer.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    return made(
        [], partial(make_strategy, "plain", device="cpu", seed=3), models, train_batch_size=8,
        dealing=DealingOptions(seed=3), learning=LearningOptions(lr=1e-3, max_new_tokens=4),
        options=PPOOptions(dtype="float32", rollout_dtype="float32"), **changes,
    )  # fmt: skip


def spoilt() -> Experience:
    """Return eight rows; the first reward of the third is no number."""
    experience = tiny_experience()
    experience.reward[2, 0] = float("nan")
    return experience


def test_a_reward_that_is_no_number_stops_the_fit_and_the_batch_is_kept(tmp_path: Path) -> None:
    ours = trainer(save_dir=tmp_path / "state")
    ours.buffer_append(tiny_experience())
    ours.buffer_append(spoilt())
    says = r"the reward of 1 of 8 responses is not a finite number \(rows 2\).*kept in .*failed-batch-episode-1_step-1/"
    with pytest.raises(TrainingError, match=says) as raised:
        ours.fit(2, 1)
    kept = Path(str(raised.value).rsplit(" kept in ", 1)[1])
    assert kept.is_relative_to(tmp_path)
    tensors = load_file(kept / "experience.safetensors")
    assert torch.equal(tensors["sequences"], tiny_experience().sequences)
    assert torch.nonzero(tensors["reward"].isnan()).tolist() == [[2, 0]]
    rows = json.loads((kept / "batch.json").read_text())["rows"]
    assert [row["reward"][0] == "nan" for row in rows] == [number == 2 for number in range(8)]
    assert ours.learner.steps == 1  # of the first episode


def test_a_batch_that_was_kept_outlasts_the_states_that_are_written_later(tmp_path: Path) -> None:
    ours = trainer(save_dir=tmp_path / "state")
    ours.buffer_append(spoilt())
    with pytest.raises(TrainingError, match="is kept in ") as raised:
        ours.fit(1, 1)
    ours.buffer_append(tiny_experience())
    ours.fit(1, 1)  # the episode that was due, from other rows
    assert (tmp_path / "state" / "state.json").is_file()
    assert (Path(str(raised.value).rsplit(" kept in ", 1)[1]) / "experience.safetensors").is_file()


def test_without_save_dir_a_failed_batch_is_not_kept_and_the_sentence_says_so() -> None:
    ours = trainer()
    ours.buffer_append(spoilt())
    with pytest.raises(TrainingError, match="give save_dir to have such a batch kept"):
        ours.fit(1, 1)
