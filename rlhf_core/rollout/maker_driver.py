"""Drives one experience maker: has it build, take weights and make chunks, and come up again when it died.

How Ray (2.60) answers calls of an actor with `max_restarts` whose process died: one that was running ends with
`ActorUnavailableError` within two seconds; so does every call until the new process is up; from then on calls reach the
new process, in which nothing is built. `ActorDiedError` comes when Ray will not start it again. `ray.kill(...,
no_restart=False)` ends a stopped process too, after some seconds.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, RayError, RayTaskError

from rlhf_core.counting import ordinal
from rlhf_core.detached.maker import StaleWeightsError
from rlhf_core.errors import RlhfError
from rlhf_core.phases import reached
from rlhf_core.rollout.books import Lease, Unit
from rlhf_core.weights import WeightsError

if TYPE_CHECKING:
    from rlhf_core.rollout.scheduler import Dealer, Received

PING_S = 2.0
"""How often a maker is asked for a sign of life."""
_IDLE_S = 0.05
"""An idle driver looks for work this often, beside being woken."""
_RESTART_S = 0.2
_MOST_TROUBLES = 3
"""Times in a row that a maker may die without having made a chunk."""
State = Literal["building", "loading", "idle", "making", "reviving", "given up"]
_AT_WORK = ("loading", "making")

C = TypeVar("C", bound=Unit)
M = TypeVar("M", bound="Received")


class SilentMakerError(RlhfError):
    """A maker gave no sign of life, or did not do in time what it was to do."""


class AbsentMakerError(RlhfError):
    """A maker's process did not come up in time, for the first time or again: there may be no room for it any more."""


class _StoppedError(Exception):
    """The dealer stops."""


class MakerDriver(Generic[C, M]):
    """One maker's thread.

    Args:
        name: of the maker.
        handle: of its actor.
        dealer: whose maker it is.
    """

    def __init__(self, name: str, handle: Any, dealer: Dealer[C, Any]) -> None:
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
        self._maker, self._dealer = handle, dealer
        self._thread = threading.Thread(target=self._run, name=f"dealer-{name}", daemon=True)
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
            while not self._dealer.stopping.is_set():
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
            self._dealer.ledger.lost(self.name)
            self._dealer.failed(error.cause if isinstance(error, RayTaskError) else error)
        return None

    def _bring_up(self) -> None:
        """Wait until the maker's process is there, and has built its models."""
        limit_s = self._dealer.waits.start_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self._pid = self._answer(self._maker.ping.remote(), deadline - time.monotonic())
                break
            except (ActorUnavailableError, SilentMakerError) as error:
                if time.monotonic() >= deadline:
                    raise AbsentMakerError(f"waited {limit_s:.0f} s for its process, and it did not come up") from error
                if self._dealer.stopping.wait(_RESTART_S):
                    raise _StoppedError from error
        self.node, _ = self._done(self._maker.node.remote(), limit_s, "say where it is")
        self._done(self._maker.build.remote(), limit_s, "build its models")
        if self._state == "reviving":
            self.revivals += 1
        self._enter("idle")
        self._dealer.moved()

    def _serve(self) -> None:
        """Keep the maker at work."""
        asked = time.monotonic()
        while not self._dealer.stopping.is_set():
            self._take_weights()
            lease = None if self.held is None else self._dealer.ledger.lease(self.name)
            if lease is not None:
                self._make(lease)
                continue
            self._enter("idle")
            self._dealer.ledger.wait_for_change(_IDLE_S)
            if time.monotonic() > asked + PING_S:
                self._check_same_process()
                asked = time.monotonic()

    def _make(self, lease: Lease[C]) -> None:
        reached("lease")
        self._take_weights()  # what was published before the lease: no chunk begins with older ones
        if self.held is None:
            self._dealer.ledger.lost(self.name)
            return
        self._enter("making")
        controls = self._dealer.controls(lease.unit.episode)
        call = self._maker.make_chunk.remote(lease.unit, self.held, controls)
        made = self._done(call, self._dealer.waits.chunk_s, f"make a chunk of episode {ordinal(lease.unit.episode)}")
        reached("buffer")
        self._dealer.ledger.made(lease, made.owned(), version=self.held)
        self._troubles = 0

    def _take_weights(self) -> None:
        publication = self._dealer.publication
        if publication is None or publication.version in (self.held, self.refused):
            return
        self._enter("loading")
        limit_s = self._dealer.waits.start_s
        self.taking = publication.version
        call = self._maker.load_weights.remote(publication, self._dealer.waits.weights_s)
        try:
            self.held = self._done(call, limit_s, f"take weights of version {publication.version}")
        except WeightsError as error:
            self.held, self.refused = None, publication.version
            self._dealer.refused(self.name, error)
        except TimeoutError as error:
            longer = f"(raise {self._dealer.waits.start_setting} for a longer wait)"
            raise TimeoutError(f"{_first_line(error)} {longer}") from error
        finally:
            self.taking = None
        self._dealer.moved()

    def _check_same_process(self) -> None:
        """See whether an idle maker lives; another process of its name has built nothing."""
        if self._answer(self._maker.ping.remote(), self._dealer.waits.answer_s) != self._pid:
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
            if self._dealer.stopping.is_set():
                raise _StoppedError
            if now - begun >= limit_s:
                raise SilentMakerError(f"waited {limit_s:.0f} s for {self.name} to {what}, and it did not")
            if ping in done:
                ray.get(ping)
                ping = None
            elif ping is None and watched:
                ping, asked = self._maker.ping.remote(), now
            elif ping is not None and now - asked > self._dealer.waits.answer_s:
                raise SilentMakerError(
                    f"waited {self._dealer.waits.answer_s:.0f} s for a sign of life from {self.name}, and none came"
                )

    def _lose(self, error: Exception) -> bool:
        """Take the maker's lease back and have it come up again; False if that was tried often enough."""
        self._dealer.ledger.lost(self.name)
        self.held = self.refused = None
        self._troubles += 1
        if self._troubles > _MOST_TROUBLES:
            self._give_up(f"{_first_line(error)}, {self._troubles} times without having made a chunk")
            return False
        self._dealer.tell(f"{self.name} is being revived: {_first_line(error)}")
        if isinstance(error, SilentMakerError):
            ray.kill(self._maker, no_restart=False)
        self._enter("reviving")
        self._dealer.moved()
        return True

    def _give_up(self, reason: str) -> None:
        ray.kill(self._maker)
        self._dealer.ledger.lost(self.name)
        self.held = None
        self._enter("given up")
        self._dealer.tell(f"{self.name} is given up: {reason}")
        self._dealer.gave_up(f"{self.name}, {reason}")
        self._dealer.moved()

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
