"""One optimizer step of the actor, and one of the critic, from a prepared minibatch: both, or neither.

Each model passes over its micro-batches, with idle passes for ranks that wait for another. Ratios start from the
log-probabilities from before an episode's steps: `PPOLearner.recompute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import LearningConfig
from rlhf_core.errors import TrainingError
from rlhf_core.functional.losses import entropy_bonus, lm_loss, policy_loss, value_loss
from rlhf_core.functional.moments import masked_sum
from rlhf_core.models.actor import response_logits, response_logprobs, response_statistics
from rlhf_core.models.critic import response_values
from rlhf_core.models.shape import NO_LIMIT
from rlhf_core.models.trunk import autocast
from rlhf_core.phases import reached
from rlhf_core.ppo.minibatch import Micro, Minibatch, micros_of
from rlhf_core.ppo.order import Rows
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.boosted import held_back, passes
from rlhf_core.training.micro_batches import PassCost
from rlhf_core.training.modes import learning_mode
from rlhf_core.training.optim import ReadyStep, Trained, make_ready
from rlhf_core.training.padding import PaddedBatch
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
    cost: PassCost | None
    """As for `minibatch.micros_of`."""

    def noise_seed(self, role: int) -> int:
        """Return the seed of this step's dropout in one of the models, on this process."""
        keys = np.random.SeedSequence([self.seed, self.step, self.ranks.draws, role])
        return int(keys.generate_state(1)[0])


class Learnt(NamedTuple):
    """A model whose gradients are complete."""

    role: str
    figures: dict[str, float]
    step: ReadyStep | None
    """None if it is left out."""

    def take(self) -> dict[str, float]:
        """Take the step, and return all figures."""
        if self.step is None:
            return self.figures
        taken = self.step.take()
        return self.figures | {f"{self.role}_grad_norm": taken.norm, f"{self.role}_overflowed": float(taken.overflowed)}


def step_all(
    roles: Mapping[str, Trained], batch: Minibatch, ptx: PaddedBatch | None, context: StepContext
) -> dict[str, float]:
    """Take one step on the actor and on the critic, where they are; return their figures.

    Where every response abstains, only demonstrations teach: the critic takes no step, and without them neither does.

    Neither steps before the losses and gradients of both are known to be fit for it: after a loss or gradient that is
    not, the same minibatch can be learnt again, and no step is taken twice.

    Args:
        roles: the actor, or the critic, or both.
        batch: this rank's share.
        ptx: this rank's demonstrations.
        context: what both need.

    Raises:
        TrainingError: on all ranks, if a loss or gradient of any is not finite; no weight was changed.
    """
    reached("learn")
    try:
        learnt = []
        if "actor" in roles:
            learnt.append(learn_actor(roles["actor"], batch, ptx, context))
        if "critic" in roles:
            learnt.append(learn_critic(roles["critic"], batch, context))
    except BaseException:
        for trained in roles.values():
            trained.optimizer.zero_grad()
        raise
    figures: dict[str, float] = {}
    for each in learnt:
        if each.role == "critic":
            reached("between_steps")
        figures |= each.take()
    return figures


