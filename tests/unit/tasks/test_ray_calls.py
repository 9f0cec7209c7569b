from __future__ import annotations

import pytest
import ray.exceptions

from infra.errors import StoreError
from rlhf_core.detached.dealing.ledger import MakersLostError
from rlhf_core.detached.publication import WeightsError
from rlhf_core.errors import LostRankError, TrainingError
from tasks.ray_calls import may_pass, sentence, unwrapped


def raised_in_an_actor(cause: Exception) -> ray.exceptions.RayTaskError:
    error = ray.exceptions.RayTaskError("run_episode", "a remote\ntraceback", cause)
    return error.as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.ActorDiedError(),
        ray.exceptions.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory"),
        TimeoutError("waited 5 s for the trainer"),
        raised_in_an_actor(MakersLostError("every maker has died")),
        raised_in_an_actor(TimeoutError("waited 5 s for maker-0")),
        raised_in_an_actor(WeightsError("bucket 3 is damaged")),
        LostRankError("rank 1 of 2 has ended"),
        raised_in_an_actor(LostRankError("rank 1 of 2 has ended")),
    ],
)
def test_what_a_new_group_can_mend_is_tried_again_and_then_told_in_one_line(error: Exception) -> None:
    assert may_pass(error)
    assert len(sentence(error).splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [ValueError("a shape"), raised_in_an_actor(ValueError("a shape")), raised_in_an_actor(TrainingError("not finite"))],
)
def test_a_bug_or_a_bad_number_is_never_tried_again(error: Exception) -> None:
    assert not may_pass(error)


@pytest.mark.parametrize("cause", [TrainingError("the loss is not finite"), StoreError("the store is away")])
def test_a_sentence_that_an_actor_raised_is_raised_as_itself(cause: Exception) -> None:
    def call() -> None:
        raise raised_in_an_actor(cause)

    with pytest.raises(type(cause)) as caught:
        unwrapped(call)
    assert caught.value is cause
    assert str(caught.value) == str(cause)


def test_a_bug_in_an_actor_keeps_its_traceback() -> None:
    def call() -> None:
        raise raised_in_an_actor(ValueError("a shape"))

    with pytest.raises(ray.exceptions.RayTaskError, match="traceback"):
        unwrapped(call)
