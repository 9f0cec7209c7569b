"""The histories that hypothesis chooses: any who, any order, stopped and killed anywhere."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from infra.artifacts.backend import Backend
from tests.unit.artifacts.histories.history import ALIAS, BODIES, COUNTED, NUMBERED, History
from tests.unit.artifacts.histories.stage import Actor

CAST = 3
"""Actors who are on the stage at once, at most."""
STEPS = 30
files_of = st.lists(st.sampled_from(BODIES), min_size=1, max_size=2, unique=True)
kept = st.integers(1, 2)
whose = st.integers(0, CAST - 1)
landmarks = st.integers(0, 3)
stops = st.tuples(landmarks, landmarks)
pauses = st.sampled_from([0.0, 0.0, 13 * 3600.0])
PAUSES_S = [30.0, 300.0, 2000.0, 13 * 3600.0, 40 * 3600.0]


class StoreMachine(RuleBasedStateMachine):
    """A subclass says where the store is."""

    ended = 0
    """Histories of the class that were played to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History(self.open_place)
        self._is_begun = False

    @abstractmethod
    def open_place(self, curtain: ExitStack) -> Backend:
        """Return an empty store; what is entered into the stack ends with the history."""

    @initialize()
    def begin(self) -> None:
        self.history.begin()
        self._is_begun = True

    def teardown(self) -> None:
        try:
            if self._is_begun:
                self.history.end()
                type(self).ended += 1
        finally:
            self.history.close()

    def has_room(self) -> bool:
        return len(self.history.cast) < CAST

    def is_played(self) -> bool:
        return bool(self.history.cast)

    @precondition(has_room)
    @rule(files=files_of, by=st.integers(0, 1), parent=st.sampled_from([None, "ppo-state/r"]))
    def write(self, files: list[bytes], by: int, parent: str | None) -> None:
        self.history.write(files, by=by, parent=parent)

    @precondition(has_room)
    @rule(files=files_of, back=st.integers(-1, 1), in_flight=st.booleans())
    def write_numbered(self, files: list[bytes], back: int, in_flight: bool) -> None:
        self.history.write_numbered(files, self._newest_number() + back, in_flight=in_flight)

    @precondition(has_room)
    @rule(artifact=st.sampled_from([COUNTED, NUMBERED]), selector=st.sampled_from(["", "@latest", f"@{ALIAS}"]))
    def read(self, artifact: tuple[str, str], selector: str) -> None:
        self.history.read(artifact, selector)

    @precondition(has_room)
    @rule(which=st.integers(0, 5))
    def promote(self, which: int) -> None:
        self.history.promote(which)

    @precondition(has_room)
    @rule()
    def roll_back(self) -> None:
        self.history.roll_back()

    @precondition(has_room)
    @rule(artifact=st.sampled_from([COUNTED, NUMBERED]), keep=kept)
    def prune(self, artifact: tuple[str, str], keep: int) -> None:
        self.history.prune(artifact, keep)

    @precondition(has_room)
    @rule(keep=kept)
    def collect(self, keep: int) -> None:
        self.history.collect(keep)

    @precondition(lambda self: len(self.history.cast) < CAST - 1)
    @rule(
        files=files_of, one=st.integers(0, 3), other=st.integers(0, 2), stops=stops, order=st.booleans(), pause=pauses
    )
    def meet(self, files: list[bytes], one: int, other: int, stops: tuple[int, int], order: bool, pause: float) -> None:
        """Let one who relies on something and one who deletes meet, both stopped where it matters."""
        own = self.history
        if one == 0:
            relying = own.write(files, by=0)
        elif one == 1:
            relying = own.write_numbered(files, self._newest_number() + 1, in_flight=order)
        else:
            relying = own.promote(other) if one == 2 else own.read(COUNTED, f"@{ALIAS}")
        deleting = own.collect(1) if other == 0 else own.prune(COUNTED if other == 1 else NUMBERED, 1)
        pair = [(relying, stops[0]), (deleting, stops[1])]
        first, second = pair if order else pair[::-1]
        self._step_to(*first)
        own.let_time_pass(pause)
        self._step_to(*second)

    @precondition(is_played)
    @rule(which=whose, requests=st.integers(1, 12))
    def step(self, which: int, requests: int) -> None:
        self.history.step(self._actor(which), requests)

    @precondition(is_played)
    @rule(which=whose, landmark=landmarks)
    def step_to(self, which: int, landmark: int) -> None:
        self._step_to(self._actor(which), landmark)

    @precondition(is_played)
    @rule(which=whose)
    def finish(self, which: int) -> None:
        self.history.finish(self._actor(which))

    @precondition(is_played)
    @rule(which=whose)
    def kill(self, which: int) -> None:
        self.history.kill(self._actor(which))

    @rule(seconds=st.sampled_from(PAUSES_S))
    def let_time_pass(self, seconds: float) -> None:
        self.history.let_time_pass(seconds)

    def _actor(self, which: int) -> Actor:
        return self.history.cast[which % len(self.history.cast)]

    def _step_to(self, actor: Actor, landmark: int) -> None:
        self.history.step_to(actor, *actor.landmarks[landmark % len(actor.landmarks)])

    def _newest_number(self) -> int:
        return max(each.version for each in self.history.ledger.ever.values() if (each.kind, each.name) == NUMBERED)


def play(machine: type[StoreMachine], histories: int, *, shrink: bool = True) -> int:
    """Play so many histories; the same ones each time.

    Returns:
        How many were played to their end, where the ledger is compared with the store.

    Raises:
        LossError: if a history lost something, or showed it by halves.
    """
    machine.ended = 0
    chosen = settings(
        max_examples=histories,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )
    run_state_machine_as_test(machine, settings=chosen)
    return machine.ended
