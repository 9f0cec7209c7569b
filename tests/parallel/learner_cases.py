"""One optimizer step and what surrounds it, on this rank's share of eight rows; alone, on all of them.

A case's further argument is the strategy; `strict` is the booster of tests that forgives nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import nn

from rlhf_core.config import LoRAConfig, PPOConfig
from rlhf_core.models import head_slices
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.critic_start import fit_line
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.ptx import Demonstrations
from rlhf_core.strategy import plain
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.boosted import plain_model
from rlhf_core.training.boosted import weights as held_weights
from rlhf_core.training.optim import Trained, take_step
from rlhf_core.training.state import prefixed
from rlhf_core.types import Experience
from tests.parallel.directories import compiled_in_a_directory
from tests.parallel.ranks import Found
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.experience import PROMPTS, RESPONSES, tiny_experience
from tests.unit.training.built import boosters
from tests.unit.training.strict_booster import StrictBooster

CONFIG = PPOConfig(
    prompts_per_episode=8, chunk_size=8, train_batch_size=8, micro_batch_size=2, warmup_steps=0, lr=1e-4,
    critic_lr=1e-3, dtype="float32", lora=None, max_ratio=None, temperature=0.9,
)  # fmt: skip
LORA = LoRAConfig(r=2, alpha=4.0)
DEVICE = os.environ.get("CASES_DEVICE", "cpu")


def learner(ranks: Ranks, strategy: str = "plain", **changes: object) -> PPOLearner:
    config = CONFIG.model_copy(update=({} if strategy == "strict" else {"strategy": strategy}) | changes)
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
    if strategy == "strict" or config.dtype == "float16":  # which is refused to users on a CPU
        with boosters(StrictBooster if strategy == "strict" else PlainBooster):
            return PPOLearner.build(actor, critic, config, device=DEVICE, ptx=ptx, ranks=ranks)
    return PPOLearner.build(actor, critic, config, device=DEVICE, ptx=ptx, ranks=ranks)


def share(experience: Experience, ranks: Ranks) -> Experience:
    """Rows of this rank: every other one, so that their lengths differ between ranks."""
    return experience.select(range(ranks.rank, len(experience), ranks.world_size))


def near(ours: PPOLearner, experience: Experience) -> Experience:
    """Old log-probabilities near the actor's own, so that some ratios are clipped and the loss is not nearly zero."""
    new = ours.recompute(experience).action_log_probs.cpu()
    shift = 0.4 * (experience.action_log_probs + 5.5) + 0.2 * experience.advantages
    return experience.replace(action_log_probs=torch.where(experience.action_mask, new - shift, 0.0))


def found(ours: PPOLearner, *stats: object) -> Found:
    """Weights on every rank; moments on the first, where the strategy has them whole."""
    numbers = {f"{step}.{name}": value for step, each in enumerate(stats) for name, value in each._asdict().items()}  # type: ignore[attr-defined]
    tensors = {name: tensor for name, tensor in ours.state().tensors.items() if "random" not in name}
    return Found(numbers, tensors | weights(ours))


def weights(ours: PPOLearner) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for role, (model, _, _, booster) in ours._roles.items():
        names = list(trainable_parameters(plain_model(booster, model)))
        tensors |= prefixed(f"{role}.weights", held_weights(booster, model, names))
    return tensors


def step(ranks: Ranks, strategy: str = "plain", **changes: object) -> Found:
    ours = learner(ranks, strategy, **changes)
    batch = share(near(ours, tiny_experience()), ranks)
    ptx = None if ours.ptx is None else ours.ptx.batch(0)
    return found(ours, ours.training_step(batch, ptx))


def whole(ranks: Ranks, strategy: str = "plain") -> Found:
    return step(ranks, strategy)


def whole_step(ranks: Ranks, strategy: str = "plain") -> Found:
    """From ratios of 1."""
    ours = learner(ranks, strategy)
    return found(ours, ours.training_step(ours.recompute(share(tiny_experience(), ranks))))


def adapters(ranks: Ranks, strategy: str = "plain") -> Found:
    return step(ranks, strategy, lora=LORA, micro_batch_size=1)


def compiled(ranks: Ranks, strategy: str = "plain") -> Found:
    with compiled_in_a_directory(ranks):
        return step(ranks, strategy, compile_layers=True)


