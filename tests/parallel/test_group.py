"""What the first rank of a trainer group hands to the others arrives as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.group_cases import known_state
from tests.parallel.ranks import run_on_ranks

pytestmark = pytest.mark.parallel


def test_a_state_is_the_same_on_every_rank_to_the_bit(tmp_path: Path) -> None:
    for found in run_on_ranks("tests.parallel.group_cases", ["state", "no_state"], tmp_path, world_size=3):
        assert found["state"].numbers == {"steps": 3, "lr": 1e-5}
        assert found["state"].tensors.keys() == known_state().tensors.keys()
        for name, expected in known_state().tensors.items():
            assert found["state"].tensors[name].dtype == expected.dtype
            assert torch.equal(found["state"].tensors[name], expected), name
        assert found["no_state"].numbers == {"none": 1.0}
