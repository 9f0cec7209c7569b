"""Clients that wait for a server that is away: it answers what a test says, and their waits are only counted."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from prefect.client import base, orchestration
from prefect.exceptions import PrefectHTTPStatusError

from infra.patience import FAULTY_S, LONGEST_WAIT_S, Attempts, install, patience, with_key

REQUEST = httpx.Request("POST", "http://server/api/flow_runs/")
Answers = Callable[[int], httpx.Response]
"""What the server makes of the call of this number, from one on."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that a client would have made."""
    made: list[float] = []

    async def wait(wait_s: float) -> None:
        made.append(wait_s)

    monkeypatch.setattr(time, "sleep", made.append)
    monkeypatch.setattr(anyio, "sleep", wait)
    monkeypatch.setattr(Attempts, "in_vain", False)
    monkeypatch.setattr(Attempts, "said", False)
    for name in ("PrefectHttpxSyncClient", "PrefectHttpxAsyncClient"):
        monkeypatch.setattr(orchestration, name, getattr(base, name))  # whatever was installed is undone at the end
    install(900.0)
    return made


def call_sync(answers: Answers) -> int:
    """Make one call with a new client, as each task does, and return the answer's code."""
    client_class: type[base.PrefectHttpxSyncClient] = vars(orchestration)["PrefectHttpxSyncClient"]
    with client_class(base_url="http://server", transport=_transport(answers)) as client:
        return int(client.post("/flow_runs/", json={}).status_code)


def call_async(answers: Answers) -> int:
    client_class: type[base.PrefectHttpxAsyncClient] = vars(orchestration)["PrefectHttpxAsyncClient"]

    async def call() -> int:
        async with client_class(base_url="http://server", transport=_transport(answers)) as client:
            return int((await client.post("/flow_runs/", json={})).status_code)

    return asyncio.run(call())


def _transport(answers: Answers) -> httpx.MockTransport:
    calls = iter(range(1, 10_000))
    return httpx.MockTransport(lambda _: answers(next(calls)))


def away(times: int, error: type[httpx.TransportError] = httpx.ConnectError, code: int = 0) -> Answers:
    def answer(number: int) -> httpx.Response:
        if number > times:
            return httpx.Response(201, json={})
        if code:
            return httpx.Response(code)
        raise error("nobody there")

    return answer


both = pytest.mark.parametrize("call", [call_sync, call_async], ids=["sync", "async"])


@both
@pytest.mark.parametrize(
    "fault",
    [
        {"error": httpx.ConnectError},
        {"error": httpx.ReadError},
        {"error": httpx.ReadTimeout},
        {"error": httpx.RemoteProtocolError},
        {"code": 500},
        {"code": 502},
        {"code": 503},
        {"code": 504},
    ],
    ids=lambda fault: str(fault.get("code") or fault["error"].__name__),
)
def test_a_new_client_asks_until_the_server_is_back(
    call: Callable[[Answers], int], fault: dict[str, Any], waits: list[float]
) -> None:
    assert call(away(6, **fault)) == 201
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


@both
def test_a_run_that_a_lost_answer_told_of_is_not_made_twice(
    call: Callable[[Answers], int], monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    del waits
    made: list[dict[str, Any]] = []

    def transport(answers: Answers) -> httpx.MockTransport:
        def handle(request: httpx.Request) -> httpx.Response:
            made.append(json.loads(request.content))
            assert int(request.headers["content-length"]) == len(request.content)
            return answers(len(made))

        return httpx.MockTransport(handle)

    monkeypatch.setitem(globals(), "_transport", transport)
    assert call(away(2, httpx.ReadError)) == 201
    assert made[0]["idempotency_key"]
    assert made[0] == made[1] == made[2]
    first = made[0]["idempotency_key"]
    made.clear()
    assert call(away(0)) == 201
    assert made[0]["idempotency_key"] != first, "another run has another key"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/flow_runs/filter", {}),
        ("POST", "/api/logs/", []),
        ("GET", "/api/flow_runs/", None),
        ("POST", "/api/flow_runs/", {"idempotency_key": "theirs"}),
    ],
)
def test_all_other_calls_are_made_as_they_are(method: str, path: str, body: Any) -> None:
    request = httpx.Request(method, f"http://server{path}", json=body)
    assert with_key(request) is request


