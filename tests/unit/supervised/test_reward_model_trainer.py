"""coati's reward-model trainer: the numbers of `train_reward_model`, and measurements on evaluation data only."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from rlhf_core.coati.loss import LogExpLoss, LogSigLoss
from rlhf_core.config import LoRAConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.errors import ConfigError, DataError, ModelError, TrainingError
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.supervised.measures import measurement, score_sequences
from rlhf_core.supervised.reward_model import RewardModelTrainer
from rlhf_core.training.padding import pad_right
from tests.tiny_llama import tiny_llama, tiny_tokenizer

FP32 = torch.float32


def pairs(count: int, *, seed: int, first: int = 40) -> list[EncodedPair]:
    """A prompt of three tokens, then 20 if chosen and 30 if rejected, then a stop."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(first, first + 80, (count, 3), generator=generator).tolist()
    return [EncodedPair([*prompt, 20, 2], [*prompt, 30, 31, 2]) for prompt in prompts]


def collate(rows: Sequence[EncodedPair], *, rejected: str = "rejected", margins: bool = False) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for side, sequences in (("chosen", [row.chosen for row in rows]), (rejected, [row.rejected for row in rows])):
        batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"] = pad_right(sequences, torch.device("cpu"))
    if margins:
        batch["margin"] = torch.tensor([row.margin for row in rows])
    return batch


def loader(rows: Sequence[EncodedPair], batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]


def trainer(
    *, dropout: float | None = None, tokenizer: Any = None, lr: float = 1e-3, **options: Any
) -> RewardModelTrainer:
    torch.manual_seed(0)
    model = RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2))
    if dropout is not None:
        attach_lora(model.trunk, LoRAConfig(r=2, dropout=dropout), seed=0)
    optimizer = AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=lr)
    booster = PlainBooster()
    boosted, optim, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=LambdaLR(optimizer, lambda _: 1.0))
    return RewardModelTrainer(boosted, booster, optim, None, scheduler, tokenizer, **options)


def scores(ours: RewardModelTrainer, sequences: Sequence[Sequence[int]]) -> list[float]:
    return score_sequences(ours.trained.model, sequences, batch_size=1, autocast_dtype=FP32).tolist()


