"""A training state is stored beside the next episode."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_core.config import PPOConfig
from rlhf_core.detached.run import RunTrainer, _Episode
from rlhf_core.errors import TrainingError
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.loop import Collected, Loop
from rlhf_core.ppo.state import RolloutState
from rlhf_core.types import EpisodeControls
from tests.unit.ppo.experience import tiny_experience
from tests.unit.ppo.test_loop import SAMPLE

WAIT_S = 30.0
CONTROLS = EpisodeControls(0.1, 0.0, 1.0)
Trainer: Any = RunTrainer.__ray_metadata__.modified_class  # without an actor around it


class SlowKeeper:
    """Takes as long to store a state as the test says."""

    def __init__(self) -> None:
        self.may_finish = threading.Event()
        self.stored: list[int] = []

    def commit_state(self, state: Any, _samples: Any) -> None:
        assert self.may_finish.wait(WAIT_S), "nothing went on beside the commit"
        self.stored.append(len(state.history))


class IdleTrainer(Trainer):  # type: ignore[misc]
    """Episodes of one sample."""

    seen: list[list[int]]

    def _collect(self, episode: int) -> Collected:
        self.seen.append(list(self._keeper.stored))
        if episode:
            self._keeper.may_finish.set()
        self._episode = _Episode(Collected(SimpleNamespace(policy_version=torch.zeros(1)), [SAMPLE]), CONTROLS, {})
        return self._episode.collected

    def _send(self, *_: Any, **__: Any) -> float:
        return 0.0

    def _figures(self, *_: Any) -> dict[str, float]:
        return {}


class IdleLearner:
    """Takes no step."""

    has_begun = False

    def __init__(self) -> None:
        self.position = Position()

    def begin(self, *_: Any) -> None: ...

    def learn(self, _passes: int) -> list[Any]:
        return []

    def finish(self) -> None:
        self.position.episode += 1


def trainer(keeper: SlowKeeper) -> Any:
    ours = IdleTrainer((), None, [], PPOConfig(), 0, keeper, None)
    ours._learner = SimpleNamespace(state=lambda **_: ({}, {}), trained=lambda _role: None)
    ours._rollouts = SimpleNamespace(state=RolloutState)
    ours._loop = Loop(IdleLearner(), collect=ours._collect, publish=ours._publish, keep=ours._keep)
    ours.seen = []
    return ours


def test_an_episode_is_collected_while_the_one_before_is_stored() -> None:
    keeper = SlowKeeper()
    ours = trainer(keeper)
    for episode in range(3):
        ours.run_episode(episode)
    assert ours.await_commit() == 3
    assert ours.seen[:2] == [[], []]  # episode 0's state was not stored yet when episode 1 began
    assert keeper.stored == [1, 2, 3]  # one after the other


def test_an_episode_that_failed_once_it_was_learnt_is_not_run_again_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> float:
        raise RuntimeError("nobody answers")

    keeper = SlowKeeper()
    ours = trainer(keeper)
    monkeypatch.setattr(ours, "_send", away)
    with pytest.raises(RuntimeError, match="nobody answers"):
        ours.run_episode(0)
    with pytest.raises(TrainingError, match="failed in episode 1 once it had begun to learn it; build it anew"):
        ours.run_episode(0)
    assert (ours.seen, keeper.stored) == ([[]], [])


class LearningTrainer(Trainer):  # type: ignore[misc]
    """Collects eight samples for each episode."""

    def _send(self, *_: Any, **__: Any) -> float:
        return 0.0

    def _figures(self, *_: Any) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(("max_staleness", "stored"), [(0, [1]), (1, [])])
def test_a_state_is_stored_before_its_tensors_change_or_is_a_copy(max_staleness: int, stored: list[int]) -> None:
    keeper = SlowKeeper()
    seen: list[list[int]] = []
    told: list[bool] = []

    class Watching(IdleLearner):
        def begin(self, *_: Any) -> None:
            seen.append(list(keeper.stored))
            if self.position.episode:
                keeper.may_finish.set()

    def collect(_episode: int, _report: Any) -> Any:
        return [SimpleNamespace(experience=tiny_experience().to_numpy(), samples=[SAMPLE] * 8)], {}

    def state(*, copied: bool) -> Any:
        told.append(copied)
        return {}, {}

    ours = LearningTrainer((), None, [], PPOConfig(max_staleness=max_staleness), 0, keeper, None)
    ours._learner = SimpleNamespace(state=state, trained=lambda _role: None)
    ours._rollouts = SimpleNamespace(state=RolloutState, collect=collect, controls_of=lambda _episode: CONTROLS)
    ours._loop = Loop(Watching(), collect=ours._collect, publish=ours._publish, keep=ours._keep)
    waits = ours.await_commit

    def await_commit() -> int:
        keeper.may_finish.set()  # by whoever waits, and nobody else: without a wait nothing is stored
        done: int = waits()
        return done

    if not max_staleness:
        ours.await_commit = await_commit
    for episode in range(2):
        ours.run_episode(episode)
    assert waits() == 2
    assert seen == [[], stored]
    assert told == [bool(max_staleness)] * 2
