"""Shared memory between real processes: it goes with the last of them, whoever is killed and when."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.phases import watch
from rlhf_core.weights import Publisher, Subscriber, WeightsError
from rlhf_core.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tests.forked import FORKED
from tests.unit.weights.published import WAIT_S, Maker, assert_holds, held, models, update, weights

BUCKETS = 6
"""Of one byte at most, so that each tensor has its own."""


@pytest.fixture
def maker() -> Iterator[Maker]:
    made = Maker()
    yield made
    made.end()


def _publish(pipe: Connection, stop_at: int) -> None:
    """Publish version 1, then die by SIGKILL when bucket `stop_at` of version 2 is about to be laid out."""
    publisher = Publisher(transport="shared_memory", bucket_bytes=1, dtype=torch.float32)
    pipe.send(publisher.publish(weights().items(), version=1))
    pipe.recv()  # the maker holds it
    laid = 0

    def die(phase: str) -> None:
        nonlocal laid
        if phase == "publish":
            if laid == stop_at:
                os.kill(os.getpid(), signal.SIGKILL)
            laid += 1

    watch(die)
    pipe.send(publisher.publish(weights(seed=2).items(), version=2))
    time.sleep(WAIT_S)


def holders(label: str) -> set[int]:
    """Ids of all processes that have a file open or mapped: without any, the kernel frees its memory."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            mapped = label in (process / "maps").read_text()
            if mapped or any(label in os.readlink(descriptor) for descriptor in (process / "fd").iterdir()):
                found.add(int(process.name))
    return found


@pytest.mark.integration
@pytest.mark.parametrize("stop_at", [0, 3, BUCKETS])
def test_a_trainer_killed_between_two_buckets_leaves_makers_on_the_old_version(maker: Maker, stop_at: int) -> None:
    pipe, theirs = FORKED.Pipe()
    trainer = FORKED.Process(target=_publish, args=(theirs, stop_at), daemon=True)
    trainer.start()
    assert pipe.poll(WAIT_S)
    first = pipe.recv()
    version, expected = maker.take(first)
    pipe.send("go on")
    if stop_at == BUCKETS:  # control: nothing killed it
        assert pipe.poll(WAIT_S)
        assert maker.take(pipe.recv())[0] == 2
        trainer.kill()
        trainer.join()
        return
    trainer.join(WAIT_S)
    assert trainer.exitcode == -signal.SIGKILL
    version, now = maker.take(first)  # it has it open still; anyone else does not
    assert version == 1
    assert all((now[name] == expected[name]).all() for name in expected)
    assert all((now[name] == tensor.numpy()).all() for name, tensor in weights().items())
    with pytest.raises(WeightsError, match=f"process {trainer.pid}, which published them, has ended"):
        Subscriber(models).take(first, WAIT_S)


@pytest.mark.integration
def test_the_memory_of_a_killed_trainer_is_free_once_no_maker_has_it_open(maker: Maker) -> None:
    pipe, theirs = FORKED.Pipe()
    trainer = FORKED.Process(target=_publish, args=(theirs, BUCKETS), daemon=True)
    names = set(os.listdir("/dev/shm"))
    trainer.start()
    assert pipe.poll(WAIT_S)
    publication = pipe.recv()
    maker.take(publication)
    label = publication.place.label
    assert holders(label) == {trainer.pid, maker.process.pid}
    trainer.kill()
    trainer.join()
    assert holders(label) == {maker.process.pid}
    maker.end()
    assert holders(label) == set()
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "weights" in name}


def held_parameters(own: Mapping[str, nn.Module]) -> list[Tensor]:
    return [parameter for model in own.values() for parameter in model.parameters()]


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor lies in a file of a publisher's."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return "rlhf-weights" in line
    return False


def fill(sender: SharedMemorySender, *bodies: Tensor) -> Any:
    file = sender.begin()
    for body in bodies:
        file.open(body.numel())[:] = body
        file.close(body.numel())
    return file


def inode(file: Any) -> int:
    return os.stat(f"/proc/self/fd/{file.place().descriptor}").st_ino


def test_a_retired_file_is_used_again_and_grows() -> None:
    sender = SharedMemorySender("trainer")
    first = fill(sender, torch.ones(5000, dtype=torch.uint8))
    number = inode(first)
    sender.free(first)
    second = fill(sender, torch.full((9000,), 2, dtype=torch.uint8), torch.full((9000,), 3, dtype=torch.uint8))
    assert inode(second) == number
    assert second.place().offsets == (0, 12288)
    sender.free(second)
    sender.close()


