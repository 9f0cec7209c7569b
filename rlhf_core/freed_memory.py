"""Memory that a process has freed, and that glibc and PyTorch keep for its next use.

Trainer and makers work in turn: what one needs for its pass, another would hold unused.
"""

from __future__ import annotations

import ctypes

import torch

_M_MMAP_THRESHOLD = -3  # malloc.h's
_LARGE = 16 << 20


def give_back() -> None:
    """Give back the memory that this process has freed: the system's, where the C library can, and a GPU's.

    With glibc, blocks of 16 MB and more return as they are freed from now on. Else it comes to keep those of up to
    32 MB, and in a thread's heaps the next layer's do not fit where the last one's were: that was 70 MB for each layer
    of a 7B maker.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.malloc_trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
