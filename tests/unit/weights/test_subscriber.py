"""A maker takes all of a publication or nothing, and never one that is older than what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from rlhf_core.rollout.worker import MakerActor, StaleWeightsError
from rlhf_core.weights import Publication, Publisher, Subscriber, WeightsError
from tests.unit.weights.published import WAIT_S, assert_holds, held, models, update, weights


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(transport="shared_memory", bucket_bytes=1, dtype=torch.float32)
    yield made
    made.close()


@pytest.fixture
def successor() -> Iterator[Publisher]:
    """The publisher of a trainer that was started again."""
    made = Publisher(transport="shared_memory", dtype=torch.float32)
    yield made
    made.close()


def test_weights_replace_and_never_add(publisher: Publisher) -> None:
    own = models()
    subscriber = Subscriber(lambda: own)
    for version in range(3):
        assert subscriber.take(publisher.publish(weights().items(), version=version), WAIT_S) == version
    assert subscriber.version == 2
    assert_holds(own, weights())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor.extra": torch.ones(1)}, "unknown.*actor.extra"),
        ({"critic.head.bias": None}, "missing.*critic.head.bias"),
        ({"critic.head.bias": torch.ones(2)}, "another shape.*critic.head.bias"),
    ],
)
@pytest.mark.parametrize("fully", [True, False])
def test_weights_that_do_not_fit_leave_every_model_as_it_was(
    publisher: Publisher, change: dict[str, torch.Tensor | None], message: str, fully: bool
) -> None:
    own = models()
    before, subscriber = held(own), Subscriber(lambda: own)
    wrong = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with pytest.raises(WeightsError, match=message):
        subscriber.take(publisher.publish(wrong.items(), version=1, fully=fully), WAIT_S)
    assert subscriber.version is None
    assert_holds(own, before)


def test_an_update_may_leave_out_what_is_not_trained_and_a_full_publication_may_not(publisher: Publisher) -> None:
    own = models()
    subscriber, before = Subscriber(lambda: own), held(own)
    trained = {name: tensor for name, tensor in weights().items() if not name.startswith("actor.")}
    with pytest.raises(WeightsError, match="missing"):
        subscriber.take(publisher.publish(trained.items(), version=1), WAIT_S)
    assert subscriber.take(publisher.publish(trained.items(), version=1, fully=False), WAIT_S) == 1
    assert_holds(own, before | trained)


def test_damage_in_the_last_bucket_leaves_every_model_as_it_was(publisher: Publisher) -> None:
    own = models()
    subscriber = Subscriber(lambda: own)
    subscriber.take(publisher.publish(weights().items(), version=1), WAIT_S)
    publication = publisher.publish(weights(seed=1).items(), version=2)
    with open(f"/proc/self/fd/{publication.place.descriptor}", "r+b") as file:
        file.seek(publication.place.offsets[-1])
        file.write(b"x")
    with pytest.raises(WeightsError, match=f"bucket {len(publication.buckets) - 1} .* damaged"):
        subscriber.take(publication, WAIT_S)
    assert subscriber.version == 1
    assert_holds(own, weights())


def test_an_older_version_is_refused_unless_it_is_a_full_one_of_another_trainer(
    publisher: Publisher, successor: Publisher
) -> None:
    own = models()
    subscriber = Subscriber(lambda: own)

    def take(by: Publisher, version: int, *, fully: bool = True) -> Publication:
        publication = by.publish(weights(seed=version).items(), version=version, fully=fully)
        subscriber.take(publication, WAIT_S)
        return publication

    late = take(publisher, 4)
    take(publisher, 5)
    with pytest.raises(WeightsError, match="version 4 came after those of version 5"):
        subscriber.take(late, WAIT_S)
    with pytest.raises(WeightsError, match="version 3 came after"):
        take(successor, 3, fully=False)
    assert_holds(own, weights(seed=5))
    take(successor, 3)  # restored from the state after its third episode
    assert subscriber.version == 3
    assert_holds(own, weights(seed=3))


def test_whose_full_weights_are_held_is_known_whoever_sent_an_update_since(
    publisher: Publisher, successor: Publisher
) -> None:
    own = models()
    subscriber = Subscriber(lambda: own)
    assert subscriber.incarnation is None
    first = publisher.publish(weights().items(), version=1)
    subscriber.take(first, WAIT_S)
    assert subscriber.incarnation == first.incarnation
    subscriber.take(successor.publish(weights(seed=2).items(), version=2, fully=False), WAIT_S)
    assert subscriber.incarnation == first.incarnation
    full = successor.publish(weights(seed=2).items(), version=2)
    subscriber.take(full, WAIT_S)
    assert subscriber.incarnation == full.incarnation != first.incarnation


def test_a_swap_that_fails_half_way_leaves_no_version(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    own = models()
    subscriber = Subscriber(lambda: own)
    subscriber.take(publisher.publish(weights().items(), version=1), WAIT_S)
    later = publisher.publish(update(seed=1).items(), version=2, fully=False)  # these are copied
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", _run_out_of_memory_at_second(torch.Tensor.copy_))
        with pytest.raises(MemoryError):
            subscriber.take(later, WAIT_S)
    assert subscriber.version is None
    assert subscriber.take(later, WAIT_S) == 2
    assert_holds(own, weights() | update(seed=1))


def test_a_maker_makes_nothing_with_weights_that_were_replaced_half_way(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = models()
    maker = MakerActor("maker-0", lambda: SimpleNamespace(**own))  # type: ignore[arg-type, return-value]
    maker.build()
    maker.load_weights(publisher.publish(weights().items(), version=1), WAIT_S)
    later = publisher.publish(update(seed=1).items(), version=2, fully=False)  # these are copied
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", _run_out_of_memory_at_second(torch.Tensor.copy_))
        with pytest.raises(MemoryError):
            maker.load_weights(later, WAIT_S)
    with pytest.raises(StaleWeightsError, match="maker-0 holds no weights, but version 1"):
        maker.make_chunk(None, 1, None)


def _run_out_of_memory_at_second(copy: object) -> object:
    calls: list[int] = []

    def copied(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return copy(*arguments)  # type: ignore[operator]

    return copied
