from __future__ import annotations

import pytest
import ray.exceptions

from infra.errors import StoreError
from rlhf_core.errors import TrainingError
from tasks.ray_calls import unwrapped


def raised_in_an_actor(cause: Exception) -> ray.exceptions.RayTaskError:
    error = ray.exceptions.RayTaskError("run_episode", "a remote\ntraceback", cause)
    return error.as_instanceof_cause()


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
