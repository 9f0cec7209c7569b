"""The mode of a training step: checkpointed or not, adapters' dropout by seed and step, float16 scaled."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import LoRAConfig
from rlhf_core.ppo.step import StepContext
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.micro_batches import FEW_PASSES
from tests.unit.ppo.experience import tiny_experience
from tests.unit.ppo.test_learner import CONFIG
from tests.unit.ppo.test_options import gradients, learner, shifted


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


def test_dropout_is_another_in_every_seed_step_rank_and_role() -> None:
    def seed(*, seed: int = 0, step: int = 0, rank: int = 0, role: int = 0) -> int:
        context = StepContext(CONFIG, torch.device("cpu"), torch.float32, Ranks(rank, 4), seed, step, FEW_PASSES)
        return context.noise_seed(role)

    drawn = [seed(), seed(seed=1), seed(step=1), seed(rank=1), seed(role=1), seed(step=2), seed(rank=2)]
    assert len(set(drawn)) == len(drawn)
    assert seed(step=1) == drawn[2]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_steps_and_ranks_drop_other_parts_of_the_adapters(role: str) -> None:
    def kept(*, step: int = 0, rank: int = 0) -> torch.Tensor:
        """What reaches the first adapter's second matrix in a step, from weights that are always the same."""
        ours = learner(lora=LoRAConfig(r=2, dropout=0.4))
        ours.steps, ours.ranks = step, Ranks(rank, 1)
        seen: list[torch.Tensor] = []
        model = ours._roles[role].model
        first = next(module for name, module in model.named_modules() if name.endswith("lora_dropout.default"))
        first.register_forward_hook(lambda _, inputs, output: seen.append((output == 0) & (inputs[0] != 0)))
        ours.training_step(tiny_experience())
        return torch.cat([dropped.flatten() for dropped in seen])

    plain, again, later, elsewhere = kept(), kept(), kept(step=1), kept(rank=1)
    assert torch.equal(plain, again)
    assert plain.any()
    assert not torch.equal(plain, later)
    assert not torch.equal(plain, elsewhere)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_overflows_in_float16_leaves_out_one_models_step_and_is_told(role: str, value: float) -> None:
    ours = learner(dtype="float16")
    batch = shifted(ours)
    model = ours._roles[role].model
    before = [parameter.clone() for parameter in model.parameters()]
    hook = next(iter(model.parameters())).register_hook(lambda gradient: gradient * value)
    stats = ours.training_step(batch)._asdict()
    other = "critic" if role == "actor" else "actor"
    assert (stats[f"{role}_overflowed"], stats[f"{role}_grad_norm"]) == (1.0, 0.0)
    assert stats[f"{other}_overflowed"] == stats["skipped"] == 0.0
    assert stats[f"{other}_grad_norm"] > 0
    assert all(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
    assert ours.state().facts[role]["loss_scale"] == {"factor": 32768.0, "good_steps": 0}
    hook.remove()
    assert ours.training_step(batch)._asdict()[f"{role}_grad_norm"] > 0


def test_float16_scales_its_loss_and_agrees_with_float32() -> None:
    # On a CPU, float16 is slow and exact enough to compare.
    half, single = learner(dtype="float16"), learner()
    batch = shifted(single)
    stats, expected = half.training_step(batch), single.training_step(batch)
    assert stats.actor_loss == pytest.approx(expected.actor_loss, rel=2e-2, abs=2e-2)
    assert stats.actor_grad_norm == pytest.approx(expected.actor_grad_norm, rel=5e-2)
    assert half.state().facts["actor"]["loss_scale"] == {"factor": 65536.0, "good_steps": 1}
