"""Supervised trainers lose nothing that was learnt, and refuse in a sentence what would be learnt wrongly."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.coati.loss import LogExpLoss
from rlhf_core.data.encoding import EncodedPair, encode_pairs
from rlhf_core.data.preferences import PreferencePair
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.supervised.batches import (
    DataCollatorForPreferenceDataset,
    MaskedTokens,
    as_masked,
    pair_batch,
    pair_batch_of,
    token_batch_of,
)
from rlhf_core.training.checkpoint import list_checkpoints
from tests.unit.supervised.test_reward_model_trainer import collate as collate_pairs
from tests.unit.supervised.test_reward_model_trainer import pairs
from tests.unit.supervised.test_reward_model_trainer import trainer as pair_trainer
from tests.unit.supervised.test_sft_trainer import EXAMPLES, collate, loader, trainer, weights

GOOD = collate(EXAMPLES[:2])
PAIRS = collate_pairs(pairs(2, seed=1))


def names(directory: Path) -> list[str]:
    return [found.name for found in list_checkpoints(directory)]


def test_an_evaluation_that_fails_loses_nothing_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trainer(max_epochs=2, save_dir=tmp_path)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ours, "_score", fail)
    with pytest.raises(MemoryError):
        ours.fit(loader(7), loader(7))
    assert names(tmp_path) == ["epoch-0_step-1"]
    again = trainer(max_epochs=2, save_dir=tmp_path)
    again.load_checkpoint(tmp_path)
    again.fit(loader(7), loader(7))
    straight = trainer(max_epochs=2)
    straight.fit(loader(7), loader(7))
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(straight).items())
    assert names(tmp_path) == ["epoch-0_step-1", "epoch-1_step-2"]


@pytest.mark.parametrize(
    ("make", "says"), [(list, "eval_dataloader holds no batch"), (lambda: iter([GOOD]), "can be gone through once")]
)
def test_evaluation_data_that_could_not_be_measured_are_refused_before_anything_is_learnt(make: Any, says: str) -> None:
    ours = trainer()
    with pytest.raises(DataError, match=says):
        ours.fit(loader(7), make())
    assert ours.step == 0


def test_training_data_that_can_be_gone_through_once_are_no_two_epochs() -> None:
    ours = trainer(max_epochs=2)
    with pytest.raises(DataError, match=r"train_dataloader is an iterator .* cannot be iterated again"):
        ours.fit(iter([GOOD]))


def test_directories_that_cannot_be_written_are_found_before_anything_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for what, ours in (("save_dir", trainer(save_dir=tmp_path / "file" / "inside")), ("log_dir", trainer())):
        with pytest.raises(ConfigError, match=f"{what} is .*file.*, where nothing can be written"):
            ours.fit(loader(7), log_dir=tmp_path / "file" if what == "log_dir" else None)
        assert ours.step == 0


def test_no_run_writes_among_the_checkpoints_of_another_and_a_branch_sets_later_ones_aside(tmp_path: Path) -> None:
    trainer(max_epochs=3, save_interval=1, save_dir=tmp_path).fit(loader(7))
    assert names(tmp_path) == ["epoch-0_step-1", "epoch-1_step-2", "epoch-2_step-3"]
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run, up to epoch-2_step-3"):
        trainer(save_dir=tmp_path).fit(loader(7))
    ours = trainer(max_epochs=1, save_dir=tmp_path)
    ours.load_checkpoint(tmp_path)
    ours.fit(loader(7))
    assert names(tmp_path) == ["epoch-0_step-1", "epoch-1_step-2", "epoch-2_step-3"]  # no other name for step 3
    branch = trainer(max_epochs=2, save_dir=tmp_path)
    branch.load_checkpoint(tmp_path / "epoch-0_step-1")
    branch.fit(loader(7))
    assert names(tmp_path) == ["epoch-0_step-1", "epoch-1_step-2"]
    assert (tmp_path / "abandoned-epoch-2_step-3" / "modeling").is_dir()


def test_a_checkpoint_may_be_named_from_inside_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(max_epochs=1, save_dir=tmp_path).fit(loader(7))
    monkeypatch.chdir(tmp_path / "epoch-0_step-1")
    ours = trainer()
    ours.load_checkpoint(".")
    assert ours.step == 1


def test_an_optimizer_of_another_form_is_refused_before_a_weight_changes(tmp_path: Path) -> None:
    trainer(max_epochs=1, save_dir=tmp_path).fit(loader(7))
    ours = trainer()
    ours.trained.optimizer.param_groups.append({"params": [], "lr": 0.1})
    before = weights(ours)
    with pytest.raises(ModelError, match="numbers of weights in the optimizer's groups"):
        ours.load_checkpoint(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(ours).items())


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([GOOD["input_ids"]], "this one is a list"),
        (GOOD | {"attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \[2, 3\], expected \[2, 6\]"),
        (GOOD | {"loss_mask": torch.ones(2, 3)}, r"loss_mask has shape \[2, 3\]"),
        (GOOD | {"labels": torch.ones(2, 3)}, r"labels has shape \[2, 3\]"),
        (GOOD | {"position_ids": torch.ones(1, 6)}, r"position_ids has shape \[1, 6\]"),
        (GOOD | {"input_ids": [[1], [1, 2]]}, "input_ids is no tensor and cannot be made one"),
    ],
)
def test_a_batch_of_another_form_is_named(batch: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        trainer(max_epochs=1).fit([batch])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"margin": torch.ones(3)}, r"margin has shape \[3\], expected \[2\]"),
        ({"margin": torch.tensor([0.5, -1.0])}, "a pair's margin is -1.0"),
        ({"chosen_loss_mask": torch.ones(2, 3)}, r"chosen_loss_mask has shape \[2, 3\]"),
        (
            {"rejected_attention_mask": torch.tensor([[1] * 6, [0] * 6])},
            "row 1 of 2 rejected sequences has no token",
        ),
    ],
)
def test_a_batch_of_pairs_of_another_form_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        pair_trainer().fit([PAIRS | changes])


def test_numbers_that_would_turn_the_loss_around_are_refused() -> None:
    for options, says in (
        ({"centring": -0.1}, r"centring is -0\.1, but"),
        ({"centring": 0.1, "loss_fn": LogExpLoss()}, r"centring is 0\.1 beside a loss_fn"),
    ):
        with pytest.raises(ConfigError, match=says):
            pair_trainer(**options)
    with pytest.raises(DataError, match=r"margin is -0\.5"):
        pair_batch([EncodedPair([1, 2], [1, 3], -0.5)])
    with pytest.raises(DataError, match=r"has margin -0\.5"):
        encode_pairs([PreferencePair("p", "a", "b", -0.5)], Letters())  # type: ignore[arg-type]


class Letters:
    """A template that encodes letters."""

    def prompt_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    response_ids = prompt_ids


def test_a_mask_of_integers_is_a_mask_where_it_is_called_one_and_refused_where_it_is_not() -> None:
    assert as_masked(MaskedTokens([5, 6, 7], [0, 1, 1])) == ([5, 6, 7], [False, True, True])
    for mask in ([0, 1, 1], [1, 1, 1], [0, 0, 0]):
        with pytest.raises(DataError, match="a loss mask, or a response"):
            as_masked(([5, 6, 7], mask))
    assert as_masked(([5], [1])) == ([5, 1], [False, True])  # an end token may be 1


@pytest.mark.parametrize("packed", [False, True])
def test_positions_that_do_not_count_from_0_change_nothing_of_what_is_learnt(packed: bool) -> None:
    ids, every = torch.arange(10, 18).view(1, 8), torch.ones(1, 8, dtype=torch.bool)
    attended = every
    if packed:  # three tokens, then five
        owner = torch.tensor([0] * 3 + [1] * 5)
        attended = ((owner[:, None] == owner) & torch.ones(8, 8, dtype=torch.bool).tril())[None, None]
    batch = {
        "input_ids": ids,
        "attention_mask": attended,
        "loss_mask": every,
        "position_ids": torch.arange(5, 13)[None],
    }
    learnt = token_batch_of(batch, apply_loss_mask=True).loss_mask[0].tolist()
    assert learnt == [place not in ({0, 3} if packed else {0}) for place in range(8)]


def alike(*responses: int) -> EncodedPair:
    """A pair whose responses begin with the same token, behind a prompt of two tokens."""
    chosen, rejected = ([5, 6, 20, token] for token in responses)
    return EncodedPair(chosen, rejected, prompt_tokens=2)


@pytest.mark.parametrize("named", ["collated", "prompt_length"])
def test_a_prompts_end_is_where_the_batch_says_it_is(named: str, caplog: pytest.LogCaptureFixture) -> None:
    def batch(pair: EncodedPair) -> dict[str, Any]:
        if named == "collated":
            return DataCollatorForPreferenceDataset()([pair])
        return collate_pairs([pair]) | {"prompt_length": torch.tensor([2])}

    learnt, heldout = alike(30, 31), EncodedPair([5, 6, 21], [5, 6, 22, 23], prompt_tokens=2)
    assert pair_batch_of(batch(learnt)).prompts == ((5, 6),)
    with pytest.raises(DataError, match="has the prompt of an evaluation pair"):
        pair_trainer().fit([batch(learnt)], [batch(heldout)])
    assert "where their prompts end" not in caplog.text


def test_a_guessed_prompt_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pair_trainer(max_epochs=2).fit([PAIRS], [collate_pairs(pairs(2, seed=2))] * 2)
    assert caplog.text.count("batches of pairs do not say where their prompts end") == 1


def test_the_collator_takes_coatis_rows_and_refuses_what_has_no_response_left() -> None:
    row = {
        "chosen_input_ids": [5, 6, 7], "chosen_loss_mask": [0, 1, 1], "rejected_input_ids": [5, 8],
        "rejected_loss_mask": [0, 1], "margin": 0.5,
    }  # fmt: skip
    batch = DataCollatorForPreferenceDataset()([row, row | {"margin": None}])
    assert batch["chosen_loss_mask"].tolist() == [[False, True, True]] * 2
    assert batch["reject_attention_mask"].tolist() == [[True, True]] * 2
    assert batch["margin"].tolist() == [0.5, 0.0]
    assert pair_batch_of(batch).prompts == ((5,), (5,))
    with pytest.raises(DataError, match="no response within max_length, 1 token"):
        DataCollatorForPreferenceDataset(max_length=1)([row])
    with pytest.raises(DataError, match="lacks 'chosen_loss_mask'"):
        DataCollatorForPreferenceDataset()([{"chosen_input_ids": [1], "rejected_input_ids": [1]}])
