"""One rank of a group that does one piece of work and is done: SFT, or a reward model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import ray

from rlhf_core.ray_tools.member import GROUPS, GroupMember

Tell = Callable[[str], None]
"""Takes a line for whoever follows the work."""


@ray.remote(concurrency_groups=GROUPS)
class RankActor(GroupMember):
    """Does a piece of work with the other ranks of its group.

    Args:
        work: is given what takes its lines; called once the group is formed. What it returns is small and plain.
    """

    def __init__(self, work: Callable[[Tell], Any]) -> None:
        self._work = work
        self._lines: deque[str] = deque()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def run(self) -> Any:
        """Do the work, and return what it returns."""
        with self._working():
            return self._work(self._lines.append)

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def lines(self) -> list[str]:
        """Return the lines that the work has told since the last call."""
        return [self._lines.popleft() for _ in range(len(self._lines))]
