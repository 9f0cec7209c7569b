"""The formula of bytes per rank, by hand; real tensors are held to it in tests/parallel."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.models.memory import bytes_per_rank
from rlhf_core.strategy.parts import Parts

# parameters 1000, of which 600 are trained, on 4 ranks: weights, gradients, master, moments
BY_HAND: dict[tuple[Any, Any], tuple[int, int, int, int]] = {
    ("plain", "fp32"): (4000, 2400, 0, 4800),
    ("ddp", "bf16"): (4000, 2400, 0, 4800),  # autocast over float32
    ("zero2", "fp32"): (4000, 600, 600, 1200),
    ("colossalai_zero2", "bf16"): (2000, 300, 600, 1200),
    ("zero2_cpu", "fp16"): (2000, 300, 600, 1200),
    ("gemini", "bf16"): (500, 300, 600, 1200),
    ("colossalai_gemini", "fp32"): (1000, 600, 0, 1200),
}


@pytest.mark.parametrize(("strategy", "precision"), BY_HAND)
def test_each_rank_holds_its_part(strategy: Any, precision: Any) -> None:
    held = bytes_per_rank(strategy, parameters=1000, trained=600, world_size=4, precision=precision)
    assert tuple(held)[:4] == BY_HAND[strategy, precision]
    in_host = held.master + held.moments if strategy == "zero2_cpu" else 0
    assert (held.host, held.device + held.host) == (in_host, sum(tuple(held)[:4]))


def test_a_part_is_rounded_up() -> None:
    assert bytes_per_rank("zero2", parameters=5, trained=5, world_size=2, precision="fp32").moments == 3 * 8


def test_parts_of_3d_by_hand() -> None:
    """All weights: a half of each. Adapters: 400 frozen ones in halves, and of 600 the half that is cut in halves."""
    two = Parts(tp=2)
    assert tuple(bytes_per_rank("3d", parameters=1000, trained=1000, parts=two))[:4] == (2000, 2000, 0, 4000)
    assert tuple(bytes_per_rank("3d", parameters=1000, trained=600, parts=two))[:4] == (2600, 1800, 0, 3600)
    stages = Parts(pp=2)  # of adapters, too, each has those of its layers
    assert tuple(bytes_per_rank("3d", parameters=1000, trained=600, parts=stages))[:4] == (2000, 1200, 0, 2400)
