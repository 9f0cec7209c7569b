"""coati's `Strategy`, by its methods alone, on this rank's share of eight rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import LlamaForCausalLM

from rlhf_core.coati.strategy import Strategy, make_strategy
from rlhf_core.config.strategy import StrategyName
from rlhf_core.strategy.ranks import Ranks
from tests.parallel.directories import directory_of_all
from tests.parallel.ranks import Found
from tests.tiny_llama import tiny_llama

OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
MAX_NORM = 0.5
ROWS = (torch.arange(8 * 12).reshape(8, 12) * 7) % 200
SHARD_MB = 0.05


def trained(ranks: Ranks, name: StrategyName) -> Found:
    """Two steps of two rows a rank; then what is published."""
    strategy, model, optimizer = prepared(name)
    numbers = teach(strategy, ranks, model, optimizer)
    shards = list(strategy.get_model_state_dict_shard(model, shard_size=SHARD_MB))
    names = [name for shard in shards for name in shard]
    numbers |= {"shards": float(len(shards)), "tensors": float(len(names)), "names": float(len(set(names)))}
    tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert type(strategy.unwrap_model(model)).__name__ == "LlamaForCausalLM"
    return Found(numbers, tensors)


def moved(ranks: Ranks, first: StrategyName, then: StrategyName, shard: str) -> Found:
    """Two steps under one strategy, and two more under another that loads what the first one saved."""
    strategy, model, optimizer = prepared(first)
    teach(strategy, ranks, model, optimizer)
    with directory_of_all(ranks) as directory:
        places = str(directory / "model.safetensors"), str(directory / "optimizer.safetensors")
        strategy.save_model(model, places[0], shard=shard == "shard")
        strategy.save_optimizer(optimizer, places[1], shard=shard == "shard")
        strategy.save_pretrained(model, str(directory / "whole"))
        written = {file.suffix for file in directory.rglob("*") if file.is_file()}
        other, model, optimizer = prepared(then, seed=7)
        other.load_model(model, places[0])
        other.load_optimizer(optimizer, places[1])
        numbers = teach(other, ranks, model, optimizer)
    return Found(numbers | {"pickled": float(not written <= {".safetensors", ".json"})})


def untrained(ranks: Ranks, name: StrategyName) -> Found:
    """A model without an optimizer, which begins elsewhere on every rank."""
    model = make_strategy(name, device="cpu").prepare(tiny_llama(seed=ranks.rank))
    return Found({"is_plain": float(type(model) is LlamaForCausalLM)}, dict(model.named_parameters()))


def adagrad(ranks: Ranks, name: StrategyName) -> Found:  # noqa: ARG001 - a case's
    """An optimizer that the strategy does not take ends the case."""
    strategy = make_strategy(name, device="cpu")
    model = nn.Linear(4, 4)
    strategy.prepare((model, torch.optim.Adagrad(model.parameters())))
    return Found()


def prepared(name: StrategyName, *, seed: int = 3) -> tuple[Strategy, nn.Module, Any]:
    strategy = make_strategy(name, device="cpu", max_norm=MAX_NORM)
    model = tiny_llama(initializer_range=0.2, seed=seed)
    optimizer = strategy.new_optimizer(model.parameters(), **OPTIONS)
    model, optimizer = strategy.prepare((model, optimizer))
    return strategy, model, optimizer


def teach(strategy: Strategy, ranks: Ranks, model: nn.Module, optimizer: Any) -> dict[str, float]:
    numbers = {}
    loader = strategy.setup_dataloader(TensorDataset(ROWS), 2, shuffle=False)
    for step, (ids,) in enumerate(loader):
        loss = model(input_ids=ids, labels=ids).loss
        strategy.backward(loss, model, optimizer)
        strategy.optimizer_step(optimizer)
        numbers[f"{step}.norm"] = optimizer.get_grad_norm()
        numbers[f"{step}.loss"] = ranks.sum(loss).item() / ranks.world_size
        optimizer.zero_grad()
    return numbers
