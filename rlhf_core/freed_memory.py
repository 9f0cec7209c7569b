"""Memory that a process has freed, and that glibc keeps for its next use.

Trainer and makers work in turn: what one needs for its pass, another would hold unused.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Give the system back the pages that this process has freed; nothing where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
