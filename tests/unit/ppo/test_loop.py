"""The loop: each phase once, whatever fails, and first what failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlhf_core.config import PPOConfig
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.loop import Collected, Loop
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import Sample

SAMPLE = Sample(
    prompt="p", answer="a", response="r", key="k", score=3.0, verifier=0.0, well_formed=True, rm_score=None, kl=1.0,
    length=3, ended=True,
)  # fmt: skip


class Run:
    """A learner and all phases; writes down what is called, and fails once where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_at = ""
        self.position, self.has_begun = Position(), False
        self.controls = RewardControls(PPOConfig(), ALONE)
        self.loop = Loop(
            self, collect=self.collect, publish=lambda version: self.call(f"publish {version}"),
            keep=lambda episode, steps: self.call(f"keep {episode} {steps}"), peers=self.peers, controls=self.controls,
        )  # fmt: skip

    def call(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails_at:
            self.fails_at = ""
            raise RuntimeError(what)

    def collect(self, episode: int) -> Collected:
        self.call(f"collect {episode}")
        return Collected("rows", [SAMPLE, SAMPLE])

    @contextmanager
    def peers(self, episode: int) -> Iterator[None]:
        self.call(f"peers {episode}")
        yield

    def begin(self, rows: Any, samples: list[Sample]) -> None:
        self.call(f"begin {rows} {len(samples)}")
        self.has_begun = True

    def learn(self, passes: int) -> list[str]:
        self.call(f"learn {passes}")
        return ["step"]

    def finish(self) -> None:
        self.position, self.has_begun = Position(self.position.episode + 1), False


def whole(episode: int) -> list[str]:
    return [
        f"collect {episode}", f"peers {episode}", "begin rows 2", "learn 3", f"publish {episode + 1}",
        f"keep {episode} ['step']",
    ]  # fmt: skip


def test_each_episode_has_its_phases_in_order_up_to_the_one_that_was_asked_for() -> None:
    run = Run()
    run.loop.run(2, passes=3)
    assert run.calls == [*whole(0), *whole(1)]
    run.loop.run(2, passes=3)
    assert len(run.calls) == 12  # nothing is due


@pytest.mark.parametrize(
    ("fails_at", "goes_on_with"),
    [
        ("collect 0", whole(0)),
        ("begin rows 2", whole(0)),
        ("learn 3", ["peers 0", "learn 3", "publish 1", "keep 0 ['step']"]),
        ("publish 1", ["publish 1"]),  # under the same version; it is not learnt again
        ("keep 0 ['step']", []),
    ],
)
def test_after_an_error_it_goes_on_with_what_failed(fails_at: str, goes_on_with: list[str]) -> None:
    run = Run()
    run.fails_at = fails_at
    with pytest.raises(RuntimeError, match=r".*"):
        run.loop.run(2, passes=3)
    run.calls.clear()
    run.loop.run(2, passes=3)
    assert run.calls == [*goes_on_with, *whole(1)]
    assert run.controls.state()["scores"] == [4, 3.0, 0.0]  # two samples of each episode, each noted once
