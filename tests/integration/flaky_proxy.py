"""A network that misbehaves on command, between a client and a server on this machine: of S3, or Prefect's."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import urlsplit

PIECE_BYTES = 1 << 16
HOLD_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Spoiling:
    """What is to happen to a request."""

    pattern: re.Pattern[bytes]
    fate: str
    status: int = 503
    away_s: float = 0.0
    leaver: FlakyProxy | None = None
    released: threading.Event = field(default_factory=threading.Event)


class FlakyProxy:
    """Forwards connections message by message, but for the requests that it was told to spoil."""

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        """Where clients find it."""
        self._spoilt: list[Spoiling] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.count = 0
        """Requests that were spoilt."""
        self.seen: list[bytes] = []
        """Every request that came, its headers included and its body left out."""
        self.clock_ahead = timedelta()
        """How far the server's clock is ahead of ours, for all that its clients can tell."""
        self._kept: list[bytes] = []
        self._back_at = 0.0
        self.refused: list[int] = []
        """Of each time that the server was away, how many connections came meanwhile."""
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answers(self, pattern: bytes, times: int = 1) -> None:
        """Pass on the next requests whose first line matches, and hang up instead of passing on their answers."""
        self._spoil(pattern, "lose", times)

    def truncate_answers(self, pattern: bytes, times: int = 1) -> None:
        """Pass on the next requests whose first line matches, then half of each answer, and hang up."""
        self._spoil(pattern, "truncate", times)

    def answer_unavailable(self, pattern: bytes, times: int = 1, status: int = 503) -> None:
        """Answer the next requests whose first line matches with an error, and do not pass them on."""
        self._spoil(pattern, "refuse", times, status)

    def flip_bodies(self, pattern: bytes, times: int = 1) -> None:
        """Pass on the next requests whose first line matches with the last byte of their body flipped."""
        self._spoil(pattern, "flip", times)

    def cut_requests(self, pattern: bytes, times: int = 1) -> None:
        """Pass on half of the next requests whose first line matches, and hang up on both sides."""
        self._spoil(pattern, "cut", times)

    def reset(self, pattern: bytes, times: int = 1) -> None:
        """Break the connection off (RST) when the next requests whose first line matches have come."""
        self._spoil(pattern, "reset", times)

    def send_twice(self, pattern: bytes, times: int = 1) -> None:
        """Pass on the next requests whose first line matches twice, and the second answer."""
        self._spoil(pattern, "twice", times)

    def keep_copies(self, pattern: bytes, times: int = 1) -> None:
        """Pass on the next requests whose first line matches as usual, and keep copies for `deliver_copies`."""
        self._spoil(pattern, "copy", times)

    def leave(self, away_s: float = float("inf")) -> None:
        """Hang up everywhere, and on everybody who calls, for so long or until `come_back`."""
        self._back_at = time.monotonic() + away_s
        self.refused.append(0)
        self._hang_up()

    def come_back(self) -> None:
        """Be there again."""
        self._back_at = 0.0

    def leave_after(self, pattern: bytes, away_s: float, *, leaver: FlakyProxy | None = None) -> None:
        """Pass on the next request whose first line matches and its answer, then be away for so long.

        Args:
            pattern: of the first line.
            away_s: for how long.
            leaver: another proxy, which is away in place of this one.
        """
        with self._lock:
            self._spoilt.append(Spoiling(re.compile(pattern), "leave", away_s=away_s, leaver=leaver or self))

    def hold_answers(self, pattern: bytes) -> threading.Event:
        """Pass on the next request whose first line matches, and hold its answer until the event is set."""
        return self._spoil(pattern, "hold", 1).released

    def deliver_copies(self) -> list[int]:
        """Send the requests that were kept once more, long after; return the status of each answer."""
        found = []
        while self._kept:
            with socket.create_connection(self._upstream) as server:
                server.sendall(self._kept.pop(0))
                found.append(int(_read_message(server).split(b" ", 2)[1]))
        return found

    def close(self) -> None:
        """Hang up everywhere."""
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _spoil(self, pattern: bytes, fate: str, times: int, status: int = 503) -> Spoiling:
        spoiling = Spoiling(re.compile(pattern), fate, status)
        with self._lock:
            self._spoilt += [spoiling] * times
        return spoiling

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if time.monotonic() < self._back_at:
            self.refused[-1] += 1
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        with client, suppress(OSError), socket.create_connection(self._upstream) as server:
            with self._lock:
                self._open |= {client, server}
            try:
                while request := _read_message(client):
                    self.seen.append(request.partition(b"\r\n\r\n")[0])
                    if not self._pass_on(request, client, server):
                        return
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pass_on(self, request: bytes, client: socket.socket, server: socket.socket) -> bool:
        """Treat one request as it was decided; return whether the connection stays."""
        spoiling = self._fate(request)
        fate = spoiling.fate if spoiling else ""
        if spoiling and fate == "refuse":
            client.sendall(b"HTTP/1.1 %d Spoilt\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % spoiling.status)
        if fate == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fate == "cut":
            server.sendall(request[: len(request) - max(1, len(request.partition(b"\r\n\r\n")[2]) // 2)])
        if fate in {"refuse", "reset", "cut"}:
            return False
        if fate == "copy":
            self._kept.append(request)
        server.sendall(request[:-1] + bytes([request[-1] ^ 1]) if fate == "flip" else request)
        answer = _read_message(server, no_body=request.startswith(b"HEAD"))
        if fate == "twice":
            server.sendall(request)
            answer = _read_message(server, no_body=request.startswith(b"HEAD"))
        if spoiling and fate == "hold":
            spoiling.released.wait(HOLD_TIMEOUT_S)
        self._answer(answer, client, fate)
        if spoiling and spoiling.leaver:
            spoiling.leaver.leave(spoiling.away_s)
        if answer.startswith(b"HTTP/1.1 101"):
            _relay_both_ways(client, server)  # a web socket from here on
            return False
        return fate not in {"lose", "truncate", "leave"}

    def _answer(self, answer: bytes, client: socket.socket, fate: str) -> None:
        if self.clock_ahead:
            date = format_datetime(datetime.now(UTC) + self.clock_ahead, usegmt=True).encode()
            answer = re.sub(rb"(?i)(?<=\r\ndate: )[^\r]*", date, answer, count=1)
        if fate != "lose":
            client.sendall(answer[: len(answer) // 2] if fate == "truncate" else answer)

    def _fate(self, request: bytes) -> Spoiling | None:
        line = request.partition(b"\r\n")[0]
        with self._lock:
            for index, spoiling in enumerate(self._spoilt):
                if spoiling.pattern.search(line):
                    del self._spoilt[index]
                    self.count += 1
                    return spoiling
        return None


@contextmanager
def flaky_proxy(upstream_url: str) -> Iterator[FlakyProxy]:
    """Run a proxy before a server."""
    proxy = FlakyProxy(upstream_url)
    try:
        yield proxy
    finally:
        proxy.close()


def _relay_both_ways(client: socket.socket, server: socket.socket) -> None:
    relay = threading.Thread(target=_relay, args=(server, client), daemon=True)
    relay.start()
    _relay(client, server)
    relay.join()


def _relay(source: socket.socket, target: socket.socket) -> None:
    """Pass on whatever comes until one side hangs up, and hang up on both."""
    with suppress(OSError):
        while piece := source.recv(PIECE_BYTES):
            target.sendall(piece)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _read_message(source: socket.socket, *, no_body: bool = False) -> bytes:
    """Read one HTTP message, of known length or in chunks, or nothing at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = source.recv(PIECE_BYTES)
        if not piece:
            return b""
        data += piece
        if b"\r\nexpect: 100-continue\r\n" in data.lower() and data.endswith(b"\r\n\r\n"):
            source.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    head, _, body = data.partition(b"\r\n\r\n")
    if no_body:
        return data
    if re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE):
        while not data.endswith(b"\r\n0\r\n\r\n"):
            if not (piece := source.recv(PIECE_BYTES)):
                return b""
            data += piece
        return data
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    missing = 0 if length is None else int(length[1]) - len(body)
    pieces = [data]
    while missing > 0:
        piece = source.recv(PIECE_BYTES)
        if not piece:
            return b""
        pieces.append(piece)
        missing -= len(piece)
    # The proxy has answered 100 itself; the header is not part of the signature.
    return re.sub(rb"(?i)\r\nexpect: 100-continue(?=\r\n)", b"", b"".join(pieces), count=1)
