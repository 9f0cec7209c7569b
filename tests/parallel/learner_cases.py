"""One optimizer step and what surrounds it, on this rank's share of eight rows; alone, on all of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import nn

from rlhf_core.config import LoRAConfig, PPOConfig
from rlhf_core.errors import TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy import plain_optimizer
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.optim import Trained, take_step
from rlhf_core.trainer.ppo.controls import RewardControls
from rlhf_core.trainer.ppo.critic_start import fit_line
from rlhf_core.trainer.ppo.learner import PPOLearner
from rlhf_core.trainer.ppo.ptx import Demonstrations
from rlhf_core.types import Experience
from tests.parallel.ranks import Found
from tests.tiny_llama import tiny_llama
from tests.unit.trainer.experience import PROMPTS, RESPONSES, tiny_experience

CONFIG = PPOConfig(
    prompts_per_episode=8, chunk_size=8, train_batch_size=8, micro_batch_size=2, warmup_steps=0, lr=1e-4,
    critic_lr=1e-3, dtype="float32", lora=None, max_ratio=None, temperature=0.9,
)  # fmt: skip
LORA = LoRAConfig(r=2, alpha=4.0)
DEVICE = os.environ.get("CASES_DEVICE", "cpu")


def learner(ranks: Ranks, **changes: object) -> PPOLearner:
    config = CONFIG.model_copy(update=changes)
    # Every rank begins elsewhere: the booster makes them equal.
    actor = tiny_llama(initializer_range=0.2, seed=ranks.rank)
    critic = None
    if config.advantage_estimator == "gae":
        critic = Critic.from_causal_lm(actor)
        nn.init.normal_(critic.head.weight, std=0.02, generator=torch.Generator().manual_seed(ranks.rank))
    if config.lora is not None:
        attach_lora(actor, config.lora, seed=1)
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    ptx = None
    if config.ptx_coef > 0:
        examples = list(zip(PROMPTS, RESPONSES, strict=True))
        size = 4 // ranks.world_size
        ptx = Demonstrations(examples, batch_size=size, seed=0, device=DEVICE, ranks=ranks)
    return PPOLearner.build(actor, critic, config, device=DEVICE, ptx=ptx)


def share(experience: Experience, ranks: Ranks) -> Experience:
    """Rows of this rank: every other one, so that their lengths differ between ranks."""
    return experience.select(range(ranks.rank, len(experience), ranks.world_size))


def near(ours: PPOLearner, experience: Experience) -> Experience:
    """Old log-probabilities near the actor's own, so that some ratios are clipped and the loss is not nearly zero."""
    new = ours.recompute(experience).action_log_probs.cpu()
    shift = 0.4 * (experience.action_log_probs + 5.5)
    return experience.replace(action_log_probs=torch.where(experience.action_mask, new - shift, 0.0))


def found(ours: PPOLearner, *stats: object) -> Found:
    numbers = {f"{step}.{name}": value for step, each in enumerate(stats) for name, value in each._asdict().items()}  # type: ignore[attr-defined]
    return Found(numbers, {name: tensor for name, tensor in ours.state().tensors.items() if "random" not in name})


def step(ranks: Ranks, **changes: object) -> Found:
    ours = learner(ranks, **changes)
    batch = share(near(ours, tiny_experience()), ranks)
    ptx = None if ours._ptx is None else ours._ptx.batch(0)
    return found(ours, ours.training_step(batch, ptx))


def whole(ranks: Ranks) -> Found:
    return step(ranks)


def adapters(ranks: Ranks) -> Found:
    return step(ranks, lora=LORA, micro_batch_size=1)


def mixed(ranks: Ranks) -> Found:
    return step(ranks, ptx_coef=0.3, entropy_coef=0.05, eps_clip_high=0.3, dual_clip=3.0, correction="truncated")


def small_buckets(ranks: Ranks) -> Found:
    """Gradients travel in many buckets, and the embedding's in several."""
    kept, plain_optimizer.BUCKET_ELEMENTS = plain_optimizer.BUCKET_ELEMENTS, 1000
    try:
        return step(ranks)
    finally:
        plain_optimizer.BUCKET_ELEMENTS = kept


