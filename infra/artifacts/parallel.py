"""A few transfers at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
THREADS = 4


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the function's result for each item, in order; the first error ends it all."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="artifacts") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
