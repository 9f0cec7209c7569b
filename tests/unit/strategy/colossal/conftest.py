"""A group of this process alone: what works in groups only, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlhf_core.strategy.ranks import join_alone, leave


@pytest.fixture(scope="package")
def alone() -> Iterator[None]:
    if torch.cuda.is_available():
        pytest.skip("written for a CPU, where ColossalAI would take the GPU; tests/gpu has the strategies on one")
    torch.set_num_threads(1)
    join_alone()
    yield
    leave()
