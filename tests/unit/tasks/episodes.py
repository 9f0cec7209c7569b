"""Rows of episodes as PPO keeps them, and the size of a picture, for the tests of what is shown of a run."""

from __future__ import annotations

import struct
from typing import Any

WIDTH = 960


def episode(at: int, **changed: float) -> dict[str, Any]:
    row = {"score": 0.5, "verifier": 0.25, "raw/verifier": 0.25, "accuracy_given_form": 0.5, "well_formed": 0.5}
    row |= {"score_std": 0.8, "verifier_std": 0.4364357804719847}  # zeros and ones: sqrt(0.25 * 0.75 * 64 / 63)
    row |= {"samples": 64.0, "kl": 0.125 * at, "length": 15.0, "entropy": 0.5, "clip_fraction": 0.0}
    row |= {"explained_variance": 0.1, "critic_loss": 0.2, "seconds_learn": 4.0, "seconds_generate": 2.0}
    return {"episode": at, **row, **changed}


def size(data: bytes) -> tuple[int, int]:
    """Return width and height as a PNG's header has them."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height
