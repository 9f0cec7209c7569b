"""SFT and reward model on this rank's share of the data; alone, on all of it with twice the batch.

A case's further argument is the strategy; `strict` is the booster of tests that forgives nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.config import LoRAConfig, RewardModelConfig, SFTConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.supervised.reward_model import RewardModelTrainer, train_reward_model
from rlhf_core.supervised.sft import SFTTrainer, train_sft
from rlhf_core.supervised.trainer import SupervisedTrainer
from rlhf_core.training.boosted import plain_model, weights
from rlhf_core.training.optim import Trained
from tests.parallel.directories import compiled_in_a_directory, directory_of_all
from tests.parallel.ranks import Found
from tests.parallel.strategy_cases import laid_out
from tests.tiny_llama import tiny_llama
from tests.unit.supervised.test_reward_model_trainer import collate as collate_pairs
from tests.unit.supervised.test_reward_model_trainer import pairs
from tests.unit.supervised.test_sft_trainer import EXAMPLES, collate
from tests.unit.training.built import boosters
from tests.unit.training.strict_booster import StrictBooster

FP32 = torch.float32
SFT = SFTConfig(batch_size=8, micro_batch_size=2, lr=1e-3, warmup_steps=0, max_length=16)
PAIRS = [pair._replace(margin=0.1 * number) for number, pair in enumerate(pairs(7, seed=1))]


def _share(rows: list[Any], ranks: Ranks) -> list[Any]:
    return rows[ranks.rank :: ranks.world_size]


def _found(trained: Trained, history: list[dict[str, float]]) -> Found:
    """Numbers of every step, and what is trained, on every rank."""
    model, _, _, booster = trained
    names = list(trainable_parameters(plain_model(booster, model)))
    numbers = {f"{step}.{name}": value for step, each in enumerate(history) for name, value in each.items()}
    return Found(numbers, weights(booster, model, names))


def _sft(ranks: Ranks, strategy: str, examples: list[Any], **changes: object) -> Found:
    model = tiny_llama(initializer_range=0.2, seed=ranks.rank)  # the booster makes them equal
    named = {} if strategy == "strict" else {"strategy": strategy}
    config = SFT.model_copy(update={"batch_size": 8 // ranks.world_size, **named, **changes})
    with boosters(StrictBooster) if strategy == "strict" else nullcontext():
        history, trained = train_sft(model, examples, config, seed=3, autocast_dtype=FP32, heldout=EXAMPLES[:3])
    return _found(trained, history)


def sft(ranks: Ranks, strategy: str = "plain") -> Found:
    return _sft(ranks, strategy, EXAMPLES)


def sft_packed_adapters(ranks: Ranks, strategy: str = "plain") -> Found:
    return _sft(ranks, strategy, EXAMPLES, packing=True, lora=LoRAConfig(r=2))


def sft_checkpointed(ranks: Ranks, strategy: str = "plain") -> Found:
    return _sft(ranks, strategy, EXAMPLES, gradient_checkpointing=True)


def sft_compiled(ranks: Ranks, strategy: str = "plain") -> Found:
    with compiled_in_a_directory(ranks):
        return _sft(ranks, strategy, EXAMPLES, compile_layers=True)


def sft_with_nothing_for_the_second_rank(ranks: Ranks, strategy: str = "plain") -> Found:
    return _sft(ranks, strategy, EXAMPLES[:1])


def sft_uneven_with_dropout(ranks: Ranks, strategy: str = "plain") -> Found:
    """Seven rows of which two ranks have four and three, one at a time; no idle pass may draw from their dropout."""
    lora = LoRAConfig(r=2, dropout=0.3)
    return _sft(ranks, strategy, EXAMPLES, micro_batch_size=1, epochs=2, lora=lora)


def _model(ranks: Ranks) -> RewardModel:
    torch.manual_seed(ranks.rank)
    return RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2, seed=ranks.rank))


def reward_model(ranks: Ranks, strategy: str = "plain") -> Found:
    config = RewardModelConfig(
        batch_size=8 // ranks.world_size, micro_batch_size=2, lr=1e-3, head_lr=1e-2, warmup_steps=0, centring=0.1,
        strategy="plain" if strategy == "strict" else strategy,
    )  # type: ignore[arg-type]  # fmt: skip
    with boosters(StrictBooster) if strategy == "strict" else nullcontext():
        history, _, trained = train_reward_model(_model(ranks), PAIRS, config, seed=3, autocast_dtype=FP32)
    return _found(trained, history)


def _boosted(ranks: Ranks, model: nn.Module, strategy: str, *, adam: bool = False) -> tuple[Any, Any, Any, Any]:
    """SGD follows the gradient, not its sign: later steps can be compared too. Sharding strategies have Adam alone."""
    booster: Any
    if strategy in {"plain", "strict", "3d"} and not adam:
        booster = StrictBooster() if strategy == "strict" else make_booster(strategy, ranks=ranks)  # type: ignore[arg-type]
        optimizer: Any = SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)
    else:
        booster = make_booster(strategy, ranks=ranks)  # type: ignore[arg-type]
        groups = [{"params": list(model.parameters()), "lr": 1e-3, "weight_decay": 0.0}]
        optimizer = booster.new_optimizer(groups, betas=(0.9, 0.95))
    model, optim, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 1.0))
    return model, booster, optim, scheduler


def _sft_trainer(
    ranks: Ranks, strategy: str = "plain", *, adam: bool = False, dropout: float = 0.0, **options: Any
) -> SFTTrainer:
    made = tiny_llama(initializer_range=0.2, seed=ranks.rank)
    if dropout:
        attach_lora(made, LoRAConfig(r=2, dropout=dropout), seed=1)
    model, booster, optim, scheduler = _boosted(ranks, made, strategy, adam=adam)
    return SFTTrainer(model, booster, optim, scheduler, **({"max_epochs": 2, "accumulation_steps": 2} | options))


def _pair_trainer(ranks: Ranks, strategy: str = "plain", **options: Any) -> RewardModelTrainer:
    model, booster, optim, scheduler = _boosted(ranks, _model(ranks), strategy)
    return RewardModelTrainer(model, booster, optim, None, scheduler, None, max_epochs=2, **options)


def _batches(rows: list[Any], ranks: Ranks, make: Any) -> list[dict[str, Any]]:
    """Two rows of each rank to a batch, four alone: the same rows in every minibatch."""
    whole = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    return [make(_share(each, ranks)) for each in whole]


def sft_trainer(ranks: Ranks, strategy: str = "plain") -> Found:
    """The second rank measures on fewer batches than the first."""
    strategy, ranks = laid_out(ranks, strategy)
    ours = _sft_trainer(ranks, strategy)
    unseen = _batches(EXAMPLES[:3], ranks, collate)
    ours.fit(_batches(EXAMPLES, ranks, collate), [each for row in unseen for each in _apart(row)])
    return _found(ours.trained, ours.history)


def _apart(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a batch for each of its rows."""
    return [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(len(batch["input_ids"]))]


