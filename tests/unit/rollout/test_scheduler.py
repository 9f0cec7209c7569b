"""The scheduler with makers that are threads of this process: who dies, hangs or refuses, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from rlhf_core.errors import DataError
from rlhf_core.rollout import scheduler as module
from rlhf_core.rollout.lease_queue import LeaseQueue, MakersLostError
from rlhf_core.rollout.scheduler import Scheduler, Waits
from rlhf_core.rollout.worker import StaleWeightsError
from rlhf_core.types import EpisodeControls
from rlhf_core.weights import WeightsError

WAIT_S = 20.0


@dataclass(frozen=True)
class Piece:
    episode: int
    index: int
    rows: int = 4


class Result(NamedTuple):
    maker: str
    version: int
    controls: EpisodeControls | None

    def owned(self) -> Self:
        return self


class Weights(NamedTuple):
    version: int


class FakeRay:
    """Calls of actors as futures."""

    @staticmethod
    def wait(calls: list[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        done = wait_for(calls, timeout, FIRST_COMPLETED).done
        return [call for call in calls if call in done][:1], [call for call in calls if call not in done]

    @staticmethod
    def get(call: Future[Any]) -> Any:
        return call.result()

    @staticmethod
    def kill(maker: Maker, no_restart: bool = True) -> None:
        maker.killed.append(no_restart)
        maker.die(for_good=no_restart)


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("the process is gone", actor_id=None)


class Maker:
    """A maker whose process can die; `make` says what a chunk comes to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.make: Callable[[], None] = lambda: None
        self.take: Callable[[int], None] = lambda _: None
        self.misses_weights = False
        self.version: int | None = None
        self.chunks = 0
        self.builds = 0
        self.lent: list[tuple[Any, ...]] = []
        self.killed: list[bool] = []
        self.is_silent = False
        self._pid, self._gone = 1, False
        self._restarted_at = 0.0
        self._pool = ThreadPoolExecutor(4)
        for method in ("ping", "node", "build", "load_weights", "make_chunk"):
            setattr(self, method, SimpleNamespace(remote=self._caller(getattr(self, f"_{method}"))))

    def die(self, *, for_good: bool = False, down_s: float = 0.1) -> None:
        self._pid += 1
        self._gone, self._restarted_at = for_good, time.monotonic() + down_s
        self.version, self.is_silent = None, False

    def _caller(self, method: Callable[..., Any]) -> Callable[..., Future[Any]]:
        def call(*arguments: Any) -> Any:
            pid = self._pid
            self._check(pid)
            try:
                found = method(*arguments)
            except Exception as error:
                raise RayTaskError("f", "traceback", error).as_instanceof_cause() from error
            while self.is_silent:
                time.sleep(0.01)
            self._check(pid)
            return found

        return lambda *arguments: self._pool.submit(call, *arguments)

    def _check(self, pid: int) -> None:
        if self._gone:
            raise ActorDiedError
        if pid != self._pid or time.monotonic() < self._restarted_at:
            raise unavailable()

    def _ping(self) -> int:
        return self._pid

    def _node(self) -> tuple[str, str]:
        return f"node of {self.name}", "127.0.0.1"

    def _build(self, *lent: tuple[Any, ...]) -> None:
        self.builds += 1
        self.lent += lent

    def _load_weights(self, publication: Weights, timeout_s: float) -> int:
        if self.misses_weights:
            time.sleep(timeout_s + 0.3)  # its answer takes a moment, too
            raise TimeoutError("the weights did not come")
        self.take(publication.version)
        self.version = publication.version
        return publication.version

    def _make_chunk(self, _unit: Piece, version: int, controls: EpisodeControls | None) -> Result:
        if version != self.version:
            raise StaleWeightsError(f"{self.name} holds {self.version}")
        self.make()
        self.chunks += 1
        return Result(self.name, version, controls)


class Stage:
    """A queue, a scheduler and its makers; `collect` plays the trainer."""

    def __init__(self, *names: str, size: int = 4, episodes: int = 3, **options: Any) -> None:
        waits = options.pop("waits", Waits(start_s=WAIT_S, answer_s=1.0, chunk_s=WAIT_S))
        self.queue: LeaseQueue[Piece, Result] = LeaseQueue(
            lambda episode: [Piece(episode, index) for index in range(size)], episodes=episodes, **options
        )
        self.said: list[str] = []
        self.scheduler: Scheduler[Piece, Result] = Scheduler(
            self.queue, controls=lambda episode: EpisodeControls(float(episode)), waits=waits,
            on_trouble=self.said.append,
        )  # fmt: skip
        self.makers = {name: Maker(name) for name in names}
        for name, maker in self.makers.items():
            self.scheduler.add(name, maker)

    def collect(self, episode: int = 0, version: int = 0) -> list[Result]:
        found = self.queue.collect(episode, version=version, timeout_s=WAIT_S, on_progress=lambda *_: None)
        return [made.result for made in found]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    monkeypatch.setattr(module, "ray", FakeRay)
    monkeypatch.setattr(module, "PING_S", 0.05)
    stages: list[Stage] = []

    def make(*names: str, start: bool = True, **options: Any) -> Stage:
        made = Stage(*names, **options)
        stages.append(made)
        if start:
            made.scheduler.start()
        return made

    yield make
    for made in stages:
        made.scheduler.stop()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_makers_are_given_chunks_once_they_hold_weights_and_the_newest_before_the_next_episode(stage: Any) -> None:
    ours = stage("a", "b")
    time.sleep(0.2)
    assert ours.queue.counts().issued == 0  # nobody holds any weights
    ours.scheduler.publish(Weights(0), completed=None)
    ours.scheduler.await_taken(0, WAIT_S)
    assert ours.scheduler.held_versions == {"a": 0, "b": 0}
    assert [made.version for made in ours.collect()] == [0] * 4
    ours.scheduler.publish(Weights(1), completed=1)
    found = ours.collect(1, version=1)
    assert {(made.version, made.controls) for made in found} == {(1, EpisodeControls(1.0))}
    assert ours.scheduler.nodes == {"node of a", "node of b"}
    assert ours.scheduler.versions_in_use == {1}


