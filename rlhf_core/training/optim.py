"""AdamW as a booster makes it, its learning-rate schedule, and the one way in which a step is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.errors import ModelError, TrainingError
from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy.booster import Booster, OwnBooster
from rlhf_core.strategy.optimizer import CheckedOptimizer, GradientError
from rlhf_core.strategy.plain import PlainBooster, PlainOptimizer
from rlhf_core.strategy.ranks import Ranks, current_ranks

Metrics = dict[str, float]
OnStep = Callable[[Metrics], None]
FLOOR = 0.1
"""Where the cosine ends, as a factor on the peak rate."""
# The second moment forgets within 20 steps: a run has tens or hundreds of them, and rewards drift.
BETAS = (0.9, 0.95)


class Trained(NamedTuple):
    """A model with what trains it."""

    model: nn.Module
    optimizer: Any
    """As the booster returned it, or a bare one of torch's."""
    scheduler: Any
    """Stepped once per optimizer step."""
    booster: Booster


class StepTaken(NamedTuple):
    """What came of a step."""

    norm: float
    """Of the gradient, before clipping; 0 if it overflowed, or the booster does not know it."""
    overflowed: bool
    """Whether the gradient overflowed in float16, so that the step was left out."""


def fit_to_train(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's trainable weights by name.

    Raises:
        ModelError: if nothing is trainable, or something trainable is not float32.
    """
    parameters = trainable_parameters(model)
    if not parameters:
        raise ModelError(f"{type(model).__name__} has no trainable weights; attach adapters or unfreeze it")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"trainable weights must be float32, got {parameter.dtype} for {name}, in which small steps vanish; "
                "load the model in float32, or train adapters over it"
            )
    return parameters


def make_trained(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    schedule: Callable[[int], float],
    other_lrs: Mapping[str, float] | None = None,
    betas: tuple[float, float] = BETAS,
    booster: OwnBooster | None = None,
) -> Trained:
    """Return the model with its booster's Adam over its trainable weights, and its schedule, boosted.

    Weight decay is decoupled, and applied to matrices only: biases and norms keep their scale.

    Args:
        model: trains those of its parameters that require a gradient; they must be float32.
        lr: peak learning rate.
        weight_decay: per step, times the learning rate.
        schedule: factor on the learning rate by step, from 0.
        other_lrs: peak rates of parameters whose names begin so; the others get `lr`.
        betas: how slowly the moments forget.
        booster: None takes a plain one in float32, which clips as `take_step` says.

    Raises:
        ModelError: if nothing is trainable, or something trainable is not float32.
    """
    parameters = fit_to_train(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        rate = next((other for prefix, other in (other_lrs or {}).items() if name.startswith(prefix)), lr)
        decay = weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    booster = PlainBooster(max_norm=None) if booster is None else booster
    optimizer = booster.new_optimizer(
        [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in groups.items()],
        betas=betas,
    )
    boosted, wrapped, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=LambdaLR(optimizer, schedule))
    follow(scheduler, wrapped)
    return Trained(boosted, wrapped, scheduler, booster)


class ReadyStep(NamedTuple):
    """A step that nothing stands against: loss and gradient are finite, or float16 leaves it out."""

    trained: Trained
    optimizer: Any
    """Of the model, a bare one of torch's wrapped."""

    def take(self) -> StepTaken:
        """Step optimizer and schedule on all ranks, and forget the gradients; the only place where one steps."""
        self.optimizer.step()
        norm = _norm_of(self.optimizer)
        # Boosters that scale losses leave a step out by themselves; those of others tell it by the norm alone.
        overflowed = not math.isfinite(norm)
        if not overflowed:
            self.trained.scheduler.step()
        self.optimizer.zero_grad()
        return StepTaken(0.0 if overflowed else norm, overflowed)


def make_ready(
    trained: Trained,
    *,
    loss: Tensor,
    what: str,
    others: Tensor | None = None,
    grad_clip: float | None = None,
    ranks: Ranks | None = None,
) -> ReadyStep:
    """See on all ranks that a step can be taken, and return it; so several models are checked before any steps.

    An optimizer of ours averages the gradients over ranks and clips their norm over all weights; so does a bare one of
    torch's, which is wrapped for the step. One that another booster made does all this in its own way as it steps.

    Args:
        trained: the model whose gradients are complete.
        loss: of the whole minibatch, to be checked with the gradient.
        what: name of the model, for the error.
        others: further figures of the minibatch that must be finite for a step to be taken.
        grad_clip: largest norm, above 0; None leaves it to the optimizer.
        ranks: who trains together; None takes torch.distributed's default group.

    Raises:
        TrainingError: on all ranks, if a loss or figure of any or the norm is not finite; no weight was changed and the
            gradients are forgotten.
    """
    ranks = current_ranks() if ranks is None else ranks
    optimizer = trained.optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = PlainOptimizer(optimizer, max_norm=None, ranks=ranks)
    value = loss.item()
    if ranks.any(not math.isfinite(value)):
        optimizer.zero_grad()
        raise _cannot_step(what, f"loss is {value}")
    if others is not None and ranks.any(not bool(others.isfinite().all())):
        optimizer.zero_grad()
        raise _cannot_step(what, f"loss is {value}, but a figure beside it is not finite ({_listed(others)})")
    if isinstance(optimizer, CheckedOptimizer):
        try:
            optimizer.make_ready(max_norm=grad_clip)
        except GradientError as error:
            raise _cannot_step(what, f"loss is {value} and its gradient's norm {error.norm}") from error
    return ReadyStep(trained, optimizer)


def take_step(
    trained: Trained,
    *,
    loss: Tensor,
    what: str,
    others: Tensor | None = None,
    grad_clip: float | None = None,
    ranks: Ranks | None = None,
) -> StepTaken:
    """Take the step that `make_ready` returns for the same arguments; it raises what that raises."""
    return make_ready(trained, loss=loss, what=what, others=others, grad_clip=grad_clip, ranks=ranks).take()


def _norm_of(optimizer: Any) -> float:
    """Return the norm of the last step's gradient; 0 if the booster does not know it."""
    try:
        return float(optimizer.get_grad_norm() or 0.0)
    except NotImplementedError:  # ColossalAI's, of what torch's DDP trains
        return 0.0


def follow(scheduler: Any, optimizer: Any) -> None:
    """Let the schedule set the rates of the groups that are stepped, where boosting built another optimizer."""
    if scheduler.optimizer.param_groups is optimizer.param_groups:
        return
    scheduler.optimizer = optimizer
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def _listed(figures: Tensor) -> str:
    return ", ".join(f"{figure:.4g}" for figure in figures.flatten().tolist())


def _cannot_step(what: str, trouble: str) -> TrainingError:
    return TrainingError(
        f"the {what}'s {trouble}, which no step can be taken from; lower its learning rate, or look for overflow in "
        "the data or the dtype"
    )


def warmup_then_constant(warmup_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak rate by optimizer step, from 0: it rises linearly and stays.

        factor(i) = min(1, (i + 1) / (warmup_steps + 1))

    The first step already has a rate above zero; the first step after the warm-up has the full one.
    """
    return lambda step: min(1.0, (step + 1) / (warmup_steps + 1))


def warmup_then_decay(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak rate that rises linearly, then falls linearly to zero after the last step.

        factor(i) = min((i + 1) / (warmup_steps + 1), (total_steps - i) / (total_steps - warmup_steps))

    Both are 1 at i = warmup_steps. A warm-up longer than the run is cut to the run.
    """
    warmup = min(warmup_steps, total_steps - 1)
    return lambda step: max(0.0, min((step + 1) / (warmup + 1), (total_steps - step) / (total_steps - warmup)))


def warmup_then_cosine(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak rate that rises linearly, then falls along a cosine to a tenth.

        factor(i) = (i + 1) / (warmup + 1)                                          while i < warmup
        factor(i) = 0.1 + 0.9 * (1 + cos(pi * (i - warmup) / (total - warmup))) / 2   afterwards

    It is 1 at i = warmup, and stays at the tenth after `total_steps`. A warm-up longer than the run is cut to the run.
    """
    warmup = min(warmup_steps, total_steps - 1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (total_steps - warmup))
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2

    return factor
