"""Following a run in the terminal: its marked lines as they come, whatever the server does meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from infra.errors import ServiceError
from infra.services.automations import RESTARTING, RESUMES

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from rich.console import Console

LOOK_S = 0.5
UNTAKEN_NOTICE_S = 30.0
"""After this, an unstarted run's waiting is said, once."""
UNSTARTED_LIMIT_S = 600.0
"""A worker takes a run within seconds, and the longest start, imports on a cold disk, is a minute."""
AWAY_LIMIT_S = 180.0
"""A server that is started again is away for ten seconds or so; SQLite may wait a minute for a lock, and again."""
CRASH_LIMIT_S = 45.0
"""Within this time a crash is `Restarting`, if it is to be mended at all: a busy server takes half a minute."""
RESTART_LIMIT_S = 120.0
_PAGE = 200
_LATE_S = 30.0
"""A line reaches the server up to so much later than its time says; the last look takes later ones too."""
_SERVER_ERRORS = 500
_TOO_MANY_REQUESTS = 429


class Follower:
    """Prints the marked lines of one run, whose log has those of its stages, too."""

    def __init__(self, client: Any, flow_run: Any, console: Console, *, prefix: str) -> None:
        self._client = client
        self._run_id: UUID = flow_run.id
        self._name = f"run {flow_run.name} ({flow_run.id})"
        self._console = console
        self._prefix = prefix
        self._said: set[UUID] = set()
        self._latest: datetime | None = None
        self._began = time.monotonic()
        self._answered = self._began
        self._started = False
        self._notice_given = False
        self._crash: Any | None = None
        self._crash_seen = self._began

    async def follow(self) -> Any:
        """Print lines until the run is in a final state, and return that state.

        Raises:
            ServiceError: if no worker started the run, or the server stayed away; the run itself goes on.
        """
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        # The client's own retries wait for minutes without a word: here the deadline is ours.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while True:
                try:
                    state = await self._look()
                except Exception as error:
                    if self._crash is not None and self._crash.name != RESTARTING:
                        return self._crash  # it ended with the stack, as by `rlhf down`
                    self._ride_out(error)
                else:
                    self._answered = time.monotonic()
                    if state is not None:
                        return state
                await asyncio.sleep(LOOK_S)

    async def _look(self) -> Any | None:
        """Print what is new; return the state once it is final and all is printed."""
        flow_run = await self._client.read_flow_run(self._run_id)
        state = flow_run.state
        if state is None or not state.is_crashed():
            self._crash = None
        if state is not None and state.is_final() and not self._is_mended(flow_run):
            await asyncio.sleep(2 * LOOK_S)  # the last lines are sent in batches of half a second
            await self._print_lines(since=None)
            return state
        self._watch_start(state)
        await self._print_lines(since=self._latest)
        return None

    def _is_mended(self, flow_run: Any) -> bool:
        """Whether a run that crashed is about to be started again, which is said once for each crash."""
        state = flow_run.state
        if not state.is_crashed() or RESUMES not in flow_run.tags:
            return False
        if self._crash is None or self._crash.id != state.id:
            if state.name == RESTARTING:
                self._console.print(state.message, style="yellow")
            elif self._crash is None:
                told = f"the run crashed; waiting up to {CRASH_LIMIT_S:.0f} s for the server to start it again"
                self._console.print(told, style="yellow")
            self._crash, self._crash_seen = state, time.monotonic()
        limit = RESTART_LIMIT_S if state.name == RESTARTING else CRASH_LIMIT_S
        return time.monotonic() - self._crash_seen < limit

    def _watch_start(self, state: Any | None) -> None:
        if self._started:
            return
        waited = time.monotonic() - self._began
        if state is not None and not (state.is_scheduled() or state.is_pending()):
            self._started = True
            if state.is_running():
                self._console.print("running", style="dim")
            return
        if waited > UNTAKEN_NOTICE_S and not self._notice_given:
            self._notice_given = True
            taken = state is not None and state.is_pending()
            what = "a worker has taken the run, but not started it" if taken else "no worker has taken the run"
            self._console.print(f"{what} after {UNTAKEN_NOTICE_S:.0f} s (see `rlhf status`); waiting", style="yellow")
        if waited > UNSTARTED_LIMIT_S:
            raise ServiceError(
                f"{self._name} has not started within {UNSTARTED_LIMIT_S / 60:.0f} min: look with `rlhf status` "
                "whether a worker runs, and start one with `rlhf up`; the run waits for it, unless you end it with "
                f"prefect flow-run cancel {self._run_id}"
            )

    async def _print_lines(self, *, since: datetime | None) -> None:
        """Print the marked lines that were not printed yet, page by page, oldest first."""
        from datetime import timedelta

        from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
        from prefect.client.schemas.sorting import LogSort
        from rich.text import Text

        wanted = LogFilter(
            flow_run_id=LogFilterFlowRunId(any_=[self._run_id]),
            timestamp=None
            if since is None
            else LogFilterTimestamp.model_validate({"after_": since - timedelta(seconds=_LATE_S)}),
        )
        offset, page = 0, None
        while page is None or len(page) == _PAGE:
            page = await self._client.read_logs(wanted, limit=_PAGE, offset=offset, sort=LogSort.TIMESTAMP_ASC)
            offset += len(page)
            for log in page:
                if log.id in self._said:
                    continue
                self._said.add(log.id)
                self._latest = max(filter(None, (self._latest, log.timestamp)))
                if log.message.startswith(self._prefix):
                    at = f"{log.timestamp.astimezone():%H:%M:%S}"
                    self._console.print(Text.assemble((at, "dim"), " ", log.message))

    def _ride_out(self, error: Exception) -> None:
        """Return if the error may pass, as when the server is started again; else raise what is to be told."""
        from httpx import HTTPStatusError, TransportError
        from prefect.exceptions import ObjectNotFound

        if isinstance(error, ObjectNotFound):
            raise ServiceError(f"{self._name} is not on the server any more: somebody has deleted it") from error
        status = error.response.status_code if isinstance(error, HTTPStatusError) else 0
        passing = isinstance(error, TransportError) or status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS
        if not passing:
            raise error
        if time.monotonic() - self._answered > AWAY_LIMIT_S:
            raise ServiceError(
                f"the Prefect server has not answered for {AWAY_LIMIT_S:.0f} s ({str(error) or type(error).__name__}); "
                f"{self._name} may go on without it: bring it back with `rlhf up`, and look there"
            ) from error
