"""How long we go on asking a server that does not answer."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from infra.artifacts import clock
from infra.artifacts.s3_errors import REQUEST_ERRORS, reason_to_retry, server_name
from infra.errors import StoreAwayError

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
QUIET_S = 5.0
"""What takes no longer than this to pass is not worth a line in the log."""
LATE_S = 5.0
"""What lasts longer than its time by more than this was stopped with its process, as when a laptop sleeps."""
LONGEST_STOP_S = 1800.0
"""So long a request may be stopped, in all: a writer's lease holds an hour longer than the writer relies on it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    connect_s: float = 5.0
    read_s: float = 30.0
    """For the next bytes of an answer."""
    attempt_s: float = 40.0
    """For one request as a whole, and more for a body: see `slowest`. Nothing else ends a small write to a server that
    hangs: before its body it waits for a word (100 Continue), and `read_s` does not count that."""
    deadline_s: float = 120.0
    """For an answer, over all attempts: a server that is away for a minute delays a run, it does not end it."""
    slowest: float = 100e3
    """Bytes a second at which a body is still waited for; one without any bytes is not, after `read_s`."""
    open_s: float = 8.0
    """The deadline when a store is opened for the first time: that an address is wrong is said soon."""

    delete_s: float = 120.0
    """The longest deadline of a deletion, however patient everything else is: `leases.DELETION_LIFE` counts on it."""

    @classmethod
    def of(cls, deadline_s: float | None, *, patient: bool) -> Self:
        """Return one with another deadline; None is the usual one.

        Args:
            deadline_s: for an answer, over all attempts.
            patient: whether it holds for the first opening, too: where nobody waits for a word.
        """
        usual = cls()
        deadline_s = usual.deadline_s if deadline_s is None else deadline_s
        return cls(deadline_s=deadline_s, open_s=deadline_s if patient else usual.open_s)


class Retrier:
    """Runs requests against one bucket until they are answered or the deadline has passed."""

    def __init__(self, endpoint_url: str | None, bucket: str, patience: Patience) -> None:
        self._server = server_name(endpoint_url)
        self._bucket = bucket
        self._patience = patience

    @property
    def server(self) -> str:
        """What messages call the server."""
        return self._server

    def run(
        self,
        what: str,
        attempt: Callable[[float], T],
        limit_s: float | None = None,
        size: int = 0,
        *,
        stops_count: bool = False,
    ) -> T:
        """Return the attempt's result.

        Args:
            what: what is done, for the message ("writing keys/...").
            attempt: makes the request once, within the seconds that it is given.
            limit_s: a deadline of its own, in place of the usual one.
            size: of the body that is sent, in bytes: a slow line is not a server that is away.
            stops_count: whether the deadline comes nearer while this process is stopped: others count on it.

        Raises:
            RefusedError: if the server said no, in a way that does not pass.
            StoreAwayError: if there was no answer until the deadline.
        """
        body_s = size / self._patience.slowest
        limit_s = body_s + (self._patience.deadline_s if limit_s is None else limit_s)
        waiting = _Waiting(forgives_s=0.0 if stops_count else LONGEST_STOP_S)
        pause_s, told = FIRST_PAUSE_S, False
        while True:
            given_s = max(0.1, min(self._patience.attempt_s + body_s, limit_s - waiting.seconds))
            try:
                result = attempt(given_s)
            except REQUEST_ERRORS as error:
                reason = reason_to_retry(error, what, self._server, self._bucket)
            else:
                if told:
                    log.warning("the S3 server %s answers again: %s", self._server, what)
                return result
            waiting.note(given_s)
            away = StoreAwayError(self._unanswered(what, limit_s, reason))
            if limit_s - waiting.seconds <= pause_s:
                raise away
            if waiting.seconds > QUIET_S and not told:
                told = True
                silent = f"the S3 server {self._server} does not answer ({reason})"
                log.warning("%s: %s; trying for %.0f s more", what, silent, limit_s - waiting.seconds)
            clock.pause(paused_s := pause_s * random.uniform(0.5, 1.0))
            waiting.note(paused_s)
            if waiting.seconds >= limit_s:  # stopped in the pause
                raise away
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _unanswered(self, what: str, limit_s: float, reason: str) -> str:
        if reason.startswith("it answered"):
            return (
                f"the S3 server {self._server} could not do what we asked within {limit_s:.0f} s, {what} in the bucket "
                f"{self._bucket!r}: {reason}; look into its log, and whether its disk is full"
            )
        return (
            f"the S3 server {self._server} did not answer within {limit_s:.0f} s while {what} in the bucket "
            f"{self._bucket!r} ({reason}); check that it runs and that RLHF_S3_ENDPOINT_URL is its address"
        )


class _Waiting:
    """How long a request has waited, on a clock that goes on while the machine sleeps.

    Args:
        forgives_s: for so long, in all, the process may be stopped without that being counted.
    """

    def __init__(self, forgives_s: float) -> None:
        self.seconds = 0.0
        self._forgives_s = forgives_s
        self._last = clock.boottime()

    def note(self, expected_s: float) -> None:
        """Count the time since the last note, in which nothing was done that takes longer than expected."""
        now = clock.boottime()
        took_s, self._last = now - self._last, now
        forgiven_s = min(max(0.0, took_s - expected_s - LATE_S), self._forgives_s)
        self._forgives_s -= forgiven_s
        self.seconds += took_s - forgiven_s
