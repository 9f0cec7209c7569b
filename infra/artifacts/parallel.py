"""A few transfers at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
THREADS = 4
"""For small requests, which wait more than they work."""
BODIES = min(8, max(2, os.cpu_count() or 2))
"""For bodies of blobs, of which each is in memory: hashing them keeps a core busy."""


def in_parallel(function: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Return the function's result for each item, in order; the first error ends it all."""
    with ThreadPoolExecutor(threads, thread_name_prefix="artifacts") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
