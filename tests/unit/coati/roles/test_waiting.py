"""What an actor's failure means to a run of the four groups, in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from rlhf_core.coati.roles import waiting
from rlhf_core.coati.roles.base import BasePPORole
from rlhf_core.errors import DataError, LostRankError, TrainingError


class OutOfMemoryError(RuntimeError):
    """As torch's is called, and Ray's too."""


def failed(cause: Exception) -> RayError:
    return RayTaskError("learn", "traceback", cause)


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception | None]:
    """What is wrong with each member."""
    found: dict[str, Exception | None] = {"actor-0": None, "actor-1": None}
    monkeypatch.setattr(waiting, "troubles", lambda *_: found)
    return found


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (failed(DataError("no prompt")), DataError, "no prompt"),
        (failed(OutOfMemoryError("CUDA")), TrainingError, "the GPU's memory does not hold critic-0; lower --train"),
        (
            ray.exceptions.OutOfMemoryError("much"),
            TrainingError,
            "Ray ended critic-0 or another process of its machine",
        ),
        (failed(LostRankError("rank 1 of 2 is stopped")), LostRankError, "critic-0: rank 1 of 2 is stopped"),
        (failed(GetTimeoutError("Get timed out.")), TimeoutError, "critic-0: Get timed out"),
    ],
)
def test_what_an_actor_says_is_passed_on(error: RayError, kind: type[Exception], sentence: str) -> None:
    meaning = waiting.explained(error, "critic-0", {})
    assert type(meaning) is kind
    assert str(meaning).startswith(sentence)


@pytest.mark.usefixtures("states")
def test_a_fault_of_ours_is_shown_as_it_came() -> None:
    assert waiting.explained(failed(ZeroDivisionError()), "critic-0", {}) is None


@pytest.mark.parametrize("error", [failed(LostRankError("rank 1 of 2 has ended")), failed(ActorDiedError())])
def test_who_has_ended_is_named_whoever_noticed_it(error: Any, states: dict[str, Exception | None]) -> None:
    states["actor-1"] = ActorDiedError()
    meaning = waiting.explained(error, "initial-0", {})
    assert isinstance(meaning, LostRankError)
    assert str(meaning).startswith("actor-1 of this run has ended (")


def test_a_model_whose_part_of_a_batch_does_not_come_is_told_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs[:3], refs[3:4]))
    role: Any = SimpleNamespace(_settings=SimpleNamespace(timeout_s=30.0))
    refs: Any = SimpleNamespace(all=lambda: list("abcde"))
    with pytest.raises(TimeoutError, match="waited 30 s for the critic's values of one batch, which"):
        BasePPORole.make_experience(role, refs)
