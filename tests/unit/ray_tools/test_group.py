"""What the first rank says of others that are gone, or keep silent. Ray is a stand-in here."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import ray

from rlhf_core.errors import LostRankError
from rlhf_core.ray_tools.group import Peers, answers


def test_a_rank_that_ended_before_it_was_called_is_named_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str, namespace: str | None = None) -> Any:  # noqa: ARG001
        raise ValueError(f"Failed to look up actor with name '{name}'")

    monkeypatch.setattr(ray, "get_actor", get_actor)
    with (
        pytest.raises(LostRankError, match=r"^rank 1 of 3 \(trainer-1\) has ended"),
        Peers(["trainer-1", "trainer-2"], 5.0).taking_part("build"),
    ):
        pytest.fail("nothing can be done without it")


def test_a_rank_that_does_not_answer_is_named() -> None:
    class Silent:
        def future(self) -> Future[Any]:
            return Future()

    with pytest.raises(TimeoutError, match="waited 0 s for trainer-1 of the trainer group"):
        answers({Silent(): "trainer-1"}, 0.01)
