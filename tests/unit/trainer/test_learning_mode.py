"""The mode of a training step: checkpointed or not, adapters' dropout by seed and step, float16 scaled."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import LoRAConfig
from tests.unit.trainer.experience import tiny_experience
from tests.unit.trainer.test_ppo_options import gradients, learner, shifted

torch.set_num_threads(1)


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2), LoRAConfig(r=2, dropout=0.4)])
def test_checkpointed_activations_give_the_same_step(lora: LoRAConfig | None) -> None:
    stats, found = [], []
    for checkpointing in (False, True):
        ours = learner(lora=lora, gradient_checkpointing=checkpointing)
        stats.append(ours.training_step(shifted(ours)))
        found.append(gradients(ours) | gradients(ours, "critic"))
        assert ours.actor.training is ours.critic.training is False
    assert stats[0] == pytest.approx(stats[1], rel=1e-6)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-6 * gradient.abs().max().item())


def test_checkpointing_is_really_on_while_learning() -> None:
    ours = learner(gradient_checkpointing=True)
    calls = []
    layer = ours.actor.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(layer.training))
    batch = ours.recompute(tiny_experience())
    assert calls == [False] * 4  # a forward pass for each micro-batch
    calls.clear()
    ours.training_step(batch)
    assert calls == [True] * 8  # and once more in each backward pass


def test_dropout_depends_on_seed_and_step_and_on_nothing_else() -> None:
    lora = LoRAConfig(r=2, dropout=0.4)
    stats = []
    for _ in range(2):
        ours = learner(lora=lora)
        torch.rand(3)  # whoever else draws
        before = torch.get_rng_state()
        stats.append([ours.training_step(shifted(ours)) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert stats[0] == stats[1]


def test_float16_scales_its_loss_and_agrees_with_float32() -> None:
    # On a CPU, float16 is slow and exact enough to compare.
    half, single = learner(dtype="float16"), learner()
    batch = shifted(single)
    stats, expected = half.training_step(batch), single.training_step(batch)
    assert stats.actor_loss == pytest.approx(expected.actor_loss, rel=2e-2, abs=2e-2)
    assert stats.actor_grad_norm == pytest.approx(expected.actor_grad_norm, rel=5e-2)
    assert half.state().facts["actor"]["loss_scale"] == {"factor": 65536.0, "good_steps": 1}
