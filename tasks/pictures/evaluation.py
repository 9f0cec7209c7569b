"""Held-out scores of the policies that were compared, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from rlhf_core.counting import counted
from tasks.pictures.style import BLUE, INK, PURPLE, SMALL, VERMILION, dress, new_figure, shared_legend
from tasks.results import SHOWN_CONFIDENCE


def draw_evaluations(evaluations: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return the figure of a point and an interval for each role, the best constant answer as a line.

    Args:
        evaluations: metrics of each evaluation, by role, from the base model to the champion.
    """
    shown = {role: metrics for role, metrics in evaluations.items() if isfinite(shown_score(metrics))}
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
        score = shown_score(metrics)
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
    axes.set_yticks(range(len(shown)), [role_name(role) for role in shown])
    axes.set_ylim(max(1, len(shown)) - 0.4, -0.8)  # the first role on top
    if not by_model:
        axes.set_xlim(-0.02, 1.02)
    shared_legend(figure, handles, labels)
    return figure


def shown_score(metrics: Mapping[str, Any]) -> float:
    """Return the figure that an evaluation's interval belongs to; nan if it has none."""
    value = metrics.get("score" if metrics.get("judge") == "reward_model" else "accuracy")
    return float(value) if isinstance(value, int | float) else float("nan")


def role_name(role: str) -> str:
    """Return a role as people write it."""
    return role.upper() if role in {"sft", "ppo"} else role
