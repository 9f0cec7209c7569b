"""What only a GPU can show of strategies: that nothing for CPUs is active, float16, and an automatic placement."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from rlhf_core.models.trunk import autocast
from rlhf_core.strategy.ranks import Ranks
from tests.parallel.ranks import Found
from tests.parallel.strategy_cases import llama, loss_of, trained_by


def inert(ranks: Ranks) -> Found:  # noqa: ARG001 - a case's
    """One for each thing that is as ColossalAI and torch made it, after whatever this process has trained."""
    low_level = importlib.import_module("colossalai.zero.low_level.low_level_optim")
    helpers = importlib.import_module("colossalai.zero.low_level._utils")
    chunk = importlib.import_module("colossalai.zero.gemini.chunk.chunk")
    manager = importlib.import_module("colossalai.zero.gemini.chunk.manager")
    loader = importlib.import_module("colossalai.kernel.kernel_loader").CPUAdamLoader
    accelerator = importlib.import_module("colossalai.accelerator").get_accelerator()
    from_upstream = {
        "accelerator": accelerator.name == "cuda" and type(accelerator).__module__.startswith("colossalai."),
        "collectives": low_level.dist is dist and helpers.dist is dist,
        "chunks": all(each.Chunk.__module__.startswith("colossalai.") for each in (chunk, manager)),
        "kernels": all(each.__module__.startswith("colossalai.") for each in loader.REGISTRY),
        "record_stream": type(torch.Tensor.record_stream).__name__ == "method_descriptor",
        "synchronize": torch.cuda.synchronize.__module__ == "torch.cuda",
        "set_device": torch.cuda.set_device.__module__ == "torch.cuda",
    }
    return Found({name: float(is_theirs) for name, is_theirs in from_upstream.items()})


def half(ranks: Ranks, strategy: str) -> Found:
    """Steps in float16 until one is taken; then one whose loss is far too large on the last rank, and a look at it."""
    trained = trained_by(llama(hidden=128, layers=2), strategy, "fp16", ranks)

    def step(times: float) -> float:
        with autocast(torch.device("cuda"), torch.float16):
            loss = loss_of(trained.model)
        trained.booster.backward(loss * times, trained.optimizer)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        return loss.item()

    for _ in range(10):  # the scale may have to come down first
        first = step(1.0)
        if not trained.optimizer.last_step_skipped:
            break
    before = trained.optimizer.scale.facts()
    second = step(1e9 if ranks.rank == ranks.world_size - 1 else 1.0)
    skipped, after = trained.optimizer.last_step_skipped, trained.optimizer.scale.facts()
    losses = {"first": first, "second": second, "third": step(1.0)}
    return Found(losses | {"skipped": float(skipped), "halved": after["factor"] / before["factor"]})


def auto(ranks: Ranks) -> Found:
    """Four steps of one pass each under gemini_auto."""
    trained = trained_by(llama(hidden=128, layers=2), "gemini_auto", "bf16", ranks)
    numbers = {}
    for step in range(4):
        with autocast(torch.device("cuda"), torch.bfloat16):
            loss = loss_of(trained.model)
        trained.booster.backward(loss, trained.optimizer)
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        numbers[f"{step}.loss"] = loss.item()
    return Found(numbers)
