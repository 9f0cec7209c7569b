"""The passes of one optimizer step through one model: each micro-batch, and idle ones for ranks that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import LearningConfig
from rlhf_core.models.device import autocast
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.boosted import held_back, passes
from rlhf_core.trainer.learning_mode import learning_mode
from rlhf_core.trainer.optim import Trained

T = TypeVar("T")


class StepContext(NamedTuple):
    """What both steps need to know."""

    config: LearningConfig
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    seed: int
    step: int

    def noise_seed(self, role: int) -> int:
        """Return the seed of this step's dropout in one of the models, on this rank."""
        keys = np.random.SeedSequence([self.seed, self.step, self.ranks.rank, role])
        return int(keys.generate_state(1)[0])


def idle_rows(device: torch.device) -> dict[str, Any]:
    """Return one row, of a token of prompt and one of response, for a pass that is made for other ranks' sake."""
    sequences = torch.zeros(1, 2, dtype=torch.long, device=device)
    mask = torch.ones_like(sequences, dtype=torch.bool)
    return {"sequences": sequences, "attention_mask": mask, "num_actions": 1}


def make_passes(
    trained: Trained,
    work: Sequence[T],
    learn: Callable[[T], None],
    context: StepContext,
    *,
    role: int,
    forward: Callable[..., Tensor],
) -> None:
    """Let the model learn from each micro-batch; then make idle passes while another rank still learns.

    Idle passes come last, so that they draw from no other's dropout, and their gradients are zero.

    Args:
        trained: the model.
        work: micro-batches; another rank may have more, or none.
        learn: goes forward and backward.
        context: of the step.
        role: tells one model's dropout from another's.
        forward: what an idle pass calls with the model and a row.
    """
    count = passes(trained.booster, len(work), context.ranks)
    seed, checkpointing = context.noise_seed(role), context.config.gradient_checkpointing
    with learning_mode(trained.model, checkpointing=checkpointing, seed=seed, device=context.device):
        for number in range(count):
            with held_back(trained.booster, trained.model, trained.optimizer, is_last=number == count - 1):
                if number < len(work):
                    learn(work[number])
                    continue
                with autocast(context.device, context.dtype):
                    found = forward(trained.model, **idle_rows(context.device))
                go_backward(trained, 0.0 * found.float().sum(), context)


def go_backward(trained: Trained, loss: Tensor, context: StepContext) -> None:
    """Add the loss's gradients; averaging over ranks divides by their number, which is undone here."""
    trained.booster.backward(loss * context.ranks.world_size, trained.optimizer)
