"""What `make test-parallel` prints at its end: how far each shape of a detached trainer is from `PPOTrainer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = ("shape", "optimizer steps", "largest difference in the actor's loss", "in the critic's")
ROWS: list[Row] = []
"""Of this session: runs whose losses were as close as they should be."""


@dataclass(frozen=True)
class Row:
    """One run beside `PPOTrainer`'s."""

    shape: str
    steps: int
    actor: float
    critic: float

    def cells(self) -> tuple[str, ...]:
        """Return the line's columns."""
        return (
            self.shape,
            str(self.steps),
            *("none" if each == 0 else f"{each:.1e}" for each in (self.actor, self.critic)),
        )


Losses = Sequence[tuple[float, float]]
"""Of actor and critic, at each optimizer step."""


def keep(shape: str, ours: Losses, theirs: Losses) -> None:
    """Have a comparison that came out well shown at the end.

    Args:
        shape: whose losses, in words.
        ours: the detached trainer's.
        theirs: `PPOTrainer`'s.
    """
    actor, critic = (
        max(abs(one - other) for one, other in zip(*both, strict=True))
        for both in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    )
    ROWS.append(Row(shape, len(ours), actor, critic))


def lines(rows: Sequence[Row]) -> list[str]:
    """Return the table as Markdown."""
    return [f"| {' | '.join(cells)} |" for cells in (HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows))]
