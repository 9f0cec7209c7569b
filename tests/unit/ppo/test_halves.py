"""Actor and critic that learn apart, each with a learner of its own, take the steps that they take together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.config import LearningConfig
from rlhf_core.errors import ConfigError
from rlhf_core.models.critic import Critic
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner, PPOStats
from rlhf_core.training.optim import Trained, make_trained
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.experience import tiny_experience

CONFIG = LearningConfig(train_batch_size=4, micro_batch_size=2, max_epochs=2, dtype="float32", max_ratio=None)
OF_THE_CRITIC = ("critic_loss", "value_clip_fraction", "critic_grad_norm", "critic_lr", "value_mean",
                 "explained_variance")  # fmt: skip
OF_BOTH = ("advantage_mean", "advantage_std", "importance_weight")


def trained(model: nn.Module) -> Trained:
    return make_trained(model, lr=1e-3, weight_decay=0.0, schedule=lambda _: 1.0)


def actor() -> Trained:
    return trained(tiny_llama(initializer_range=0.2))


def critic() -> Trained:
    return trained(Critic.from_causal_lm(tiny_llama(initializer_range=0.2)))


def learner(first: Trained | None, second: Trained | None, **options: Any) -> PPOLearner:
    return PPOLearner(first, second, CONFIG, device="cpu", seed=1, max_new_tokens=8, **options)


def learn(ours: PPOLearner) -> list[PPOStats]:
    return learn_episode(ours, tiny_experience(), seed=1, episode=0) + learn_episode(
        ours, tiny_experience(1), seed=1, episode=1
    )


def weights(of: Trained) -> dict[str, torch.Tensor]:
    return dict(of.model.named_parameters())


def test_halves_take_the_steps_of_the_whole_to_the_bit() -> None:
    together, apart = (actor(), critic()), (actor(), critic())
    whole = learn(learner(*together))
    first, second = learn(learner(apart[0], None, apart=True)), learn(learner(None, apart[1], apart=True))
    assert len(whole) == len(first) == len(second) == 8
    assert whole[0].critic_loss > 0
    for one, mine, hers in zip(whole, first, second, strict=True):
        for name in PPOStats._fields:
            has = (hers,) if name in OF_THE_CRITIC else (mine, hers) if name in OF_BOTH else (mine,)
            assert all(getattr(one, name) == getattr(half, name) for half in has), name
    for same, half in zip(together, apart, strict=True):
        for name, weight in weights(same).items():
            assert torch.equal(weight, weights(half)[name]), name


def test_a_learner_without_a_critic_is_refused_unless_one_learns_elsewhere() -> None:
    with pytest.raises(ConfigError, match="needs a critic, and there is none"):
        learner(actor(), None)
    learner(actor(), None, apart=True)
