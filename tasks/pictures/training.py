"""Training curves of the supervised stages, and what a reward model's scores are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf_core.functional.intervals import wilson_interval
from tasks.pictures.panels import Rows, values
from tasks.pictures.style import BLUE, INK, VERMILION, count_along, dress, legend, marker, small_multiples
from tasks.results import SHOWN_CONFIDENCE

_MOST_UNSMOOTHED = 20
HELDOUT = "heldout_loss"
"""Name in the rows of those steps after which the loss was measured on held-out examples."""
SFT_CURVES = (("loss", "Loss of SFT", "nats per token"), ("lr", "Learning rate of SFT", "per step"))
REWARD_MODEL_CURVES = (
    ("loss", "Loss of the reward model", "nats per pair"),
    ("accuracy", "Right in training", "share of a batch's pairs"),
)


def draw_sft(rows: Rows) -> Figure | None:
    """Return the figure of SFT's loss and learning rate by step; None if the rows hold neither.

    Args:
        rows: one a step, with step, loss and lr.
    """
    curves = [each for each in SFT_CURVES if _holds(rows, each[0])]
    if not curves:
        return None
    figure, grid = small_multiples(len(curves), columns=2, row_inches=2.1)
    for axes, curve in zip(grid, curves, strict=True):
        _draw_curve(axes, rows, *curve)
    return figure


def draw_reward_model(rows: Rows, metrics: Mapping[str, Any]) -> Figure | None:
    """Return the figure of training, calibration and scores; None if there is nothing of any of them.

    Args:
        rows: one a step, with step, loss and accuracy.
        metrics: of the reward model's artifact, with its bins.
    """
    curves = [each for each in REWARD_MODEL_CURVES if _holds(rows, each[0])]
    bins = [each for each in metrics.get("calibration_bins", ()) if each["pairs"]]
    histogram = metrics.get("score_histogram") or {}
    scored = bool(histogram.get("edges"))
    panels = len(curves) + bool(bins) + scored
    if not panels:
        return None
    figure, grid = small_multiples(panels, columns=2, row_inches=2.1)
    for axes, curve in zip(grid, curves, strict=False):
        _draw_curve(axes, rows, *curve)
    if bins:
        _draw_calibration(grid[len(curves)], bins)
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
