"""An answer of an S3 server whose body is read while it comes, and asked for again from where it broke off."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from fsspec.asyn import sync

PIECE_BYTES = 1 << 20
"""How much is handed over at a time: larger pieces cost fresh memory, smaller ones a change of threads each."""


class Answer:
    """The body of one answer; belongs to one thread.

    Args:
        loop: runs the requests.
        body: as aiobotocore returns it.
    """

    def __init__(self, loop: AbstractEventLoop, body: Any) -> None:
        self._loop, self._body = loop, body

    def read(self, size: int, timeout: float) -> bytes:
        """Return so many bytes; fewer only where the body ends.

        Args:
            size: in bytes.
            timeout: in seconds, for all of them.
        """

        async def fill() -> bytes:
            parts, left = [], size
            while left and (part := await self._body.read(left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

        found: bytes = sync(self._loop, fill, timeout=timeout)
        return found

    def close(self) -> None:
        """Let go of the connection, which is used again if all of the body has been read."""
        with suppress(RuntimeError):  # the loop ends with the process
            self._loop.call_soon_threadsafe(self._body.close)


def read_through(
    ask: Callable[[int, float], Answer], run: Callable[[Callable[[float], bytes]], bytes], size: int
) -> Iterator[bytes]:
    """Yield an object piece by piece; it comes in one answer, unless that breaks off.

    Args:
        ask: asks for the object from a byte on, within some seconds.
        run: makes attempts, each within the seconds that it is given, until one returns.
        size: of the object, in bytes.
    """
    answer: Answer | None = None
    done = 0

    def attempt(timeout: float) -> bytes:
        nonlocal answer
        answer = answer or ask(done, timeout)
        try:
            return answer.read(min(PIECE_BYTES, size - done), timeout)
        except BaseException:
            answer.close()
            answer = None
            raise

    try:
        while done < size and (piece := run(attempt)):
            done += len(piece)
            yield piece
    finally:
        if answer is not None:
            answer.close()
