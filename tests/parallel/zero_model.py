"""A model in which every kind of weight occurs, and the loop that trains it, under any booster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.config import LoRAConfig
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.strategy.ranks import Ranks
from tests.tiny_llama import tiny_llama

STEPS, ROWS, LENGTH, MICRO = 5, 8, 12, 2
LR, OTHER_LR, DECAY, CLIP = 1e-3, 3e-3, 0.1, 0.5
BETAS = (0.9, 0.95)


class Assorted(nn.Module):
    """A Llama, and weights of odd numbers of elements, of some rows only, and of none.

    The dtype of `angles` matters: a hundredth of them, as bfloat16 rounds, is another loss.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.llama = tiny_llama(seed=seed, initializer_range=0.2)
        self.odd = nn.Parameter(torch.full((3, 7), 0.1))
        self.single = nn.Parameter(torch.ones(1))
        self.of_even_rows = nn.Parameter(torch.full((4, 2), 0.1))
        self.of_none = nn.Parameter(torch.ones(5, 3))
        self.register_buffer("angles", torch.tensor([0.123456789, 1.01]))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits; those of rows that begin with an even token depend on a weight of their own."""
        logits: Tensor = self.llama(input_ids=ids, use_cache=False).logits.float()
        logits = logits * (1 + self.odd.float().mean()) * self.single.float() * self.angles.cos().sum()
        even = ids[:, 0] % 2 == 0
        if even.any():
            factor = torch.where(even, 1 + self.of_even_rows.float().sum(), torch.ones(()))
            logits = logits * factor[:, None, None]
        return logits


class Taught(NamedTuple):
    """What came of steps."""

    numbers: dict[str, float]
    """By step: loss, share of tokens foretold, gradient's norm."""
    first: dict[str, Tensor]
    """The first step's gradient, clipped, where the first rank is."""


def assorted(ranks: Ranks, *, lora: bool = False) -> nn.Module:
    """Return the model; every rank's begins elsewhere, as boosting makes them equal."""
    model = Assorted(seed=ranks.rank)
    with torch.no_grad():
        model.odd.add_(ranks.rank)
        model.angles.add_(ranks.rank)
    if lora:
        attach_lora(model.llama, LoRAConfig(r=3, alpha=6.0), seed=1 + ranks.rank)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return three groups: matrices, weights of one dimension without decay, and those beside the Llama, faster."""
    own = trainable_parameters(model)
    inside = [parameter for name, parameter in own.items() if name.startswith("llama")]
    others = [parameter for name, parameter in own.items() if not name.startswith("llama")]
    made = [
        {"params": [each for each in inside if each.ndim > 1], "lr": LR, "weight_decay": DECAY},
        {"params": [each for each in inside if each.ndim == 1], "lr": LR, "weight_decay": 0.0},
        {"params": others, "lr": OTHER_LR, "weight_decay": DECAY},
    ]
    return [group for group in made if group["params"]]


def boosted(booster: Any, model: nn.Module) -> tuple[Any, Any]:
    """Return model and optimizer, boosted."""
    optimizer = booster.new_optimizer(groups(model), betas=BETAS)
    return booster.boost(model, optimizer)[:2]


def rows(step: int, ranks: Ranks) -> Tensor:
    """Return this rank's rows of a step: of two ranks, one has all that begin with an even token."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 250, (ROWS, LENGTH), generator=draw)
    ids[:, 0] = torch.arange(ROWS) + 10
    return ids[ranks.rank :: ranks.world_size]


def gradient_pass(booster: Any, model: Any, optimizer: Any, ids: Tensor, *, is_last: bool = True) -> tuple[float, int]:
    """Add one micro-batch's gradients; return its share of the loss, and how many tokens it foretold."""
    world = booster.ranks.world_size
    with nullcontext() if is_last else booster.no_sync(model, optimizer):
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=booster.autocast_dtype == torch.bfloat16):
            logits = model(ids)
        log_probs = logits[:, :-1].log_softmax(-1)
        found = log_probs.gather(-1, ids[:, 1:, None])
        loss = -found.sum() / (ROWS * (LENGTH - 1))
        booster.backward(loss * world, optimizer)
    return loss.item(), int((log_probs.argmax(-1) == ids[:, 1:]).sum())


def gradients(booster: Any, model: Any, optimizer: Any, step: int) -> tuple[float, float]:
    """Add a whole step's gradients in micro-batches; return loss and share of tokens foretold, over all ranks."""
    device = next(model.parameters()).device
    parts = rows(step, booster.ranks).to(device).split(MICRO)
    found = [
        gradient_pass(booster, model, optimizer, part, is_last=number == len(parts) - 1)
        for number, part in enumerate(parts)
    ]
    totals = booster.ranks.sum(torch.tensor(found, dtype=torch.float64).sum(0)).tolist()
    return totals[0], totals[1] / (ROWS * (LENGTH - 1))


def teach(
    booster: Any,
    model: Any,
    optimizer: Any,
    steps: Sequence[int] = range(STEPS),
    then: Callable[[], None] | None = None,
) -> Taught:
    """Take the steps; `then` is called before each of them is forgotten."""
    numbers, first = {}, {}
    for step in steps:
        loss, foretold = gradients(booster, model, optimizer, step)
        optimizer.make_ready()
        optimizer.step()
        if step == 0:
            first = {
                name: moment / (1 - BETAS[0])
                for name, moment in booster.state(model, optimizer).moments.get("exp_avg", {}).items()
            }
        if then is not None:
            then()
        optimizer.zero_grad()
        numbers |= {f"{step}.loss": loss, f"{step}.foretold": foretold, f"{step}.norm": optimizer.get_grad_norm()}
    return Taught(numbers, first)
