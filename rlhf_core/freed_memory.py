"""Memory that a process has freed, and that glibc and PyTorch keep for its next use.

Trainer and makers work in turn: what one needs for its pass, another would hold unused.
"""

from __future__ import annotations

import ctypes

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h's
_LARGE = 16 << 20


def give_back() -> None:
    """Give back the memory that this process has freed: the system's, where the C library can, and a GPU's.

    From the first call on, glibc returns blocks of 16 MB and more as they are freed. By itself it learns to keep those
    of up to 32 MB. In a thread's heaps the next layer's blocks do not fit into the gaps of the last layer's: a 7B maker
    kept 70 MB for each layer.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)  # glibc's own ratio, which it leaves to us from here on
        libc.malloc_trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
