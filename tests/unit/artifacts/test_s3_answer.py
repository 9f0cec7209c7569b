"""Bodies that come whole, break off, or are given up half-way."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

from fsspec.asyn import get_loop, sync

from infra.artifacts.s3_answer import PIECE_BYTES, Answer, read_through

OBJECT = bytes(range(256)) * (PIECE_BYTES // 100)  # two and a half pieces
DRIBBLE = 100_000


class Body:
    """Gives a little at a time, as a network does, and breaks off after so many bytes."""

    def __init__(self, content: bytes, breaks_after: int | None = None) -> None:
        self._content, self._left = BytesIO(content), breaks_after
        self.closed = False

    async def read(self, size: int) -> bytes:
        part = self._content.read(min(size, DRIBBLE))
        if self._left is not None:
            self._left -= len(part)
            if self._left < 0:
                raise ConnectionResetError
        return part

    def close(self) -> None:
        self.closed = True


class Server:
    """Answers from the byte that it is asked for; its first answers break off."""

    def __init__(self, *breaks: int) -> None:
        self._breaks = list(breaks)
        self.asked: list[int] = []
        self.bodies: list[Body] = []

    def ask(self, start: int, timeout: float) -> Answer:
        assert timeout == 7.0
        self.asked.append(start)
        self.bodies.append(Body(OBJECT[start:], self._breaks.pop(0) if self._breaks else None))
        return Answer(get_loop(), self.bodies[-1])

    def are_closed(self) -> list[bool]:
        async def wait() -> None:
            """Stand behind the calls that close them."""

        sync(get_loop(), wait)
        return [body.closed for body in self.bodies]


def persist(attempt: Callable[[float], bytes]) -> bytes:
    """Try again, as the retrier does."""
    while True:
        try:
            return attempt(7.0)
        except ConnectionResetError:
            continue


def test_an_object_comes_in_one_answer_and_in_pieces() -> None:
    server = Server()
    pieces = list(read_through(server.ask, persist, len(OBJECT)))
    assert b"".join(pieces) == OBJECT
    assert [len(piece) for piece in pieces[:-1]] == [PIECE_BYTES, PIECE_BYTES]
    assert (server.asked, server.are_closed()) == ([0], [True])


def test_what_breaks_off_is_asked_for_from_where_it_stopped() -> None:
    server = Server(PIECE_BYTES + 5 * DRIBBLE, 0)  # in the second piece; then at once
    assert b"".join(read_through(server.ask, persist, len(OBJECT))) == OBJECT
    assert server.asked == [0, PIECE_BYTES, PIECE_BYTES]
    assert all(server.are_closed())


def test_whoever_stops_reading_lets_go_of_the_connection() -> None:
    server = Server()
    pieces = read_through(server.ask, persist, len(OBJECT))
    next(pieces)
    pieces.close()
    assert server.are_closed() == [True]


def test_a_body_that_ends_early_is_the_readers_to_notice() -> None:
    server = Server()
    assert b"".join(read_through(server.ask, persist, len(OBJECT) + 10)) == OBJECT