def test_a_dead_makers_chunk_goes_to_another_at_once_and_it_comes_up_again_with_the_newest_weights(stage: Any) -> None:
    ours = stage("dying", "other", start=False)
    dying = ours.makers["dying"]
    dead = threading.Event()

    def die() -> None:
        if not dead.is_set():
            dead.set()
            dying.die(down_s=0.5)

    dying.make = die
    ours.makers["other"].make = lambda: dead.wait(WAIT_S) and None
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    assert [made.maker for made in ours.collect()].count("other") >= 3
    assert ours.queue.counts().lost == 1
    ours.scheduler.publish(Weights(1), completed=1)
    ours.collect(1, version=1)
    until(lambda: dying.version == 1)
    assert (dying.builds, ours.scheduler.revivals, ours.scheduler.living) == (2, 1, ("dying", "other"))
    assert ours.said[0].startswith("dying is being revived: ")
    assert ours.queue.counts().balance


def test_a_silent_maker_is_ended_and_comes_up_again(stage: Any) -> None:
    ours = stage("silent", "other", start=False)
    silent = ours.makers["silent"]
    has_chunk = threading.Event()

    def hang() -> None:
        if not silent.killed:
            silent.is_silent = True
        has_chunk.set()

    silent.make = hang
    ours.makers["other"].make = lambda: has_chunk.wait(WAIT_S) and None  # it could make all of them by itself
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    ours.collect()
    until(lambda: ours.scheduler.revivals == 1)
    assert silent.killed == [False]
    assert "for a sign of life from silent, and none came" in ours.said[0]


def test_an_idle_maker_whose_process_was_replaced_is_built_before_it_gets_a_chunk(stage: Any) -> None:
    ours = stage("idle")
    ours.scheduler.publish(Weights(0), completed=None)
    ours.collect()
    ours.makers["idle"].die(down_s=0)  # so quickly that no call meets it
    until(lambda: ours.makers["idle"].version == 0)
    assert (ours.makers["idle"].builds, ours.makers["idle"].lent) == (2, [])


def test_a_maker_is_lent_what_it_builds_its_models_with_for_each_of_its_processes(stage: Any) -> None:
    ours = stage("borrower", start=False)
    borrower, numbers = ours.makers["borrower"], count()
    ours.scheduler.lends = lambda: (next(numbers),)
    ours.scheduler.start()
    until(lambda: borrower.builds == 1)
    borrower.die()
    until(lambda: borrower.builds == 2)
    assert borrower.lent == [(0,), (1,)]


def test_a_maker_that_dies_again_and_again_is_given_up_and_with_the_last_the_run(stage: Any) -> None:
    ours = stage("fragile", start=False)
    fragile = ours.makers["fragile"]
    fragile.make = lambda: fragile.die(down_s=0)
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    with pytest.raises(MakersLostError, match=r"every experience maker .* fragile, .* 4 times without having made"):
        ours.collect()
    assert fragile.killed == [True]
    assert ours.scheduler.living == ()
    assert ours.queue.counts().lost == 4
    with pytest.raises(MakersLostError):
        ours.scheduler.await_taken(0, WAIT_S)


def test_one_that_ray_will_not_start_again_is_given_up_and_the_others_go_on(stage: Any) -> None:
    ours = stage("gone", "other", start=False)
    ours.makers["gone"].die(for_good=True)
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    ours.scheduler.await_taken(0, WAIT_S)
    assert {made.maker for made in ours.collect()} == {"other"}
    assert ours.scheduler.living == ("other",)


def test_one_that_does_not_come_up_in_time_is_given_up(stage: Any) -> None:
    ours = stage("absent", "other", start=False, waits=Waits(start_s=2.0, answer_s=1.0, chunk_s=WAIT_S))
    ours.makers["absent"].die(down_s=1000)
    ours.scheduler.start()
    until(lambda: ours.scheduler.living == ("other",))
    assert ours.said == ["absent is given up: waited 2 s for its process, and it did not come up"]
    assert ours.makers["absent"].killed == [True]