def test_a_file_that_held_a_model_gives_its_memory_back_when_adapters_follow() -> None:
    sender = SharedMemorySender("trainer")
    file = fill(sender, torch.ones(1 << 20, dtype=torch.uint8))
    sender.free(file)
    again = fill(sender, torch.ones(1 << 10, dtype=torch.uint8))
    assert os.stat(f"/proc/self/fd/{again.place().descriptor}").st_blocks * 512 <= 4096
    sender.free(again)
    sender.close()


def test_a_file_that_a_maker_reads_is_not_written() -> None:
    publisher = Publisher(transport="shared_memory", bucket_bytes=1, dtype=torch.float32)
    publication = publisher.publish(weights().items(), version=1)
    receiver = SharedMemoryReceiver()
    with receiver.buckets(publication, WAIT_S) as (buckets, _):
        before = [bucket.clone() for bucket in buckets]
        publisher.retire(in_use=())
        other = publisher.publish(weights(seed=2).items(), version=2)
        assert other.place.label != publication.place.label
        assert all(map(torch.equal, buckets, before))
    publisher.close()
    receiver.close()


def test_versions_in_use_stay_and_two_files_serve_any_number_of_versions() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    own = models()
    subscriber = Subscriber(lambda: own)
    first = publisher.publish(weights().items(), version=0)
    labels = set()
    for version in range(1, 6):
        publication = publisher.publish(weights(seed=version).items(), version=version)
        publisher.retire(in_use={0, version})
        labels.add(publication.place.label)
        subscriber.take(publication, WAIT_S)
    assert len(labels) == 2
    late = models()
    Subscriber(lambda: late).take(first, WAIT_S)
    assert_holds(late, weights())
    late = models()  # the former weights go, and let go of their file
    publisher.retire(in_use={5})
    publisher.publish(weights(seed=6).items(), version=6)
    publisher.publish(weights(seed=7).items(), version=7)
    before = held(late)
    with pytest.raises(WeightsError, match="bucket 0 of weights version 0 arrived damaged"):
        Subscriber(lambda: late).take(first, WAIT_S)
    assert_holds(late, before)
    publisher.close()
    subscriber.close()


def test_makers_use_the_memory_itself_which_the_trainer_does_not_write_as_long_as_they_do() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    first, second = models(), models()
    subscribers = [Subscriber(lambda: first), Subscriber(lambda: second)]
    labels = set()
    for version in range(6):
        publication = publisher.publish(weights(seed=version).items(), version=version)
        labels.add(publication.place.label)
        for subscriber, own in zip(subscribers, (first, second), strict=True):
            subscriber.take(publication, WAIT_S)
            assert_holds(own, weights(seed=version))
            assert all(map(is_shared, held_parameters(own)))
        publisher.retire(in_use={version})
    assert len(labels) == 2
    for version in range(6, 9):  # the makers stay where they are
        publisher.retire(in_use=())
        assert publisher.publish(weights(seed=version).items(), version=version).place.label != publication.place.label
    publisher.close()
    for own in (first, second):
        assert_holds(own, weights(seed=5))
    with torch.no_grad():
        first["actor"].weight.zero_()  # type: ignore[operator, union-attr]
    assert_holds(second, weights(seed=5))


def test_what_a_maker_writes_in_that_memory_is_never_taken_for_what_is_published_there_next() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    own = models()
    subscriber = Subscriber(lambda: own)

    def publish(version: int, *, fully: bool = True) -> None:
        subscriber.take(publisher.publish(weights(seed=version).items(), version=version, fully=fully), WAIT_S)
        publisher.retire(in_use={version})
        assert_holds(own, weights(seed=version))

    for version in range(12):
        publish(version, fully=version % 3 != 2)
    publish(12)
    with torch.no_grad():  # as nobody does
        own["actor"].weight.zero_()  # type: ignore[operator, union-attr]
    publish(13)
    with pytest.raises(WeightsError, match="bucket 0 of weights version 14 arrived damaged"):
        publish(14)  # where version 12 was
    publish(15)
    publisher.close()


def test_the_memory_is_free_once_the_last_weight_is_gone_though_nobody_let_go_of_it() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    own = models()
    publication = publisher.publish(weights().items(), version=1)
    Subscriber(lambda: own).take(publication, WAIT_S)
    publisher.close()
    label = publication.place.label
    assert_holds(own, weights())
    assert holders(label) == {os.getpid()}
    own.clear()
    gc.collect()
    assert holders(label) == set()


