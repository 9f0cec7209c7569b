"""Schedules a run's chunks on its makers: keeps each at work with the newest weights, and revives one that died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, RayError, RayTaskError

from rlhf_core.counting import ordinal
from rlhf_core.errors import RlhfError
from rlhf_core.phases import reached
from rlhf_core.rollout.lease_queue import Lease, LeaseQueue, MakersLostError, Unit
from rlhf_core.rollout.worker import StaleWeightsError
from rlhf_core.types import EpisodeControls
from rlhf_core.weights import WeightsError

PING_S = 2.0
"""How often a maker is asked for a sign of life."""
_IDLE_S = 0.05
"""An idle driver looks for work this often, beside being woken."""
_RESTART_S = 0.2
_MOST_TROUBLES = 3
"""Times in a row that a maker may die without having made a chunk."""
State = Literal["building", "loading", "idle", "making", "reviving", "given up"]
_AT_WORK = ("loading", "making")
_LOOK_S = 0.5
"""A wait for makers looks again this often, beside being woken."""


class Published(Protocol):
    """Weights that makers can take; what else it holds is between trainer and makers."""

    @property
    def version(self) -> int: ...  # noqa: D102


class Received(Protocol):
    """What a maker made of a unit."""

    def owned(self) -> Self:
        """Return it without anything that lies in the object store."""


class Waits(NamedTuple):
    """How long the scheduler waits for a maker."""

    start_s: float = 120.0
    """To come up, to build its models, and to take weights."""
    answer_s: float = 30.0
    """For a sign of life; one that gives none is ended, and comes up again."""
    chunk_s: float = 1800.0
    """For one chunk."""
    start_setting: str = "ppo.cluster.start_timeout_s"
    """What a user raises for a longer `start_s`."""

    @property
    def weights_s(self) -> float:
        """For weights, by a maker itself: it says what it waited for before `start_s` are over and it is ended."""
        return max(self.start_s - self.answer_s, self.start_s / 2)


C = TypeVar("C", bound=Unit)
M = TypeVar("M", bound=Received)


class Scheduler(Generic[C, M]):
    """Drives every maker from a thread of its own, in the first trainer rank's process.

    A maker holds one chunk at a time and returns it as the call's result, so nothing piles up on the way. One that dies
    loses its lease at once, to another maker; Ray starts its process again, where it was told to (`max_restarts`), and
    the scheduler has it build its models and take the newest weights. A maker that dies
    several times in a row without having made a chunk is given up, as is one whose process Ray does not start again;
    when none is left, whoever collects is told.

    Args:
        queue: knows what is due, and is told what became of it.
        controls: returns an episode's controls when a chunk of it is leased; None leaves them to the makers.
        lends: returns what a maker is to build its models with, asked for anew each time.
        waits: how long is waited for a maker.
        on_trouble: is told, in a sentence, whenever something is wrong with a maker.
    """

    def __init__(
        self,
        queue: LeaseQueue[C, M],
        *,
        controls: Callable[[int], EpisodeControls | None] | None = None,
        lends: Callable[[], tuple[Any, ...]] = tuple,
        waits: Waits | None = None,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.queue = queue
        self.controls = controls or (lambda _: None)
        self.lends = lends
        self.waits = waits or Waits()
        self.tell = on_trouble
        self.publication: Published | None = None
        """What makers take before their next chunk."""
        self.stopping = threading.Event()
        self._drivers: dict[str, MakerThread[C, M]] = {}
        self._failure: Exception | None = None
        self._refusal: Exception | None = None
        """Why weights were refused last."""
        self._changed = threading.Condition()

    def add(self, name: str, handle: Any) -> None:
        """Take in a maker, before the scheduler is started.

        Args:
            name: of the maker, for messages and leases.
            handle: of its actor, with the methods of `MakerActor`.
        """
        self._drivers[name] = MakerThread(name, handle, self)

    def start(self) -> None:
        """Begin: makers build their models, and wait for weights."""
        for driver in self._drivers.values():
            driver.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Lease nothing more; wait for the threads, but no longer than `timeout_s`. The makers live on."""
        self.stopping.set()
        self.queue.wake()
        deadline = time.monotonic() + timeout_s
        for driver in self._drivers.values():
            driver.join(max(0.0, deadline - time.monotonic()))

    def publish(self, publication: Published, *, completed: int | None) -> None:
        """Have every maker take a publication before its next chunk; return at once.

        Args:
            publication: of the weights, of a higher version than the one before.
            completed: episodes that are learnt with it, which lets makers begin later ones; None if none was.
        """
        self.publication = publication
        if completed is not None:
            self.queue.learnt(completed - 1)  # after the weights: a chunk that this makes due is made with them
        self.queue.wake()

    def await_taken(self, version: int, timeout_s: float) -> None:
        """Wait until all makers that live hold a version; one that is being revived takes it when it is up.

        Raises:
            TimeoutError: if some do not; it names them.
            MakersLostError: if none is left.
            Exception: that a maker failed with.
        """
        self._await(lambda driver: driver.lacks(version), timeout_s, f"to take weights of version {version}")

    def await_up(self, timeout_s: float) -> None:
        """Wait until all makers have been up once, so that it is known where they are; raises as `await_taken`."""
        self._await(lambda driver: driver.is_starting, timeout_s, "to come up")

    @property
    def living(self) -> tuple[str, ...]:
        """Names of the makers that are not given up; those that are being revived among them."""
        return tuple(driver.name for driver in self._drivers.values() if not driver.is_given_up)

    @property
    def held_versions(self) -> Mapping[str, int]:
        """The version that each maker holds; without those that hold none."""
        return {driver.name: held for driver in self._drivers.values() if (held := driver.held) is not None}

    @property
    def versions_in_use(self) -> set[int]:
        """Versions that a maker may still be about to take: their publisher keeps them."""
        taking = {driver.taking for driver in self._drivers.values() if driver.taking is not None}
        return taking if self.publication is None else taking | {self.publication.version}

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the machines that makers are on."""
        return {driver.node for driver in self._drivers.values() if driver.node is not None}

    @property
    def idle_seconds(self) -> Mapping[str, float]:
        """By maker: the time so far in which it neither made a chunk nor took weights."""
        return {driver.name: driver.idle_seconds for driver in self._drivers.values()}

    @property
    def revivals(self) -> int:
        """How often a maker came up again."""
        return sum(driver.revivals for driver in self._drivers.values())

    def moved(self) -> None:
        """Take note that a maker came on: what a driver tells."""
        with self._changed:
            self._changed.notify_all()

    def gave_up(self, reason: str) -> None:
        """Take note that a driver gave its maker up."""
        if not self.living:
            self.failed(MakersLostError(f"every experience maker of the run has died; the last one: {reason}"))
        self._fail_if_all_refused()

    def refused(self, name: str, error: Exception) -> None:
        """Take note that a maker could not take weights: it waits for the next ones, unless none could."""
        self.tell(f"{name} could not take the weights, and waits for the next ones: {error}")
        self._refusal = error.cause if isinstance(error, RayTaskError) else error
        self._fail_if_all_refused()

    def failed(self, error: Exception) -> None:
        """Take note of an error that no other maker would mend: whoever collects or waits raises it."""
        self._failure = error
        self.queue.fail(error)
        self.moved()

    def _fail_if_all_refused(self) -> None:
        """Fail if every maker that is left waits for the next weights, which nothing more will be learnt for."""
        living = [driver for driver in self._drivers.values() if not driver.is_given_up]
        newest = None if self.publication is None else self.publication.version
        if self._refusal is not None and living and all(driver.refused == newest for driver in living):
            self.failed(self._refusal)

    def _await(self, is_late: Callable[[MakerThread[C, M]], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while late := [driver.name for driver in self._drivers.values() if is_late(driver)]:
                self._raise_failure()
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"waited {timeout_s:.0f} s for {', '.join(late)} {what}; raise "
                        f"{self.waits.start_setting}, or look into the cluster's log"
                    )
                self._changed.wait(_LOOK_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class SilentMakerError(RlhfError):
    """A maker gave no sign of life, or did not do in time what it was to do."""


class AbsentMakerError(RlhfError):
    """A maker's process did not come up in time, for the first time or again: there may be no room for it any more."""


