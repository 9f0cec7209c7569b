"""A difference gives the very bits of a full publication, or all of it is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from rlhf_core.weights import Publication, Publisher, Subscriber, WeightsError, subscriber
from rlhf_core.weights import difference as differences
from rlhf_core.weights.shared_memory import SharedMemoryReceiver
from tests.unit.weights.published import WAIT_S

WIDTH = 999  # no multiple of eight


def drifting(versions: int, *, by: float = 1e-5) -> Iterator[dict[str, torch.Tensor]]:
    """Float32 weights that move as far in a version as PPO's do, heads among them."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "actor.weight": torch.randn(3, WIDTH, generator=generator) * 0.05,
        "critic.head.weight": torch.randn(1, WIDTH, generator=generator),
    }
    for _ in range(versions):
        yield {name: tensor.clone() for name, tensor in weights.items()}
        weights["actor.weight"] += by * torch.randn(3, WIDTH, generator=generator).sign()
        weights["critic.head.weight"][0, :40] += 1e-6


def maker() -> dict[str, nn.Module]:
    actor = nn.Linear(WIDTH, 3, bias=False).bfloat16()
    return {"actor": actor, "critic": nn.ModuleDict({"head": nn.Linear(WIDTH, 1, bias=False)})}


def assert_holds(models: dict[str, nn.Module], weights: dict[str, torch.Tensor]) -> None:
    assert torch.equal(models["actor"].weight, weights["actor.weight"].bfloat16())
    assert torch.equal(models["critic"]["head"].weight, weights["critic.head.weight"])  # type: ignore[index]


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(transport="shared_memory", bucket_bytes=100, dtype=torch.bfloat16, sparse=True)
    yield made
    made.close()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of everything that is fetched."""
    found: list[int] = []
    plain = SharedMemoryReceiver.buckets

    def counted(self: SharedMemoryReceiver, publication: Publication, timeout_s: float) -> object:
        found.append(publication.nbytes)
        return plain(self, publication, timeout_s)

    monkeypatch.setattr(SharedMemoryReceiver, "buckets", counted)
    return found


def test_version_after_version_gives_the_bits_of_full_ones_for_less_than_half_the_bytes(
    publisher: Publisher, fetched: list[int]
) -> None:
    models = maker()
    subscriber = Subscriber(lambda: models)
    for version, weights in enumerate(drifting(20)):
        subscriber.take(publisher.publish(weights.items(), version=version), WAIT_S)
        publisher.retire(in_use={version})
        assert_holds(models, weights)
    full = 3 * WIDTH * 2 + WIDTH * 4
    assert fetched[0] == full
    assert len(fetched) == 20
    assert all(0 < size < full / 2 for size in fetched[1:])


def test_a_maker_that_missed_a_version_takes_all_of_it(publisher: Publisher, fetched: list[int]) -> None:
    models = maker()
    subscriber = Subscriber(lambda: models)
    told = [
        (publisher.publish(weights.items(), version=version), weights) for version, weights in enumerate(drifting(3))
    ]
    for publication, weights in (told[0], told[2]):
        subscriber.take(publication, WAIT_S)
        assert_holds(models, weights)
    assert fetched == [told[0][0].nbytes] * 2


def test_no_difference_is_laid_out_where_most_values_change(publisher: Publisher) -> None:
    found = [publisher.publish(weights.items(), version=v) for v, weights in enumerate(drifting(2, by=1.0))]
    assert found[1].difference is None


def write(publication: Publication, buckets: Sequence[int]) -> None:
    with open(f"/proc/self/fd/{publication.place.descriptor}", "r+b") as file:
        for bucket in buckets:
            file.seek(publication.place.offsets[bucket])
            file.write(b"damage")


def tamper(models: dict[str, nn.Module], first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Change a weight that the difference does not overwrite."""
    same = (first["actor.weight"].bfloat16() == second["actor.weight"].bfloat16()).nonzero()[0]
    with torch.no_grad():
        models["actor"].weight[tuple(same)] += 1


@pytest.mark.parametrize("what", ["the difference is damaged", "the maker has other weights", "other dtypes"])
def test_a_difference_that_does_not_lead_there_is_left_for_all_of_it(publisher: Publisher, what: str) -> None:
    first, second = drifting(2)
    models = maker()
    subscriber = Subscriber(lambda: models)
    subscriber.take(publisher.publish(first.items(), version=0), WAIT_S)
    publication = publisher.publish(second.items(), version=1)
    assert publication.difference is not None
    if what == "the difference is damaged":
        write(publication.difference.update, [0])
    elif what == "other dtypes":
        models["actor"].float()
    else:
        tamper(models, first, second)
    subscriber.take(publication, WAIT_S)
    if what == "other dtypes":
        models["actor"].bfloat16()
    assert_holds(models, second)
    assert subscriber.version == 1


@pytest.mark.parametrize("what", ["gone", "late", "not applicable"])
def test_a_difference_that_does_not_come_or_fails_is_left_for_all_of_it(
    publisher: Publisher, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = drifting(2)
    models = maker()
    taking = Subscriber(lambda: models)
    taking.take(publisher.publish(first.items(), version=0), WAIT_S)
    publication = publisher.publish(second.items(), version=1)
    difference = publication.difference
    assert difference is not None
    waits, plain = [], SharedMemoryReceiver.buckets

    def buckets(self: SharedMemoryReceiver, wanted: Publication, timeout_s: float) -> object:
        waits.append(timeout_s)
        if wanted is difference.update and what == "late":
            raise TimeoutError
        return plain(self, wanted, timeout_s)

    def fail(*_: object) -> bool:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(SharedMemoryReceiver, "buckets", buckets)
    if what == "not applicable":
        monkeypatch.setattr(subscriber, "apply", fail)
    elif what == "gone":
        place = replace(difference.update.place, label="another")
        difference = replace(difference, update=replace(difference.update, place=place))
        publication = replace(publication, difference=difference)
    assert taking.take(publication, WAIT_S) == 1
    assert_holds(models, second)
    assert waits[0] <= WAIT_S / 2  # time is left for the whole
    assert waits[1] <= WAIT_S


def test_a_difference_that_came_to_a_gpu_is_applied() -> None:
    class OnGpu(torch.Tensor):
        def numpy(self) -> object:  # type: ignore[override]
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")

        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return self.as_subclass(torch.Tensor)

    old, new = ({"actor.w": torch.arange(5.0) + by * torch.tensor([1.0, 0, 0, 0, 0])} for by in (0, 1))
    changes = differences.changes(old, new)
    assert changes is not None
    sent = Publisher(transport="shared_memory", dtype=torch.float32).publish(changes.items(), version=1, fully=False)
    told = differences.Difference(0, differences.checksums(new), sent)
    assert differences.apply(told, old, {name: tensor.as_subclass(OnGpu) for name, tensor in changes.items()})
    assert torch.equal(old["actor.w"], new["actor.w"])


def test_weights_are_as_before_if_neither_leads_there(publisher: Publisher) -> None:
    first, second = drifting(2)
    models = maker()
    subscriber = Subscriber(lambda: models)
    subscriber.take(publisher.publish(first.items(), version=0), WAIT_S)
    publication = publisher.publish(second.items(), version=1)
    tamper(models, first, second)
    before = models["actor"].weight.detach().clone()
    write(publication, [0])
    with pytest.raises(WeightsError, match="bucket 0 of weights version 1 arrived damaged"):
        subscriber.take(publication, WAIT_S)
    assert torch.equal(models["actor"].weight, before)
    assert torch.equal(models["critic"]["head"].weight, first["critic.head.weight"])  # type: ignore[index]
    assert subscriber.version == 0
