"""The picture of a run: when each process was busy, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rlhf_core.detached.roles.spans import Span

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
