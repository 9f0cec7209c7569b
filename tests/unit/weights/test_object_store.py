"""What a maker says when buckets do not come out of Ray's object store, which tests/integration has a real one of."""

from __future__ import annotations

import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, OwnerDiedError

from rlhf_core.weights import Publication, Subscriber, WeightsError
from rlhf_core.weights.buckets import lay_out
from rlhf_core.weights.object_store import ObjectStorePlace, ObjectStoreSender
from tests.unit.weights.published import assert_holds, held, models, weights


@pytest.fixture
def publication(monkeypatch: pytest.MonkeyPatch) -> Publication:
    """With copies in place of references."""
    monkeypatch.setattr(ray, "put", lambda body: body.copy())
    monkeypatch.setattr(ray, "get", lambda references, **_: references)
    form = {"version": 7, "fully": True, "incarnation": "trainer"}
    return lay_out(weights().items(), ObjectStoreSender().begin(), dtype=torch.float32, bucket_bytes=1, **form)


def test_memory_that_is_used_for_every_second_bucket_mixes_none_up(publication: Publication) -> None:
    own = models()
    assert len(publication.buckets) == len(weights())
    for body in publication.place.references:
        body.flags.writeable = False  # as Ray's
    assert Subscriber(lambda: own).take(publication, 1) == 7
    assert_holds(own, weights())


def test_a_bucket_less_is_noticed(publication: Publication) -> None:
    place = ObjectStorePlace(publication.place.references[:-1])
    fewer = Publication(7, True, "trainer", publication.slots, publication.buckets, place)
    with pytest.raises(WeightsError, match="have 6 buckets, but 5 came"):
        Subscriber(models).take(fewer, 1)


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        (
            GetTimeoutError("late"),
            TimeoutError,
            "waited 3 s for 6 buckets of weights version 7 from the trainer's node",
        ),
        (OwnerDiedError("00", None, ""), WeightsError, "weights of version 7 are lost: the trainer"),
        (ObjectLostError("00", None, ""), WeightsError, "weights of version 7 are lost: the trainer"),
    ],
)
def test_what_does_not_come_is_said_in_a_sentence_and_changes_nothing(
    publication: Publication,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Exception,
    kind: type[Exception],
    message: str,
) -> None:
    def get(*_: object, **__: object) -> None:
        raise trouble

    monkeypatch.setattr(ray, "get", get)
    own = models()
    before = held(own)
    with pytest.raises(kind, match=message):
        Subscriber(lambda: own).take(publication, 3)
    assert_holds(own, before)