def test_weights_of_another_dtype_are_copies_and_the_rest_is_not() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.bfloat16)
    own = models()
    own["actor"].to(torch.bfloat16)
    subscriber = Subscriber(lambda: own)
    subscriber.take(publisher.publish(weights().items(), version=1), WAIT_S)
    expected = {name: tensor.bfloat16() for name, tensor in weights().items()}
    assert all(map(torch.equal, own["actor"].parameters(), (expected["actor.weight"], expected["actor.bias"])))
    assert [is_shared(parameter) for parameter in held_parameters(own)] == [True, True, False, False, True, True]
    assert torch.equal(own["critic"].head.weight, weights()["critic.head.weight"])  # type: ignore[union-attr, arg-type]
    publisher.close()


def test_a_weight_that_is_no_longer_published_in_its_dtype_leaves_the_former_file() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    own = models()
    subscriber = Subscriber(lambda: own)
    subscriber.take(publisher.publish(weights().items(), version=1), WAIT_S)
    assert all(map(is_shared, held_parameters(own)))
    publisher._dtype = torch.bfloat16  # as of a trainer that was built anew
    for version in (2, 3, 4):
        subscriber.take(publisher.publish(weights(seed=version).items(), version=version), WAIT_S)
        publisher.retire(in_use={version})
        assert torch.equal(own["actor"].weight, weights(seed=version)["actor.weight"].bfloat16().float())
        assert [is_shared(parameter) for parameter in held_parameters(own)] == [False] * 4 + [True] * 2
    publisher.close()


def test_what_is_trained_lies_in_the_trainers_memory_where_nothing_else_is_ever_sent() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    own, labels = models(), set()
    bias = own["actor"].bias.detach().clone()  # type: ignore[union-attr, operator]
    subscriber = Subscriber(lambda: own)
    for version in range(5):
        publication = publisher.publish(update(seed=version).items(), version=version, fully=False)
        subscriber.take(publication, WAIT_S)
        publisher.retire(in_use={version})
        labels.add(publication.place.label)
        assert_holds(own, update(seed=version) | {"actor.bias": bias})
        assert [is_shared(parameter) for parameter in held_parameters(own)] == [True, False] + [True] * 4
    assert len(labels) == 2
    publisher.close()


def test_a_maker_that_stays_behind_costs_one_more_file() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    quick, slow = models(), models()
    makers = {"quick": Subscriber(lambda: quick), "slow": Subscriber(lambda: slow)}
    labels = set()
    for version in range(12):
        publication = publisher.publish(weights(seed=version).items(), version=version)
        labels.add(publication.place.label)
        makers["quick"].take(publication, WAIT_S)
        if version % 2:
            makers["slow"].take(publication, WAIT_S)
        publisher.retire(in_use={version})
        assert_holds(slow, weights(seed=version - 1 + version % 2) if version else held(models()))
    assert len(labels) == 3
    publisher.close()


def test_makers_that_copy_keep_no_file_from_the_trainer() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.bfloat16)
    own = {role: model.double() for role, model in models().items()}
    subscriber = Subscriber(lambda: own)
    labels = set()
    for version in range(3):
        publication = publisher.publish(weights(seed=version).items(), version=version)
        subscriber.take(publication, WAIT_S)
        publisher.retire(in_use=())
        labels.add(publication.place.label)
    assert len(labels) == 1
    publisher.close()


def test_a_maker_whose_weights_were_all_written_since_keeps_no_file_from_the_trainer() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32, sparse=True)
    own, now = models(), weights()
    subscriber = Subscriber(lambda: own)
    first = publisher.publish(now.items(), version=1)
    subscriber.take(first, WAIT_S)
    assert all(map(is_shared, held_parameters(own)))
    for tensor in now.values():
        tensor.view(-1)[0] += 1
    second = publisher.publish(now.items(), version=2)
    assert second.difference is not None
    subscriber.take(second, WAIT_S)
    assert_holds(own, now)
    assert not any(map(is_shared, held_parameters(own)))
    publisher.retire(in_use={2})
    assert publisher.publish(now.items(), version=3).place.label == first.place.label
    publisher.close()


def test_another_file_under_the_same_number_is_not_taken() -> None:
    publisher = Publisher(transport="shared_memory", dtype=torch.float32)
    publication = publisher.publish(weights().items(), version=1)
    publisher.close()
    other = os.memfd_create("rlhf-weights-another-1")  # the descriptor's number is free, and given again
    try:
        assert other == publication.place.descriptor
        os.ftruncate(other, 1 << 20)
        with pytest.raises(WeightsError, match="version 1 are not in this machine's memory any more"):
            Subscriber(models).take(publication, WAIT_S)
    finally:
        os.close(other)