@both
def test_it_raises_as_before_after_a_quarter_of_an_hour_and_never_waits_long_at_once(
    call: Callable[[Answers], int], waits: list[float]
) -> None:
    with pytest.raises(httpx.ConnectError):
        call(away(10_000))
    assert sum(waits) == pytest.approx(900.0, abs=1.0)
    assert max(waits) == LONGEST_WAIT_S


@both
def test_an_answer_that_stays_bad_is_raised_as_before(call: Callable[[Answers], int], waits: list[float]) -> None:
    with pytest.raises(PrefectHTTPStatusError, match="503"):
        call(away(10_000, code=503))
    assert sum(waits) == pytest.approx(900.0, abs=1.0)


@both
def test_a_fault_of_the_server_is_soon_believed(call: Callable[[Answers], int], waits: list[float]) -> None:
    with pytest.raises(PrefectHTTPStatusError, match="500"):
        call(away(10_000, code=500))
    assert sum(waits) == pytest.approx(FAULTY_S, abs=1.0)


@both
@pytest.mark.parametrize("code", [400, 401, 404, 409, 422])
def test_a_refusal_is_raised_at_once(call: Callable[[Answers], int], code: int, waits: list[float]) -> None:
    with pytest.raises(PrefectHTTPStatusError, match=str(code)):
        call(away(10_000, code=code))
    assert waits == []


@both
def test_what_only_shows_things_waits_less(call: Callable[[Answers], int], waits: list[float]) -> None:
    with patience(20.0), pytest.raises(PrefectHTTPStatusError, match="503"):
        call(away(10_000, code=503))
    assert sum(waits) == pytest.approx(20.0, abs=1.0)
    waits.clear()
    assert call(away(60)) == 201, "the next call has all the time again"


@both
def test_once_it_waited_in_vain_the_last_words_of_a_run_are_short(
    call: Callable[[Answers], int], waits: list[float]
) -> None:
    with pytest.raises(httpx.ConnectError):
        call(away(10_000))
    waits.clear()
    with pytest.raises(httpx.ConnectError):
        call(away(10_000))
    assert sum(waits) == pytest.approx(30.0, abs=1.0)
    assert call(away(0)) == 201
    assert call(away(60)) == 201, "a server that has answered is waited for as at first"


@both
def test_a_certificate_that_is_refused_is_not_waited_for(call: Callable[[Answers], int], waits: list[float]) -> None:
    def refuse(_: int) -> httpx.Response:
        raise httpx.ConnectError("certificate verify failed") from ssl.SSLCertVerificationError("self-signed")

    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        call(refuse)
    assert waits == []


def test_a_process_that_was_stopped_has_not_waited_all_the_while() -> None:
    now = 0.0
    attempts = Attempts(REQUEST, 900.0, clock=lambda: now)
    now = 8 * 3600.0
    assert attempts.wait_s(httpx.ConnectError("")) is not None
    assert attempts.spent_s < 100


def test_attempts_that_hang_count_as_waiting() -> None:
    now, tried = 0.0, 0
    attempts = Attempts(REQUEST, 900.0, clock=lambda: now)
    now = 30.0
    while (wait_s := attempts.wait_s(httpx.ReadTimeout(""))) is not None:
        now += wait_s + 30.0
        tried += 1
    assert now == pytest.approx(900.0, abs=40.0)
    assert 20 < tried < 32


def test_a_long_absence_is_said_once_without_what_was_asked(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    del waits
    with caplog.at_level("WARNING", logger="prefect.client"):
        call_sync(away(2))
        assert caplog.messages == []
        with patience(60.0), pytest.raises(httpx.ConnectError):
            call_sync(away(10_000))
        call_sync(away(20))
        said = "The Prefect server at http://server/ is away (ConnectError): asking it again for %d min"
        assert caplog.messages == [said % 1]
        call_sync(away(20))
    assert caplog.messages == [said % 1, said % 15]
