"""What DDP and ZeRO-2 are held to on every rank, booster by booster, without a trainer."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_core.config.strategy import StrategyName
from rlhf_core.errors import ModelError
from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy.colossal.compat.zero import GlooCollectives
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.optimizer import GradientError
from rlhf_core.strategy.ranks import Ranks
from tests.parallel.held import held_bytes
from tests.parallel.ranks import Found
from tests.parallel.zero_model import CLIP, Taught, assorted, boosted, gradient_pass, gradients, rows, teach


def made(ranks: Ranks, strategy: StrategyName, precision: Any = "fp32", *, lora: bool = False) -> tuple[Any, Any, Any]:
    """Return booster, model and optimizer."""
    booster = make_booster(strategy, precision=precision, max_norm=CLIP, ranks=ranks)
    model, optimizer = boosted(booster, assorted(ranks, lora=lora))
    return booster, model, optimizer


def state_of(booster: Any, model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return weights and moments under flat names; those of the first rank only."""
    state = booster.state(model, optimizer)
    moments = {f"{moment}/{name}": tensor for moment, held in state.moments.items() for name, tensor in held.items()}
    return {f"weight/{name}": tensor for name, tensor in state.weights.items()} | moments


def found(taught: Taught, tensors: dict[str, Tensor]) -> Found:
    return Found(taught.numbers, tensors | {f"first/{name}": tensor for name, tensor in taught.first.items()})


def steps(ranks: Ranks, strategy: StrategyName, precision: str, what: str = "whole") -> Found:
    """Five steps in micro-batches."""
    parts = made(ranks, strategy, precision, lora=what == "lora")
    if what == "buckets" and strategy != "plain":  # many, of which the larger weights pass the size
        parts[2].inner._reduce_bucket_size = 1000
        for bucket in parts[2].inner.pg_to_bucket_store.values():
            bucket.reduce_bucket_size = 1000
    taught = teach(*parts)
    working = {f"working/{name}": tensor for name, tensor in trainable_parameters(parts[0].plain(parts[1])).items()}
    return found(taught, state_of(*parts) | {name: tensor.detach() for name, tensor in working.items()})


def save(ranks: Ranks, strategy: StrategyName, precision: str, directory: str, shard: str) -> Found:
    """Two steps, a checkpoint, and a third step."""
    booster, model, optimizer = made(ranks, strategy, precision)
    teach(booster, model, optimizer, range(2))
    write(booster, model, optimizer, Path(directory), shard=shard == "shard")
    before = state_of(booster, model, optimizer)
    return found(teach(booster, model, optimizer, [2]), before)


