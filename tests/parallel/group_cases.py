"""What ranks of a trainer group share, on the ranks of `run_on_ranks`."""

from __future__ import annotations

import torch

from rlhf_core.strategy.ranks import Ranks, SharedState, share_state
from tests.parallel.ranks import Found


def known_state() -> SharedState:
    """Tensors of every form that a training state has, and some that it could have."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "float32": torch.randn(3, 5, generator=generator),
        "bfloat16": torch.randn(7, generator=generator).to(torch.bfloat16),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "count": torch.tensor(4.0),
        "nothing": torch.empty(0, 2),
        "a view": torch.arange(6.0).reshape(2, 3).T,
    }
    return SharedState(tensors, {"steps": 3, "schedule": {"last_lr": [1e-5]}})


def state(ranks: Ranks) -> Found:
    found = share_state(known_state() if ranks.is_first else None, ranks)
    assert found is not None
    return Found({"steps": found.facts["steps"], "lr": found.facts["schedule"]["last_lr"][0]}, dict(found.tensors))


def no_state(ranks: Ranks) -> Found:
    return Found({"none": float(share_state(None, ranks) is None)})
