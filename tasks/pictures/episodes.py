"""The curves of a PPO run: small multiples over its episodes, and where their time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tasks.pictures.panels import CONSTANT, START, Line, Panel, Rows, curves, seconds_by_phase
from tasks.pictures.style import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    MOST_MARKED,
    PURPLE,
    VERMILION,
    count_along,
    dress,
    legend,
    marker,
    shared_legend,
    small_multiples,
)
from tasks.results import SHOWN_CONFIDENCE

Style = tuple[str, Any]
"""Colour, and dashes as matplotlib takes them."""
_LEVELS: tuple[Style, ...] = ((VERMILION, "--"), (GREEN, "-."))
_START_STYLE, _CONSTANT_STYLE, _ZERO_STYLE = (INK, ":"), (PURPLE, (0, (1, 3))), (INK, "-")
_FEWEST_FOR_A_BAND = 3


def draw_episodes(rows: Rows, *, evaluations: Mapping[str, Mapping[str, Any]] | None = None) -> Figure:
    """Return the figure of a run's curves.

    Args:
        rows: of its episodes, in order.
        evaluations: metrics of the policies to compare with (the SFT start, the champion) by the name to show.
    """
    evaluations = evaluations or {}
    panels = curves(rows, evaluations=evaluations)
    phases = seconds_by_phase(rows)
    figure, grid = small_multiples(len(panels) + bool(phases), columns=3)
    styles = _styles(evaluations)
    for panel, axes in zip(panels, grid, strict=False):
        _draw(axes, panel, len(rows), styles)
    if phases:
        _draw_time(grid[-1], phases, len(rows))
    if not rows:
        dress(grid[0], title="No episode yet", x="episode", y="")
    _draw_legend(figure, panels, styles)
    return figure


def _styles(evaluations: Mapping[str, Any]) -> dict[str, Style]:
    named = {f"{role}, greedy": style for role, style in zip(evaluations, _LEVELS, strict=False)}
    return {START: _START_STYLE, **named, CONSTANT: _CONSTANT_STYLE}


def _draw(axes: Axes, panel: Panel, episodes: int, styles: Mapping[str, Style]) -> None:
    dress(axes, title=panel.title, x="episode", y=panel.unit)
    count_along(axes, 1, episodes)
    for level in panel.references:
        colour, dashes = styles.get(level.name, _ZERO_STYLE)
        width = 1.1 if level.name in styles else 0.6
        axes.axhline(level.value, color=colour, linestyle=dashes, linewidth=width, zorder=1)
    for line, colour in zip(panel.lines, COLOURS * len(panel.lines), strict=False):
        _draw_line(axes, line, colour)
    legend(axes, len(panel.lines))
    axes.set_ylim(bottom=panel.floor, top=None if panel.ceiling is None else panel.ceiling * 1.02)


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    episodes = list(range(1, len(line.values) + 1))
    name = line.name.replace("_", " ")
    axes.plot(
        episodes, line.values, color=colour, linewidth=1.5, marker=marker(len(episodes)), markersize=3, label=name
    )
    known = [at for at, low in enumerate(line.low) if isfinite(low)]
    if len(known) < _FEWEST_FOR_A_BAND:
        axes.vlines([episodes[at] for at in known], [line.low[at] for at in known], [line.high[at] for at in known],
                    color=colour, linewidth=1.2)  # fmt: skip
    else:
        axes.fill_between(episodes, line.low, line.high, color=colour, alpha=0.18, linewidth=0)


def _draw_time(axes: Axes, phases: Mapping[str, Sequence[float]], episodes: int) -> None:
    dress(axes, title="Where the time went", x="episode", y="seconds")
    count_along(axes, 1, episodes)
    width = 0.8 if episodes <= MOST_MARKED else 1.0  # gaps between many bars only flicker
    bottom = [0.0] * episodes
    for (phase, seconds), colour in zip(phases.items(), COLOURS * len(phases), strict=False):
        axes.bar(range(1, episodes + 1), seconds, bottom=bottom, color=colour, width=width, label=phase)
        bottom = [below + spent for below, spent in zip(bottom, seconds, strict=True)]
    axes.set_ylim(0, max(max(bottom, default=0.0), 1e-9) * 1.8)  # room for the legend above the bars
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper left", labelcolor=INK, handlelength=1.0,
                columnspacing=0.8, borderaxespad=0.1)  # fmt: skip


def _draw_legend(figure: Figure, panels: Sequence[Panel], styles: Mapping[str, Style]) -> None:
    drawn = {level.name for panel in panels for level in panel.references}
    entries: list[tuple[Any, str]] = []
    if any(isfinite(low) for panel in panels for line in panel.lines for low in line.low):
        shade = Patch(color=BLUE, alpha=0.25, linewidth=0)
        entries.append((shade, f"{SHOWN_CONFIDENCE:.0%} interval over the episode's samples"))
    for name, (colour, dashes) in styles.items():
        if name in drawn:
            entries.append((Line2D([], [], color=colour, linestyle=dashes, linewidth=1.1), name))
    shared_legend(figure, [handle for handle, _ in entries], [label for _, label in entries])
