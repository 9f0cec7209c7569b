"""AdamW by its definition, and steps that must not be taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.errors import ModelError, TrainingError
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.training.optim import Trained, make_trained, take_step, warmup_then_constant, warmup_then_decay


def trained(model: nn.Module, *, lr: float = 0.1, weight_decay: float = 0.0, **others: Any) -> Trained:
    return make_trained(model, lr=lr, weight_decay=weight_decay, schedule=warmup_then_constant(0), **others)


def test_the_rate_of_a_step_is_the_schedules_at_that_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    both = make_trained(model, lr=0.1, weight_decay=0.0, schedule=warmup_then_constant(2))
    for expected in (0.1 / 3, 0.2 / 3, 0.1, 0.1):
        assert both.scheduler.get_last_lr() == pytest.approx([expected])
        before = model.weight.item()
        model.weight.sum().backward()  # a constant gradient: Adam moves by the rate exactly
        take_step(both, grad_clip=1e9, loss=torch.zeros(()), what="model")
        assert before - model.weight.item() == pytest.approx(expected, rel=1e-4)


class Rebuilding(PlainBooster):
    """Steps another optimizer than the one that it was given, as a plugin may."""

    def boost(self, model: nn.Module, optimizer: Any = None, *others: Any, lr_scheduler: Any = None) -> Any:
        groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        rebuilt = torch.optim.AdamW(groups, lr=123.0)
        return super().boost(model, rebuilt, *others, lr_scheduler=lr_scheduler)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_a_schedule_follows_an_optimizer_that_boosting_built_anew() -> None:
    model = nn.Linear(1, 1, bias=False)
    both = make_trained(
        model, lr=0.1, weight_decay=0.0, schedule=warmup_then_constant(1), booster=Rebuilding(max_norm=None)
    )
    for expected in (0.05, 0.1):
        before = model.weight.item()
        model.weight.sum().backward()
        take_step(both, loss=torch.zeros(()), what="model")
        assert before - model.weight.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999)])
def test_two_steps_agree_with_the_definition_of_adamw(betas: tuple[float, float]) -> None:
    model = nn.Linear(2, 1, bias=False)
    start = model.weight.detach().clone()
    both = trained(model, lr=0.01, weight_decay=0.1, **({} if betas == (0.9, 0.95) else {"betas": betas}))
    gradients = [torch.tensor([[0.5, -2.0]]), torch.tensor([[0.1, 3.0]])]
    # Loshchilov and Hutter 2019, algorithm 2; 0.9 and 0.95 are ours
    expected, first, second = start.clone(), torch.zeros(1, 2), torch.zeros(1, 2)
    for t, gradient in enumerate(gradients, start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient**2
        update = (first / (1 - betas[0] ** t)) / ((second / (1 - betas[1] ** t)).sqrt() + 1e-8)
        expected = expected - 0.01 * (update + 0.1 * expected)
        model.weight.grad = gradient.clone()
        take_step(both, grad_clip=1e9, loss=torch.zeros(()), what="model")
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_by_their_norm_over_all_weights() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    both = trained(model)
    seen: list[list[float]] = []
    both.optimizer.optim.register_step_pre_hook(
        lambda *_: seen.append([*model.weight.grad[0].tolist(), model.bias.grad.item()])
    )
    norm, overflowed = take_step(both, grad_clip=1.0, loss=torch.zeros(()), what="model")
    assert not overflowed
    assert norm == pytest.approx(5.0)
    assert seen[0] == pytest.approx([0.6, 0.0, 0.8], rel=1e-4)
    assert model.weight.grad is None


def test_only_matrices_decay_and_a_head_may_have_its_own_rate() -> None:
    model = nn.Sequential()
    model.add_module("trunk", nn.Linear(2, 2))
    model.add_module("head", nn.Linear(2, 1))
    both = make_trained(model, lr=0.1, weight_decay=0.5, schedule=warmup_then_constant(0), other_lrs={"head.": 0.7})
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        names[member]: (group["lr"], group["weight_decay"])
        for group in both.optimizer.param_groups
        for member in group["params"]
    }
    assert found == {
        "trunk.weight": (0.1, 0.5),
        "trunk.bias": (0.1, 0.0),
        "head.weight": (0.7, 0.5),
        "head.bias": (0.7, 0.0),
    }


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_step_is_taken_from_what_is_not_finite(what: str, value: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    model.weight.grad = torch.full((1, 1), value if what == "gradient" else 1.0)
    both = trained(model)
    loss = torch.tensor(value if what == "loss" else 1.0)
    with pytest.raises(TrainingError, match=r"the actor's loss is .* no step can be taken"):
        take_step(both, grad_clip=1.0, loss=loss, what="actor")
    assert (model.weight.item(), model.weight.grad) == (before, None)
    assert not both.optimizer.state


def test_a_figure_that_is_not_finite_is_told_apart_from_the_loss() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.ones(1, 1)
    with pytest.raises(TrainingError, match=r"loss is 2.0, but a figure beside it is not finite \(1, nan\)"):
        take_step(trained(model), loss=torch.tensor(2.0), others=torch.tensor([1.0, math.nan]), what="actor")
    assert model.weight.grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_overflowed_in_float16_is_told_without_a_number_that_is_none(value: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    schedule = warmup_then_constant(3)
    both = make_trained(model, lr=0.1, weight_decay=0.0, schedule=schedule, booster=PlainBooster("fp16"))
    model.weight.grad = torch.full((1, 1), value)
    rate = both.scheduler.get_last_lr()
    assert take_step(both, loss=torch.zeros(()), what="model") == (0.0, True)
    assert (model.weight.item(), both.scheduler.get_last_lr()) == (before, rate)


def test_trainable_weights_in_half_precision_are_refused() -> None:
    with pytest.raises(ModelError, match=r"must be float32, got torch.bfloat16 for weight"):
        trained(nn.Linear(1, 1, dtype=torch.bfloat16))


def test_a_frozen_model_cannot_be_trained() -> None:
    with pytest.raises(ModelError, match="no trainable weights"):
        trained(nn.Linear(1, 1).requires_grad_(requires_grad=False))


def test_warm_up_rises_linearly_and_stays() -> None:
    factor = warmup_then_constant(2)
    assert [factor(step) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert warmup_then_constant(0)(0) == 1.0


def test_decay_falls_linearly_to_zero_after_the_last_step() -> None:
    factor = warmup_then_decay(2, 6)
    assert [factor(step) for step in range(7)] == pytest.approx([1 / 3, 2 / 3, 1, 3 / 4, 1 / 2, 1 / 4, 0])


def test_a_warm_up_longer_than_the_run_still_gives_rates_above_zero() -> None:
    factor = warmup_then_decay(10, 3)
    assert [factor(step) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert warmup_then_decay(2, 1)(0) == 1.0
