"""Bodies on their way to an S3 server and back: a block at a time, each with a limit in time of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Protocol

BLOCK_BYTES = 256 << 10
"""Larger blocks cost fresh memory each, smaller ones a call each: at 16 KiB or 1 MiB a third of the speed is lost."""


class Answer(Protocol):
    """The body of an answer, as botocore returns it."""

    def read(self, amt: int, /) -> bytes:
        """Return so many bytes; fewer only where the body ends."""

    def close(self) -> None:
        """Let go of the connection, which is used again if all of the body has been read."""


class Outgoing(BytesIO):
    """A body that is sent block by block: sent as a whole, all of it would have to pass within one block's limit."""

    def __init__(self, body: bytes, timeout: float) -> None:
        """Describe a body.

        Args:
            body: all of it.
            timeout: in seconds, for all of it.
        """
        super().__init__(body)
        self._deadline, self._timeout = time.monotonic() + timeout, timeout

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next block: what sends it asks for 16 KiB.

        Raises:
            TimeoutError: if the body has taken too long already.
        """
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"a body was not sent within {self._timeout:.0f} s")
        return super().read(size if size is None or size < 0 else max(size, BLOCK_BYTES))


def read_through(
    ask: Callable[[int], Answer], run: Callable[[Callable[[float], bytes]], bytes], size: int
) -> Iterator[bytes]:
    """Yield an object block by block; it comes in one answer, unless that breaks off.

    Args:
        ask: asks for the object from a byte on.
        run: makes attempts until one returns.
        size: of the object, in bytes.
    """
    answer: Answer | None = None
    done = 0

    def attempt(_: float) -> bytes:
        nonlocal answer
        answer = answer or ask(done)
        try:
            return answer.read(min(BLOCK_BYTES, size - done))
        except BaseException:
            answer.close()
            answer = None
            raise

    try:
        while done < size and (block := run(attempt)):
            done += len(block)
            yield block
    finally:
        if answer is not None:
            answer.close()
