"""Checksums of buckets: of memory by XXH3, of a GPU's memory by arithmetic that runs there."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio, as a signed number
_WORD = 8
_AT_ONCE = 8 << 20
"""Words: bounds the memory for what they are mixed into."""
_ONES = {bits: (1 << bits) - 1 for bits in (32, 35)}
"""A shift of a signed number brings in its sign; these take it out again."""


def checksum(body: Tensor) -> int:
    """Return the checksum of a vector of bytes, on the device where it lies."""
    return xxh3(body) if body.device.type == "cpu" else word_sum(body)


def xxh3(body: Tensor) -> int:
    """Return XXH3 of bytes in host memory; it reads faster than a copy copies, and five times as fast as CRC-32."""
    return xxhash.xxh3_64_intdigest(body.numpy().data)


def word_sum(body: Tensor) -> int:
    """Return the sum of all 64-bit words, each mixed with its place, modulo 2**64; on any device.

        x_i = w_i + (2 i + 1) C
        y_i = (x_i ^ (x_i >> 32)) C
        sum = sum_i y_i ^ (y_i >> 29)

    C is odd, so that no two words in the same place are mixed into the same number; shifts bring in zeros.
    """
    words = torch.nn.functional.pad(body, (0, -body.numel() % _WORD)).view(torch.int64)
    total = 0
    for first in range(0, words.numel(), _AT_ONCE):
        part = words[first : first + _AT_ONCE]
        mixed = torch.arange(first, first + part.numel(), device=part.device).mul_(2).add_(1).mul_(_ODD).add_(part)
        mixed ^= (mixed >> 32) & _ONES[32]
        mixed *= _ODD
        mixed ^= (mixed >> 29) & _ONES[35]
        total += int(mixed.sum())
    return total % (1 << 64)
