"""What the public trainer refuses, each in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.coati.callbacks import Callback
from rlhf_core.errors import ConfigError, DataError, ModelError, TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.models.reward_model import RewardModel
from tests.unit.coati.ppo_trainers import (
    TOKENIZER,
    prompts,
    trainer,
    weights,
)


class Spoilt(torch.nn.Module):
    """A reward model that is not always a number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(len(ids))
        scores[-1] = self.value
        return scores


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_stops_the_run_and_the_batch_is_kept(value: float, tmp_path: Path) -> None:
    ours = trainer(reward_model=Spoilt(value), save_dir=tmp_path)
    with pytest.raises(TrainingError, match=r"reward of 1 of 2 responses is not a finite number.*kept in ") as raised:
        ours.fit(1, 1, 1, prompts())
    directory = Path(str(raised.value).rsplit(" kept in ", 1)[1])
    assert directory.is_relative_to(tmp_path)
    rows = json.loads((directory / "batch.json").read_text())["rows"]
    assert [row["reward"][-1] for row in rows] == ["0", str(value)]
    assert "plus" in rows[0]["prompt"]
    assert load_file(directory / "experience.safetensors")["sequences"].shape[0] == 2
    assert ours.position.step == 0


def test_a_loss_that_is_no_number_stops_the_run_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    ours = trainer(save_dir=tmp_path, save_interval=1)

    class Poison(Callback):
        steps = 0

        def on_learn_batch_start(self) -> None:
            self.steps += 1
            if self.steps == 2:
                with torch.no_grad():
                    ours.learner.critic.head.weight.fill_(float("nan"))

    ours.callbacks = (Poison(),)
    with pytest.raises(
        TrainingError, match=r"critic's loss is nan.*the batch is kept in .*failed-batch-epoch-0_step-1"
    ):
        ours.fit(1, 2, 1, prompts())
    again = trainer()
    again.load_checkpoint(tmp_path)
    assert again.position.step == 1
    assert all(weight.isfinite().all() for weight in weights(again).values())


def test_a_full_disk_does_not_hide_why_a_batch_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("rlhf_core.ppo.failed_batch.save_file", full)
    says = r"reward of 1 of 2 responses is not a finite number.*; the batch could not be kept in .*No space left"
    with pytest.raises(TrainingError, match=says):
        trainer(reward_model=Spoilt(float("nan")), save_dir=tmp_path).fit(1, 1, 1, prompts())


def test_without_save_dir_a_failed_batch_is_not_kept_and_the_sentence_says_so() -> None:
    with pytest.raises(TrainingError, match="give save_dir to have such a batch kept"):
        trainer(reward_model=Spoilt(float("nan"))).fit(1, 1, 1, prompts())


def other_vocabulary() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (lambda: {"reward_model": RewardModel.from_causal_lm(other_vocabulary())}, ModelError, "the reward model"),
        (lambda: {"critic": Critic.from_causal_lm(other_vocabulary())}, ModelError, "the critic"),
        (lambda: {"initial_model": other_vocabulary()}, ModelError, "the initial model"),
        (lambda: {"actor": other_vocabulary(), "tokenizer": TOKENIZER}, ModelError, "different vocabularies"),
        (lambda: {"train_batch_size": 0}, ConfigError, "train_batch_size must be at least 1, got 0"),
        (lambda: {"accumulation_steps": 0}, ConfigError, "accumulation_steps must be at least 1, got 0"),
        (lambda: {"eps_clip": 1.5}, ConfigError, "eps_clip is 1.5"),
        (lambda: {"ptx_coef": 1.0}, ConfigError, "ptx_coef is 1.0"),
        (lambda: {"kl_coef": -0.1}, ConfigError, "kl_coef is -0.1"),
        (lambda: {"save_interval": 3}, ConfigError, "save_interval is 3.*save_dir"),
        (lambda: {"temprature": 0.7}, ConfigError, "temprature.*did you mean temperature"),
        (lambda: {"reward_model": None}, ConfigError, "expected a reward_model"),
        (lambda: {"critic": None, "critic_optim": None}, ConfigError, "gae needs a critic"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_by_the_constructor(changes: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        trainer(**changes())
    assert "\n" not in str(raised.value)


EMPTY = {"input_ids": torch.zeros(0, 4, dtype=torch.long), "attention_mask": torch.zeros(0, 4, dtype=torch.long)}
PADDED = {
    "input_ids": torch.zeros(2, 4, dtype=torch.long),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]),
}


@pytest.mark.parametrize(
    ("batches", "says"), [([], "holds no batch"), ([EMPTY], "is empty"), ([PADDED], "is all padding")]
)
def test_empty_and_all_padded_prompts_are_refused_in_a_sentence(batches: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        trainer().fit(1, 1, 1, batches)


def test_numbers_below_one_are_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="num_update_steps must be at least 1, got 0"):
        trainer().fit(1, 1, 0, prompts())
