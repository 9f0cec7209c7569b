"""One function over the rows of a batch, as a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_core.rewards.calls import call_each
from rlhf_core.rewards.process import RewardProcess
from rlhf_core.rewards.resolve import RewardFunction


def call_rows(
    process: RewardProcess, function: RewardFunction, arguments: Sequence[tuple[Any, ...]], *, names: Sequence[str]
) -> Tensor:
    """Return what `call_each` returns, [B] in float32."""
    return torch.tensor(call_each(process, function, arguments, names=names), dtype=torch.float32)
