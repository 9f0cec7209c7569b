"""What the first rank says of others that are gone, or keep silent. Ray is a stand-in here."""

from __future__ import annotations

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


def test_one_that_failed_is_heard_while_another_waits_for_it_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(references: list[str]) -> list[str]:
        if "failed" in references:
            raise OSError("its own reason")
        return references

    def wait(references: list[str], *, num_returns: int = 1, timeout: float) -> tuple[list[str], list[str]]:
        done = [reference for reference in references if reference == "failed"][:num_returns]
        assert num_returns == 1, f"all are waited for, {timeout:.0f} s"
        return done, [reference for reference in references if reference not in done]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(OSError, match="its own reason"):
        answers({"waits": "trainer-1", "failed": "trainer-2"}, 300.0)
    with pytest.raises(TimeoutError, match="waited 0 s for trainer-1 of the trainer group"):
        answers({"waits": "trainer-1"}, 0.01)
