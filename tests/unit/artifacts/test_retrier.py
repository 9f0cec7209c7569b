"""How long a server is waited for."""

from __future__ import annotations

from typing import Any

import pytest

from infra.artifacts import retrier
from infra.artifacts.credentials import S3Options
from infra.artifacts.retrier import Patience, Retrier
from infra.artifacts.s3 import S3Backend
from infra.errors import StoreAwayError, StoreError


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
        monkeypatch.setattr(retrier, "clock", self)

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
