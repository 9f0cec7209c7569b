"""When each process of a run was busy, and with what; and the picture of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Span(NamedTuple):
    """A stretch of work of one process."""

    role: str
    rank: int
    what: str
    start: float
    """Seconds since the epoch, by the clock of its machine."""
    end: float


class Spans:
    """Keeps one process's spans.

    Args:
        role: of the process.
        rank: in its group.
    """

    def __init__(self, role: str, rank: int) -> None:
        self._role, self._rank = role, rank
        self.kept: list[Span] = []

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Run the block, and keep when it ran."""
        start = time.time()
        try:
            yield
        finally:
            self.kept.append(Span(self._role, self._rank, what, start, time.time()))


COLOURS = {
    "generate": "#0072B2",
    "log-probs": "#56B4E9",
    "reference": "#009E73",
    "values": "#E69F00",
    "scores": "#CC79A7",
    "assemble": "#999999",
    "learn": "#D55E00",
    "save": "#000000",
}
"""Of Okabe and Ito: told apart by everybody."""
LEFT_OUT = ("load",)
"""Before the first time step, and longer than all else."""
_THINNEST = 0.001
"""Of the whole width: less would not be seen."""


def draw_timeline(spans: Sequence[Span]) -> Figure:
    """Return the figure: a line for each process, seconds from the first work on."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - for this alone: every role's process keeps spans
    from matplotlib.patches import Patch  # noqa: PLC0415

    shown = [span for span in spans if span.what not in LEFT_OUT]
    lines = sorted({(span.role, span.rank) for span in shown}, key=_place)
    start = min((span.start for span in shown), default=0.0)
    whole = max((span.end for span in shown), default=1.0) - start
    figure = Figure(figsize=(11, 1.4 + 0.5 * len(lines)), layout="constrained")
    axes = figure.subplots()
    for span in shown:
        seconds = max(span.end - span.start, _THINNEST * whole)
        axes.barh(
            lines.index((span.role, span.rank)), seconds, left=span.start - start, height=0.7,
            color=COLOURS.get(span.what, "#F0E442"), linewidth=0,
        )  # fmt: skip
    axes.set_yticks(range(len(lines)), [f"{role} {rank}" for role, rank in lines])
    axes.invert_yaxis()
    axes.set_xlim(0, whole)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [what for what in COLOURS if any(span.what == what for span in shown)]
    handles = [Patch(color=COLOURS[what], label=what) for what in kinds]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(kinds) or 1, frameon=False)
    return figure


def write_timeline(spans: Sequence[Span], path: Path) -> None:
    """Write the picture as PNG."""
    draw_timeline(spans).savefig(path, dpi=110, format="png")


def _place(line: tuple[str, int]) -> tuple[int, int]:
    order = ("actor", "initial", "critic", "reward")
    role, rank = line
    return order.index(role), rank
