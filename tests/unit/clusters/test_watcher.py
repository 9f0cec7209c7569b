"""The watcher's own thread: nothing that the control server does or says ends it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from infra.clusters import existing
from infra.clusters.control_server import Job
from infra.clusters.existing import Charge, Watcher
from infra.errors import ClusterError


class Ended(BaseException):
    """Of this process, by which a watcher ends in truth."""


def in_turn(*steps: Any) -> Callable[..., Any]:
    """Return a function that returns or raises one thing after the other."""
    left = iter(steps)

    def step(*_: Any) -> Any:
        if isinstance(now := next(left), BaseException):
            raise now
        return now

    return step


@pytest.mark.parametrize("error", [ClusterError("it is away"), KeyError("a surprise")])
def test_a_watch_that_meets_an_error_goes_on(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(existing, "_CHECK_S", 0.001)
    watch = Watcher.__new__(Watcher)  # without a cluster
    watch._charge, watch._silent_looks, watch._me = Charge("rlhf:night:m", "job", 120.0), 0, b"me"
    server: Any = SimpleNamespace(
        job=in_turn(error, Job(False, ""), Job(True, "")),
        end_runs=in_turn(error, None),
        actors=in_turn([]),
        kill=in_turn(Ended()),
    )
    watch._server = server
    with pytest.raises(Ended):
        watch._watch()
