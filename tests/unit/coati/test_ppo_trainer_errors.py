"""Wherever an error ends a fit, the next one goes on as if there had been none; other runs are not mixed in."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rlhf_core.coati.callbacks import Callback, PerformanceEvaluator
from rlhf_core.config import PPOOptions
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.training.checkpoint import list_checkpoints
from rlhf_core.training.optim import make_trained
from tests.unit.coati.ppo_trainers import demonstrations, encoded, padded, prompts, record_stats, trainer, weights


class Broken(Exception):  # noqa: N818
    """Whatever goes wrong."""


class FailsOnce(Callback):
    """Raises at the n-th call of one hook."""

    def __init__(self, hook: str, call: int) -> None:
        def fail(*_: Any) -> None:
            self.calls += 1
            if self.calls == call:
                raise Broken

        self.calls = 0
        setattr(self, hook, fail)


def same(ours: Any, other: Any) -> bool:
    others = weights(other)
    return all(torch.equal(weight, others[name]) for name, weight in weights(ours).items())


FIT = (2, 2, 2)  # two episodes of four rows: four steps each


def straight() -> Any:
    ours = trainer()
    torch.manual_seed(7)
    ours.fit(*FIT, prompts())
    return ours


@pytest.fixture(scope="module")
def unbroken() -> Any:
    return straight()


@pytest.mark.parametrize(
    ("hook", "call"),
    [
        ("on_make_experience_end", 1),  # while the first pass over the prompts, and the first episode, have begun
        ("on_make_experience_start", 2),
        ("on_make_experience_start", 4),  # while the second episode is collected
        ("on_make_experience_end", 4),  # and the second pass has begun
        ("on_learn_batch_start", 1),  # before the first step
        ("on_learn_batch_start", 2),
        ("on_learn_batch_end", 2),  # right after a step
        ("on_learn_epoch_end", 2),  # after an episode's last one
        ("on_episode_end", 1),
    ],
)
def test_a_fit_after_an_error_goes_on_as_if_there_had_been_none(hook: str, call: int, unbroken: Any) -> None:
    ours = trainer(callbacks=(FailsOnce(hook, call),))
    stats, loader = record_stats(ours), prompts()
    torch.manual_seed(7)
    with pytest.raises(Broken):
        ours.fit(*FIT, loader)
    ours.fit(*FIT, loader)
    assert len(stats) == ours.position.step == 8
    assert ours.position == unbroken.position
    assert same(ours, unbroken)


def test_two_fits_on_one_loader_are_one_longer_fit(unbroken: Any) -> None:
    ours, loader = trainer(), prompts()
    torch.manual_seed(7)
    ours.fit(1, *FIT[1:], loader)
    ours.fit(*FIT, loader)
    assert same(ours, unbroken)


def own_order() -> DataLoader[Any]:
    """Return a loader that shuffles by a generator of its own."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(encoded(map(str, range(6))), 2, shuffle=True, collate_fn=padded, generator=generator)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [1, 4])
def test_a_loader_with_a_generator_of_its_own_deals_the_same_again(call: int) -> None:
    ours, loader, expected = trainer(callbacks=(FailsOnce("on_make_experience_end", call),)), own_order(), trainer()
    with pytest.raises(Broken):
        ours.fit(2, 2, 1, loader)
    ours.fit(2, 2, 1, loader)
    expected.fit(2, 2, 1, own_order())
    assert same(ours, expected)


def test_a_seed_that_is_set_between_an_error_and_a_fit_on_another_loader_counts() -> None:
    ours = trainer(callbacks=(FailsOnce("on_make_experience_end", 1),))
    with pytest.raises(Broken):
        ours.fit(*FIT, prompts())
    torch.manual_seed(7)
    ours.fit(*FIT, prompts())
    assert same(ours, straight())


def test_a_new_loader_after_a_log_that_could_not_be_opened_is_read_from_its_beginning(tmp_path: Path) -> None:
    ours, loader = trainer(), prompts(shuffle=False)
    ours.fit(1, 2, 1, prompts())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="log_dir"):
        ours.fit(2, 1, 1, loader, log_dir=tmp_path / "file")
    ours.fit(2, 1, 1, loader)
    assert ours._fed.loaders["prompts"].state().facts == {"pass": 0, "batches": 1, "samples": 2}


