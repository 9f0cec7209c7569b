"""Clients of Prefect that wait for a server that is away.

Prefect's own clients wait 2, 4, 8 ... seconds without bound. Before their first success they do not wait at all when a
connection is refused: each task, subflow and page has its own client, which then fails at once, and the run with it.
The clients here ask again every few seconds for a quarter of an hour, so that a run goes on as soon as the server is
back. After that they raise what Prefect's raise. The environment tells workers and flows to use them
(`prefect_plugin.py`); a command that a person types does not.

What a server did before its answer was lost is not done twice: Prefect gives each proposal of a state an id, and here
each run that is made has a key. A line of a log, or a page, may be there twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import anyio
import httpx
from prefect.client import orchestration
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.logging import get_logger

from infra.errors import is_untrusted

AWAY = frozenset(
    [
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    ]
)
"""What a server, or a proxy before it, answers when it wants to be asked later."""
FAULTY_S = 60.0
"""How long an answer of 500 is ignored: a server that is ending gives it; a server with a fault keeps giving it."""
LONGEST_WAIT_S = 5.0
"""Between two attempts: a run notices so late, at most, that the server is back."""
_FIRST_WAIT_S = 0.5
_LONGEST_ATTEMPT_S = 60.0
"""An attempt that lasted longer was stopped with its process, as when a laptop sleeps: it did not wait so long."""
_NOTICE_S = 10.0
_MAKING_RUNS = ("/flow_runs/", "/create_flow_run")
_AFTERWARDS_S = 30.0
"""Once a call has waited without an answer, later calls wait no longer than this, so that the run can end."""
_limit_s: ContextVar[float | None] = ContextVar("limit_s", default=None)


@contextmanager
def patience(limit_s: float) -> Iterator[None]:
    """Wait for the server no longer than this within the block, for what only shows something.

    If clients do not wait at all, it changes nothing.

    Args:
        limit_s: how long a call may wait for a server that is away.
    """
    token = _limit_s.set(limit_s)
    try:
        yield
    finally:
        _limit_s.reset(token)


def install(limit_s: float) -> None:
    """Let every client that this process makes from now on wait for its server.

    Args:
        limit_s: how long a call may wait for a server that is away, in all.
    """

    class PatientSyncClient(_PatientSyncClient):
        longest_s = limit_s

    class PatientAsyncClient(_PatientAsyncClient):
        longest_s = limit_s

    vars(orchestration).update(PrefectHttpxSyncClient=PatientSyncClient, PrefectHttpxAsyncClient=PatientAsyncClient)


def with_key(request: httpx.Request) -> httpx.Request:
    """Return a request that may be repeated: one that makes a run has a key, by which the server makes it once.

    Args:
        request: any; all others are returned as they are.
    """
    if request.method != "POST" or not request.url.path.endswith(_MAKING_RUNS):
        return request
    body = json.loads(request.content)
    if body.get("idempotency_key"):
        return request
    content = json.dumps({**body, "idempotency_key": str(uuid4())}).encode()
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    return httpx.Request("POST", request.url, headers=headers, content=content, extensions=request.extensions)


class Attempts:
    """The attempts of one call: how long to wait before the next one, if there is one.

    Args:
        request: what is asked.
        limit_s: for how long, in all.
        clock: seconds that count while the process runs.
    """

    in_vain = False
    """Whether no call of this process was answered since one waited as long as it could."""
    said = False
    """Whether no call of this process was answered since it was said that the server is away."""

    def __init__(self, request: httpx.Request, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        told = _limit_s.get()
        self._longest_s = limit_s
        self.limit_s = min(limit_s if told is None else told, _AFTERWARDS_S if Attempts.in_vain else limit_s, limit_s)
        self.spent_s = 0.0
        self._clock = clock
        self._last = clock()
        self._next_s = _FIRST_WAIT_S
        self._request = request

    def wait_s(self, fault: httpx.Response | Exception) -> float | None:
        """Return how long to wait before the call is tried again; None: no more.

        Args:
            fault: what came of the last attempt.
        """
        if isinstance(fault, Exception) and is_untrusted(fault):
            return None
        now = self._clock()
        self.spent_s += min(max(now - self._last, 0.0), _LONGEST_ATTEMPT_S)
        limit_s = self.limit_s
        if isinstance(fault, httpx.Response) and fault.status_code not in AWAY:
            limit_s = min(limit_s, FAULTY_S)
        if self.spent_s >= limit_s:
            Attempts.in_vain |= limit_s == self._longest_s
            return None
        wait_s = min(self._next_s, limit_s - self.spent_s)
        self._next_s = min(2 * self._next_s, LONGEST_WAIT_S)
        self.spent_s += wait_s
        self._last = now + wait_s
        if self.spent_s > _NOTICE_S and not Attempts.said:
            Attempts.said = True
            self._say(fault, limit_s)
        return wait_s

    def is_to_be_repeated(self, answer: httpx.Response, retry_codes: Collection[int]) -> bool:
        """Whether an answer says that the server wants to be asked later.

        Args:
            answer: what came.
            retry_codes: further codes, at which Prefect asks again.
        """
        if answer.status_code in AWAY or answer.status_code in retry_codes or answer.is_server_error:
            return True
        Attempts.in_vain = Attempts.said = False
        return False

    def _say(self, fault: httpx.Response | Exception, limit_s: float) -> None:
        came = f"answered {fault.status_code}" if isinstance(fault, httpx.Response) else type(fault).__name__
        address = self._request.url.copy_with(path="/", query=None, userinfo=None)
        get_logger("client").warning(
            "The Prefect server at %s is away (%s): asking it again for %.0f min", address, came, limit_s / 60
        )


class _PatientSyncClient(PrefectHttpxSyncClient):
    """Prefect's client, with other waits between its attempts."""

    longest_s = 0.0

    def _send_with_retry(
        self,
        request: httpx.Request,
        send: Callable[[httpx.Request], httpx.Response],
        send_args: tuple[Any, ...],
        send_kwargs: dict[str, Any],
        retry_codes: Collection[int] = (),
        retry_exceptions: tuple[type[Exception], ...] = (),
    ) -> httpx.Response:
        request = with_key(request)
        attempts = Attempts(request, self.longest_s)
        while True:
            try:  # one attempt, with the token that a server may ask for
                answer: httpx.Response = super()._send_with_retry(request, send, send_args, send_kwargs)
            except _passing(retry_exceptions) as error:
                if (wait_s := attempts.wait_s(error)) is None:
                    raise
            else:
                if not attempts.is_to_be_repeated(answer, retry_codes) or (wait_s := attempts.wait_s(answer)) is None:
                    return answer
                answer.close()
            time.sleep(wait_s)


class _PatientAsyncClient(PrefectHttpxAsyncClient):
    """Prefect's client, with other waits between its attempts."""

    longest_s = 0.0

    async def _send_with_retry(
        self,
        request: httpx.Request,
        send: Callable[[httpx.Request], Awaitable[httpx.Response]],
        send_args: tuple[Any, ...],
        send_kwargs: dict[str, Any],
        retry_codes: Collection[int] = (),
        retry_exceptions: tuple[type[Exception], ...] = (),
    ) -> httpx.Response:
        request = with_key(request)
        attempts = Attempts(request, self.longest_s)
        while True:
            try:
                answer: httpx.Response = await super()._send_with_retry(request, send, send_args, send_kwargs)
            except _passing(retry_exceptions) as error:
                if (wait_s := attempts.wait_s(error)) is None:
                    raise
            else:
                if not attempts.is_to_be_repeated(answer, retry_codes) or (wait_s := attempts.wait_s(answer)) is None:
                    return answer
                await answer.aclose()
            await anyio.sleep(wait_s)


def _passing(retry_exceptions: tuple[type[Exception], ...]) -> tuple[type[Exception], ...]:
    return (*retry_exceptions, httpx.ConnectError)
