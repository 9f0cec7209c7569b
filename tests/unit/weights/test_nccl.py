"""What carries weights from GPU to GPU, with gloo in NCCL's place: makers ask, and nobody's end is another's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from rlhf_core.weights import Publication, Publisher, WeightsError, nccl, publisher
from rlhf_core.weights.nccl import Connection, NcclReceiver, NcclSender
from tests.unit.weights.published import WAIT_S, Maker, weights


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    for module in (nccl, publisher):
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


def transport_of(sender: Publisher) -> NcclSender:
    found = sender._senders["nccl 127.0.0.1"]
    assert isinstance(found, NcclSender)
    return found


@pytest.mark.integration
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


@pytest.mark.integration
def test_a_maker_that_dies_costs_the_others_nothing(sender: Publisher, makers: list[Maker]) -> None:
    first, second = makers
    assert_has(first.take(publish(sender, 1)), 1)
    assert_has(second.take(publish(sender, 1)), 1)
    first.end()
    assert_has(second.take(publish(sender, 2)), 2)
    revived = Maker(device="cpu")
    assert_has(revived.take(publish(sender, 3)), 3)
    revived.end()


@pytest.mark.integration
def test_a_trainer_that_is_silent_or_gone_is_named_at_the_deadline(sender: Publisher, makers: list[Maker]) -> None:
    maker = makers[0]
    publication = publish(sender, 1)
    transport_of(sender)._closing.set()  # it lives, and answers nobody
    time.sleep(2 * nccl._POLL_S)
    answer = maker.take(publication, timeout_s=2)
    assert answer.startswith("TimeoutError: waited 2 s for weights of version 1 from the trainer at 127.0.0.1")
    sender.close()
    successor = Publisher(transport="nccl", dtype=torch.float32)
    try:
        assert_has(maker.take(publish(successor, 2), WAIT_S), 2)
    finally:
        successor.close()


@pytest.mark.integration
@pytest.mark.parametrize("written", [None, "nonsense"])
def test_a_request_that_is_not_written_or_not_to_be_read_holds_up_nobody(
    sender: Publisher, makers: list[Maker], written: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_WRITTEN_S", 0.2, raising=False)
    publication = publish(sender, 1)
    store = nccl.connect("127.0.0.1", publication.place.port, WAIT_S)
    ticket = store.add("requests", 1)  # whoever drew it is gone
    if written is not None:
        store.set(f"request/{ticket}", written)
    assert_has(makers[0].take(publication, timeout_s=10), 1)


def test_a_publisher_that_nobody_asks_is_silent(sender: Publisher, capfd: pytest.CaptureFixture[str]) -> None:
    publish(sender, 1)
    time.sleep(1.2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.integration
def test_the_connection_of_a_maker_that_came_up_again_replaces_its_former_one(sender: Publisher) -> None:
    groups = []
    for version in (1, 2):
        maker = Maker(device="cpu", name="maker-0")
        assert_has(maker.take(publish(sender, version)), version)
        maker.end()
        groups += list(transport_of(sender)._connections.values())
    assert list(transport_of(sender)._connections) == ["maker-0"]
    former, latter = groups
    assert former._group is None
    assert latter._group is not None


def test_a_group_that_cannot_be_left_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def abort(self) -> None:
            time.sleep(WAIT_S)

    monkeypatch.setattr(nccl, "_ABORT_S", 0.1, raising=False)
    own = Connection(None, "name", 1, torch.device("cpu"))
    own._group = Stuck()
    started = time.monotonic()
    own.abort()
    assert time.monotonic() - started < 5


def test_one_deadline_holds_for_connecting_asking_and_fetching(
    sender: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = publish(sender, 1)
    transport_of(sender)._closing.set()
    connect = nccl.connect

    def slowly(*arguments: object) -> object:
        time.sleep(1.6)
        return connect(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(nccl, "connect", slowly)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="waited 2 s"), NcclReceiver().buckets(publication, 2.0):
        pass
    assert time.monotonic() - started < 3


def test_a_process_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(WeightsError, match="this process has none; choose auto"):
        Publisher(transport="nccl", dtype=torch.float32).publish(weights().items(), version=1)
