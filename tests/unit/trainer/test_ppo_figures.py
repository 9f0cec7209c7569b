"""What a step tells: figures over tokens, the loss that was minimised, and nothing of a critic that is not trained."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.errors import TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.trainer.base import pad_examples
from rlhf_core.trainer.ppo.learner import PPOLearner
from tests.tiny_llama import tiny_llama
from tests.unit.trainer.experience import tiny_experience
from tests.unit.trainer.test_ppo_learner import CONFIG
from tests.unit.trainer.test_ppo_options import EXAMPLES, learner, shifted


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
    stats = ours.learn(tiny_experience().replace(returns=None), seed=0, episode=0)[0]
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
