"""Another user of this machine, who tries what he can: reads what to try as JSON, and prints what came of each.

Run as root, it becomes that user once everything is imported, for he may not read where the interpreter lies. With the
word `owner` it stays who it is, and shows that the same tries go well with what he does not have.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from infra.certificate import own_certificate

UID = 54321
"""Nobody's: no file of the system is his, and he is in no group."""
ANSWER_S = 10.0
HTTP_ANSWER_S = 60.0
"""A server of HTTP does answer, if late where sixteen ask at once; others may say nothing to what they do not know."""
NO_ANSWER = "no answer"
"""What comes of a connection that is refused, broken off, or no conversation of the kind."""


def http(url: str, method: str = "GET", headers: dict[str, str] | None = None, body: str = "") -> str:
    """Return the status, or that nothing of HTTP came back; an allowed origin is told as well."""
    parts = urlsplit(url)
    assert parts.hostname
    nobody_is_checked = ssl.create_default_context()
    nobody_is_checked.check_hostname, nobody_is_checked.verify_mode = False, ssl.CERT_NONE
    secure = {"context": nobody_is_checked} if parts.scheme == "https" else {}
    kind: Any = HTTPSConnection if secure else HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=HTTP_ANSWER_S, **secure)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body or None, headers or {})
        answer = connection.getresponse()
        answer.read()
    except (OSError, HTTPException):
        return NO_ANSWER
    finally:
        connection.close()
    origin = answer.getheader("Access-Control-Allow-Origin")
    return f"{answer.status} for {origin}" if origin else str(answer.status)


def s3(url: str, method: str = "GET", key: str = "", secret: str = "", body: str = "") -> str:
    """Return the status of a request that is signed with a key and a secret."""
    request = AWSRequest(method, url, data=body)
    S3SigV4Auth(Credentials(key, secret), "s3", "us-east-1").add_auth(request)
    return http(url, method, dict(request.headers.items()), body)


def call(address: str, method: str, token: str = "", trusted: str = "", own: str = "") -> str:
    """Return the code of a call of gRPC.

    Args:
        address: host and port.
        method: with its service.
        token: of Ray; none is sent if it is empty.
        trusted: the server's certificate, for TLS; without it the call is plain.
        own: a certificate of one's own and its key.
    """
    channel = grpc.insecure_channel(address)
    if trusted:
        parts = [own.encode() or None] * 2
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted.encode(), *parts))
    metadata = [("authorization", f"Bearer {token}")] if token else []
    try:
        with channel:
            made = channel.stream_stream(method, lambda body: body, lambda body: body)
            list(made(iter([b""]), timeout=ANSWER_S, metadata=metadata))
    except grpc.RpcError as error:
        code = error.code()  # type: ignore[attr-defined]
        return NO_ANSWER if code is grpc.StatusCode.UNAVAILABLE else str(code.name)
    return "OK"


def listen(url: str, token: str = "", subprotocol: str = "prefect") -> str:
    """Return what comes of a web socket that starts as Prefect's client does."""

    async def begin() -> str:
        async with asyncio.timeout(ANSWER_S), connect(url, subprotocols=[subprotocol]) as line:  # type: ignore[list-item]
            await line.send(json.dumps({"type": "auth", "token": token} if token else {"type": "auth"}))
            return str(json.loads(await line.recv()).get("type"))

    try:
        return asyncio.run(begin())
    except TimeoutError:
        return "open"  # nothing was refused
    except ConnectionClosed as error:
        return f"closed {error.code}"
    except (InvalidHandshake, OSError):
        return NO_ANSWER


def reach(host: str, port: int) -> str:
    """Return whether a port takes a connection."""
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError:
        return NO_ANSWER
    return "open"


def say(port: int, text: str) -> str:
    """Return whether a port of the loopback closes the connection after a line."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_S) as line:
            line.sendall(text.encode() + b"\n")
            line.settimeout(ANSWER_S)
            return "answer" if line.recv(1) else "closed"
    except TimeoutError:
        return "open"
    except OSError:
        return NO_ANSWER


def unix(path: str, kind: int) -> str:
    """Return whether a Unix socket of a kind (of `socket.SocketKind`) takes a connection."""
    with socket.socket(socket.AF_UNIX, kind) as line:
        line.settimeout(ANSWER_S)
        try:
            line.connect(path)
        except OSError:
            return NO_ANSWER
    return "open"


def files(roots: list[str]) -> str:
    """Return what can be read, written or entered of what lies in some folders, and of the files themselves."""
    found, left = [], [Path(root) for root in roots]
    while left:
        path = left.pop()
        try:
            if path.is_symlink():
                continue
            is_folder = path.is_dir()
            if is_folder:
                left += path.iterdir()
        except OSError:
            is_folder = False
        # A folder that may only be listed or passed through has no harm in it: what lies in it is looked at.
        if os.access(path, os.W_OK) or (not is_folder and os.access(path, os.R_OK)):
            found.append(str(path))
    return " ".join(found) or "nothing"


def processes(pids: list[int]) -> str:
    """Return the processes whose environment, memory or open files can be seen."""
    seen = []
    for pid in pids:
        for part in ("environ", "mem", "fd", "maps"):
            try:
                path = Path(f"/proc/{pid}/{part}")
                if part == "fd":
                    list(path.iterdir())
                else:
                    path.open("rb").close()  # who may not look is refused here; nothing is at the first byte of memory
                seen.append(f"{pid}/{part}")
            except (PermissionError, FileNotFoundError, ProcessLookupError):
                continue
    return " ".join(seen) or "nothing"


def shell(program: str, script: str, variables: dict[str, str], *arguments: str) -> str:
    """Return what a program says to a script, as far as it tells of what is there."""
    try:
        done = subprocess.run(
            [program, *arguments],
            input=script,
            env={"PATH": "/usr/bin:/bin", "HOME": "/", **variables},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return NO_ANSWER
    return done.stdout.strip() or NO_ANSWER


TRIES: dict[str, Callable[..., str]] = {
    each.__name__: each for each in (http, s3, call, listen, reach, say, unix, files, processes, shell)
}


NOWHERE = "127.0.0.1:9"
REHEARSAL: list[tuple[str, list[Any]]] = [
    ("http", [f"http://{NOWHERE}/"]),
    ("http", [f"https://{NOWHERE}/"]),
    ("s3", [f"http://{NOWHERE}/", "GET", "key", "secret"]),
    ("call", [NOWHERE, "/service/Method", "token", own_certificate("rehearsal"), own_certificate("rehearsal")]),
    ("listen", [f"ws://{NOWHERE}/", "token"]),
    ("shell", ["/bin/true", "", {}]),
]


def tried(one: tuple[str, list[Any]]) -> str:
    """Return what came of a try; also what it failed with, so that all are told."""
    try:
        return TRIES[one[0]](*one[1])
    except Exception as error:
        return f"raised {error!r}"


def main() -> None:
    """Try everything, several at once."""
    wanted: list[tuple[str, list[Any]]] = json.load(sys.stdin)
    for one in REHEARSAL:  # what Python loads at the first use can be read only now
        assert tried(one) == NO_ANSWER, one
    if sys.argv[1:] != ["owner"]:
        os.setgroups([])
        os.setgid(UID)
        os.setuid(UID)
    with ThreadPoolExecutor(16) as pool:
        json.dump(list(pool.map(tried, wanted)), sys.stdout)


if __name__ == "__main__":
    main()