def test_an_episode_is_ended_with_the_number_of_passes_that_it_was_begun_with(tmp_path: Path) -> None:
    ours = trainer(callbacks=(FailsOnce("on_learn_batch_start", 2),), save_dir=tmp_path, save_interval=1)
    with pytest.raises(Broken):
        ours.fit(1, 1, 2, prompts())
    other = trainer()
    other.load_checkpoint(tmp_path)
    for each in (ours, other):
        with pytest.raises(ConfigError, match="episode 1 was begun with num_update_steps 2, but this fit has 3"):
            each.fit(1, 1, 3, prompts())


def test_the_end_of_an_episode_is_one_checkpoint_from_which_any_fit_may_follow(tmp_path: Path) -> None:
    trainer(save_dir=tmp_path, save_interval=2).fit(1, 1, 2, prompts())
    assert [found.name for found in list_checkpoints(tmp_path)] == ["epoch-0_step-2"]
    ours = trainer()
    ours.load_checkpoint(tmp_path)
    assert (ours.position.episode, ours.position.windows) == (1, 0)
    ours.fit(1, 1, 5, prompts())
    assert ours.position.step == 2


def test_going_back_to_a_checkpoint_forgets_what_was_collected_since(tmp_path: Path) -> None:
    ours = trainer(save_dir=tmp_path, save_interval=1, callbacks=(FailsOnce("on_learn_batch_start", 2),))
    loader = prompts()
    torch.manual_seed(7)
    with pytest.raises(Broken):
        ours.fit(2, 1, 2, loader)
    ours.load_checkpoint(tmp_path)
    assert len(ours.buffer) == 2
    ours.fit(2, 1, 2, loader)
    expected = trainer()
    torch.manual_seed(7)
    expected.fit(2, 1, 2, prompts())
    assert same(ours, expected)


def test_a_run_that_goes_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(save_dir=tmp_path, save_interval=1).fit(4, 1, 1, prompts())
    ours = trainer(save_dir=tmp_path)
    ours.load_checkpoint(tmp_path / "actor" / "epoch-1_step-2")
    with caplog.at_level(logging.WARNING):
        ours.fit(3, 1, 1, prompts())
    names = ["epoch-0_step-1", "epoch-1_step-2", "epoch-2_step-3"]
    assert [found.name for found in list_checkpoints(tmp_path)] == names
    assert "epoch-3_step-4" in caplog.text
    for role in ("actor", "critic", "trainer"):
        aside = {path.name for path in (tmp_path / role).glob("abandoned-*")}
        assert aside == {"abandoned-epoch-2_step-3", "abandoned-epoch-3_step-4"}


def test_a_run_from_elsewhere_does_not_write_among_checkpoints_that_it_does_not_go_on_from(tmp_path: Path) -> None:
    for name in ("one", "other"):
        trainer(save_dir=tmp_path / name).fit(1, 1, 1, prompts())
    ours = trainer(save_dir=tmp_path / "other")
    ours.load_checkpoint(tmp_path / "one")
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        ours.fit(2, 1, 1, prompts())


def test_an_optimizer_of_another_form_is_refused_before_a_weight_changes(tmp_path: Path) -> None:
    trainer(save_dir=tmp_path).fit(1, 1, 1, prompts())
    ours = trainer()
    grouped = make_trained(
        ours.learner.critic, lr=1e-3, weight_decay=0.0, schedule=lambda _: 1.0, other_lrs={"head.": 1e-2}
    )
    ours = trainer(
        critic=grouped.model, critic_optim=grouped.optimizer, critic_lr_scheduler=grouped.scheduler,
        critic_booster=grouped.booster,
    )  # fmt: skip
    before = weights(ours)
    with pytest.raises(ModelError, match="numbers of weights in the optimizer's groups, but this run has"):
        ours.load_checkpoint(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(ours).items())
    assert ours.position.step == 0