def test_what_no_other_maker_would_do_better_ends_the_run_in_its_own_sentence(stage: Any) -> None:
    ours = stage("a", "b", start=False)

    def refuse() -> None:
        raise DataError("a prompt has 300 tokens")

    for maker in ours.makers.values():
        maker.make = refuse
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    with pytest.raises(DataError, match=r"^a prompt has 300 tokens$"):
        ours.collect()


def test_a_maker_that_cannot_take_weights_waits_for_the_next_ones(stage: Any) -> None:
    ours = stage("a", "b", start=False)

    def take(version: int) -> None:
        if version == 0:
            raise WeightsError("bucket 3 is damaged")

    ours.makers["a"].take = take
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    ours.scheduler.await_taken(0, WAIT_S)  # nobody waits for what it will not take
    assert {made.maker for made in ours.collect()} == {"b"}
    ours.scheduler.publish(Weights(1), completed=1)
    ours.scheduler.await_taken(1, WAIT_S)
    assert ours.scheduler.held_versions == {"a": 1, "b": 1}
    assert ours.makers["a"].killed == []


def test_a_maker_that_waits_for_weights_in_vain_says_so_and_is_not_ended(stage: Any) -> None:
    ours = stage("waiting", start=False, waits=Waits(start_s=2.0, answer_s=1.0, chunk_s=WAIT_S))
    waiting = ours.makers["waiting"]
    waiting.misses_weights = True
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    until(lambda: ours.said)
    waiting.misses_weights = False
    assert ours.said[0] == (
        "waiting is being revived: the weights did not come (raise ppo.cluster.start_timeout_s for a longer wait)"
    )
    assert waiting.killed == []
    ours.scheduler.await_taken(0, WAIT_S)


def test_weights_that_no_maker_can_take_end_the_run(stage: Any) -> None:
    ours = stage("a", "b", start=False)

    def take(version: int) -> None:
        raise WeightsError(f"version {version} does not fit")

    for maker in ours.makers.values():
        maker.take = take
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    with pytest.raises(WeightsError, match="version 0 does not fit"):
        ours.collect()


def test_weights_that_the_last_maker_refused_end_the_run_when_the_others_are_given_up(stage: Any) -> None:
    ours = stage("refusing", "absent", start=False, waits=Waits(start_s=2.0, answer_s=1.0, chunk_s=WAIT_S))

    def take(version: int) -> None:
        raise WeightsError(f"version {version} is damaged")

    ours.makers["refusing"].take = take
    ours.makers["absent"].die(down_s=1000)
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    with pytest.raises(WeightsError, match="version 0 is damaged"):
        ours.collect()


def test_stopping_ends_the_wait_for_a_process_and_gives_no_maker_up(stage: Any) -> None:
    ours = stage("absent", start=False)
    ours.makers["absent"].die(down_s=1000)
    ours.scheduler.start()
    time.sleep(0.1)  # it is waited for, or will be
    started = time.monotonic()
    ours.scheduler.stop(WAIT_S)
    assert time.monotonic() - started < WAIT_S / 2
    assert ours.makers["absent"].killed == []


def test_a_wait_for_weights_names_who_is_late(stage: Any) -> None:
    ours = stage("late", "quick", start=False)
    go_on = threading.Event()
    ours.makers["late"].take = lambda _: go_on.wait(WAIT_S) and None
    ours.scheduler.start()
    ours.scheduler.publish(Weights(0), completed=None)
    until(lambda: ours.scheduler.held_versions == {"quick": 0})
    with pytest.raises(TimeoutError, match=r"waited 0 s for late to take weights of version 0"):
        ours.scheduler.await_taken(0, 0.1)
    assert ours.scheduler.versions_in_use == {0}
    go_on.set()


def test_idle_time_is_that_without_a_chunk(stage: Any) -> None:
    ours = stage("a", size=1)
    ours.makers["a"].make = lambda: time.sleep(0.5)
    ours.scheduler.publish(Weights(0), completed=None)
    ours.scheduler.await_taken(0, WAIT_S)
    before, started = ours.scheduler.idle_seconds["a"], time.monotonic()
    ours.collect()
    then, made = ours.scheduler.idle_seconds["a"], time.monotonic()
    assert then - before < made - started - 0.3
    time.sleep(0.3)
    assert ours.scheduler.idle_seconds["a"] - then == pytest.approx(time.monotonic() - made, abs=0.15)


def test_stopping_waits_no_longer_than_it_is_told(stage: Any) -> None:
    ours = stage("a")
    go_on = threading.Event()
    ours.makers["a"].make = lambda: go_on.wait(WAIT_S) and None
    ours.scheduler.publish(Weights(0), completed=None)
    until(lambda: ours.queue.counts().out == 1)
    started = time.monotonic()
    ours.scheduler.stop(timeout_s=5)
    assert time.monotonic() - started < 5  # the thread looks up from its call
    go_on.set()
