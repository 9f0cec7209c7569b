"""The figures of a run: the supervised stages by step, PPO by episode, and held-out scores of the policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rlhf_core.counting import counted
from rlhf_core.functional.intervals import wilson_interval
from tasks.pictures.panels import CONSTANT, START, Line, Panel, Rows, curves, seconds_by_phase, values
from tasks.pictures.style import (
    BLUE,
    COLOURS,
    GREEN,
    INK,
    MOST_MARKED,
    PURPLE,
    SMALL,
    VERMILION,
    count_along,
    dress,
    legend,
    marker,
    new_figure,
    shared_legend,
    small_multiples,
)
from tasks.results import SHOWN_CONFIDENCE

_MOST_UNSMOOTHED = 20
HELDOUT = "heldout_loss"
"""Name in the rows of those steps after which the loss was measured on held-out examples."""
SFT_CURVES = (("loss", "Loss of SFT", "nats per token"), ("lr", "Learning rate of SFT", "per step"))
REWARD_MODEL_CURVES = (
    ("loss", "Loss of the reward model", "nats per pair"),
    ("accuracy", "Right in training", "share of a batch's pairs"),
)
Style = tuple[str, Any]
"""Colour, and dashes as matplotlib takes them."""
_LEVELS: tuple[Style, ...] = ((VERMILION, "--"), (GREEN, "-."))
_START_STYLE, _CONSTANT_STYLE, _ZERO_STYLE = (INK, ":"), (PURPLE, (0, (1, 3))), (INK, "-")
_FEWEST_FOR_A_BAND = 3


def draw_sft(rows: Rows) -> Figure | None:
    """Return the figure of SFT's loss and learning rate by step; None if the rows hold neither.

    Args:
        rows: one a step, with step, loss and lr.
    """
    known = [each for each in SFT_CURVES if _holds(rows, each[0])]
    if not known:
        return None
    figure, grid = small_multiples(len(known), columns=2, row_inches=2.1)
    for axes, curve in zip(grid, known, strict=True):
        _draw_curve(axes, rows, *curve)
    return figure


def draw_reward_model(rows: Rows, metrics: Mapping[str, Any]) -> Figure | None:
    """Return the figure of training, calibration and scores; None if there is nothing of any of them.

    Args:
        rows: one a step, with step, loss and accuracy.
        metrics: of the reward model's artifact, with its bins.
    """
    known = [each for each in REWARD_MODEL_CURVES if _holds(rows, each[0])]
    bins = [each for each in metrics.get("calibration_bins", ()) if each["pairs"]]
    histogram = metrics.get("score_histogram") or {}
    scored = bool(histogram.get("edges"))
    panels = len(known) + bool(bins) + scored
    if not panels:
        return None
    figure, grid = small_multiples(panels, columns=2, row_inches=2.1)
    for axes, curve in zip(grid, known, strict=False):
        _draw_curve(axes, rows, *curve)
    if bins:
        _draw_calibration(grid[len(known)], bins)
    if scored:
        _draw_histogram(grid[-1], histogram)
    return figure


def _holds(rows: Rows, name: str) -> bool:
    return any(isfinite(value) for value in values(rows, name))


def _draw_curve(axes: Axes, rows: Rows, name: str, title: str, unit: str) -> None:
    dress(axes, title=title, x="step", y=unit)
    steps = [row.get("step", at) for at, row in enumerate(rows, start=1)]
    found = values(rows, name)
    count_along(axes, min(steps), max(steps))
    smooth = len(found) > _MOST_UNSMOOTHED and name != "lr"
    axes.plot(steps, found, color=BLUE, linewidth=0.8 if smooth else 1.5, alpha=0.4 if smooth else 1.0,
              marker="" if smooth else marker(len(found)), markersize=3, label="each step")  # fmt: skip
    if smooth:
        width = max(2, len(found) // 12)
        axes.plot(steps, _running_mean(found, width), color=BLUE, linewidth=1.8, label=f"mean of {width} steps")
    entries = 1 + smooth
    if name == "loss" and _holds(rows, HELDOUT):
        known = [(step, loss) for step, loss in zip(steps, values(rows, HELDOUT), strict=True) if isfinite(loss)]
        axes.plot(*zip(*known, strict=True), "s", color=VERMILION, markersize=4, label="held out")
        entries += 1
    legend(axes, entries)
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0.0, top=1.02 if name == "accuracy" else None)


def _running_mean(found: Sequence[float], width: int) -> list[float]:
    """Return the mean of the last `width` values at each place, of as many as there are near the beginning."""
    means = []
    for end in range(1, len(found) + 1):
        window = found[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def _draw_calibration(axes: Axes, bins: Sequence[Mapping[str, Any]]) -> None:
    dress(axes, title="Calibration on held-out pairs", x="confidence in the preferred response", y="share right")
    axes.plot([0.5, 1], [0.5, 1], color=INK, linestyle=":", linewidth=1.1, label="calibrated")
    for each in bins:
        interval = wilson_interval(round(each["correct"] * each["pairs"]), each["pairs"], SHOWN_CONFIDENCE)
        axes.vlines(each["confidence"], interval.low, interval.high, color=BLUE, linewidth=1.2)
    axes.plot(
        [each["confidence"] for each in bins],
        [each["correct"] for each in bins],
        "o", color=BLUE, markersize=4, label=f"bins, {SHOWN_CONFIDENCE:.0%} interval",
    )  # fmt: skip
    axes.set_xlim(0.48, 1.02)
    axes.set_ylim(0.0, 1.02)
    legend(axes, 2, "lower right")


def _draw_histogram(axes: Axes, histogram: Mapping[str, Any]) -> None:
    dress(axes, title="Scores of held-out responses", x="score of the reward model, unscaled", y="responses")
    for name, colour in (("chosen", BLUE), ("rejected", VERMILION)):
        axes.stairs(histogram[name], histogram["edges"], color=colour, linewidth=1.5, label=name)
        axes.stairs(histogram[name], histogram["edges"], color=colour, alpha=0.18, fill=True)
    axes.set_ylim(bottom=0)
    legend(axes, 2)


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
        _draw_panel(axes, panel, len(rows), styles)
    if phases:
        _draw_time(grid[-1], phases, len(rows))
    if not rows:
        dress(grid[0], title="No episode yet", x="episode", y="")
    _draw_legend(figure, panels, styles)
    return figure


def _styles(evaluations: Mapping[str, Any]) -> dict[str, Style]:
    named = {f"{role}, greedy": style for role, style in zip(evaluations, _LEVELS, strict=False)}
    return {START: _START_STYLE, **named, CONSTANT: _CONSTANT_STYLE}


def _draw_panel(axes: Axes, panel: Panel, episodes: int, styles: Mapping[str, Style]) -> None:
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


def draw_evaluations(evaluations: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return the figure of a point and an interval for each role, the best constant answer as a line.

    Args:
        evaluations: metrics of each evaluation, by role, from the base model to the champion.
    """
    shown = {role: metrics for role, metrics in evaluations.items() if isfinite(_shown_score(metrics))}
    figure = new_figure(1.0 + 0.34 * max(1, len(shown)))
    axes = figure.subplots()
    by_model = any(metrics.get("judge") == "reward_model" for metrics in shown.values())
    unit = "mean score, standard deviations of the reward model" if by_model else "share of right answers"
    problems = max((int(metrics.get("problems", 0)) for metrics in shown.values()), default=0)
    dress(axes, title=f"Greedy answers to {counted(problems, 'held-out problem')}", x=unit, y="")
    axes.grid(axis="y", visible=False)
    handles: list[Artist] = []
    labels: list[str] = []
    for place, (role, metrics) in enumerate(shown.items()):
        score = _shown_score(metrics)
        low, high = (float(metrics.get(end, score)) for end in ("low", "high"))
        colour = VERMILION if role == "ppo" else BLUE
        bar = axes.hlines(place, low, high, color=colour, linewidth=2)
        axes.plot(score, place, "o", color=colour, markersize=6)
        axes.annotate(f"{score:.3f}", (score, place), xytext=(0, 6), textcoords="offset points", ha="center",
                      fontsize=SMALL, color=INK)  # fmt: skip
        if not handles:
            handles, labels = [bar], [f"{SHOWN_CONFIDENCE:.0%} interval"]
    constant = [metrics["constant_accuracy"] for metrics in shown.values() if "constant_accuracy" in metrics]
    if constant and not by_model:
        handles.append(axes.axvline(float(constant[0]), color=PURPLE, linestyle=":", linewidth=1.6, zorder=0))
        labels.append(f"best constant answer, {constant[0]:.3f}")
    axes.set_yticks(range(len(shown)), [_role_name(role) for role in shown])
    axes.set_ylim(max(1, len(shown)) - 0.4, -0.8)  # the first role on top
    if not by_model:
        axes.set_xlim(-0.02, 1.02)
    shared_legend(figure, handles, labels)
    return figure


