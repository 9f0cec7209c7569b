"""What goes wrong on one rank, and what the learner makes of it on all."""

from __future__ import annotations

import torch
from torch import nn

from rlhf_core.errors import TrainingError
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.ranks import Ranks
from tests.parallel.learner_cases import found, learner, learnt, share, weights
from tests.parallel.ranks import Found
from tests.unit.ppo.experience import tiny_experience


def moved(ours: PPOLearner, before: dict[str, torch.Tensor], role: str = "actor") -> float:
    """Return by how much a model's weights have moved."""
    after = weights(ours)
    return max((after[name] - tensor).abs().max().item() for name, tensor in before.items() if name.startswith(role))


def spoil_gradients(model: nn.Module, by: float) -> None:
    """Let all gradients of a model be multiplied by something, whoever takes them."""

    def multiply(_: nn.Module, __: object, out: object) -> None:
        tensor: torch.Tensor = getattr(out, "logits", out)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient * by)

    model.register_forward_hook(multiply)


def exploding(ranks: Ranks, strategy: str = "plain") -> Found:
    """One token of the last rank explodes; the critic learns, the actor of every rank stays, and both go on."""
    ours = learner(ranks, strategy, max_ratio=20.0)
    before = weights(ours)
    batch = ours.recompute(share(tiny_experience(), ranks))
    if ranks.rank == ranks.world_size - 1:
        batch.action_log_probs[0, 0] -= 50.0
    stats = ours.training_step(batch)
    apart = {"moved": moved(ours, before), "critic_moved": moved(ours, before, "critic")}
    again = ours.training_step(ours.recompute(share(tiny_experience(), ranks)))
    result = found(ours, stats, again)
    return result._replace(numbers=result.numbers | apart)


def overflowing(ranks: Ranks) -> Found:
    """In float16, the gradient of the last rank's actor overflows: the actor's step is left out on all."""
    ours = learner(ranks, dtype="float16")
    before = weights(ours)
    if ranks.rank == ranks.world_size - 1:
        spoil_gradients(ours.actor, float("inf"))
    result = found(ours, ours.training_step(ours.recompute(share(tiny_experience(), ranks))))
    scales = {role: ours.state().facts[role]["loss_scale"]["factor"] for role in ("actor", "critic")}
    return result._replace(numbers=result.numbers | {"moved": moved(ours, before)} | scales)


def no_rows(ranks: Ranks) -> Found:
    rows = tiny_experience()
    return learnt(ranks, "plain", rows.select([]) if ranks.rank == 1 else rows, 8)


def other_rows(ranks: Ranks) -> Found:
    return learnt(ranks, "plain", share(tiny_experience(), ranks), 8)


def unjudged(ranks: Ranks) -> Found:
    """Three of eight rows abstain, which all ranks have."""
    rows = tiny_experience()
    judged = torch.arange(len(rows)).unsqueeze(1) >= 3
    return learnt(ranks, "plain", rows.replace(action_mask=rows.action_mask & judged), 8, max_abstained=0.25)


def nan_advantage(ranks: Ranks, strategy: str = "plain") -> Found:
    ours = learner(ranks, strategy)
    batch = ours.recompute(share(tiny_experience(), ranks))
    if ranks.rank == 1:
        batch.advantages[0, 0] = float("nan")
    return found(ours, ours.training_step(batch))


def nan_gradient(ranks: Ranks, strategy: str = "plain") -> Found:
    """The losses are finite; the gradient of one rank is not."""
    ours = learner(ranks, strategy)
    if ranks.rank == 1:
        spoil_gradients(ours.actor, float("nan"))
    return found(ours, ours.training_step(ours.recompute(share(tiny_experience(), ranks))))


def critic_gradient(ranks: Ranks, strategy: str = "plain") -> Found:
    """The critic's gradient is not finite on one rank; the actor's is fit for a step on both, which then go on."""
    ours = learner(ranks, strategy)
    batch = ours.recompute(share(tiny_experience(), ranks))
    if ranks.rank == 1:
        spoil_gradients(ours.critic, float("nan"))
    before = found(ours).tensors
    try:
        ours.training_step(batch)
    except TrainingError as error:
        refused = float("the critic's loss is" in str(error) and "norm nan" in str(error))
    apart = sum(float(not torch.equal(tensor, before[name])) for name, tensor in found(ours).tensors.items())
    ours.critic._forward_hooks.clear()
    norm = ours.training_step(batch).actor_grad_norm  # of this step's gradient alone
    return Found({"refused": refused, "moved": apart, "norm": norm})


def no_returns(ranks: Ranks) -> Found:
    ours = learner(ranks)
    batch = ours.recompute(share(tiny_experience(), ranks))
    return found(ours, ours.training_step(batch.replace(returns=None) if ranks.rank == 1 else batch))