def learn_actor(trained: Trained, batch: Minibatch, ptx: PaddedBatch | None, context: StepContext) -> Learnt:
    """Go backward through (1 - ptx_coef) * policy + ptx_coef * lm - entropy_coef * entropy.

    The step is left out, on all ranks, if a ratio of any is above `config.max_ratio`.

    Raises:
        TrainingError: on all ranks, if a loss or gradient of any is not finite.
    """
    config, ranks = context.config, context.ranks
    demonstrations, ptx_tokens = _cut_ptx(ptx, context)
    sums = torch.zeros(6, device=context.device)
    highest = torch.zeros((), device=context.device)

    def learn(work: Micro | PaddedBatch) -> None:
        nonlocal highest
        if isinstance(work, Micro):
            part, ratio = _learn_policy(trained, work, batch.denominator, context)
            sums[:5] += part
            highest = torch.maximum(highest, ratio)
        else:
            ptx_loss = _learn_demonstrations(trained, work, ptx_tokens, context)
            sums[0] += config.ptx_coef * ptx_loss
            sums[5] += ptx_loss

    all_work: list[Micro | PaddedBatch] = [*batch.micros, *demonstrations]
    make_passes(trained, all_work, learn, context, role=0, forward=response_logits)
    sums = ranks.sum(sums)
    # Backends order NaN at will: it travels apart. A NaN is an error, told by the loss; the guard is for explosions.
    nan, largest = ranks.max(torch.stack([highest.isnan().float(), highest.nan_to_num(nan=0.0)])).tolist()
    figures = _figures_of(sums, max(batch.tokens, 1)) | {
        "max_ratio": largest,
        "actor_lr": float(trained.scheduler.get_last_lr()[0]),
    }
    if not batch.tokens and config.ptx_coef == 0:
        return Learnt("actor", figures | {"skipped": 1.0}, None)
    if config.max_ratio is not None and largest > config.max_ratio and not nan and bool(sums.isfinite().all()):
        trained.optimizer.zero_grad()
        return Learnt("actor", figures | {"skipped": 1.0}, None)
    step = make_ready(
        trained, loss=sums[0], others=sums[1:], what="actor", grad_clip=_clip_of(trained, config), ranks=ranks
    )
    return Learnt("actor", figures, step)


def learn_critic(trained: Trained, batch: Minibatch, context: StepContext) -> Learnt:
    """Go backward through vf_coef * value loss.

    Raises:
        TrainingError: on all ranks, if a loss or gradient of any is not finite.
    """
    config = context.config
    sums = torch.zeros(2, device=context.device)

    def learn(micro: Micro) -> None:
        rows = micro.experience
        with autocast(context.device, context.dtype):
            values = response_values(
                trained.model,
                sequences=rows.sequences,
                attention_mask=rows.attention_mask,
                num_actions=rows.num_actions,
            )
        assert rows.returns is not None  # `prepare` has seen to it
        value = value_loss(
            values=values,
            old_values=rows.values,
            returns=rows.returns,
            mask=rows.action_mask,
            denominator=batch.denominator,
            clip_eps=config.value_clip,
            weights=micro.weights,
        )
        go_backward(trained, config.vf_coef * value.loss, context)
        sums.add_(torch.stack([value.loss.detach(), value.clipped]))

    make_passes(trained, batch.micros, learn, context, role=1, forward=response_values)
    sums = context.ranks.sum(sums)
    lr = float(trained.scheduler.get_last_lr()[0])
    if not batch.tokens:
        return Learnt("critic", {"critic_lr": lr}, None)
    step = make_ready(trained, loss=sums[0], what="critic", grad_clip=_clip_of(trained, config), ranks=context.ranks)
    loss, clipped = sums.tolist()
    figures = {"critic_loss": loss, "value_clip_fraction": clipped / batch.tokens, "critic_lr": lr}
    return Learnt("critic", figures, step)


def _figures_of(sums: Tensor, tokens: int) -> dict[str, float]:
    _, actor_loss, clipped, divergence, entropy, ptx_loss = sums.tolist()
    return {
        "actor_loss": actor_loss,
        "clip_fraction": clipped / tokens,
        "approx_kl": divergence / tokens,
        "entropy": entropy / tokens,
        "ptx_loss": ptx_loss,
    }


