"""The hooks are coati's, and the performance figures are those of a sum done by hand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import count

import pytest

from rlhf_core.coati.callbacks import (
    Callback,
    ExperienceMakerPerformanceEvaluator,
    MakerCallback,
    PerformanceEvaluator,
    TrainerCallback,
    TrainerPerformanceEvaluator,
)
from tests.unit.test_types import experience


@pytest.mark.parametrize(
    ("kind", "hooks"),
    [
        (
            Callback,
            "on_fit_start() on_fit_end() on_episode_start(episode) on_episode_end(episode) on_make_experience_start() "
            "on_make_experience_end(experience) on_learn_epoch_start(epoch) on_learn_epoch_end(epoch) "
            "on_learn_batch_start() on_learn_batch_end(experience)",
        ),
        (
            TrainerCallback,
            "on_fit_start() on_fit_end() on_episode_start(episode) on_episode_end(episode) on_epoch_start(epoch) "
            "on_epoch_end(epoch) on_batch_start() on_batch_end(metrics,experience) on_update_start() on_update_end()",
        ),
        (
            MakerCallback,
            "on_loop_start() on_loop_end() on_make_experience_start() on_make_experience_end(experience) "
            "on_send_start() on_send_end() on_batch_start() on_batch_end()",
        ),
    ],
)
def test_the_hooks_are_coatis_and_do_nothing(kind: type, hooks: str) -> None:
    found = {
        f"{name}({','.join(list(inspect.signature(hook).parameters)[1:])})"
        for name, hook in inspect.getmembers(kind, inspect.isfunction)
        if name.startswith("on_")
    }
    assert found == set(hooks.split())
    hook = kind()
    for name in found:
        bare, _, arguments = name.partition("(")
        getattr(hook, bare)(*[0 for argument in arguments.rstrip(")").split(",") if argument])


def seconds() -> Iterator[float]:
    """A clock that goes on by half a second with every look at it."""
    return (0.5 * tick for tick in count())


MADE = experience(rows=4, prompt=6, actions=4, start=0)  # 4 rows of 10 tokens: 40 tokens


def test_performance_of_an_in_process_run_is_the_sum_done_by_hand() -> None:
    clock = seconds()
    evaluator = PerformanceEvaluator(1000, 800, 1000, 500, ignore_episodes=1, clock=lambda: next(clock))
    for episode in range(3):
        evaluator.on_episode_start(episode)
        evaluator.on_make_experience_start()
        evaluator.on_make_experience_end(MADE)
        for _ in range(2):
            evaluator.on_learn_batch_start()
            evaluator.on_learn_batch_end(MADE)
        evaluator.on_episode_end(episode)
    evaluator.on_fit_end()
    making, learning = evaluator.performance()
    # Two episodes count. Making: 8 samples in 2 x 0.5 s; each 40 tokens x 2 x (1000 to sample + 3300 to score).
    assert (making.samples, making.seconds, making.samples_per_second) == (8, 1.0, 8.0)
    assert making.tflops == pytest.approx(2 * 40 * 2 * 4300 / 1.0 / 1e12)
    # Learning: 16 samples in 4 x 0.5 s; each 40 tokens x 2 x 1800 parameters x 3.
    assert (learning.samples, learning.seconds, learning.samples_per_second) == (16, 2.0, 8.0)
    assert learning.tflops == pytest.approx(4 * 40 * 2 * 1800 * 3 / 2.0 / 1e12)


def test_gradient_checkpointing_counts_a_second_forward_pass() -> None:
    clock = seconds()
    evaluator = PerformanceEvaluator(1000, 0, 0, 0, enable_grad_checkpoint=True, clock=lambda: next(clock))
    evaluator.on_learn_batch_start()
    evaluator.on_learn_batch_end(MADE)
    assert evaluator.performance()[1].tflops == pytest.approx(40 * 2 * 1000 * 4 / 0.5 / 1e12)


def test_a_detached_trainers_first_episode_does_not_count_and_sending_is_apart() -> None:
    clock = seconds()
    evaluator = TrainerPerformanceEvaluator(1000, 800, clock=lambda: next(clock))
    for episode in range(2):
        evaluator.on_episode_start(episode)
        evaluator.on_batch_start()
        evaluator.on_batch_end({"actor_loss": 0.0}, MADE)
        evaluator.on_update_start()
        evaluator.on_update_end()
    evaluator.on_fit_end()
    found = evaluator.performance()
    assert found.split == {"train": 0.5, "update": 0.5}
    assert (found.samples, found.samples_per_second) == (4, 4.0)
    assert found.tflops == pytest.approx(40 * 2 * 1800 * 3 / 0.5 / 1e12)


def test_a_detached_maker_is_measured_in_making_and_sending() -> None:
    clock = seconds()
    evaluator = ExperienceMakerPerformanceEvaluator(1000, 800, 1000, 500, clock=lambda: next(clock))
    evaluator.on_make_experience_start()
    evaluator.on_make_experience_end(MADE)
    evaluator.on_send_start()
    evaluator.on_send_end()
    evaluator.on_loop_end()
    found = evaluator.performance()
    assert found.split == {"make": 0.5, "send": 0.5}
    assert found.samples_per_second == 4.0
    assert found.tflops == pytest.approx(40 * 2 * 4300 / 0.5 / 1e12)


def test_nothing_measured_is_no_division_by_zero() -> None:
    making, learning = PerformanceEvaluator(1, 1, 1, 1).performance()
    assert making.samples_per_second == making.tflops == learning.tflops == 0.0
