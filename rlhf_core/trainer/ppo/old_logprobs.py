"""The log-probabilities that ratios start from: those of the learner's own forward pass, before an episode's steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_core.buffer.order import minibatch_order
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.device import autocast
from rlhf_core.trainer.boosted import passes
from rlhf_core.trainer.optim import Trained
from rlhf_core.trainer.ppo.passes import StepContext, idle_rows
from rlhf_core.types import Experience


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
