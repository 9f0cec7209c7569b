"""The loop of a detached trainer, without any actor: its hooks, its batches, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.coati.callbacks import TrainerCallback
from rlhf_core.coati.detached.registration import (
    MakerFacts,
    MissingMakersError,
    Production,
    Registry,
    check_like_trainer,
    units_per_episode,
)
from rlhf_core.coati.detached.replay_buffer import BufferTimeoutError
from rlhf_core.coati.detached.scheduled_fit import DealingOptions
from rlhf_core.coati.detached.trainer import DetachedTrainer
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.types import Experience
from tests.unit.coati.detached.test_replay_buffer import numbers, rows

IMPATIENT = DealingOptions(seed=5, start_timeout_s=0.05, experience_timeout_s=0.05)


class Every(TrainerCallback):
    """Keeps the names of all hooks, in the order of their calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def tell(*arguments: Any) -> None:
            shown = "" if name == "on_batch_end" else ",".join(map(str, arguments))
            self.told.append(f"{name.removeprefix('on_')}({shown})")

        return tell


class Summing(DetachedTrainer):
    """Learns nothing, and keeps what it was given."""

    fails_at = -1
    sends = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.steps: list[list[int]] = []
        self.updates: list[bool] = []

    def training_step(self, experience: Experience) -> dict[str, Any]:
        if len(self.steps) == self.fails_at:
            raise RuntimeError("no")
        self.steps.append(numbers(experience))
        return {"loss": 0.0}

    def _update_remote_makers(self, fully_update: bool = False, **kwargs: Any) -> None:  # noqa: ARG002
        if not self.sends:
            raise RuntimeError("nobody answers")
        self.updates.append(fully_update)


def test_hooks_are_called_in_coatis_order() -> None:
    every = Every()
    trainer = Summing([], train_batch_size=1, callbacks=[every])
    trainer.buffer_append(rows(0, 1, 2, 3))
    trainer.fit(total_steps=5, update_steps=2, train_epochs=2)  # the fifth is no whole episode
    steps = ["batch_start()", "batch_end()"] * 2
    episode = [
        "episode_start({0})", "epoch_start(0)", *steps, "epoch_end(0)", "epoch_start(1)", *steps, "epoch_end(1)",
        "update_start()", "update_end()", "episode_end({0})",
    ]  # fmt: skip
    expected = ["fit_start()", *(each.format(number) for number in range(2) for each in episode), "fit_end()"]
    assert every.told == expected
    assert trainer.updates == [False, False]
    trainer.sync_models_to_remote_makers()
    assert trainer.updates[-1] is True


def test_the_first_epoch_takes_fresh_batches_and_later_ones_the_same_in_orders_of_their_own() -> None:
    trainer = Summing([], train_batch_size=2, dealing=replace(IMPATIENT, experience_timeout_s=30.0))
    trainer.buffer_extend([rows(*range(5)), rows(*range(5, 16))])
    trainer.fit(total_steps=8, update_steps=8, train_epochs=3)
    epochs = [trainer.steps[start : start + 8] for start in (0, 8, 16)]
    assert epochs[0] == [[number, number + 1] for number in range(0, 16, 2)]
    assert sorted(epochs[1]) == sorted(epochs[2]) == epochs[0]
    assert len({str(epoch) for epoch in epochs}) == 3


def test_the_end_of_episode_and_fit_is_told_after_an_error_and_no_step_is_taken_twice() -> None:
    every = Every()
    trainer = Summing([], train_batch_size=1, callbacks=[every])
    trainer.fails_at = 3
    trainer.buffer_append(rows(*range(8)))
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(total_steps=6, update_steps=2)
    assert every.told[-2:] == ["episode_end(1)", "fit_end()"]
    trainer.fails_at = -1
    with pytest.raises(RlhfError, match=r"took some steps of episode 2 and failed in it, .* create the trainer anew"):
        trainer.fit(total_steps=6, update_steps=2)


def test_a_fit_whose_weights_could_not_be_sent_sends_them_when_it_goes_on_and_learns_nothing_twice() -> None:
    every = Every()
    trainer = Summing([], train_batch_size=1, callbacks=[every])
    trainer.sends = False
    trainer.buffer_append(rows(*range(6)))
    with pytest.raises(RuntimeError, match="nobody answers"):
        trainer.fit(total_steps=6, update_steps=2)
    assert every.told[-2:] == ["episode_end(0)", "fit_end()"]
    trainer.sends = True
    trainer.fit(total_steps=6, update_steps=2)  # episodes 1 and 2 of the same fit
    assert trainer.steps == [[number] for number in range(6)]
    assert len(trainer.updates) == 3
    assert every.told[-2:] == ["episode_end(2)", "fit_end()"]