def test_every_callback_is_told_of_the_end_and_none_hides_the_fits_own_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []

    class Listens(Callback):
        def on_fit_end(self) -> None:
            told.append("fit")

        def on_episode_end(self, episode: int) -> None:
            told.append(f"episode {episode}")

    ends = (FailsOnce("on_episode_end", 1), FailsOnce("on_fit_end", 1), Listens())
    with pytest.raises(DataError, match="is empty"):
        trainer(callbacks=ends).fit(1, 1, 1, [padded([{"input_ids": [1]}]) | _empty()])
    assert told == ["episode 0", "fit"]
    assert "FailsOnce.on_fit_end failed" in caplog.text


def _empty() -> dict[str, torch.Tensor]:
    return dict.fromkeys(("input_ids", "attention_mask"), torch.zeros(0, 4, dtype=torch.long))


def test_performance_asks_nothing_of_ranks_that_an_error_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for collective in ("sum", "max", "gather", "broadcast_object", "barrier"):
        monkeypatch.setattr(
            f"rlhf_core.strategy.ranks.Ranks.{collective}", lambda *_, name=collective: asked.append(name)
        )
    PerformanceEvaluator(1, 1, 1, 1).on_fit_end()
    assert asked == []


ROWS = padded(encoded(["1 plus 1", "2 plus 2"]))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"input_ids": ROWS["input_ids"]}, "prompts has no 'attention_mask'"),
        ({"attention_mask": ROWS["attention_mask"]}, "with 'input_ids'.* is 'attention_mask'"),
        ([ROWS["input_ids"]], "this one is a list"),
        (ROWS | {"input_ids": ROWS["input_ids"] + 400}, "prompts hold the token id .* vocabulary has 259"),
        (ROWS | {"key": ["a"]}, "2 prompts has 1 keys"),
        (ROWS | {"entry": [None]}, "2 prompts has 1 of entry"),
    ],
)
def test_a_batch_of_prompts_that_cannot_be_read_is_named(batch: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        trainer().fit(1, 1, 1, [batch])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask of shape \[2, 3\]"),
        ({"labels": torch.ones(2, 3)}, r"labels of shape \[2, 3\]"),
        ({"input_ids": ROWS["input_ids"] + 400}, "demonstrations hold the token id"),
    ],
)
def test_demonstrations_that_cannot_be_read_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        trainer(ptx_coef=0.3).fit(1, 1, 1, prompts(), [ROWS | changes])


def test_what_only_an_error_later_would_have_told_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    for changes, says in (
        ({"critic_optim": None}, "there is a critic to train, but no critic_optim"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"buffer_limit": -1}, "buffer_limit must be at least 0, got -1"),
        ({"options": PPOOptions(flash_attention=True, rollout_dtype="float32")}, "16 bits alone, but rollout_dtype is"),
    ):
        with pytest.raises(ConfigError, match=says):
            trainer(**changes)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"save_dir is .*file, where nothing can be written"):
        trainer(save_dir=tmp_path / "file").fit(1, 1, 1, prompts())
    with pytest.raises(ConfigError, match=r"log_dir is .*file, where nothing can be written"):
        trainer().fit(1, 1, 1, prompts(), log_dir=tmp_path / "file")


def test_a_generator_of_prompts_can_be_gone_through_once_and_says_so() -> None:
    ours = trainer()
    with pytest.raises(DataError, match=r"prompt_dataloader is an iterator .* cannot be iterated again"):
        ours.fit(3, 1, 1, (batch for batch in [ROWS, ROWS]))
    assert ours.position.step == 2


def test_demonstrations_go_on_in_a_second_fit_too() -> None:
    ours, loader, learnt = trainer(ptx_coef=0.3), prompts(), demonstrations()
    ours.fit(1, 1, 1, loader, learnt)
    ours.fit(2, 1, 1, loader, learnt)
    assert ours._fed.loaders["demonstrations"].state().facts == {"pass": 0, "batches": 2, "samples": 4}
