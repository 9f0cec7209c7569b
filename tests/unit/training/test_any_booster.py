"""Trainers on a booster that wraps and hides: the numbers, to the bit, and the states of a plain one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.config import LoRAConfig, RewardModelConfig, SFTConfig
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.booster import OwnBooster
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.supervised.reward_model import RewardModelTrainer, train_reward_model
from rlhf_core.supervised.sft import SFTTrainer, train_sft
from tests.tiny_llama import tiny_llama
from tests.unit.coati.ppo_trainers import differences, prompts, record_stats, trainer, weights
from tests.unit.ppo.experience import tiny_experience
from tests.unit.ppo.test_options import learner
from tests.unit.supervised.test_reward_model_trainer import collate as collate_pairs
from tests.unit.supervised.test_reward_model_trainer import pairs
from tests.unit.supervised.test_sft_trainer import EXAMPLES, collate
from tests.unit.training.built import boosters
from tests.unit.training.foreign_booster import ForeignBooster
from tests.unit.training.strict_booster import StrictBooster

FP32 = torch.float32
BOTH = (PlainBooster, StrictBooster)
CHOICES: dict[str, dict[str, Any]] = {
    "all weights": {"entropy_coef": 0.1},
    "adapters with dropout, activations computed again": {
        "lora": LoRAConfig(r=2, dropout=0.3), "gradient_checkpointing": True, "correction": "decoupled",
        "max_epochs": 2,
    },
    "a critic that starts as a reward model": {"critic_init": "reward_model", "micro_batch_size": 3},
}  # fmt: skip


def learnt(make: Any, choices: dict[str, Any]) -> tuple[PPOLearner, list[Any]]:
    with boosters(make):
        ours = learner(train_batch_size=4, **({"micro_batch_size": 2} | choices))
        return ours, learn_episode(ours, tiny_experience(), seed=0, episode=0)


def test_a_foreign_booster_that_has_only_the_protocols_methods_trains_and_saves(tmp_path: Path) -> None:
    ran = []
    for make in (PlainBooster, ForeignBooster):
        ours = foreign_trainer(make, accumulation_steps=2, save_dir=tmp_path / make.__name__)
        stats = record_stats(ours)
        ours.fit(2, 2, 1, prompts(shuffle=False))
        ran.append([step._replace(actor_grad_norm=0.0, critic_grad_norm=0.0) for step in stats])
        again = foreign_trainer(make)
        again.load_checkpoint(tmp_path / make.__name__)
        states = [each.learner.state().tensors for each in (ours, again)]
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert ran[0] == ran[1]


def foreign_trainer(make: Any, **changes: Any) -> Any:
    """What `trainer` returns, built by a booster that makes no optimizers."""
    models = trainer()
    parameters: dict[str, Any] = {}
    for role, (model, *_) in models.learner._roles.items():
        booster = make()
        boosted, optim, _, _, scheduler = booster.boost(
            model,
            optimizer := AdamW(model.parameters(), lr=1e-3),
            lr_scheduler=LambdaLR(optimizer, lambda _: 1.0),
        )
        parameters |= {
            f"{role}_booster": booster, role: boosted, f"{role}_optim": optim, f"{role}_lr_scheduler": scheduler,
        }  # fmt: skip
    return trainer(**(parameters | changes))


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not differences(one, other)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_learner_takes_the_same_steps_on_any_booster(name: str) -> None:
    (plain, expected), (strict, found) = (learnt(make, CHOICES[name]) for make in BOTH)
    assert found == expected
    torch.manual_seed(0)
    whole = plain.state()
    torch.manual_seed(0)
    assert strict.state().facts == whole.facts
    assert_same(whole.tensors, {name: strict.state().tensors[name] for name in whole.tensors})
    for role in ("actor", "critic"):
        assert_same(dict(plain.merged_weights(role)), dict(strict.merged_weights(role)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1]])
def test_the_state_of_one_booster_is_gone_on_with_under_another(first: Any, second: Any) -> None:
    choices = CHOICES["a critic that starts as a reward model"]
    ours, _ = learnt(first, choices)
    with boosters(second):
        other = learner(train_batch_size=4, **choices)
    other.load_state(*ours.state())
    batch = tiny_experience(seed=1)
    assert learn_episode(other, batch, seed=0, episode=1) == learn_episode(ours, batch, seed=0, episode=1)
    assert_same(dict(ours.merged_weights("critic")), dict(other.merged_weights("critic")))


def test_the_trainer_samples_learns_and_saves_on_any_booster(tmp_path: Path) -> None:
    stats, found, lora = [], [], LoRAConfig(r=2, dropout=0.3)
    for make in BOTH:
        torch.manual_seed(11)
        ours = trainer(lora=lora, make_booster=make, save_dir=tmp_path / make.__name__, save_interval=2)
        stats.append(record_stats(ours))
        ours.fit(2, 1, 2, prompts())
        found.append(ours)
    assert stats[0] == stats[1]
    trained = weights(found[1])
    assert_same({name: weights(found[0])[name] for name in trained}, trained)
    for made, read in (BOTH, BOTH[::-1]):
        again = trainer(lora=lora, make_booster=read)
        again.load_checkpoint(tmp_path / made.__name__ / "trainer" / "epoch-0_step-2")
        again.fit(2, 1, 2, prompts())
        assert_same({name: weights(again)[name] for name in trained}, trained)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sft_takes_the_same_steps_on_any_booster() -> None:
    config = SFTConfig(
        batch_size=4, micro_batch_size=2, lr=1e-2, warmup_steps=0, packing=True, max_length=20,
        lora=LoRAConfig(r=2, dropout=0.3), gradient_checkpointing=True,
    )  # fmt: skip
    runs = []
    for make in BOTH:
        with boosters(make):
            model = tiny_llama(initializer_range=0.2)
            runs.append(train_sft(model, EXAMPLES, config, seed=1, autocast_dtype=FP32, heldout=EXAMPLES[:3]))
    assert runs[0].history == runs[1].history
    assert "heldout_loss" in runs[0].history[-1]
    assert_same(*(exact(run.trained.booster, run.trained.model) for run in runs))


def test_a_reward_model_takes_the_same_steps_on_any_booster() -> None:
    config = RewardModelConfig(batch_size=4, micro_batch_size=2, lr=1e-2, warmup_steps=0, centring=0.1)
    runs = []
    for make in BOTH:
        with boosters(make):
            model = RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2))
            nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
            runs.append(train_reward_model(model, pairs(7, seed=1), config, seed=1, autocast_dtype=FP32))
    assert runs[0].history == runs[1].history
    assert_same(*(exact(run.trained.booster, run.trained.model) for run in runs))


def exact(booster: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    with booster.exact(model) as whole:
        return {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}


def boosted(model: nn.Module, booster: OwnBooster) -> tuple[Any, Any, Any]:
    optimizer = AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    model, optim, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 1.0))
    return model, optim, scheduler


def sft_trainer(make: Any, **options: Any) -> SFTTrainer:
    language_model, booster = tiny_llama(initializer_range=0.2), make()
    attach_lora(language_model, LoRAConfig(r=2, dropout=0.3), seed=0)
    model, optim, scheduler = boosted(language_model, booster)
    return SFTTrainer(model, booster, optim, scheduler, accumulation_steps=2, **options)


def pair_trainer(make: Any, **options: Any) -> RewardModelTrainer:
    torch.manual_seed(0)
    booster = make()
    model, optim, scheduler = boosted(RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2)), booster)
    return RewardModelTrainer(model, booster, optim, None, scheduler, None, **options)


@pytest.mark.parametrize("kind", ["sft", "pairs"])
def test_supervised_trainers_learn_measure_and_go_on_under_any_booster(kind: str, tmp_path: Path) -> None:
    make_trainer: Any = sft_trainer if kind == "sft" else pair_trainer
    make: Any = collate if kind == "sft" else collate_pairs
    rows: Any = EXAMPLES if kind == "sft" else pairs(7, seed=1)
    unseen = [make(EXAMPLES[:3] if kind == "sft" else pairs(3, seed=2))]
    batches = [make(rows[start : start + 2]) for start in range(0, 7, 2)]
    ran = []
    for booster in BOTH:
        torch.manual_seed(3)
        ours = make_trainer(booster, max_epochs=2, save_dir=tmp_path / booster.__name__, save_interval=1)
        ours.fit(batches, unseen, log_dir=tmp_path / "logs" / booster.__name__)
        ran.append(ours)
    assert ran[0].history == ran[1].history
    files = sorted((tmp_path / "logs").rglob("metrics.jsonl"))
    assert len({file.read_text() for file in files}) == 1 < len(files)
    for made, read in (BOTH, BOTH[::-1]):
        again = make_trainer(read, max_epochs=2)
        again.load_checkpoint(tmp_path / made.__name__ / "epoch-0_step-1")
        again.fit(batches)
        assert again.history == ran[0].history[1:]
        assert math.isfinite(again.history[-1]["loss"])
