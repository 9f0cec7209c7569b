"""How long a server is waited for."""

from __future__ import annotations

import pytest

from infra.artifacts.retrier import Patience, Retrier
from infra.errors import StoreError


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
