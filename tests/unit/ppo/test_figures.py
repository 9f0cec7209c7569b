"""What a step tells: figures over tokens, the loss that was minimised, and nothing of a critic that is not trained."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.errors import TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.training.padding import pad_examples
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.experience import tiny_experience
from tests.unit.ppo.test_learner import CONFIG
from tests.unit.ppo.test_options import EXAMPLES, learner, shifted


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_error_of_the_critic_leaves_the_actor_as_if_there_had_been_no_step(dtype: str) -> None:
    ours, expected = learner(dtype=dtype), learner(dtype=dtype)
    batch = shifted(ours)
    with torch.no_grad():
        ours.critic.head.bias.fill_(float("nan"))
    before, facts = ours.state()
    with pytest.raises(TrainingError, match="critic's loss is nan"):
        ours.training_step(batch)
    after = ours.state()
    assert after.facts == facts
    assert all(torch.equal(tensor, before[name]) or tensor.isnan().all() for name, tensor in after.tensors.items())
    assert all(parameter.grad is None for parameter in [*ours.actor.parameters(), *ours.critic.parameters()])
    with torch.no_grad():
        ours.critic.head.bias.zero_()
    assert ours.training_step(batch) == expected.training_step(batch)  # the same minibatch, learnt once


@pytest.mark.parametrize("overflowing", ["actor", "critic"])
def test_a_gradient_that_overflows_in_one_model_leaves_out_its_step_alone(overflowing: str) -> None:
    ours = learner(dtype="float16")
    batch = shifted(ours)
    next(getattr(ours, overflowing).parameters()).register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    stats = ours.training_step(batch)
    for role, overflowed in (("actor", stats.actor_overflowed), ("critic", stats.critic_overflowed)):
        scale = ours._roles[role].optimizer.scale
        assert overflowed == float(role == overflowing)
        assert (scale.factor, scale.good_steps) == ((32768, 0) if role == overflowing else (65536, 1))


def test_an_overflow_of_the_actor_is_forgotten_when_the_critic_ends_the_step_in_an_error() -> None:
    ours = learner(dtype="float16")
    batch = shifted(ours)
    next(ours.actor.parameters()).register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    with torch.no_grad():
        ours.critic.head.bias.fill_(math.nan)
    with pytest.raises(TrainingError, match="critic's loss is nan"):
        ours.training_step(batch)
    assert ours._roles["actor"].optimizer.scale.factor == 65536


@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant_length"])
def test_diagnostics_are_means_over_tokens_however_losses_are_aggregated(aggregation: str) -> None:
    found, expected = (ours.training_step(shifted(ours)) for ours in (learner(aggregation=aggregation), learner()))
    assert found.actor_loss != pytest.approx(expected.actor_loss, rel=1e-2)
    for name in ("entropy", "approx_kl", "clip_fraction", "value_clip_fraction"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5), name


def test_a_critic_that_the_estimator_needs_not_is_left_untouched_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = tiny_llama(initializer_range=0.2)
    critic = Critic.from_causal_lm(actor)
    before = [parameter.clone() for parameter in critic.parameters()]
    config = CONFIG.model_copy(update={"advantage_estimator": "rloo"})
    with caplog.at_level("INFO"):
        ours = PPOLearner.build(actor, critic, config, device="cpu")
    assert [record.message for record in caplog.records if "critic" in record.message] == [
        "advantage estimator rloo needs no critic; it stays as it is"
    ]
    stats = learn_episode(ours, tiny_experience().replace(returns=None), seed=0, episode=0)[0]
    assert (stats.critic_loss, stats.critic_grad_norm, stats.critic_lr, stats.value_mean) == (0, 0, 0, 0)
    assert all(torch.equal(new, old) for new, old in zip(critic.parameters(), before, strict=True))


def test_the_error_tells_the_loss_that_was_minimised() -> None:
    config = {"entropy_coef": 0.1, "ptx_coef": 0.3}
    expected, ours = learner(**config), learner(**config)
    ptx = pad_examples(EXAMPLES, torch.device("cpu"))
    stats = expected.training_step(shifted(expected), ptx)
    loss = 0.7 * stats.actor_loss + 0.3 * stats.ptx_loss - 0.1 * stats.entropy
    batch = shifted(ours)
    next(iter(ours.actor.parameters())).register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(TrainingError, match="the actor's loss is ") as caught:
        ours.training_step(batch, ptx)
    told = float(str(caught.value).split("loss is ")[1].split()[0])
    assert told == pytest.approx(loss, rel=1e-4)
