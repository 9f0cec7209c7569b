"""What time it is, and waiting: in one place, so that a test can let hours pass between two calls."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now() -> datetime:
    """Return the time of day, in UTC: for what other machines read."""
    return datetime.now(UTC)


def boottime() -> float:
    """Return seconds on a clock that goes on while the machine sleeps: for how long something took."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def pause(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)