def test_the_constructor_is_coatis() -> None:
    parameters = inspect.signature(RewardModelTrainer).parameters.values()
    inherited = [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert [name for name, default in inherited if default is inspect.Parameter.empty] == [
        "model", "booster", "optimizer", "plugin", "lr_scheduler", "tokenizer",
    ]  # fmt: skip
    assert inherited[6:] == [
        ("loss_fn", None), ("max_epochs", 1), ("beta", 0.0), ("accumulation_steps", 1), ("start_epoch", 0),
        ("save_interval", 0), ("save_dir", None), ("coordinator", None),
    ]  # fmt: skip


def test_a_window_is_one_minibatch_whose_loss_is_a_mean_over_its_pairs() -> None:
    some = pairs(7, seed=1)
    fine, coarse = trainer(accumulation_steps=2), trainer()
    fine.fit(loader(some, 2))
    coarse.fit(loader(some, 4))
    assert [step["pairs"] for step in fine.history] == [4, 3]
    for one, other in zip(fine.history, coarse.history, strict=True):
        for name in ("loss", "accuracy", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name


def test_the_first_loss_is_that_of_the_scores_with_margins_subtracted() -> None:
    some = [row._replace(margin=float(number)) for number, row in enumerate(pairs(3, seed=1))]
    ours = trainer()
    gaps = [a - b for a, b in zip(*(scores(ours, side) for side in list(zip(*some, strict=True))[:2]), strict=True)]
    expected = sum(math.log(1 + math.exp(-(gap - row.margin))) for gap, row in zip(gaps, some, strict=True)) / 3
    for loss_fn in (None, LogSigLoss(), LogExpLoss()):
        other = trainer(loss_fn=loss_fn)
        other.fit([collate(some, margins=True)])
        assert other.history[0]["loss"] == pytest.approx(expected, rel=1e-5)
        assert other.history[0]["accuracy"] == pytest.approx(sum(gap > 0 for gap in gaps) / 3, rel=1e-6)


def test_centring_adds_the_squared_sum_of_a_pairs_scores() -> None:
    some = pairs(3, seed=1)
    ours = trainer()
    sums = [a + b for a, b in zip(*(scores(ours, side) for side in list(zip(*some, strict=True))[:2]), strict=True)]
    losses = []
    for centring in (0.0, 0.5):
        ours = trainer(centring=centring)
        ours.fit(loader(some, 3))
        losses.append(ours.history[0]["loss"])
    assert losses[1] - losses[0] == pytest.approx(0.5 * sum(each**2 for each in sums) / 3, rel=1e-4)


def test_losses_of_huge_differences_do_not_overflow() -> None:
    for loss_fn in (LogSigLoss(), LogExpLoss()):
        ours = trainer(loss_fn=loss_fn)
        ours.trained.model.head.weight.data.mul_(1e7)
        before = scores(ours, [pairs(1, seed=1)[0].chosen])[0]
        assert abs(before) > 1e4
        ours.fit(loader(pairs(4, seed=1), 4))
        assert math.isfinite(ours.history[0]["loss"])


def test_the_spelling_of_coatis_collator_is_read() -> None:
    some = pairs(4, seed=1)
    ours, usual = trainer(), trainer()
    ours.fit([collate(some, rejected="reject")])
    usual.fit([collate(some)])
    assert ours.history == usual.history


def test_accuracy_is_of_the_evaluation_data_and_not_of_the_training_pairs(tmp_path: Path) -> None:
    learnt, heldout = pairs(32, seed=1), pairs(24, seed=2)
    turned = [EncodedPair(bad, good) for good, bad, *_ in pairs(8, seed=3)]  # what is wrong by what was learnt
    ours = trainer(max_epochs=3, save_dir=tmp_path)
    ours.fit(loader(learnt, 8), loader([*heldout, *turned], 5), log_dir=tmp_path / "logs")
    assert ours.history[-1]["accuracy"] == 1.0
    found = ours.evaluation
    assert found is not None
    assert (found.correct, found.pairs, found.accuracy) == (24, 32, 0.75)
    rows = [*heldout, *turned]
    expected = measurement(
        chosen=torch.tensor(scores(ours, [row.chosen for row in rows])),
        rejected=torch.tensor(scores(ours, [row.rejected for row in rows])),
    )
    assert found.brier == pytest.approx(expected.brier, rel=1e-4)
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    stored = json.loads((tmp_path / "evaluation-epoch-2.json").read_text())
    assert stored == json.loads(json.dumps(found.facts()))
    [file] = (tmp_path / "logs").glob("reward-model/*/metrics.jsonl")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["eval/accuracy"] for row in logged if "eval/accuracy" in row][-1] == 0.75


@pytest.mark.parametrize("masked", [False, True])
def test_measuring_on_a_prompt_that_is_learnt_is_refused_before_it_is(masked: bool) -> None:
    learnt, heldout = collate(pairs(8, seed=1)), collate(pairs(8, seed=1)[-1:])
    if masked:  # responses that begin alike hide the prompt's end, unless the batch says where it is
        heldout["chosen_input_ids"][:, 3] = heldout["rejected_input_ids"][:, 3] = 21
        for batch in (learnt, heldout):
            batch["chosen_loss_mask"] = (
                torch.arange(batch["chosen_input_ids"].shape[1]).expand_as(batch["chosen_input_ids"]) >= 3
            )
    ours = trainer()
    before = ours.trained.model.head.weight.clone()
    with pytest.raises(DataError, match="a training pair has the prompt of an evaluation pair"):
        ours.fit([learnt], [heldout])
    assert torch.equal(ours.trained.model.head.weight, before)


@pytest.mark.parametrize("dropout", [None, 0.3])
def test_going_on_from_a_checkpoint_equals_not_having_stopped(dropout: float | None, tmp_path: Path) -> None:
    some = pairs(8, seed=1)
    straight = trainer(dropout=dropout, max_epochs=2, save_interval=3, save_dir=tmp_path)
    torch.manual_seed(7)
    straight.fit(loader(some, 2, shuffle=True), loader(pairs(4, seed=2), 4))
    resumed = trainer(dropout=dropout, max_epochs=2)
    resumed.load_checkpoint(tmp_path / "epoch-0_step-3")
    torch.manual_seed(8)
    resumed.fit(loader(some, 2, shuffle=True), loader(pairs(4, seed=2), 4))
    assert resumed.history == straight.history[3:]
    for one, other in zip(resumed.trained.model.parameters(), straight.trained.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.evaluation == straight.evaluation


def test_a_checkpoint_loads_as_a_reward_model(tmp_path: Path) -> None:
    ours = trainer(save_dir=tmp_path)
    ours.fit(loader(pairs(4, seed=1), 2))
    loaded = RewardModel.from_pretrained(tmp_path / "epoch-0_step-2" / "modeling", FP32)
    assert torch.equal(loaded.head.weight, ours.trained.model.head.weight)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    trainer(tokenizer=tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ModelError, match=r"tokenizer has 260 tokens, but the reward model's vocabulary only 259"):
        trainer(tokenizer=tokenizer)


def test_what_cannot_be_learnt_is_named() -> None:
    good = collate(pairs(2, seed=1))
    with pytest.raises(ConfigError, match=r"beta is 0\.1"):
        trainer(beta=0.1)
    with pytest.raises(DataError, match="lacks 'rejected_attention_mask'"):
        trainer().fit([{name: value for name, value in good.items() if name != "rejected_attention_mask"}])
    with pytest.raises(DataError, match="2 chosen sequences and 1 rejected"):
        trainer().fit([good | {name: value[:1] for name, value in good.items() if name.startswith("rejected")}])
    with pytest.raises(DataError, match=r"pairs hold the token id \d{3}, but"):
        trainer().fit([good | {"chosen_input_ids": good["chosen_input_ids"] + 500}])
    with pytest.raises(DataError, match="eval_dataloader holds no batch"):
        trainer().fit([good], [])
    broken = trainer()
    broken.trained.model.head.bias.data.fill_(float("inf"))
    with pytest.raises(TrainingError, match="reward model's loss is nan"):
        broken.fit([good])