def reward_model_trainer(ranks: Ranks, strategy: str = "plain") -> Found:
    strategy, ranks = laid_out(ranks, strategy)
    ours = _pair_trainer(ranks, strategy)
    heldout = pairs(7, seed=2)
    ours.fit(
        _batches(PAIRS, ranks, lambda rows: collate_pairs(rows, margins=True)), _batches(heldout, ranks, collate_pairs)
    )
    found = _found(ours.trained, ours.history)
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


def an_evaluation_that_fails_on_one_rank(ranks: Ranks, strategy: str = "plain") -> Found:
    try:
        return _ends(_sft_trainer(ranks, strategy), [collate(EXAMPLES[:2])], FailsOnSecondRank(ranks))
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


def resumed(ranks: Ranks, strategy: str = "plain", dropout: str = "0") -> Found:
    """The last two of four steps, from the checkpoint after the second; of adapters, where these drop."""
    strategy, ranks = laid_out(ranks, strategy)
    batches = _batches(EXAMPLES, ranks, collate) * 2
    with directory_of_all(ranks) as directory:
        straight = _sft_trainer(ranks, strategy, dropout=float(dropout), save_interval=1, save_dir=directory)
        straight.fit(batches)
        again = _sft_trainer(ranks, strategy, dropout=float(dropout))
        again.load_checkpoint(directory / "epoch-0_step-2")
    again.fit(batches)
    assert again.history == straight.history[2:]
    return _found(again.trained, again.history)


def saved(ranks: Ranks, strategy: str, directory: str) -> Found:
    """Four steps with a checkpoint after each."""
    ours = _sft_trainer(ranks, strategy, adam=True, accumulation_steps=1, save_interval=1, save_dir=directory)
    ours.fit(_batches(EXAMPLES, ranks, collate))
    return _found(ours.trained, ours.history)


def gone_on(ranks: Ranks, strategy: str, directory: str, step: str) -> Found:
    """What is left of the four steps, by as many ranks as there are now."""
    ours = _sft_trainer(ranks, strategy, adam=True, accumulation_steps=1)
    ours.load_checkpoint(Path(directory) / f"epoch-{(int(step) - 1) // 2}_step-{step}")
    ours.fit(_batches(EXAMPLES, ranks, collate))
    return _found(ours.trained, ours.history)
