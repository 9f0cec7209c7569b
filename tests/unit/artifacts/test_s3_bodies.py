"""Bodies that come whole, break off, or are given up half-way; what is sent block by block, and until when."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import chain, repeat

import pytest

from infra.artifacts.credentials import S3Options
from infra.artifacts.s3 import BLOCK_BYTES, Outgoing, S3Backend, read_through
from infra.artifacts.s3_requests import Patience

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


SENT = bytes(16 << 20)
"""More than the sockets of a connection hold: who sends it notices that nobody reads."""


@contextmanager
def reading_server(pauses_s: list[float]) -> Iterator[str]:
    """Yield the address of a server that takes each body in small pieces, with the next of these pauses after each."""
    released = threading.Event()

    def take(connection: socket.socket, pause_s: float) -> None:
        with connection:
            head, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            found = re.search(rb"(?i)content-length: (\d+)", head)
            left = int(found[1]) - len(body) if found else 0
            while left > 0 and not released.wait(pause_s) and (piece := connection.recv(1 << 18)):
                left -= len(piece)
            if left <= 0:
                tag = hashlib.md5(SENT, usedforsecurity=False).hexdigest().encode()
                connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "%s"\r\nContent-Length: 0\r\n\r\n' % tag)

    def accept() -> None:
        with suppress(OSError):  # the test is over
            for pause_s in chain(pauses_s, repeat(pauses_s[-1])):
                connection = listener.accept()[0]
                threads.append(threading.Thread(target=take, args=(connection, pause_s), daemon=True))
                threads[-1].start()

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threads = [threading.Thread(target=accept, daemon=True)]
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            released.set()
            listener.shutdown(socket.SHUT_RDWR)
        for each in threads:
            each.join(10.0)


@pytest.mark.parametrize("pauses_s", [[0.02], [60.0, 0.0]], ids=["a slow line", "a line that stalls, once"])
def test_a_body_is_sent_as_long_as_it_moves_and_again_soon_after_it_stops(pauses_s: list[float]) -> None:
    patience = Patience(read_s=0.5, deadline_s=20.0, slowest=1e9)
    with reading_server(pauses_s) as url:
        started = time.monotonic()
        S3Backend("s3://b", "b", "", S3Options(url, "key", "secret", "us-east-1"), patience).upload("k", SENT)
        assert 0.5 < time.monotonic() - started < 15.0
