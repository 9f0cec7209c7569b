"""Weights between Ray actors: through shared memory, through the object store, and past a trainer's death."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from infra.clusters import connect, disconnect, lease_cluster, release_cluster
from rlhf_core.phases import watch
from rlhf_core.weights import Publication, Publisher, Subscriber, WeightsError
from tests.integration.cluster_processes import wait_until_nothing_is_left
from tests.unit.weights.published import held, models, weights

pytestmark = pytest.mark.integration

WAIT_S = 120.0
WIDTH = 10_000
"""Of one layer: Ray sends what is smaller than 100 KB along with its reference."""
CLUSTER = "publication"


@ray.remote(concurrency_groups={"status": 1})
class Trainer:
    """Publishes; stands still at a bucket, if it is told to, for somebody to kill it there."""

    def __init__(self, transport: str) -> None:
        self._publisher = Publisher(
            transport=transport,  # type: ignore[arg-type]
            bucket_bytes=1,
            dtype=torch.float32,
        )
        self._stands_still = threading.Event()

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def await_standing_still(self) -> bool:
        return self._stands_still.wait(WAIT_S)

    def publish(self, version: int, nodes: list[str], *, until: int | None = None) -> Publication:
        laid: list[int] = []

        def stand_still(phase: str) -> None:
            if phase == "publish" and until is not None:
                if len(laid) == until:
                    self._stands_still.set()
                    time.sleep(10 * WAIT_S)
                laid.append(version)

        watch(stand_still)
        return self._publisher.publish(weights(seed=version, width=WIDTH).items(), version=version, nodes=nodes)


@ray.remote
class Maker:
    """Takes what it is told."""

    def __init__(self) -> None:
        self._models = models(WIDTH)
        self._subscriber = Subscriber(lambda: self._models)

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def take(self, publication: Publication) -> int:
        return self._subscriber.take(publication, WAIT_S)

    def held(self) -> tuple[int | None, dict[str, Any]]:
        return self._subscriber.version, {name: tensor.numpy() for name, tensor in held(self._models).items()}


def asked(reference: Any) -> Any:
    return ray.get(reference, timeout=WAIT_S)


@pytest.fixture(scope="module")
def makers(forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    directory: Path = tmp_path_factory.mktemp("clusters")
    record = lease_cluster(CLUSTER, directory=directory, num_cpus=1, object_store_mb=80)
    try:
        with patch.dict(os.environ, forked):
            connect(record)
        yield [Maker.options(num_cpus=0).remote() for _ in range(2)]  # type: ignore[attr-defined]
    finally:
        disconnect()
        release_cluster(CLUSTER)
        wait_until_nothing_is_left(record)


def trainer(transport: str = "auto") -> Any:
    return Trainer.options(num_cpus=0).remote(transport)  # type: ignore[attr-defined]


def assert_hold(makers: list[Any], version: int) -> None:
    for found, values in asked([maker.held.remote() for maker in makers]):
        assert found == version
        for name, tensor in weights(seed=version, width=WIDTH).items():
            assert (values[name] == tensor.numpy()).all(), name


def test_makers_of_a_node_share_memory_and_others_get_objects(makers: list[Any]) -> None:
    publisher, nodes = trainer(), asked([maker.node.remote() for maker in makers])
    places = []
    for version, where in ((1, nodes), (2, [nodes[0], "another"]), (3, nodes)):
        publication = asked(publisher.publish.remote(version, where))
        places.append(type(publication.place).__name__)
        assert asked([maker.take.remote(publication) for maker in makers]) == [version] * 2
        assert_hold(makers, version)
    assert places == ["SharedMemoryPlace", "ObjectStorePlace", "SharedMemoryPlace"]
    ray.kill(publisher)


@pytest.mark.parametrize("transport", ["shared_memory", "objects"])
def test_a_trainer_killed_between_two_buckets_leaves_makers_on_the_old_version(
    makers: list[Any], transport: str
) -> None:
    publisher, first = trainer(transport), 10 if transport == "shared_memory" else 20
    publication = asked(publisher.publish.remote(first, []))
    asked([maker.take.remote(publication) for maker in makers])
    late = asked(publisher.publish.remote(first + 1, []))  # whole, but nobody is told of it in time
    interrupted = publisher.publish.remote(first + 2, [], until=3)
    assert asked(publisher.await_standing_still.remote())
    os.kill(asked(publisher.pid.remote()), 9)
    with pytest.raises(RayActorError):
        asked(interrupted)
    if transport == "shared_memory":  # Ray keeps objects of a dead owner for a while, and they are as good as ever
        with pytest.raises(RayTaskError, match="take what the trainer publishes next") as refused:
            asked(makers[0].take.remote(late))
        assert isinstance(refused.value.cause, WeightsError)
    assert_hold(makers, first)
    successor = trainer(transport)  # restored, it publishes the version that was under way
    asked([maker.take.remote(asked(successor.publish.remote(first + 2, []))) for maker in makers])
    assert_hold(makers, first + 2)
    ray.kill(successor)
