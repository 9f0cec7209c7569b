"""What keeps a Prefect server on sqlite answering: two things that hold it up for minutes, or for good.

*Garbage.* A collection runs in whatever thread happens to allocate, mostly that of the event loop. Where it finds a
cursor, it waits for the cursor's connection, and that one may wait for the database's lock, up to a minute; whoever
holds the lock waits for the event loop. Nothing goes on until the connection gives up with `database is locked`. It was
seen with each server that a few runs kept busy on two cores. A thread of its own may wait as long as it likes.

*Web sockets.* On sqlite Prefect answers a hundred requests at a time, and takes each open web socket for one of them. A
run holds several. With some thirty runs begun at once, as after a power cut, all hundred are taken by sockets, and no
request is answered until processes end: those wait for an answer.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

from prefect.server.api.server import RequestLimitMiddleware

EVERY_S = 1.0
ALL_EVERY = 60
"""Of so many collections one looks at old objects too, for which all of the server waits a fraction of a second."""
_started = threading.Lock()
_within_the_limit = RequestLimitMiddleware.__call__


def count_requests_alone() -> None:
    """Let web sockets of this process's server be open beside the requests that it answers at a time."""
    RequestLimitMiddleware.__call__ = _requests_alone  # type: ignore[assignment,method-assign]


def collect_in_a_thread() -> None:
    """Collect the garbage of this process from now on in a thread; what is there already is taken for lasting."""
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


def _collect() -> None:
    number = 0
    while True:
        time.sleep(EVERY_S)
        number += 1
        gc.collect(2 if number % ALL_EVERY == 0 else 1)
