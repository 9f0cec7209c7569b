"""The groups as the driver calls them: who is asked, who is waited for, and what is left of a group that fails."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlhf_core.coati.roles import groups, loop
from rlhf_core.coati.roles.groups import PPOActorRayActorGroup, PPOCriticRayActorGroup
from rlhf_core.coati.roles.placement import Allotment

HANGS_S = 30.0


class Rank:
    """A handle whose calls return references by name."""

    def __init__(self, rank: int) -> None:
        self._rank, self._count = rank, 1

    @property
    def calculate_value(self) -> Rank:
        return self

    def options(self, *, num_returns: int) -> Rank:
        self._count = num_returns
        return self

    def remote(self, *made: str) -> Any:
        if not made:
            return f"idle of {self._rank}"
        found = [f"value of {each} by {self._rank}" for each in made]
        return found[0] if self._count == 1 else found


def critic(number: int) -> Any:
    group = object.__new__(PPOCriticRayActorGroup)
    group.role, group.world_size = "critic", number
    group.actors = [Rank(rank) for rank in range(number)]
    return group


def test_batches_are_valued_in_turns_and_idle_ranks_answer_too() -> None:
    assert critic(2).async_calculate_value(["a", "b", "c"]) == [
        "value of a by 0", "value of b by 1", "value of c by 0",
    ]  # fmt: skip
    assert critic(3).async_calculate_value(["a"]) == ["value of a by 0", "idle of 1", "idle of 2"]


def test_ranks_without_a_batch_are_waited_for_under_their_names() -> None:
    def answers(kind: str) -> Any:
        return lambda *_: [f"{kind}"]

    asked: dict[Any, str] = {}
    actor = SimpleNamespace(
        names=["actor-0"],
        async_sample_prompts_and_make_sequence=answers("made"),
        async_calculate_action_log_probs=answers("own"),
    )
    run: Any = SimpleNamespace(
        actor=actor,
        critic=critic(3),
        initial=SimpleNamespace(names=["initial-0"], async_calculate_base_action_log_probs=answers("base")),
        reward=SimpleNamespace(names=["reward-0"], async_calculate_r=answers("score")),
        answers=lambda calls, _: asked.update(calls),
    )
    (refs,) = loop._composed(run, range(1), 0)
    assert refs.all() == ["made", "own", "base", "value of made by 0", "score"]
    assert asked["value of made by 0"] == "critic-0"
    assert (asked["idle of 1"], asked["idle of 2"]) == ("critic-1", "critic-2")


class Room:
    """Room that knows whether it was left."""

    rooms: list[Room]

    def __init__(self, *_: object, **__: object) -> None:
        self.is_left = False
        self.rooms.append(self)

    def options(self, rank: int) -> dict[str, Any]:
        raise ValueError(f"no such option for {rank}")

    def leave(self) -> None:
        self.is_left = True


def test_a_group_that_cannot_be_made_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "rooms", [], raising=False)
    monkeypatch.setattr(groups, "Room", Room)
    with pytest.raises(ValueError, match="no such option for 0"):
        PPOActorRayActorGroup(1, 2, allotment=Allotment(1, 0.0))
    assert [room.is_left for room in Room.rooms] == [True]


def test_a_cluster_that_answers_no_more_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "END_S", 0.1, raising=False)
    monkeypatch.setattr(ray, "kill", lambda _: time.sleep(HANGS_S))
    group = critic(1)
    started = time.monotonic()
    group.end()
    assert time.monotonic() - started < HANGS_S / 2
