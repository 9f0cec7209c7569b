"""The numbers that flags take, each as argparse's `type`: what is out of range is told by what it must be."""

from __future__ import annotations

import argparse

_HIGHEST_SEED = 2**63 - 1  # PyTorch takes no more


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from error


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from error


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def count(text: str) -> int:
    """Return a whole number of at least 0."""
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {value}")
    return value


def seed(text: str) -> int:
    """Return a whole number that seeds NumPy and PyTorch."""
    value = _whole(text)
    if not 0 <= value <= _HIGHEST_SEED:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_HIGHEST_SEED}, not {value}")
    return value


def above_zero(text: str) -> float:
    """Return a finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def non_negative(text: str) -> float:
    """Return a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return value


def share(text: str) -> float:
    """Return a number of at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, not {text}")
    return value
