"""What each rank does for bench/strategies.py: make one model, count its bytes, take steps when it is told to."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.supervised.batches import MaskedTokens, TokenBatch, token_batch
from rlhf_core.supervised.step import token_loss
from rlhf_core.training.optim import Trained, make_trained
from tests.parallel.held import measured
from tests.parallel.ranks import Found
from tests.parallel.strategy_cases import laid_out

MODEL: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
WARM_UP = 2
"""Steps before any is timed: buckets, chunks and the optimizer's state are made in the first."""
_trained: list[Trained] = []
"""The one model of this process."""
_batches: list[TokenBatch] = []
"""This rank's rows."""


def prepare(ranks: Ranks, strategy: str, precision: str, rows: str, tokens: str) -> Found:
    """Make the model ready and warm it up; return what this rank holds, in bytes.

    Args:
        ranks: who trains together.
        strategy: by name; `3d-tp2` cuts the matrices into two parts.
        precision: fp32 or bf16.
        rows: of a step, on all ranks together.
        tokens: of a row.
    """
    strategy, ranks = laid_out(ranks, strategy)
    draw = torch.Generator().manual_seed(0)
    everything = torch.randint(0, MODEL["vocab_size"], (int(rows), int(tokens)), generator=draw)
    mine = [MaskedTokens(row, [True] * len(row)) for row in everything[ranks.rank :: ranks.world_size].tolist()]
    _batches.append(token_batch(mine))
    before, counts = _resident(), []

    def make() -> Trained:
        torch.manual_seed(0)
        booster = make_booster(strategy, precision=precision, ranks=ranks)  # type: ignore[arg-type]
        model = LlamaForCausalLM(LlamaConfig(**MODEL)).train()
        counts.append(model.num_parameters())
        return make_trained(model, lr=1e-4, weight_decay=0.1, schedule=lambda _: 1.0, booster=booster)

    def loss_of(model: nn.Module) -> Tensor:
        return _loss(model, precision)

    held, trained = measured(make, loss_of)
    _trained.append(trained)
    for _ in range(WARM_UP):
        _step(trained)
    return Found(held._asdict() | {"resident": float(_resident() - before), "parameters": float(counts[0])})


def steps(ranks: Ranks, count: str) -> Found:
    """Take steps, and return how long one takes until all ranks have taken it, and how long this rank's processor."""
    ranks.barrier()
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(int(count)):
        _step(_trained[0])
    ranks.barrier()
    taken = {"step_s": time.perf_counter() - started, "cpu_s": time.process_time() - busy}
    return Found({name: seconds / int(count) for name, seconds in taken.items()})


def _step(trained: Trained) -> None:
    trained.booster.backward(_loss(trained.model, trained.booster.precision), trained.optimizer)  # type: ignore[attr-defined]
    trained.optimizer.step()
    trained.optimizer.zero_grad()


def _loss(model: nn.Module, precision: str) -> Tensor:
    (batch,), dtype = _batches, torch.bfloat16 if precision == "bf16" else torch.float32
    return token_loss(model, batch, denominator=batch.tokens, device=torch.device("cpu"), autocast_dtype=dtype)


def _resident() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident
