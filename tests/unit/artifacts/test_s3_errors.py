"""What goes wrong between an S3 server and us comes out as one sentence, whichever library met it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ServerDisconnectedError
from botocore.exceptions import ClientError
from urllib3.exceptions import SSLError

from infra.artifacts import S3Options, open_store
from infra.artifacts.retrier import Patience, Retrier
from infra.artifacts.s3 import S3Backend
from infra.errors import StoreError, StoreNotReadyError
from tests.unit.untrusted_server import untrusted_server


@pytest.fixture
def garbled() -> Iterator[str]:
    """The address of a server that says 503, and garbles why."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:  # the test is over
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"HTTP/1.1 503 Slow Down\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_refusal_that_breaks_off_is_no_answer(garbled: str) -> None:
    options = S3Options(endpoint_url=garbled, access_key="key", secret_key="secret")
    backend = S3Backend("s3://b", "b", "", options, Patience(deadline_s=0.05))
    with pytest.raises(StoreError, match=r"did not answer within 0 s while reading k .* \(its answer broke off\)"):
        list(backend.download("k", 10))


@pytest.mark.parametrize(
    ("error", "reason"), [(ServerDisconnectedError(), "ServerDisconnectedError"), (SSLError("secret"), "no TLS")]
)
def test_what_the_libraries_below_raise_is_told_by_its_kind(error: Exception, reason: str) -> None:
    def attempt(_: float) -> None:
        raise error

    with pytest.raises(StoreError, match=reason) as raised:
        Retrier("http://store:8333", "b", Patience(deadline_s=0.05)).run("reading k", attempt)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("ask", [S3Backend.probe, lambda backend: list(backend.download("k", 10))])
def test_a_server_whose_certificate_is_refused_is_not_asked_again(
    ask: Callable[[S3Backend], object], tmp_path: Path
) -> None:
    with untrusted_server(tmp_path) as url:
        options = S3Options(endpoint_url=url, access_key="key", secret_key="secret")
        backend = S3Backend("s3://b", "b", "", options, Patience(deadline_s=600.0, open_s=600.0))
        with pytest.raises(StoreError, match=rf"^the certificate of the S3 server {url} is not trusted") as met:
            ask(backend)
    assert not met.value.passes


def test_a_clock_that_is_wrong_may_be_right_the_next_time() -> None:
    asked = []

    def attempt(given_s: float) -> None:
        asked.append(given_s)
        answer: Any = {"Error": {"Code": "RequestTimeTooSkewed"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        raise ClientError(answer, "PutObject")

    with pytest.raises(StoreNotReadyError, match=r"http://store:8333 and this machine differ on the time; set the"):
        Retrier("http://store:8333", "b", Patience()).run("writing k", attempt)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "address", ["http://my_store:8333", "http://[::1", "http://a..b", "http://a\n", "ftp://a", "a:1"]
)
def test_an_address_that_is_none_is_told(address: str) -> None:
    with pytest.raises(StoreError, match=r"RLHF_S3_ENDPOINT_URL\) must be http://host:port"):
        Retrier(address, "b", Patience())


@pytest.mark.parametrize("address", ["http://store:8333", "https://s3.example.org/path", "http://[::1]:8333"])
def test_an_address_that_is_one_is_taken(address: str) -> None:
    assert Retrier(address, "b", Patience()).server == address


@pytest.mark.parametrize("url", ["s3://[b", "s3://user:secret@[b", "s3://b/prefix?region=x", "file:///a#1", "s3:///b"])
def test_an_address_of_a_store_that_is_none_is_told(url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="RLHF_STORE_URL") as raised:
        open_store(url, cache_dir=tmp_path, s3=S3Options())
    assert "secret" not in str(raised.value)