def mixed(ranks: Ranks, strategy: str = "plain") -> Found:
    return step(
        ranks, strategy, ptx_coef=0.3, entropy_coef=0.05, eps_clip_high=0.3, dual_clip=3.0, correction="truncated"
    )


def small_buckets(ranks: Ranks) -> Found:
    """Gradients travel in many buckets, and the embedding's in several."""
    kept, plain.BUCKET_ELEMENTS = plain.BUCKET_ELEMENTS, 1000
    try:
        return step(ranks)
    finally:
        plain.BUCKET_ELEMENTS = kept


def sliced(ranks: Ranks, strategy: str = "plain") -> Found:
    """The head goes over a token of each row at a time, where there are more than two."""
    kept = head_slices.LOGITS_BYTES
    head_slices.LOGITS_BYTES = 4 * CONFIG.micro_batch_size * tiny_llama().config.vocab_size * 2
    try:
        return step(ranks, strategy, ptx_coef=0.3, entropy_coef=0.05)
    finally:
        head_slices.LOGITS_BYTES = kept


def sequence_mean(ranks: Ranks) -> Found:
    return step(ranks, aggregation="sequence_mean", correction="decoupled", importance_cap=1.5)


def constant_length(ranks: Ranks) -> Found:
    return step(ranks, aggregation="constant_length", advantage_estimator="rloo", samples_per_prompt=2)


def all_abstain(ranks: Ranks) -> Found:
    """After a step, a minibatch of which every response abstains: neither rank steps, and neither waits."""
    ours = learner(ranks)
    batch = share(near(ours, tiny_experience()), ranks)
    nobody = batch.replace(action_mask=torch.zeros_like(batch.action_mask))
    return found(ours, ours.training_step(batch), ours.training_step(nobody))


def learnt(ranks: Ranks, strategy: str, experience: Experience, batch_size: int, **changes: object) -> Found:
    """An episode in minibatches of so many rows of all ranks."""
    ours = learner(ranks, strategy, train_batch_size=batch_size // ranks.world_size, max_epochs=3, **changes)
    return found(ours, *learn_episode(ours, experience, seed=0, episode=0))


def episode(ranks: Ranks, strategy: str = "plain") -> Found:
    """Three passes of two steps, the first in the order of the rows."""
    return learnt(ranks, strategy, tiny_experience(), 4)


def uneven(ranks: Ranks, strategy: str = "plain") -> Found:
    """Of seven rows, minibatches of six leave one, so that a second rank has none; three rows are two micro-batches."""
    return learnt(ranks, strategy, tiny_experience().select(range(7)), 6)


def uneven_adapters(ranks: Ranks, strategy: str = "plain") -> Found:
    """With dropout, which no idle pass may change."""
    lora = LoRAConfig(r=2, alpha=4.0, dropout=0.3)
    return learnt(ranks, strategy, tiny_experience().select(range(7)), 6, lora=lora, correction="decoupled")


def unequal_micro_batches(ranks: Ranks, strategy: str = "plain") -> Found:
    """The first rank has two rows, the second six."""
    ours = learner(ranks, strategy)
    rows = near(ours, tiny_experience())
    mine = range(8) if ranks.world_size == 1 else (range(2), range(2, 8))[ranks.rank]
    return found(ours, ours.training_step(rows.select(mine)))


def from_reward_model(ranks: Ranks, strategy: str = "plain") -> Found:
    ours = learner(ranks, strategy, critic_init="reward_model")
    batch = ours.recompute(share(tiny_experience(), ranks))
    line = fit_line(share(tiny_experience(), ranks), gamma=1.0, ranks=ranks)
    result = found(ours, ours.training_step(batch))
    return result._replace(numbers=result.numbers | {"slope": line.slope, "intercept": line.intercept})


def whole_from_reward_model(ranks: Ranks, strategy: str = "plain") -> Found:
    return learnt(ranks, strategy, tiny_experience(), 8, critic_init="reward_model")


def checkpointed(ranks: Ranks, strategy: str = "plain") -> Found:
    return learnt(ranks, strategy, tiny_experience(), 4, gradient_checkpointing=True)


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


def no_tokens_here(ranks: Ranks, strategy: str = "plain") -> Found:
    """The last rank's rows are all padding; the others' count."""
    ours = learner(ranks, strategy)
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
