"""Memory that a process has freed, and that glibc and PyTorch keep for its next use.

Trainer and makers work in turn: what one needs for its pass, another would hold unused.
"""

from __future__ import annotations

import ctypes

import torch


def give_back() -> None:
    """Give back the memory that this process has freed: the system's, where the C library can, and a GPU's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
