"""Passes of a model over micro-batches, and idle ones for ranks that wait: to learn, or to restate log-probabilities.

Ratios start from the log-probabilities of the learner's own forward pass, before an episode's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import LearningConfig
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.trunk import autocast
from rlhf_core.ppo.order import minibatch_order
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.boosted import held_back, passes
from rlhf_core.training.modes import learning_mode
from rlhf_core.training.optim import Trained
from rlhf_core.types import Experience

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


def own_logprobs(actor: Trained, batch: Experience, context: StepContext) -> Tensor:
    """Return the log-probability of each response token of this rank's rows, [B A], zero on padding.

    Cut into micro-batches as a step that learns these rows cuts them.

    Args:
        actor: as it was boosted; every rank makes equally many passes where they wait for each other.
        batch: this rank's rows, on their device.
        context: with temperature and arithmetic.
    """
    return _forward(actor, batch, batch.split(context.config.micro_batch_size), context)


def shared_logprobs(actor: Trained, batch: Experience, context: StepContext) -> Tensor:
    """Return the log-probability of each response token, [B A], zero on padding; each rank computes its share.

    The share are the rows that the rank learns in the first pass, cut as they are there: the ratio is then 1 exactly.

    Args:
        actor: as it was boosted.
        batch: all rows, on their device, the same on every rank.
        context: with ranks, sizes of batches, temperature and arithmetic.
    """
    ranks, size = context.ranks, context.config.train_batch_size * context.ranks.world_size
    minibatches = minibatch_order(seed=0, episode=0, epoch=0, samples=len(batch), batch_size=size)
    shares = [[rows[rank :: ranks.world_size] for rows in minibatches] for rank in range(ranks.world_size)]
    parts = [part for rows in shares[ranks.rank] for part in batch.select(rows).split(context.config.micro_batch_size)]
    mine = batch.select(np.concatenate(shares[ranks.rank]))
    gathered = ranks.gather(_forward(actor, mine, parts, context))
    places = torch.as_tensor(np.concatenate([np.concatenate(share) for share in shares]), device=gathered.device)
    found = torch.empty_like(gathered)
    found[places] = gathered
    return found


def _forward(actor: Trained, batch: Experience, parts: Sequence[Experience], context: StepContext) -> Tensor:
    """Return the log-probabilities of a batch that was cut into parts; idle passes follow while others have more."""
    found = [batch.action_log_probs[:0]]
    idle = passes(actor.booster, len(parts), context.ranks) - len(parts)  # agreed on before the first of them
    with torch.no_grad(), autocast(context.device, context.dtype):
        for part in parts:
            found.append(
                response_logprobs(
                    actor.model,
                    sequences=part.sequences,
                    attention_mask=part.attention_mask,
                    num_actions=part.num_actions,
                    temperature=context.config.temperature,
                )
            )
        for _ in range(idle):
            response_logprobs(actor.model, **idle_rows(context.device), temperature=1.0)
    return torch.where(batch.action_mask, torch.cat(found), 0.0)
