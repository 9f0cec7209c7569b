"""What each strategy is held to on every rank: steps, bytes, and what becomes of a rank's death."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.errors import LostRankError
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.optim import Trained, make_trained
from tests.parallel import strategy_stages as stages
from tests.parallel.held import measured
from tests.parallel.ranks import Found
from tests.parallel.strategy_stages import named

IDS = torch.arange(32).view(2, 16)


def steps(ranks: Ranks, stage: str, strategy: str, precision: str) -> Found:
    """Five steps of all weights."""
    return stages.STAGES[stage](ranks, strategy, precision)


def adapter_steps(ranks: Ranks, stage: str, strategy: str, precision: str) -> Found:
    """Five steps of adapters alone; in PPO of the critic's head too."""
    return stages.STAGES[stage](ranks, strategy, precision, lora=stages.LORA)


def held(ranks: Ranks, strategy: str, precision: str, what: str) -> Found:
    """Bytes of all tensors of this rank, as they come while one step is taken; of all weights, or of adapters."""
    counts: dict[str, float] = {}

    def make() -> Trained:
        model = llama(hidden=192, layers=4)
        if what == "adapters":
            attach_lora(model, stages.LORA, seed=0)
        counts["parameters"] = sum(each.numel() for each in model.parameters())
        counts["trained"] = sum(each.numel() for each in trainable_parameters(model).values())
        return trained_by(model, strategy, precision, ranks)

    found, _ = measured(make, loss_of)
    return Found(counts | found._asdict())


def dying(ranks: Ranks, strategy: str) -> Found:
    """In its third step the last rank is killed; the others say who is gone, and how long they waited for it."""
    trained = trained_by(llama(hidden=64, layers=2), strategy, "fp32", ranks)
    for step in range(100):
        if step == 2 and ranks.rank == ranks.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            with naming_lost_rank(ranks):
                trained.booster.backward(loss_of(trained.model), trained.optimizer)
                trained.optimizer.step()
                trained.optimizer.zero_grad()
        except LostRankError as error:
            return Found({"step": float(step), "waited_s": time.monotonic() - begun}, sentence=str(error))
    return Found()


def llama(*, hidden: int, layers: int, seed: int = 0) -> LlamaForCausalLM:
    """A model that is as large as a case needs."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(stages.DEVICE)


def laid_out(ranks: Ranks, strategy: str) -> tuple[str, Ranks]:
    """Return a strategy's name, and who trains by it."""
    name, parts = named(strategy)
    return name, ranks.laid_out(parts)


def trained_by(model: nn.Module, strategy: str, precision: str, ranks: Ranks) -> Trained:
    strategy, ranks = laid_out(ranks, strategy)
    booster = make_booster(strategy, precision=precision, max_norm=stages.CLIP, ranks=ranks, device=stages.DEVICE)  # type: ignore[arg-type]
    return make_trained(model, lr=stages.LR, weight_decay=stages.DECAY, schedule=lambda _: 1.0, booster=booster)


def loss_of(model: Any) -> Tensor:
    """Return the mean over all tokens but the first of each row, in whichever arithmetic it is called."""
    ids = IDS.to(stages.DEVICE)
    rows = {"sequences": ids, "attention_mask": torch.ones_like(ids), "num_actions": ids.shape[1] - 1}
    return -response_logprobs(model, **rows, temperature=1.0).mean()