def _learn_policy(trained: Trained, micro: Micro, denominator: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """Add one micro-batch's gradients; return its sums, and its largest ratio.

    The sums are: what is minimised, the policy's loss in it, clipped tokens, KL, entropy.
    """
    config, rows = context.config, micro.experience
    with autocast(context.device, context.dtype):
        found = response_statistics(
            trained.model,
            sequences=rows.sequences,
            attention_mask=rows.attention_mask,
            num_actions=rows.num_actions,
            temperature=config.temperature,
            entropy_needs_grad=config.entropy_coef > 0,
        )
    policy = policy_loss(
        logprobs=found.logprobs,
        old_logprobs=rows.action_log_probs,
        advantages=rows.advantages,
        mask=rows.action_mask,
        denominator=denominator,
        clip_eps=config.eps_clip,
        clip_eps_high=config.eps_clip_high,
        dual_clip=config.dual_clip,
        weights=micro.weights,
        importance=micro.importance,
    )
    loss = (1 - config.ptx_coef) * policy.loss
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * entropy_bonus(
            entropy=found.entropy, mask=rows.action_mask, denominator=denominator, weights=micro.weights
        )
    go_backward(trained, loss, context)
    entropy = masked_sum(found.entropy.detach(), rows.action_mask)
    sums = torch.stack([loss.detach(), policy.loss.detach(), policy.clipped, policy.divergence, entropy])
    return sums, policy.max_ratio


def _learn_demonstrations(trained: Trained, batch: PaddedBatch, tokens: Tensor, context: StepContext) -> Tensor:
    """Add the gradients of demonstrations; return their share of the loss."""
    width = batch.action_mask.shape[1]
    with autocast(context.device, context.dtype):
        logprobs = response_logprobs(
            trained.model, sequences=batch.sequences, attention_mask=batch.attention_mask, num_actions=width,
            temperature=1.0,
        )  # fmt: skip
    loss = lm_loss(logprobs=logprobs, mask=batch.action_mask, denominator=tokens)
    go_backward(trained, context.config.ptx_coef * loss, context)
    return loss.detach()


def _cut_ptx(ptx: PaddedBatch | None, context: StepContext) -> tuple[list[PaddedBatch], Tensor]:
    """Return the demonstrations in micro-batches, and the number of their tokens on all ranks."""
    none = torch.zeros((), device=context.device)
    if ptx is None or context.config.ptx_coef == 0:
        return [], none
    most = NO_LIMIT if context.cost is None else context.cost.most
    size = min(context.config.micro_batch_size, max(1, most // ptx.sequences.shape[1]))
    parts = zip(*(torch.split(tensor.to(context.device), size) for tensor in ptx), strict=True)
    tokens = context.ranks.sum(ptx.action_mask.sum().float().to(context.device))
    if not tokens:
        raise TrainingError("expected demonstrations with at least one token to learn, got none")
    return [PaddedBatch(*part) for part in parts], tokens


def _clip_of(trained: Trained, config: LearningConfig) -> float | None:
    """Return the norm to clip to, where no booster does it."""
    return config.grad_clip if isinstance(trained.optimizer, torch.optim.Optimizer) else None


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


def first_logprobs(
    actor: Trained, batch: Experience, minibatches: Sequence[Rows], sharing: Ranks, context: StepContext
) -> Tensor:
    """Return the log-probability of each response token, [B A], zero on padding; each rank computes its share.

    The share are the rows that the rank learns in the first pass, cut as they are there: the ratio is then 1 exactly.

    Args:
        actor: as it was boosted; every rank makes equally many passes where they wait for each other.
        batch: all rows, on their device, the same on every rank that shares them.
        minibatches: rows of each step of the first pass, of all ranks that share them.
        sharing: who shares the rows.
        context: with temperature and arithmetic.
    """
    size = sharing.world_size
    shares = [[rows[rank::size] for rows in minibatches] for rank in range(size)]
    gathered = sharing.gather(_forward(actor, [batch.select(rows) for rows in shares[sharing.rank]], context))
    places = torch.as_tensor(np.concatenate([np.concatenate(share) for share in shares]), device=gathered.device)
    found = torch.empty_like(gathered)
    found[places] = gathered
    return found


def _forward(actor: Trained, batches: Sequence[Experience], context: StepContext) -> Tensor:
    """Return the log-probabilities of all batches' rows; idle passes follow while other ranks have more to do."""
    parts = [(batch, micros_of(batch, context.config, context.cost)) for batch in batches]
    mine = sum(len(pieces) for _, pieces in parts)
    idle = passes(actor.booster, mine, context.ranks) - mine  # agreed on before the first of them
    found = []
    with torch.no_grad(), autocast(context.device, context.dtype):
        for batch, pieces in parts:
            logprobs = torch.zeros_like(batch.action_log_probs)
            for piece in pieces:
                read = response_logprobs(
                    actor.model,
                    sequences=piece.sequences,
                    attention_mask=piece.attention_mask,
                    num_actions=piece.num_actions,
                    temperature=context.config.temperature,
                )
                piece.put(logprobs, read)
            found.append(torch.where(batch.action_mask, logprobs, 0.0))
        for _ in range(idle):
            response_logprobs(actor.model, **idle_rows(context.device), temperature=1.0)
    return torch.cat(found)