def write(booster: Any, model: Any, optimizer: Any, directory: Path, *, shard: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    booster.save_model(model, str(directory / "model"), shard=shard)
    booster.save_optimizer(optimizer, str(directory / "optimizer"), shard=shard)


def resume(ranks: Ranks, strategy: StrategyName, precision: str, directory: str) -> Found:
    """A fresh model reads a checkpoint, and takes the third step."""
    booster, model, optimizer = made(ranks, strategy, precision)
    teach(booster, model, optimizer, [4])  # what is there is not what is read
    booster.load_model(model, f"{directory}/model")
    booster.load_optimizer(optimizer, f"{directory}/optimizer")
    before = state_of(booster, model, optimizer)
    return found(teach(booster, model, optimizer, [2]), before)


def unreadable(ranks: Ranks, strategy: StrategyName, directory: str) -> Found:
    """Checkpoints that are damaged, or of another model, change nothing."""
    booster, model, optimizer = made(ranks, strategy, "bf16")
    teach(booster, model, optimizer, [0])
    before, working = state_of(booster, model, optimizer), copies(booster.plain(model))
    refused = 0
    for name in ("cut", "other"):
        for load, thing in ((booster.load_model, model), (booster.load_optimizer, optimizer)):
            kind = "model" if thing is model else "optimizer"
            try:
                load(thing, f"{directory}/{name}/{kind}")
            except ModelError:
                refused += 1
    after = state_of(booster, model, optimizer)
    changed = sum(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    changed += sum(not torch.equal(tensor, working[name]) for name, tensor in copies(booster.plain(model)).items())
    return Found({"refused": refused, "changed": changed})


def copies(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def exploding(ranks: Ranks, strategy: StrategyName) -> Found:
    """A gradient of one rank is not a number; then a step is left out, and one taken."""
    booster, model, optimizer = made(ranks, strategy)
    before = state_of(booster, model, optimizer)
    ids = rows(0, ranks)
    gradient_pass(booster, model, optimizer, ids)
    hook = booster.plain(model).odd.register_hook(lambda grad: grad * (float("nan") if ranks.rank else 1.0))
    gradient_pass(booster, model, optimizer, ids)
    hook.remove()
    norm = 0.0
    try:
        optimizer.make_ready()
    except GradientError as error:
        norm = error.norm
    after = state_of(booster, model, optimizer)
    changed = sum(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    gradients(booster, model, optimizer, 3)
    optimizer.zero_grad()  # as if a loss had not been finite: nothing of it is left
    taught = teach(booster, model, optimizer)
    numbers = taught.numbers | {"refused": float(norm != norm), "changed": float(changed)}  # noqa: PLR0124 - NaN
    return Found(numbers, state_of(booster, model, optimizer))


def held(ranks: Ranks, strategy: StrategyName, precision: str) -> Found:
    """Bytes of all tensors that this process holds: weights, then more with gradients, then with moments."""
    before = held_bytes()
    booster, model, optimizer = made(ranks, strategy, precision)
    weights = held_bytes() - before
    gradients(booster, model, optimizer, 0)
    with_gradients = held_bytes() - before
    buckets = len({parameter.grad.untyped_storage().data_ptr() for _, parameter in used(booster, model)})
    optimizer.make_ready()
    optimizer.step()
    optimizer.zero_grad()
    with_moments = held_bytes() - before
    buffers = sum(buffer.nbytes for buffer in booster.plain(model).buffers())
    return Found(
        {
            "weights": weights - buffers,
            "gradients": with_gradients - weights,
            "moments": with_moments - weights,
            "buckets": buckets,
        }
    )


def waiting(ranks: Ranks) -> Found:
    """Under DDP's no_sync a gradient stays this rank's own."""
    booster, model, optimizer = made(ranks, "ddp")
    first, second = rows(0, ranks).split(2)
    gradient_pass(booster, model, optimizer, first, is_last=False)
    own = {f"own/{name}": parameter.grad.clone() for name, parameter in used(booster, model)}
    gradient_pass(booster, model, optimizer, second)
    return Found(tensors=own | {f"mean/{name}": parameter.grad.clone() for name, parameter in used(booster, model)})


def used(booster: Any, model: Any) -> list[tuple[str, Any]]:
    own = trainable_parameters(booster.plain(model)).items()
    return [(name, parameter) for name, parameter in own if parameter.grad is not None]


def views(ranks: Ranks, strategy: StrategyName, precision: str) -> Found:
    """What the booster shows of the weights, and what it takes."""
    booster, model, optimizer = made(ranks, strategy, precision)
    teach(booster, model, optimizer, [0])
    named = booster.weights(model, ["odd", "llama.model.norm.weight"])
    everything = booster.weights(model)
    with booster.exact(model) as whole:
        exact = {} if whole is None else copies(whole)
        dtypes = {} if whole is None else {name: tensor.dtype for name, tensor in whole.state_dict().items()}
    booster.load_weights(model, {name: tensor + 1 / 3 for name, tensor in named.items()})
    after = booster.weights(model, list(named))
    with booster.awake(model):
        working = {name: copies(booster.plain(model))[name] for name in named}
    numbers = {
        "named": float(len(named)), "all": float(len(everything)), "exact": float(len(exact)),
        "float32": float(all(dtype == torch.float32 for dtype in dtypes.values())),
    }  # fmt: skip
    parts = {"named": named, "all": everything, "exact": exact, "after": after, "working": working}
    tensors = {f"{part}/{name}": tensor for part, held_ in parts.items() for name, tensor in held_.items()}
    return Found(numbers, tensors | {"angles": booster.plain(model).angles.clone()})


def collectives(ranks: Ranks) -> Found:
    """Gloo's sum and gathering, by torch and by what stands for it: what they give, and the processor's seconds."""
    parts = torch.arange(12_000_000.0) + ranks.rank
    seconds: dict[str, float] = {}
    results: dict[str, Tensor] = {}
    for _ in range(5):
        for kind, where in (("torch", torch.distributed), ("ours", GlooCollectives())):
            share, whole = torch.empty(len(parts) // 2), torch.empty(len(parts))
            for name, run in (
                ("sum", partial(where.reduce_scatter_tensor, share, parts.clone(), group=None)),
                ("gather", partial(where.all_gather_into_tensor, whole, parts[: len(share)], group=None)),
            ):
                ranks.barrier()
                start = time.process_time()  # waiting for a busy machine does not count
                run()
                key = f"{kind}.{name}"
                seconds[key] = min(seconds.get(key, math.inf), time.process_time() - start)
            results |= {f"{kind}.sum": share, f"{kind}.gather": whole}
    return Found(seconds, results)
