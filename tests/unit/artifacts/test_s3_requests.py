"""An S3 server is asked until its deadline, and what goes wrong is told in one sentence, whichever library met it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ServerDisconnectedError
from botocore.exceptions import ClientError, ReadTimeoutError
from urllib3.exceptions import SSLError

from infra.artifacts import S3Options, open_store, s3_requests
from infra.artifacts.s3 import S3Backend
from infra.artifacts.s3_requests import Patience, Retrier
from infra.errors import StoreAwayError, StoreError, StoreNotReadyError
from tests.unit.untrusted_server import untrusted_server


def test_a_body_has_the_time_that_a_slow_line_takes_for_it() -> None:
    given: list[float] = []
    retrier = Retrier("http://store:8333", "b", Patience(attempt_s=10.0, slowest=1000.0))
    retrier.run("reading x", given.append)
    retrier.run("writing x", given.append, size=50_000)
    assert given == [10.0, 60.0]


def test_an_attempt_has_no_more_than_is_left_until_the_deadline() -> None:
    given: list[float] = []
    Retrier("http://store:8333", "b", Patience(deadline_s=3.0)).run("reading x", given.append)
    assert given[0] == pytest.approx(3.0, abs=0.5)


def test_a_server_that_is_away_is_named_with_its_address() -> None:
    def attempt(_: float) -> None:
        raise ConnectionRefusedError

    retrier = Retrier("http://store:8333", "b", Patience(deadline_s=0.05))
    with pytest.raises(StoreError, match=r"http://store:8333 did not answer within 0 s while reading x"):
        retrier.run("reading x", attempt)


class Sleeper:
    """A process that is stopped for so long in its attempts, or in its pauses, by turns; only the last is answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *stops_s: float, in_pauses: bool = False) -> None:
        self.now_s, self.stops_s, self.attempts, self.in_pauses = 0.0, list(stops_s), 0, in_pauses
        monkeypatch.setattr(s3_requests, "clock", self)

    def boottime(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds + (self.stops_s.pop(0) if self.in_pauses and self.stops_s else 0.0)

    def attempt(self, given_s: float) -> str:
        self.attempts += 1
        if not self.stops_s:
            return "answer"
        self.now_s += given_s + (0.0 if self.in_pauses else self.stops_s.pop(0))
        raise TimeoutError


@pytest.mark.parametrize("in_pauses", [False, True])
def test_time_for_which_the_process_was_stopped_is_not_waited(monkeypatch: pytest.MonkeyPatch, in_pauses: bool) -> None:
    asleep = Sleeper(monkeypatch, 1000.0, 0.0, in_pauses=in_pauses)
    assert Retrier("http://store:8333", "b", Patience()).run("reading x", asleep.attempt) == "answer"
    assert asleep.attempts == 3


@pytest.mark.parametrize(
    ("stops_s", "stops_count", "attempts"),
    [
        ([0.0] * 9, False, 3),
        ([1000.0, 0.0], True, 1),
        ([2000.0, 0.0], False, 1),
        ([1000.0, 1000.0, 0.0], False, 2),
    ],
    ids=["never stopped", "a deletion", "stopped for long", "stopped again and again"],
)
@pytest.mark.parametrize("in_pauses", [False, True])
def test_a_deadline_comes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, stops_s: list[float], stops_count: bool, attempts: int, in_pauses: bool
) -> None:
    asleep = Sleeper(monkeypatch, *stops_s, in_pauses=in_pauses)
    with pytest.raises(StoreAwayError):
        Retrier("http://store:8333", "b", Patience()).run("reading x", asleep.attempt, stops_count=stops_count)
    assert asleep.attempts == attempts


def test_a_deletion_counts_what_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    backend = S3Backend("s3://b", "b", "", S3Options("http://store:8333", "key", "secret"))
    monkeypatch.setattr(backend._retrier, "run", lambda *_, **given: told.update(given))
    backend.delete("leases/x.json")
    assert told["stops_count"]


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


def test_an_attempt_that_the_deadline_cut_short_does_not_hide_the_answer_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Sleeper(monkeypatch)

    def attempt(given_s: float) -> None:
        if clock.now_s == 0.0:
            raise ClientError({"Error": {"Code": "503"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "GetObject")
        clock.now_s += given_s
        raise ReadTimeoutError(endpoint_url="http://store:8333")

    with pytest.raises(StoreError, match=r"could not do what we asked within 2 s, reading x .*: it answered 503"):
        Retrier("http://store:8333", "b", Patience(deadline_s=2.0)).run("reading x", attempt)


def test_a_server_that_answered_and_is_gone_is_told_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Sleeper(monkeypatch)

    def attempt(_: float) -> None:
        if clock.now_s == 0.0:
            raise ClientError({"Error": {"Code": "503"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "GetObject")
        raise ConnectionRefusedError

    with pytest.raises(StoreError, match=r"did not answer within 2 s while reading x"):
        Retrier("http://store:8333", "b", Patience(deadline_s=2.0)).run("reading x", attempt)


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
