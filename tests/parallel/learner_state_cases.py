"""States, checkpoints and published weights of a learner on several ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import gettempdir

import torch
from safetensors.torch import load_file, save_file

from rlhf_core.ppo.episode import learn_episode
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.state import prefixed
from tests.parallel.learner_cases import LORA, found, learner, share
from tests.parallel.ranks import Found
from tests.unit.ppo.experience import tiny_experience


def gone_on(ranks: Ranks, first: str, second: str) -> Found:
    """A state is gone on with under another strategy, by as many ranks; numbers are of the steps after it."""
    size = 4 // ranks.world_size  # two steps
    ours = learner(ranks, first, train_batch_size=size)
    rows = tiny_experience()
    learn_episode(ours, rows, seed=0, episode=0)
    held = given(ours.state().tensors, ranks)
    other = learner(ranks, second, train_batch_size=size)
    other.load_state(held, json.loads(json.dumps(ours.state().facts)))
    straight, after = (learn_episode(each, tiny_experience(seed=1), seed=0, episode=1) for each in (ours, other))
    expected = found(ours, *straight)
    names = {f"straight.{name}": value for name, value in expected.numbers.items()}
    result = found(other, *after)
    return result._replace(
        numbers=result.numbers | names, tensors=result.tensors | prefixed("straight", expected.tensors)
    )


def given(tensors: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the first rank's tensors on every rank, by way of a file, as a trainer's group hands them out."""
    path = Path(gettempdir()) / f"state-{os.getppid()}.safetensors"
    if ranks.is_first:
        save_file(tensors, path)
    ranks.barrier()
    held = load_file(path)
    ranks.barrier()
    if ranks.is_first:
        path.unlink()
    return held


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


def merged(ranks: Ranks, strategy: str = "plain") -> Found:
    """What is published: all weights, in the makers' precision, on the first rank alone."""
    ours = learner(ranks, strategy)
    learn_episode(ours, tiny_experience(), seed=0, episode=0)
    published = ours.merged_weights("actor", dtype=torch.bfloat16)
    published |= prefixed("critic", ours.merged_weights("critic", dtype=torch.bfloat16))
    return Found({"count": float(len(published))}, published)


def random_states(ranks: Ranks, strategy: str = "plain") -> Found:
    """Every rank gets its own back; one of which the state of fewer ranks knows nothing keeps what it has."""
    ours = learner(ranks, strategy)
    torch.manual_seed(100 + ranks.rank)
    mine, facts = torch.get_rng_state(), ours.state().facts
    whole = given(ours.state().tensors, ranks)
    torch.manual_seed(200 + ranks.rank)
    ours.load_state(whole, facts)
    back = float(torch.equal(torch.get_rng_state(), mine))
    torch.manual_seed(300 + ranks.rank)
    other = torch.get_rng_state()
    ours.load_state({name: tensor for name, tensor in whole.items() if name != "random.cpu.1"}, facts)
    now = torch.get_rng_state()
    return Found({"back": back, "fresh": float(torch.equal(now, other)), "first": float(torch.equal(now, mine))})
