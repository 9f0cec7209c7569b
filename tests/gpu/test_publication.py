"""Weights from GPU to GPU by NCCL, and checksums that a GPU takes of its own memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlhf_core.weights import Publisher
from rlhf_core.weights.buckets import word_sum
from tests.unit.weights.published import Maker, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL refuses two processes on one GPU, and there are not two GPUs"
)


@pytest.fixture
def makers() -> Iterator[list[Maker]]:
    made = [Maker(device="cuda:1") for _ in range(2)]
    yield made
    for maker in made:
        maker.end()


def test_a_gpu_sums_its_memory_up_to_what_a_processor_does() -> None:
    body = torch.randint(0, 256, (100_003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert word_sum(body.cuda()) == word_sum(body)


@two_gpus
@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20])
def test_makers_on_another_gpu_get_version_after_version(makers: list[Maker], bucket_bytes: int) -> None:
    publisher = Publisher(transport="nccl", bucket_bytes=bucket_bytes, dtype=torch.float32)
    try:
        for version in range(1, 4):
            tensors = {name: tensor.cuda(0) for name, tensor in weights(seed=version).items()}
            publication = publisher.publish(tensors.items(), version=version)
            for maker in makers:
                maker.begin(publication)
            for maker in makers:
                held, values = maker.answer()
                assert held == version
                for name, tensor in weights(seed=version).items():
                    assert (values[name] == tensor.numpy()).all(), name
            publisher.retire(in_use={version})
    finally:
        publisher.close()


@two_gpus
def test_a_maker_that_dies_ends_neither_the_trainer_nor_another_maker(makers: list[Maker]) -> None:
    publisher = Publisher(transport="nccl", dtype=torch.float32)
    try:
        for version in (1, 2):
            publication = publisher.publish(weights(seed=version).items(), version=version)
            held, _ = makers[1].take(publication)
            assert held == version
            if version == 1:
                assert makers[0].take(publication)[0] == 1
                makers[0].end()
    finally:
        publisher.close()
