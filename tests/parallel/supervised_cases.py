"""SFT and reward model on this rank's share of the data; alone, on all of it with twice the batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.config import LoRAConfig, RewardModelConfig, SFTConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.models.lora import trainable_state
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.supervised.reward_model import RewardModelTrainer, train_reward_model
from rlhf_core.trainer.supervised.sft import SFTTrainer, train_sft
from rlhf_core.trainer.supervised.trainer import SupervisedTrainer
from tests.parallel.ranks import Found
from tests.tiny_llama import tiny_llama
from tests.unit.trainer.test_reward_model_trainer import collate as collate_pairs
from tests.unit.trainer.test_reward_model_trainer import pairs
from tests.unit.trainer.test_sft_trainer import EXAMPLES, collate

FP32 = torch.float32
SFT = SFTConfig(batch_size=8, micro_batch_size=2, lr=1e-3, warmup_steps=0, max_length=16)
PAIRS = [pair._replace(margin=0.1 * number) for number, pair in enumerate(pairs(7, seed=1))]


def _share(rows: list[Any], ranks: Ranks) -> list[Any]:
    return rows[ranks.rank :: ranks.world_size]


def _found(model: nn.Module, history: list[dict[str, float]]) -> Found:
    return Found({f"{step}.{name}": value for step, each in enumerate(history) for name, value in each.items()},
                 trainable_state(model))  # fmt: skip


def _sft(ranks: Ranks, examples: list[Any], **changes: object) -> Found:
    model = tiny_llama(initializer_range=0.2, seed=ranks.rank)  # the booster makes them equal
    config = SFT.model_copy(update={"batch_size": 8 // ranks.world_size, **changes})
    return _found(model, train_sft(model, examples, config, seed=3, autocast_dtype=FP32, heldout=EXAMPLES[:3]).history)


def sft(ranks: Ranks) -> Found:
    return _sft(ranks, EXAMPLES)


def sft_packed_adapters(ranks: Ranks) -> Found:
    return _sft(ranks, EXAMPLES, packing=True, lora=LoRAConfig(r=2))


def sft_with_nothing_for_the_second_rank(ranks: Ranks) -> Found:
    return _sft(ranks, EXAMPLES[:1])


def _model(ranks: Ranks) -> RewardModel:
    torch.manual_seed(ranks.rank)
    return RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2, seed=ranks.rank))


def reward_model(ranks: Ranks) -> Found:
    model = _model(ranks)
    config = RewardModelConfig(
        batch_size=8 // ranks.world_size, micro_batch_size=2, lr=1e-3, head_lr=1e-2, warmup_steps=0, centring=0.1
    )
    return _found(model, train_reward_model(model, PAIRS, config, seed=3, autocast_dtype=FP32).history)


def _boosted(model: nn.Module) -> tuple[Any, Any, Any, Any]:
    """SGD follows the gradient, not its sign: later steps can be compared too."""
    optimizer, booster = SGD(model.parameters(), lr=0.01), PlainBooster()
    model, optim, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 1.0))
    return model, booster, optim, scheduler


def _sft_trainer(ranks: Ranks, **options: Any) -> SFTTrainer:
    model, booster, optim, scheduler = _boosted(tiny_llama(initializer_range=0.2, seed=ranks.rank))
    return SFTTrainer(model, booster, optim, scheduler, max_epochs=2, accumulation_steps=2, **options)


def _pair_trainer(ranks: Ranks, **options: Any) -> RewardModelTrainer:
    model, booster, optim, scheduler = _boosted(_model(ranks))
    return RewardModelTrainer(model, booster, optim, None, scheduler, None, max_epochs=2, **options)


def _batches(rows: list[Any], ranks: Ranks, make: Any) -> list[dict[str, Any]]:
    """Two rows of each rank to a batch, four alone: the same rows in every minibatch."""
    whole = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    return [make(_share(each, ranks)) for each in whole]


def sft_trainer(ranks: Ranks) -> Found:
    ours = _sft_trainer(ranks)
    ours.fit(_batches(EXAMPLES, ranks, collate), _batches(EXAMPLES[:3], ranks, collate))
    return _found(ours.trained.model, ours.history)


def reward_model_trainer(ranks: Ranks) -> Found:
    ours = _pair_trainer(ranks)
    heldout = pairs(7, seed=2)
    ours.fit(
        _batches(PAIRS, ranks, lambda rows: collate_pairs(rows, margins=True)), _batches(heldout, ranks, collate_pairs)
    )
    found = _found(ours.trained.model, ours.history)
    assert ours.evaluation is not None
    facts = ours.evaluation.facts()
    numbers = {f"eval.{name}": float(value) for name, value in facts.items() if isinstance(value, int | float)}
    return found._replace(numbers=found.numbers | numbers)


def _ends(ours: SupervisedTrainer[Any], *loaders: Any) -> Found:
    ours.fit(*loaders)
    raise AssertionError("expected a sentence")


def one_rank_ends_early(ranks: Ranks) -> Found:
    batches = [collate(EXAMPLES[:2])] * (3 - ranks.rank * 2)
    return _ends(_sft_trainer(ranks), batches)


def a_bad_batch_on_one_rank(ranks: Ranks) -> Found:
    batch = collate(EXAMPLES[:2])
    if ranks.rank == 1:
        del batch["loss_mask"]
    return _ends(_sft_trainer(ranks), [batch])


class FailsOnSecondRank:
    """A loader that ends with an error of its own before its second batch."""

    def __init__(self, ranks: Ranks) -> None:
        self._fails = ranks.rank == 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield collate(EXAMPLES[:2])
        if self._fails:
            raise OSError(5, "Input/output error")
        yield collate(EXAMPLES[:2])


def a_loader_that_fails_on_one_rank(ranks: Ranks) -> Found:
    try:
        return _ends(_sft_trainer(ranks), FailsOnSecondRank(ranks))
    except OSError as error:
        return Found(sentence=str(error))


def an_evaluation_that_fails_on_one_rank(ranks: Ranks) -> Found:
    try:
        return _ends(_sft_trainer(ranks), [collate(EXAMPLES[:2])], FailsOnSecondRank(ranks))
    except OSError as error:
        return Found(sentence=str(error))


def nan_on_one_rank(ranks: Ranks) -> Found:
    ours = _pair_trainer(ranks)
    if ranks.rank == 1:
        ours.trained.model.head.bias.data.fill_(float("nan"))
    return _ends(ours, [collate_pairs(pairs(2, seed=ranks.rank))])


def an_evaluation_prompt_of_one_rank_is_learnt_on_the_other(ranks: Ranks) -> Found:
    mine = pairs(3, seed=1 + ranks.rank)
    theirs = pairs(3, seed=2 - ranks.rank)
    evaluated: list[EncodedPair] = theirs if ranks.rank == 1 else pairs(3, seed=9)
    return _ends(_pair_trainer(ranks), [collate_pairs(mine)], [collate_pairs(evaluated)])


def resumed(ranks: Ranks) -> Found:
    """The last two of four steps, from the checkpoint after the second."""
    directory = Path(gettempdir()) / f"supervised-{os.environ.get('MASTER_PORT', os.getpid())}"
    batches = _batches(EXAMPLES, ranks, collate) * 2
    straight = _sft_trainer(ranks, save_interval=1, save_dir=directory)
    straight.fit(batches)
    again = _sft_trainer(ranks)
    again.load_checkpoint(directory / "epoch-0_step-2")
    again.fit(batches)
    assert again.history == straight.history[2:]
    return _found(again.trained.model, again.history)
