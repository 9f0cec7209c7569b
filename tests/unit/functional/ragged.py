"""Rows of different lengths as padded tensors, with rubbish in the padding."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rlhf_core.functional.moments import Moments, whiten_with
from rlhf_core.ppo.minibatch import agreed_moments
from rlhf_core.strategy.ranks import ALONE

assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

LENGTHS = (5, 1, 3)


def random_rows(seed: int, *, scale: float = 1.0) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(length, generator=generator) * scale).tolist() for length in LENGTHS]


def pad(rows: list[list[float]], *, rubbish: float = float("nan"), width: int = 6) -> Tensor:
    return torch.tensor([[*row, *[rubbish] * (width - len(row))] for row in rows])


def mask(*, width: int = 6) -> Tensor:
    return torch.arange(width) < torch.tensor(LENGTHS)[:, None]


def unpad(tensor: Tensor) -> list[list[float]]:
    return [row[:length].tolist() for row, length in zip(tensor, LENGTHS, strict=True)]


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def moments(values: Tensor, counts: Tensor) -> Moments:
    """The moments that the learner takes, of one rank."""
    (found,) = agreed_moments([values], counts, ALONE)
    return found


def whitened(values: Tensor, counts: Tensor) -> Tensor:
    """The values as the learner whitens them, on one rank."""
    _, mean, variance = moments(values, counts)
    return whiten_with(values, counts, mean=mean, variance=variance)
