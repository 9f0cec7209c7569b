"""What earlier releases called PPO's figures, whose states and policies are still read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOW = {"reward": "score", "reward_std": "score_std", "score_std": "score_scale"}
_ENDS = ("", "first_", "last_")


def current_names(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode's or a run's figures, of any release, by the names that they have now."""
    if not any(f"{end}reward" in figures for end in _ENDS):  # every episode of an earlier release has one
        return dict(figures)
    now = {f"{end}{former}": f"{end}{name}" for former, name in _NOW.items() for end in _ENDS}
    return {now.get(name, name): value for name, value in figures.items()}
