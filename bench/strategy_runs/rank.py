"""One rank of `bench/strategies.py`: every strategy on the same model, in turns, with its bytes and its times."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.config import StrategyName
from rlhf_core.models.device import autocast
from rlhf_core.strategy.making import make_booster
from rlhf_core.strategy.ranks import Ranks, join, leave
from rlhf_core.strategy.shares import bytes_per_rank
from rlhf_core.trainer.optim import Trained, make_trained, take_step
from tests.parallel.held import Held, measured

STRATEGIES: tuple[StrategyName, ...] = ("plain", "ddp", "zero2", "zero2_cpu", "gemini")
PRECISIONS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
ROWS, TOKENS = 4, 128
"""Of one rank's batch."""
ROUNDS = 5
COLLECTIVE_S = 120.0


class Measured(NamedTuple):
    """One strategy in one precision."""

    held: Held
    trained: Trained
    seconds: list[float]


def model() -> LlamaForCausalLM:
    """Return a Llama of 20 million parameters, the same on every rank."""
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8192, tie_word_embeddings=True, **shape))


def measure(strategy: StrategyName, precision: Literal["fp32", "bf16"], batch: Tensor) -> Measured:
    """Build, and take the first steps; what these take longer is not timed."""
    booster = make_booster(strategy, precision=precision, max_norm=1.0)

    def make() -> Trained:
        return make_trained(model(), lr=1e-4, weight_decay=0.0, schedule=lambda _: 1.0, booster=booster)

    held, trained = measured(make, lambda boosted: loss_of(boosted, batch, booster.autocast_dtype))
    return Measured(held, trained, [])


def loss_of(boosted: nn.Module, batch: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the language model's loss, as trainers run it."""
    with autocast(batch.device, dtype):
        loss: Tensor = boosted(input_ids=batch, labels=batch).loss
    return loss


def timed_step(each: Measured, batch: Tensor, ranks: Ranks) -> None:
    """Take one step that both ranks begin together, and note its time."""
    ranks.barrier()
    started = time.perf_counter()
    loss = loss_of(each.trained.model, batch, each.trained.booster.autocast_dtype)  # type: ignore[attr-defined]
    each.trained.booster.backward(loss, each.trained.optimizer)
    take_step(each.trained, loss=loss.detach(), what="model", ranks=ranks)
    ranks.barrier()
    each.seconds.append(time.perf_counter() - started)


def main(result: Path) -> None:
    """Measure all, and let the first rank write what was found."""
    warnings.simplefilter("ignore", FutureWarning)  # of what is only looked at while tensors are counted
    torch.set_num_threads(1)
    ranks = join(COLLECTIVE_S)
    batch = torch.randint(8192, (ROWS, TOKENS), generator=torch.Generator().manual_seed(ranks.rank))
    parameters = sum(parameter.numel() for parameter in model().parameters())
    found: dict[str, dict[str, dict[str, object]]] = {}
    for precision in PRECISIONS:
        each = {strategy: measure(strategy, precision, batch) for strategy in STRATEGIES}
        for number in range(ROUNDS):
            for place in range(len(STRATEGIES)):  # another one first in each round
                timed_step(each[STRATEGIES[(place + number) % len(STRATEGIES)]], batch, ranks)
        found[precision] = {
            strategy: {
                "bytes": one.held._asdict(),
                "formula": bytes_per_rank(
                    strategy,
                    parameters=parameters,
                    trained=parameters,
                    world_size=ranks.world_size,
                    precision=precision,
                )._asdict(),
                "seconds": one.seconds,
            }
            for strategy, one in each.items()
        }
    if ranks.is_first:
        result.write_text(json.dumps({"parameters": parameters, "found": found}))
    ranks.barrier()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
