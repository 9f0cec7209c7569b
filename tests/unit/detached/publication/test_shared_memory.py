"""Shared memory between real processes: it goes with the last of them, whoever is killed and when."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.detached.publication import Publisher, Subscriber, WeightsError
from rlhf_core.detached.publication.shared_memory import SharedInbox, SharedOutbox
from rlhf_core.phases import watch
from tests.unit.detached.publication.published import CONTEXT, WAIT_S, Maker, assert_holds, held, models, weights

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


@pytest.mark.parametrize("stop_at", [0, 3, BUCKETS])
def test_a_trainer_killed_between_two_buckets_leaves_makers_on_the_old_version(maker: Maker, stop_at: int) -> None:
    pipe, theirs = CONTEXT.Pipe()
    trainer = CONTEXT.Process(target=_publish, args=(theirs, stop_at), daemon=True)
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


def test_the_memory_of_a_killed_trainer_is_free_once_no_maker_has_it_open(maker: Maker) -> None:
    pipe, theirs = CONTEXT.Pipe()
    trainer = CONTEXT.Process(target=_publish, args=(theirs, BUCKETS), daemon=True)
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


def fill(outbox: SharedOutbox, *bodies: Tensor) -> Any:
    shelf = outbox.begin()
    for body in bodies:
        shelf.open(body.numel())[:] = body
        shelf.close(body.numel())
    return shelf


def inode(shelf: Any) -> int:
    return os.stat(f"/proc/self/fd/{shelf.place().descriptor}").st_ino


def test_a_retired_file_is_used_again_and_grows() -> None:
    outbox = SharedOutbox("trainer")
    first = fill(outbox, torch.ones(5000, dtype=torch.uint8))
    number = inode(first)
    outbox.free(first)
    second = fill(outbox, torch.full((9000,), 2, dtype=torch.uint8), torch.full((9000,), 3, dtype=torch.uint8))
    assert inode(second) == number
    assert second.place().offsets == (0, 12288)
    outbox.free(second)
    outbox.shut()


def test_a_file_that_held_a_model_gives_its_memory_back_when_adapters_follow() -> None:
    outbox = SharedOutbox("trainer")
    shelf = fill(outbox, torch.ones(1 << 20, dtype=torch.uint8))
    outbox.free(shelf)
    again = fill(outbox, torch.ones(1 << 10, dtype=torch.uint8))
    assert os.stat(f"/proc/self/fd/{again.place().descriptor}").st_blocks * 512 <= 4096
    outbox.free(again)
    outbox.shut()


def test_a_file_that_a_maker_reads_is_not_written() -> None:
    publisher = Publisher(transport="shared_memory", bucket_bytes=1, dtype=torch.float32)
    publication = publisher.publish(weights().items(), version=1)
    inbox = SharedInbox()
    with inbox.buckets(publication, WAIT_S) as buckets:
        before = [bucket.clone() for bucket in buckets]
        publisher.retire(in_use=())
        other = publisher.publish(weights(seed=2).items(), version=2)
        assert other.place.label != publication.place.label
        assert all(map(torch.equal, buckets, before))
    publisher.close()
    inbox.close()


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
    publisher.retire(in_use={5})
    publisher.publish(weights(seed=6).items(), version=6)
    publisher.publish(weights(seed=7).items(), version=7)
    before = held(late)
    with pytest.raises(WeightsError, match="bucket 0 of weights version 0 arrived damaged"):
        Subscriber(lambda: late).take(first, WAIT_S)
    assert_holds(late, before)
    publisher.close()
    subscriber.close()


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
