"""Deals a run's chunks to its makers: keeps every maker at work, with the newest weights, and revives one that died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from ray.exceptions import RayTaskError

from rlhf_core.rollout.books import Unit
from rlhf_core.rollout.lease_queue import Ledger, MakersLostError
from rlhf_core.rollout.maker_driver import MakerDriver
from rlhf_core.types import EpisodeControls

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
    """How long the dealer waits for a maker."""

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


class Dealer(Generic[C, M]):
    """Drives every maker from a thread of its own, in the first trainer rank's process.

    A maker holds one chunk at a time and returns it as the call's result, so nothing piles up on the way. One that dies
    loses its lease at once, to another maker; Ray starts its process again, where it was told to (`max_restarts`), and
    the dealer has it build its models and take the newest weights. A maker that dies
    several times in a row without having made a chunk is given up, as is one whose process Ray does not start again;
    when none is left, whoever collects is told.

    Args:
        ledger: knows what is due, and is told what became of it.
        controls: returns an episode's controls when a chunk of it is leased; None leaves them to the makers.
        waits: how long is waited for a maker.
        on_trouble: is told, in a sentence, whenever something is wrong with a maker.
    """

    def __init__(
        self,
        ledger: Ledger[C, M],
        *,
        controls: Callable[[int], EpisodeControls | None] | None = None,
        waits: Waits | None = None,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ledger = ledger
        self.controls = controls or (lambda _: None)
        self.waits = waits or Waits()
        self.tell = on_trouble
        self.publication: Published | None = None
        """What makers take before their next chunk."""
        self.stopping = threading.Event()
        self._drivers: dict[str, MakerDriver[C, M]] = {}
        self._failure: Exception | None = None
        self._refusal: Exception | None = None
        """Why weights were refused last."""
        self._changed = threading.Condition()

    def add(self, name: str, handle: Any) -> None:
        """Take in a maker, before the dealer is started.

        Args:
            name: its own, for messages and in the books.
            handle: of its actor, with the methods of `MakerActor`.
        """
        self._drivers[name] = MakerDriver(name, handle, self)

    def start(self) -> None:
        """Begin: makers build their models, and wait for weights."""
        for driver in self._drivers.values():
            driver.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Lease nothing more; wait for the threads, but no longer than `timeout_s`. The makers live on."""
        self.stopping.set()
        self.ledger.wake()
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
            self.ledger.learnt(completed - 1)  # after the weights: a chunk that this makes due is made with them
        self.ledger.wake()

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
        self.ledger.fail(error)
        self.moved()

    def _fail_if_all_refused(self) -> None:
        """Fail if every maker that is left waits for the next weights, which nothing more will be learnt for."""
        living = [driver for driver in self._drivers.values() if not driver.is_given_up]
        newest = None if self.publication is None else self.publication.version
        if self._refusal is not None and living and all(driver.refused == newest for driver in living):
            self.failed(self._refusal)

    def _await(self, is_late: Callable[[MakerDriver[C, M]], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while late := [driver.name for driver in self._drivers.values() if is_late(driver)]:
                self._raise_failure()
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"waited {timeout_s:.0f} s for {', '.join(late)} {what}, in vain; raise "
                        f"{self.waits.start_setting}, or look into the cluster's log"
                    )
                self._changed.wait(_LOOK_S)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
