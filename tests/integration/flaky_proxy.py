"""A network that misbehaves on command, between a client and an S3 server on this machine."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
PIECE_BYTES = 1 << 16


class FlakyProxy:
    """Forwards connections byte by byte, but for the requests that it was told to spoil."""

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        """Where clients find it."""
        self._spoilt: list[tuple[re.Pattern[bytes], str]] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.count = 0
        """Requests that were spoilt."""
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answers(self, pattern: bytes, times: int = 1) -> None:
        """Pass on the next requests whose first line matches, and hang up instead of passing on their answers."""
        self._spoilt += [(re.compile(pattern), "lose")] * times

    def answer_unavailable(self, pattern: bytes, times: int = 1) -> None:
        """Answer the next requests whose first line matches with status 503, and do not pass them on."""
        self._spoilt += [(re.compile(pattern), "refuse")] * times

    def flip_bodies(self, pattern: bytes, times: int = 1) -> None:
        """Pass on the next requests whose first line matches with the last byte of their body flipped."""
        self._spoilt += [(re.compile(pattern), "flip")] * times

    def close(self) -> None:
        """Hang up everywhere."""
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._upstream) as server:
            with self._lock:
                self._open |= {client, server}
            try:
                while request := _read_message(client):
                    fate = self._fate(request)
                    if fate == "refuse":
                        client.sendall(UNAVAILABLE)
                        return
                    server.sendall(request[:-1] + bytes([request[-1] ^ 1]) if fate == "flip" else request)
                    answer = _read_message(server, no_body=request.startswith(b"HEAD"))
                    if fate == "lose":
                        return
                    client.sendall(answer)
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _fate(self, request: bytes) -> str | None:
        line = request.partition(b"\r\n")[0]
        with self._lock:
            for index, (pattern, fate) in enumerate(self._spoilt):
                if pattern.search(line):
                    del self._spoilt[index]
                    self.count += 1
                    return fate
        return None


@contextmanager
def flaky_proxy(upstream_url: str) -> Iterator[FlakyProxy]:
    """Run a proxy before a server."""
    proxy = FlakyProxy(upstream_url)
    try:
        yield proxy
    finally:
        proxy.close()


def _read_message(source: socket.socket, *, no_body: bool = False) -> bytes:
    """Read one HTTP message with a Content-Length, or nothing at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = source.recv(PIECE_BYTES)
        if not piece:
            return b""
        data += piece
        if b"\r\nexpect: 100-continue\r\n" in data.lower() and data.endswith(b"\r\n\r\n"):
            source.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    missing = 0 if no_body or length is None else int(length[1]) - len(body)
    pieces = [data]
    while missing > 0:
        piece = source.recv(PIECE_BYTES)
        if not piece:
            return b""
        pieces.append(piece)
        missing -= len(piece)
    # The proxy has answered 100 itself; the header is not part of the signature.
    return re.sub(rb"(?i)\r\nexpect: 100-continue(?=\r\n)", b"", b"".join(pieces), count=1)
