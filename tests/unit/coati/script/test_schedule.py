"""Optimizer steps of a run, and the learning rate along it."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.coati.script.flags import build_parser
from rlhf_core.coati.script.run import optimizer_steps, schedule_of
from rlhf_core.training.optim import warmup_then_cosine


def test_steps_are_windows_of_accumulated_batches() -> None:
    # 2 x 16 samples are 2 batches of 16; 5 passes make 10 batches, which 8 to a step make 2 steps; 3 episodes.
    args = build_parser().parse_args(["--num_episodes", "3"])
    assert optimizer_steps(args) == 6
    # 2 x 16 samples are 4 batches of 10 (the last has 2); 5 passes make 20, one to a step.
    args = build_parser().parse_args(["--train_batch_size", "10", "--accumulation_steps", "1"])
    assert optimizer_steps(args) == 20


def test_the_rate_rises_to_one_and_falls_to_a_tenth() -> None:
    factor = warmup_then_cosine(4, 14)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factor(9) == pytest.approx(0.55)  # half of the cosine's way: (1 + 0.1) / 2
    assert factor(14) == pytest.approx(0.1)
    assert factor(99) == pytest.approx(0.1)


def test_the_fall_is_that_of_torchs_cosine_annealing() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    factor = warmup_then_cosine(0, 20)
    for step in range(20):
        assert factor(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()


def test_warm_up_takes_a_fortieth_of_the_steps_unless_it_is_set() -> None:
    args = build_parser().parse_args(["--num_episodes", "50"])  # 100 steps: 2.5 % are 3, rounded up
    assert schedule_of(args)(0) == pytest.approx(1 / 4)
    args = build_parser().parse_args(["--num_episodes", "50", "--warmup_steps", "0"])
    assert schedule_of(args)(0) == 1.0
    longer_than_the_run = warmup_then_cosine(50, 3)
    assert math.isfinite(longer_than_the_run(2))
    assert longer_than_the_run(2) == 1.0
