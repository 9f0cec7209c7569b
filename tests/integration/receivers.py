"""Receivers of notices on this machine: an HTTP server that notes what is posted, and a mail server that keeps mail."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hooks:
    """A server of webhooks."""

    port: int
    posted: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Paths, and the JSON that came."""
    refuses: bool = False

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def at(self, path: str) -> list[dict[str, Any]]:
        return [body for to, body in self.posted if to == path]


@contextmanager
def hooks() -> Iterator[Hooks]:
    """Serve webhooks."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.posted.append((self.path, body))
            self.send_response(410 if found.refuses else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Hooks(server.server_address[1])
    with _served(server):
        yield found


@dataclass
class Mails:
    """A mail server."""

    port: int
    received: list[tuple[str, EmailMessage]] = field(default_factory=list)
    """Each with who it is for."""


@contextmanager
def mails() -> Iterator[Mails]:
    """Serve as much of RFC 5321 as handing mail over takes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.say("220 here")
            receiver = ""
            while line := self.rfile.readline():
                verb = line[:4].upper()
                if verb == b"QUIT":
                    self.say("221 bye")
                    return
                if verb == b"RCPT":
                    receiver = line.decode().partition("<")[2].partition(">")[0]
                if verb != b"DATA":
                    self.say("250 fine")
                    continue
                self.say("354 go on")
                lines = iter(self.rfile.readline, b".\r\n")
                message = message_from_bytes(b"".join(lines), policy=policy.default)
                assert isinstance(message, EmailMessage)
                found.received.append((receiver, message))
                self.say("250 kept")

        def say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Mails(server.server_address[1])
    with _served(server):
        yield found


@contextmanager
def _served(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
