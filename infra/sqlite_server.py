"""What keeps a Prefect server on sqlite answering: two things stop it for minutes, or for ever; and idle where it is.

*Garbage.* A collection runs in whatever thread happens to allocate, mostly in that of the event loop. If it finds a
cursor, it waits for the cursor's connection. That connection may wait for the database's lock, up to a minute, and the
holder of the lock waits for the event loop. Nothing goes on until the connection gives up with `database is locked`.
It was seen with each server that a few runs kept busy on two cores. A separate thread may wait as long as it needs.

*Web sockets.* On sqlite Prefect answers a hundred requests at a time, and counts each open web socket as one of them. A
run holds several. When some thirty runs begin at once, as after a power cut, sockets take all hundred. Then no request
is answered until processes end, and those wait for an answer.

*Idleness.* The queue of the server's own work (Docket, in memory) is looked at twenty times a second, day and night,
and Prefect has no setting for it. Nothing in it has to be done within a second.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from datetime import timedelta
from typing import Any

from burner_redis.pubsub import PubSub
from docket.dependencies import current_worker
from prefect.server.api.server import RequestLimitMiddleware

EVERY_S = 1.0
LOOK_S = 1.0
ALL_EVERY = 60
"""One of so many collections looks at old objects too; the whole server waits a fraction of a second for it."""
_started = threading.Lock()
_within_the_limit = RequestLimitMiddleware.__call__


def count_requests_alone() -> None:
    """Let web sockets of this process's server be open beside the requests that it answers at a time."""
    RequestLimitMiddleware.__call__ = _requests_alone  # type: ignore[assignment,method-assign]


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


async def _requests_alone(middleware: RequestLimitMiddleware, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await _within_the_limit(middleware, scope, receive, send)
    else:
        await middleware.app(scope, receive, send)


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
