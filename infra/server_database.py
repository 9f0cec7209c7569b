"""What keeps a Prefect server answering, and idle where it is. On sqlite three things stop it for minutes, or for ever.

*Garbage.* A collection runs in whatever thread happens to allocate, mostly in that of the event loop. If it finds a
cursor, it waits for the cursor's connection. That connection may wait for the database's lock, up to a minute, and the
holder of the lock waits for the event loop. Nothing goes on until the connection gives up with `database is locked`.
It was seen with each server that a few runs kept busy on two cores. A separate thread may wait as long as it needs.

*Web sockets.* On sqlite Prefect answers a hundred requests at a time, and counts each open web socket as one of them. A
run holds several. When some thirty runs begin at once, as after a power cut, sockets take all hundred. Then no request
is answered until processes end, and those wait for an answer.

*Writers.* Prefect begins most transactions as readers. Where another has written since, sqlite refuses the first write
at once. The client is sent away, asks again after 2, 4, 8 ... seconds, and is refused again. With six writers a call
took a minute, and the worker's sign of life was lost. Here each transaction takes the database's lock when it begins,
and those that want it are served in the order in which they came.

*Idleness.* The queue of the server's own work (Docket, in memory) is looked at twenty times a second, day and night,
and Prefect has no setting for it. Nothing in it has to be done within a second.

*Schemas.* Prefect checks the schema of a deployment's parameters twice when it is registered, and once for each run
that is made: a third of a second for what our form is drawn from, in which nothing else is answered. Here a schema is
checked once.

A PostgreSQL may be away, as after a crash. Prefect answers 500 then, which clients take for a fault that stays. Here it
answers that it wants to be asked later, and runs wait as they wait for a server that is away.
"""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from burner_redis.pubsub import PubSub
from docket.dependencies import current_worker
from jsonschema.validators import Draft202012Validator
from prefect.server.api import server
from prefect.server.api.server import RequestLimitMiddleware
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.utilities.schema_tools import validation

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

EVERY_S = 1.0
LOOK_S = 1.0
ALL_EVERY = 60
"""One of so many collections looks at old objects too; the whole server waits a fraction of a second for it."""
SCHEMAS = 64
"""How many are remembered: ours are five."""
TURN_S = 60.0
"""How long a transaction waits for its turn, before it tries as Prefect's do: sqlite's own wait for the lock."""
_started = threading.Lock()
_within_the_limit = RequestLimitMiddleware.__call__
_passes = server.is_client_retryable_exception
_begin_as_reader = AioSqliteConfiguration.begin_transaction
_has_turn = ContextVar("_has_turn", default=False)
_turns: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}


def count_requests_alone() -> None:
    """Let web sockets of this process's server be open beside the requests that it answers at a time."""
    RequestLimitMiddleware.__call__ = _requests_alone  # type: ignore[assignment,method-assign]


def write_in_turn() -> None:
    """Let transactions of this process's server write one after the other; those within another one are as before."""
    AioSqliteConfiguration.begin_transaction = _in_turn  # type: ignore[assignment,method-assign]


def ask_later_while_it_is_away() -> None:
    """Let this process's server answer 503 where it cannot reach its database."""
    server.is_client_retryable_exception = _is_away_or_passes


def check_schemas_once() -> None:
    """Let this process's server remember which schemas it has found to be valid."""
    for validator in (Draft202012Validator, validation._VALIDATOR):
        validator.check_schema = _once(validator.check_schema)


def look_less_often() -> None:
    """Have the server whose service calls this look for work of its own once a second."""
    worker = current_worker.get(None)
    if worker is None:  # this is no server
        return
    worker.scheduling_resolution = worker.minimum_check_interval = timedelta(seconds=LOOK_S)
    worker.docket.heartbeat_interval = timedelta(seconds=10 * LOOK_S)  # there is no other who could miss it
    PubSub._queue_get = _next_message


def collect_in_a_thread() -> None:
    """Collect the garbage of this process from now on in a thread; what is there already counts as lasting."""
    if not _started.acquire(blocking=False):
        return
    gc.disable()
    gc.collect()
    gc.freeze()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _once(check: Callable[..., None]) -> Callable[..., None]:
    @lru_cache(SCHEMAS)
    def check_text(schema: str, **options: Any) -> None:
        check(json.loads(schema), **options)

    return lambda schema, **options: check_text(json.dumps(schema), **options)


def _is_away_or_passes(exc: Exception) -> bool:
    return isinstance(exc, ConnectionError | FileNotFoundError) or _passes(exc)  # the second: no socket


async def _requests_alone(middleware: RequestLimitMiddleware, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await _within_the_limit(middleware, scope, receive, send)
    else:
        await middleware.app(scope, receive, send)


@asynccontextmanager
async def _in_turn(
    database: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
) -> AsyncGenerator[AsyncSessionTransaction, None]:
    turn = _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    if _has_turn.get() or not await _acquired(turn):
        async with _begin_as_reader(database, session, with_for_update) as transaction:
            yield transaction
        return
    token = _has_turn.set(True)
    try:
        async with _begin_as_reader(database, session, with_for_update=True) as transaction:
            yield transaction
    finally:
        turn.release()
        _has_turn.reset(token)


async def _acquired(turn: asyncio.Lock) -> bool:
    try:
        return await asyncio.wait_for(turn.acquire(), TURN_S)
    except TimeoutError:
        return False


async def _next_message(pubsub: PubSub, timeout: float | None) -> Any:
    """Return the next message, or None if none is there in time; a thread is not woken ten times a second for it."""
    while True:
        try:
            return pubsub._queue.get_nowait()
        except queue.Empty:
            if timeout == 0.0:
                return None
        await asyncio.sleep(LOOK_S)
        timeout = 0.0 if timeout is not None else None


def _collect() -> None:
    number = 0
    while True:
        time.sleep(EVERY_S)
        number += 1
        gc.collect(2 if number % ALL_EVERY == 0 else 1)