def draw_ancestry(found: Mapping[str, Any]) -> Figure:
    """Return the picture of what a policy came from.

    Args:
        found: boxes and arrows, as `tasks.report.ancestry` lays them out.
    """
    boxes = found["boxes"]
    columns, rows = (1 + max(box[side] for box in boxes) for side in ("column", "row"))
    figure = new_figure(0.3 + 0.62 * rows)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    for parent, child in found["arrows"]:
        ends = [(boxes[at]["column"], boxes[at]["row"]) for at in (parent, child)]
        axes.annotate("", xytext=(ends[0][0] + 0.42, ends[0][1]), xy=(ends[1][0] - 0.42, ends[1][1]),
                      arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.9})  # fmt: skip
    size = min(SMALL, 32.0 / columns)  # points: the longest name fits its box
    for at, box in enumerate(boxes):
        axes.text(box["column"], box["row"], f"{_plain(box['name'])}\n{box['told']}", ha="center", va="center",
                  fontsize=size, color=INK, bbox={"boxstyle": "round,pad=0.4", "facecolor": "white",
                                                 "edgecolor": VERMILION if at == 0 else BLUE})  # fmt: skip
    if found["left_out"]:
        axes.set_title(f"and {found['left_out']} earlier", loc="left", fontsize=SMALL, color=INK)
    return figure


def _plain(name: str) -> str:
    """Return a name in which matplotlib finds no formula."""
    return name.replace("$", r"\$")


def _shown_score(metrics: Mapping[str, Any]) -> float:
    """Return the figure that an evaluation's interval belongs to; nan if it has none."""
    value = metrics.get("score" if metrics.get("judge") == "reward_model" else "accuracy")
    return float(value) if isinstance(value, int | float) else float("nan")


def _role_name(role: str) -> str:
    """Return a role as people write it."""
    return role.upper() if role in {"sft", "ppo"} else role