def test_makers_registered_late_are_not_taken_for_pushed_experience_of_an_earlier_fit() -> None:
    trainer = Summing(["maker_0"], train_batch_size=1, dealing=IMPATIENT)
    trainer.buffer_append(rows(1))
    trainer.fit(1, 1)
    with pytest.raises(MissingMakersError, match="maker_0 to begin"):
        trainer.fit(1, 1)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ((0, 1, 1), "total_steps must be at least 1, got 0"),
        ((1, 0, 1), "update_steps must be at least 1, got 0"),
        ((1, 1, 0), "train_epochs must be at least 1, got 0"),
        ((3, 4, 1), "total_steps 3 is less than one episode's update_steps 4"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: Sequence[int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Summing([]).fit(*counts)


def test_nobody_who_sends_or_registers_is_waited_for_for_ever() -> None:
    with pytest.raises(BufferTimeoutError, match=r"waited 0\.05 s for a batch of 8 rows"):
        Summing([], dealing=IMPATIENT).fit(1, 1)
    with pytest.raises(MissingMakersError, match=r"waited 0.05 s for maker_0, maker_1 to begin"):
        Summing(["maker_0", "maker_1"], dealing=IMPATIENT).fit(1, 1)


def test_what_is_pushed_is_learnt_though_makers_are_named() -> None:
    trainer = Summing(["maker_0"], train_batch_size=1, dealing=IMPATIENT)
    trainer.buffer_append(rows(1, 2))
    trainer.fit(2, 2)
    assert trainer.steps == [[1], [2]]


@pytest.mark.parametrize(
    ("names", "size", "sentence"),
    [
        ("maker_0", 8, "expected a list of makers' names, got 'maker_0' alone"),
        ([], 0, "expected a buffer with sample_batch_size of at least 1"),
    ],
)
def test_what_is_wrong_with_an_actors_arguments_is_told_by_its_first_calls(
    names: Any, size: int, sentence: str
) -> None:
    trainer = Summing(names, train_batch_size=size)  # an error here would be a page of Ray's
    for call in (lambda: trainer.fit(1, 1), trainer.sync_models_to_remote_makers, trainer.first_trainer):
        with pytest.raises(ConfigError, match=sentence):
            call()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_staleness": -1}, "at least 0, not -1"),
        ({"stale_samples": "Drop"}, "stale_samples is one of 'wait', 'drop', not 'Drop'"),
        ({"stale_samples": "drop"}, "with max_staleness 0 drops all that is made ahead"),
        ({"rollout_dtype": "fp16"}, "rollout_dtype is one of 'float32', 'bfloat16', 'float16', not 'fp16'"),
        ({"answer_timeout_s": 0}, "answer_timeout_s is a number of seconds above 0, not 0"),
    ],
)
def test_options_that_cannot_be_are_refused_where_they_are_written(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        DealingOptions(**changes)


def facts(name: str = "maker_0", **changes: Any) -> MakerFacts:
    known = MakerFacts(
        name=name, batches=4, steps=10, rows=8, digest="abc", kl_coef=0.1, seed=0, options={"lam": 0.95},
        temperature=1.0, max_new_tokens=4, sampling={}, has_no_weights=False,
    )  # fmt: skip
    return replace(known, **changes)


def test_makers_make_up_the_episodes_exactly_or_the_fit_is_refused() -> None:
    wanted = Production(episodes=5, update_steps=4, train_batch_size=8, trainers=1)
    assert units_per_episode([facts(), facts("maker_1")], wanted) == 4
    with pytest.raises(ConfigError) as caught:
        units_per_episode([facts(), facts("maker_1", steps=9)], wanted)
    assert str(caught.value) == (
        "fit learns from 160 samples (5 episodes of update_steps 4 x train_batch_size 8 x 1 trainer), but the makers' "
        "loops make 152 (19 batches of 8); let them make 20 batches, or fit 19 total_steps"
    )
    with pytest.raises(ConfigError, match=r"learns from 32 samples .* not whole batches .* of 6 samples each"):
        units_per_episode([facts(rows=6)], wanted)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batches": 5}, r"number of batches \(4 and 5\) or in samples of each \(8 and 8\)"),
        ({"rows": 6}, r"number of batches \(4 and 4\) or in samples of each \(8 and 6\)"),
        ({"digest": "xyz"}, "begin with different batches"),
        ({"kl_coef": 0.2}, r"differ in kl_coef \(0.1 and 0.2\)"),
        ({"options": {"lam": 1.0}}, r"differ in options.lam \(0.95 and 1.0\)"),
    ],
)
def test_makers_of_different_work_are_refused_by_name(changes: dict[str, Any], sentence: str) -> None:
    registry = Registry("trainer_0", ["maker_0", "maker_1"])
    registry.register(facts(), list)
    with pytest.raises(ConfigError, match=sentence) as caught:
        registry.register(facts("maker_1", **changes), list)
    assert "maker_0 and maker_1" in str(caught.value)


def test_a_maker_that_no_trainer_names_or_that_works_by_other_values_is_refused() -> None:
    registry = Registry("trainer_0", ["maker_0"])
    with pytest.raises(ConfigError, match=r"maker_7 names trainer_0, but is not among .* \(maker_0\)"):
        registry.register(facts("maker_7"), list)
    with pytest.raises(ConfigError, match=r"maker_0 and trainer_0 differ in temperature \(1.0 and 0.7\)"):
        check_like_trainer(facts(), "trainer_0", seed=0, temperature=0.7)


def test_a_loop_works_from_the_fits_beginning_to_its_end_and_a_later_one_is_another() -> None:
    registry = Registry("trainer_0", ["maker_0"])
    ticket = registry.register(facts(), list)
    assert registry.state_of("maker_0", ticket) == "waiting"
    assert registry.await_makers(1.0, unless=lambda: False) == [facts()]
    assert registry.state_of("maker_0", ticket) == "working"
    assert registry.loader_of("maker_0") is list
    registry.end()
    assert registry.state_of("maker_0", ticket) == "over"
    again = registry.register(facts(), list)
    assert registry.state_of("maker_0", again) == "waiting"
    assert registry.state_of("maker_0", ticket) == "over"


def test_makers_that_wait_for_weights_that_nobody_sent_are_not_waited_for() -> None:
    trainer = Summing(["maker_0"], train_batch_size=8)
    trainer.register_maker(facts(has_no_weights=True), list)
    with pytest.raises(ConfigError, match=r"maker_0 wait for a trainer's weights, .* call sync_models"):
        trainer.fit(10, 2)