class _StoppedError(Exception):
    """The scheduler stops."""


class MakerThread(Generic[C, M]):
    """One maker's thread.

    Args:
        name: of the maker.
        handle: of its actor.
        scheduler: whose maker it is.
    """

    def __init__(self, name: str, handle: Any, scheduler: Scheduler[C, Any]) -> None:
        self.name = name
        self.held: int | None = None
        """Version of the weights that the maker holds."""
        self.taking: int | None = None
        """Version of the weights that it is about to hold."""
        self.refused: int | None = None
        """Version of weights that arrived damaged, or did not fit: the maker waits for the next ones."""
        self.node: str | None = None
        """Ray's id of the machine that the maker is on, once it is up."""
        self.revivals = 0
        self._maker, self._scheduler = handle, scheduler
        self._thread = threading.Thread(target=self._run, name=f"scheduler-{name}", daemon=True)
        self._state: State = "building"
        self._pid = 0
        self._troubles = 0
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        self._clock = threading.Lock()

    @property
    def is_given_up(self) -> bool:
        """Whether nothing will come of this maker any more."""
        return self._state == "given up"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, if it ever began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def lacks(self, version: int) -> bool:
        """Whether a maker that lives does not hold a version yet."""
        if self._state in ("reviving", "given up") or self.refused == version:
            return False
        return self.held is None or self.held < version

    @property
    def is_starting(self) -> bool:
        """Whether a maker has never been up yet, and may be."""
        return self._state == "building" and self.node is None

    @property
    def idle_seconds(self) -> float:
        """The time so far in which the maker neither made a chunk nor took weights."""
        with self._clock:
            self._note_idle()
            return self._idle_s

    def _run(self) -> None:
        try:
            while not self._scheduler.stopping.is_set():
                try:
                    self._bring_up()
                    self._serve()
                except (ActorDiedError, ActorUnschedulableError, AbsentMakerError) as error:
                    return self._give_up(_first_line(error))
                except Exception as error:
                    if not _may_pass(error):
                        raise
                    if not self._lose(error):
                        return None
        except _StoppedError:
            pass
        except Exception as error:  # no other maker would do better
            self._scheduler.queue.lost(self.name)
            self._scheduler.failed(error.cause if isinstance(error, RayTaskError) else error)
        return None

    def _bring_up(self) -> None:
        """Wait until the maker's process is there, and has built its models."""
        limit_s = self._scheduler.waits.start_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self._pid = self._answer(self._maker.ping.remote(), deadline - time.monotonic())
                break
            except (ActorUnavailableError, SilentMakerError) as error:
                if time.monotonic() >= deadline:
                    raise AbsentMakerError(f"waited {limit_s:.0f} s for its process, and it did not come up") from error
                if self._scheduler.stopping.wait(_RESTART_S):
                    raise _StoppedError from error
        self.node, _ = self._done(self._maker.node.remote(), limit_s, "say where it is")
        lent = self._scheduler.lends()
        self._done(self._maker.build.remote(*([lent] if lent else [])), limit_s, "build its models")
        if self._state == "reviving":
            self.revivals += 1
        self._enter("idle")
        self._scheduler.moved()

    def _serve(self) -> None:
        """Keep the maker at work."""
        asked = time.monotonic()
        while not self._scheduler.stopping.is_set():
            self._take_weights()
            lease = None if self.held is None else self._scheduler.queue.lease(self.name)
            if lease is not None:
                self._make(lease)
                continue
            self._enter("idle")
            self._scheduler.queue.wait_for_change(_IDLE_S)
            if time.monotonic() > asked + PING_S:
                self._check_same_process()
                asked = time.monotonic()

    def _make(self, lease: Lease[C]) -> None:
        reached("lease")
        self._take_weights()  # what was published before the lease: no chunk begins with older ones
        if self.held is None:
            self._scheduler.queue.lost(self.name)
            return
        self._enter("making")
        controls = self._scheduler.controls(lease.unit.episode)
        call = self._maker.make_chunk.remote(lease.unit, self.held, controls)
        made = self._done(call, self._scheduler.waits.chunk_s, f"make a chunk of episode {ordinal(lease.unit.episode)}")
        reached("buffer")
        self._scheduler.queue.made(lease, made.owned(), version=self.held)
        self._troubles = 0

    def _take_weights(self) -> None:
        publication = self._scheduler.publication
        if publication is None or publication.version in (self.held, self.refused):
            return
        self._enter("loading")
        limit_s = self._scheduler.waits.start_s
        self.taking = publication.version
        call = self._maker.load_weights.remote(publication, self._scheduler.waits.weights_s)
        try:
            self.held = self._done(call, limit_s, f"take weights of version {publication.version}")
        except WeightsError as error:
            self.held, self.refused = None, publication.version
            self._scheduler.refused(self.name, error)
        except TimeoutError as error:
            longer = f"(raise {self._scheduler.waits.start_setting} for a longer wait)"
            raise TimeoutError(f"{_first_line(error)} {longer}") from error
        finally:
            self.taking = None
        self._scheduler.moved()

    def _check_same_process(self) -> None:
        """See whether an idle maker lives; another process of its name has built nothing."""
        if self._answer(self._maker.ping.remote(), self._scheduler.waits.answer_s) != self._pid:
            raise StaleWeightsError(f"the process of {self.name} was started again")

    def _answer(self, ping: Any, limit_s: float) -> int:
        return int(self._done(ping, limit_s, "give a sign of life", watched=False))

    def _done(self, call: Any, limit_s: float, what: str, *, watched: bool = True) -> Any:
        """Return what a call returns; while it is watched, the maker must give signs of life.

        Raises:
            SilentMakerError: if it takes too long, or there is no such sign.
        """
        begun = asked = time.monotonic()
        ping: Any = None
        while True:
            awaited = [call] if ping is None else [call, ping]
            done, _ = ray.wait(awaited, timeout=max(0.0, min(PING_S, begun + limit_s - time.monotonic())))
            now = time.monotonic()
            if call in done:
                return ray.get(call)
            if self._scheduler.stopping.is_set():
                raise _StoppedError
            if now - begun >= limit_s:
                raise SilentMakerError(f"waited {limit_s:.0f} s for {self.name} to {what}, and it did not")
            if ping in done:
                ray.get(ping)
                ping = None
            elif ping is None and watched:
                ping, asked = self._maker.ping.remote(), now
            elif ping is not None and now - asked > self._scheduler.waits.answer_s:
                raise SilentMakerError(
                    f"waited {self._scheduler.waits.answer_s:.0f} s for a sign of life from {self.name}, and none came"
                )

    def _lose(self, error: Exception) -> bool:
        """Take the maker's lease back and have it come up again; False if that was tried often enough."""
        self._scheduler.queue.lost(self.name)
        self.held = self.refused = None
        self._troubles += 1
        if self._troubles > _MOST_TROUBLES:
            self._give_up(f"{_first_line(error)}, {self._troubles} times without having made a chunk")
            return False
        self._scheduler.tell(f"{self.name} is being revived: {_first_line(error)}")
        if isinstance(error, SilentMakerError):
            ray.kill(self._maker, no_restart=False)
        self._enter("reviving")
        self._scheduler.moved()
        return True

    def _give_up(self, reason: str) -> None:
        ray.kill(self._maker)
        self._scheduler.queue.lost(self.name)
        self.held = None
        self._enter("given up")
        self._scheduler.tell(f"{self.name} is given up: {reason}")
        self._scheduler.gave_up(f"{self.name}, {reason}")
        self._scheduler.moved()

    def _enter(self, state: State) -> None:
        with self._clock:
            self._note_idle()
            self._state = state

    def _note_idle(self) -> None:
        now = time.monotonic()
        if self._state not in _AT_WORK:
            self._idle_s += now - self._idle_since
        self._idle_since = now


def _may_pass(error: Exception) -> bool:
    """Whether the same maker, or its next process, may do better."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(cause, RayError | SilentMakerError | StaleWeightsError | TimeoutError | ConnectionError)


def _first_line(error: BaseException) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
