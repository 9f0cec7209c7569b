"""Bodies that come whole, break off, or are given up half-way; and what is sent block by block."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import pytest

from infra.artifacts.s3 import BLOCK_BYTES, Outgoing, read_through

OBJECT = bytes(range(256)) * (BLOCK_BYTES // 100)  # two and a half blocks


class Body:
    """Breaks off after so many bytes."""

    def __init__(self, content: bytes, breaks_after: int | None = None) -> None:
        self._content, self._left = BytesIO(content), breaks_after
        self.closed = False

    def read(self, size: int, /) -> bytes:
        if self._left is not None:
            self._left -= size
            if self._left < 0:
                raise ConnectionResetError
        return self._content.read(size)

    def close(self) -> None:
        self.closed = True


class Server:
    """Answers from the byte that it is asked for; its first answers break off."""

    def __init__(self, *breaks: int) -> None:
        self._breaks = list(breaks)
        self.asked: list[int] = []
        self.bodies: list[Body] = []

    def ask(self, start: int) -> Body:
        self.asked.append(start)
        self.bodies.append(Body(OBJECT[start:], self._breaks.pop(0) if self._breaks else None))
        return self.bodies[-1]

    def are_closed(self) -> list[bool]:
        return [body.closed for body in self.bodies]


def persist(attempt: Callable[[float], bytes]) -> bytes:
    """Try again, as the retrier does."""
    while True:
        try:
            return attempt(7.0)
        except ConnectionResetError:
            continue


def test_an_object_comes_in_one_answer_and_in_blocks() -> None:
    server = Server()
    blocks = list(read_through(server.ask, persist, len(OBJECT)))
    assert b"".join(blocks) == OBJECT
    assert [len(block) for block in blocks[:-1]] == [BLOCK_BYTES, BLOCK_BYTES]
    assert (server.asked, server.are_closed()) == ([0], [True])


def test_what_breaks_off_is_asked_for_from_where_it_stopped() -> None:
    server = Server(BLOCK_BYTES + 5, 0)  # in the second block; then at once
    assert b"".join(read_through(server.ask, persist, len(OBJECT))) == OBJECT
    assert server.asked == [0, BLOCK_BYTES, BLOCK_BYTES]
    assert all(server.are_closed())


def test_whoever_stops_reading_lets_go_of_the_connection() -> None:
    server = Server()
    blocks = read_through(server.ask, persist, len(OBJECT))
    next(blocks)
    del blocks
    assert server.are_closed() == [True]


def test_a_body_that_ends_early_is_the_readers_to_notice() -> None:
    server = Server()
    assert b"".join(read_through(server.ask, persist, len(OBJECT) + 10)) == OBJECT


def test_a_body_is_sent_in_blocks_and_again_from_its_beginning() -> None:
    body = Outgoing(OBJECT, timeout=60.0)
    assert [len(body.read(16384)), len(body.read(16384))] == [BLOCK_BYTES, BLOCK_BYTES]
    body.seek(0)
    assert body.read() == OBJECT


def test_a_body_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TimeoutError, match="was not sent within"):
        Outgoing(OBJECT, timeout=-1.0).read(16384)