def sequence_mean(ranks: Ranks) -> Found:
    return step(ranks, aggregation="sequence_mean", correction="decoupled", importance_cap=1.5)


def constant_length(ranks: Ranks) -> Found:
    return step(ranks, aggregation="constant_length", advantage_estimator="rloo", samples_per_prompt=2)


def episode(ranks: Ranks) -> Found:
    """Two passes of two steps; each rank has half of each minibatch, and the first pass keeps rows in order."""
    ours = learner(ranks, train_batch_size=8 // ranks.world_size, max_epochs=3)
    return found(ours, *ours.learn(share(tiny_experience(), ranks), seed=0, episode=0))


def from_reward_model(ranks: Ranks) -> Found:
    ours = learner(ranks, critic_init="reward_model")
    batch = ours.recompute(share(tiny_experience(), ranks))
    line = fit_line(share(tiny_experience(), ranks), gamma=1.0, ranks=ranks)
    result = found(ours, ours.training_step(batch))
    return result._replace(numbers=result.numbers | {"slope": line.slope, "intercept": line.intercept})


def exploding(ranks: Ranks) -> Found:
    """One token of the last rank explodes; the critic learns, the actor of every rank stays, and both go on."""
    ours = learner(ranks, max_ratio=20.0)
    before = {name: weight.clone() for name, weight in ours.merged_weights("actor").items()}
    batch = ours.recompute(share(tiny_experience(), ranks))
    if ranks.rank == ranks.world_size - 1:
        batch.action_log_probs[0, 0] -= 50.0
    stats = ours.training_step(batch)
    moved = max((weight - before[name]).abs().max().item() for name, weight in ours.merged_weights("actor").items())
    again = ours.training_step(ours.recompute(share(tiny_experience(), ranks)))
    result = found(ours, stats, again)
    return result._replace(numbers=result.numbers | {"moved": moved})


def overflowing(ranks: Ranks) -> Found:
    """In float16, the gradient of the last rank's actor overflows: the actor's step is left out on all."""
    ours = learner(ranks, dtype="float16")
    before = {name: weight.clone() for name, weight in ours.merged_weights("actor").items()}
    if ranks.rank == ranks.world_size - 1:
        next(iter(ours.actor.parameters())).register_hook(lambda gradient: gradient * float("inf"))
    result = found(ours, ours.training_step(ours.recompute(share(tiny_experience(), ranks))))
    moved = max((weight - before[name]).abs().max().item() for name, weight in ours.merged_weights("actor").items())
    scales = {role: ours.state().facts[role]["loss_scale"]["factor"] for role in ("actor", "critic")}
    return result._replace(numbers=result.numbers | {"moved": moved} | scales)


def no_rows(ranks: Ranks) -> Found:
    ours = learner(ranks)
    rows = share(tiny_experience(), ranks)
    return found(ours, *ours.learn(rows.select([]) if ranks.rank == 1 else rows, seed=0, episode=0))


def waiting(ranks: Ranks) -> Found:
    """The first rank sees what the last did before it came to the barrier."""
    path = Path(gettempdir()) / f"barrier-{os.getppid()}"
    if ranks.rank == ranks.world_size - 1:
        time.sleep(1.0)
        path.touch()
    ranks.barrier()
    seen = path.exists()
    ranks.barrier()
    if ranks.is_first:
        path.unlink(missing_ok=True)
    return Found({"seen": float(seen)})


def nan_advantage(ranks: Ranks) -> Found:
    ours = learner(ranks)
    batch = ours.recompute(share(tiny_experience(), ranks))
    if ranks.rank == 1:
        batch.advantages[0, 0] = float("nan")
    return found(ours, ours.training_step(batch))


def nan_gradient(ranks: Ranks) -> Found:
    """The losses are finite; the gradient of one rank is not."""
    ours = learner(ranks)
    if ranks.rank == 1:
        next(iter(ours.actor.parameters())).register_hook(lambda gradient: gradient * float("nan"))
    return found(ours, ours.training_step(ours.recompute(share(tiny_experience(), ranks))))


def critic_gradient(ranks: Ranks) -> Found:
    """The critic's gradient is not finite on one rank; the actor's is fit for a step on both."""
    ours = learner(ranks)
    batch = ours.recompute(share(tiny_experience(), ranks))
    if ranks.rank == 1:
        next(iter(ours.critic.parameters())).register_hook(lambda gradient: gradient * float("nan"))
    before = ours.state().tensors
    try:
        ours.training_step(batch)
    except TrainingError as error:
        refused = float("the critic's loss is" in str(error) and "norm nan" in str(error))
    moved = sum(float(not torch.equal(tensor, before[name])) for name, tensor in ours.state().tensors.items())
    return Found({"refused": refused, "moved": moved})


def no_returns(ranks: Ranks) -> Found:
    ours = learner(ranks)
    batch = ours.recompute(share(tiny_experience(), ranks))
    return found(ours, ours.training_step(batch.replace(returns=None) if ranks.rank == 1 else batch))


def no_tokens_here(ranks: Ranks) -> Found:
    """The last rank's rows are all padding; the others' count."""
    ours = learner(ranks)
    batch = near(ours, tiny_experience())
    mask = batch.action_mask.clone()
    mask[1::2] = False
    return found(ours, ours.training_step(share(batch.replace(action_mask=mask), ranks)))


def controls(ranks: Ranks) -> Found:
    ours = RewardControls(CONFIG.model_copy(update={"kl_target": 1.0, "normalise_rewards": True}), ranks)
    for start in (0.0, 3.0):
        values = torch.arange(start, start + 6.0)
        ours.update(kl_per_sample=values[ranks.rank :: ranks.world_size], scores=values[ranks.rank :: ranks.world_size])
    kl_coef, mean, std = ours.current()
    return Found({"kl_coef": kl_coef, "mean": mean, "std": std})


def agreement(ranks: Ranks) -> Found:
    """Sums, maxima, votes, objects and rows, each against what two ranks must say."""
    mine = torch.tensor([1.0, 10.0]) * (ranks.rank + 1)
    rows = torch.full((ranks.rank + 1, 2), float(ranks.rank))
    said = ranks.broadcast_object({"text": f"from {ranks.rank}", "numbers": [0.1, None]})
    ranks.barrier()
    added = mine.clone()
    ranks.add_up(added)
    return Found(
        {"any": ranks.any(ranks.is_first), "none": ranks.any(False), "said": float(said["text"] == "from 0")},
        {"sum": ranks.sum(mine), "max": ranks.max(mine), "rows": ranks.gather(rows), "mine": mine, "added": added},
    )


def bare_optimizer(ranks: Ranks) -> Found:
    """A torch optimizer that no booster wrapped is averaged and clipped all the same; unused weights stay unused."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    rows = torch.arange(8.0).view(4, 2)[ranks.rank :: ranks.world_size]
    loss = model["used"](rows).square().sum() / 4 * ranks.world_size
    booster = PlainBooster(ranks=ranks)
    booster.backward(loss, optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    trained = Trained(model, optimizer, scheduler, booster)
    taken = take_step(trained, loss=loss, what="model", grad_clip=0.5, ranks=ranks)
    return Found({"norm": taken.norm}, dict(model.state_dict()))


def checkpoint(ranks: Ranks) -> Found:
    """Rank 0 writes, all read."""
    path = Path(gettempdir()) / f"checkpoint-{os.getppid()}.safetensors"
    ours, booster = learner(ranks, lora=LORA), PlainBooster(ranks=ranks)
    ours.training_step(ours.recompute(share(tiny_experience(), ranks)))
    booster.save_model(ours.actor, str(path))
    fresh = learner(ranks, lora=LORA)
    booster.load_model(fresh.actor, str(path))
    ranks.barrier()
    if ranks.is_first:
        path.unlink()
    named = dict(ours.actor.named_parameters())
    return Found({"equal": float(all(torch.equal(p, named[n]) for n, p in fresh.actor.named_parameters()))})
