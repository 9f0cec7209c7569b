"""What carries weights from GPU to GPU, with gloo in NCCL's place: makers ask, and nobody's end is another's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from rlhf_core.detached.publication import Publication, Publisher, WeightsError, pairs, publisher
from tests.unit.detached.publication.published import WAIT_S, Maker, weights


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    for module in (pairs, publisher):
        monkeypatch.setattr(module, "own_device", lambda: torch.device("cpu"))
    made = Publisher(transport="nccl", bucket_bytes=1, dtype=torch.float32)
    yield made
    made.close()


@pytest.fixture
def makers() -> Iterator[list[Maker]]:
    with ExitStack() as stack:
        made = [Maker(device="cpu") for _ in range(2)]
        for maker in made:
            stack.callback(maker.end)
        yield made


def publish(sender: Publisher, version: int) -> Publication:
    return sender.publish(weights(seed=version).items(), version=version)


def assert_has(answer: object, version: int) -> None:
    assert isinstance(answer, tuple), answer
    assert answer[0] == version
    for name, tensor in weights(seed=version).items():
        assert (answer[1][name] == tensor.numpy()).all(), name


def test_each_maker_gets_what_it_asks_for_when_it_asks_for_it(sender: Publisher, makers: list[Maker]) -> None:
    first, second = makers
    older = publish(sender, 1)
    assert_has(first.take(older), 1)
    newer = publish(sender, 2)
    for maker in makers:
        maker.begin(newer)
    assert_has(first.answer(), 2)
    assert_has(second.answer(), 2)
    sender.retire(in_use={2})
    late = Maker(device="cpu")
    assert "weights of version 1 are replaced by newer ones" in late.take(older)
    assert_has(late.take(newer), 2)
    late.end()


def test_a_maker_that_dies_costs_the_others_nothing(sender: Publisher, makers: list[Maker]) -> None:
    first, second = makers
    assert_has(first.take(publish(sender, 1)), 1)
    assert_has(second.take(publish(sender, 1)), 1)
    first.end()
    assert_has(second.take(publish(sender, 2)), 2)
    revived = Maker(device="cpu")
    assert_has(revived.take(publish(sender, 3)), 3)
    revived.end()


def test_a_trainer_that_is_silent_or_gone_is_named_at_the_deadline(sender: Publisher, makers: list[Maker]) -> None:
    maker = makers[0]
    publication = publish(sender, 1)
    sender._outboxes["nccl 127.0.0.1"]._closing.set()  # type: ignore[attr-defined] # it lives, and answers nobody
    time.sleep(2 * pairs._LOOK_S)
    started = time.monotonic()
    answer = maker.take(publication, timeout_s=2)
    assert answer.startswith("TimeoutError: waited 2 s for weights of version 1 from the trainer at 127.0.0.1")
    assert time.monotonic() - started < 10
    sender.close()
    successor = Publisher(transport="nccl", dtype=torch.float32)
    try:
        assert_has(maker.take(publish(successor, 2), WAIT_S), 2)
    finally:
        successor.close()


def test_a_process_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(WeightsError, match="this process has none; choose auto"):
        Publisher(transport="nccl", dtype=torch.float32).publish(weights().items(), version=1)
