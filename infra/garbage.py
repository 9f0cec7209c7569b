"""Garbage of a Prefect server on sqlite: collected in a thread of its own, as it may stop the server for a minute.

A collection runs in whatever thread happens to allocate, mostly that of the event loop. Where it finds a cursor, it
waits for the cursor's connection, and that one may wait for the database's lock, up to a minute; whoever holds the lock
waits for the event loop. Nothing goes on until the connection gives up with `database is locked`. It was seen with each
server that a few runs kept busy on two cores. A thread of its own may wait as long as it likes.
"""

from __future__ import annotations

import gc
import threading
import time

EVERY_S = 1.0
ALL_EVERY = 60
"""Of so many collections one looks at old objects too, for which all of the server waits a fraction of a second."""
_started = threading.Lock()


def collect_in_a_thread() -> None:
    """Collect the garbage of this process from now on in a thread; what is there already is taken for lasting."""
    if not _started.acquire(blocking=False):
        return
    gc.disable()
    gc.collect()
    gc.freeze()
    threading.Thread(target=_collect, name="garbage", daemon=True).start()


def _collect() -> None:
    number = 0
    while True:
        time.sleep(EVERY_S)
        number += 1
        gc.collect(2 if number % ALL_EVERY == 0 else 1)
