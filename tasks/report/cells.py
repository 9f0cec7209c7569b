"""The tables that every form of the report shows, as plain cells: whoever renders them escapes them.

A figure that an artifact does not have leaves its cell empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.counting import counted
from rlhf_core.ppo.best import DEVELOPMENT
from tasks.progress import duration
from tasks.report.samples import BOTH_RIGHT, BOTH_WRONG, FELL, GAINED, LOST, ROSE, SAME
from tasks.results import KEPT, PLANNED, SHOWN_CONFIDENCE, STOPPED

if TYPE_CHECKING:
    from rlhf_core.gating.conditions import Condition
    from tasks.results import Decision, StageResult

INTERVAL = f"[{SHOWN_CONFIDENCE:.0%} interval]"
BROKEN = "broken"
HACK = "a reward hack"
MOST_CHANGES = 40
"""Lines of a difference that are shown; the rest is counted."""
_LONGEST_VALUE = 80
CHANGES = {
    LOST: "regressed",
    GAINED: "fixed",
    BOTH_WRONG: "still wrong",
    BOTH_RIGHT: "still right",
    FELL: "score fell",
    ROSE: "score rose",
    SAME: "score unchanged",
}
"""What became of an answer, in the order in which a person wants to see it, by the name that is shown."""


class Cells(NamedTuple):
    """One table."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def moved_counts(moved: Mapping[str, Any]) -> dict[str, int]:
    """Return how many answers became what, by the name that is shown."""
    return {shown: moved["counts"][kind] for kind, shown in CHANGES.items() if kind in moved["counts"]}


def condition_cells(decision: Decision) -> Cells:
    """Return the gate's conditions, the gain first; no rows where nothing was compared."""
    rows: list[tuple[str, ...]] = []
    if decision.p_value is not None and decision.level is not None:
        outcome = "holds" if decision.p_value <= decision.level else "may be chance"
        asked = f"at most {decision.level:.2g}"
        rows.append(("gain (p: as large by chance)", f"{decision.p_value:.2g}", asked, outcome))
    rows += [(each.name, number(vars(each), "figure"), each.asked, _outcome(each)) for each in decision.conditions]
    return Cells(("condition", "figure", "asked", "outcome"), rows)


def _outcome(condition: Condition) -> str:
    if condition.figure is None:
        return "not measured"
    return "holds" if condition.holds else BROKEN


def evaluation_cells(evaluations: Mapping[str, StageResult], *, by_model: bool) -> Cells:
    """Return the held-out figures of each policy, by role, and of the best constant answer.

    Where a reward model judges, its mean score stands in place of the share of right answers.
    """
    rows = [
        (
            role,
            with_interval(result.metrics, "score" if by_model else "accuracy"),
            "" if by_model else number(result.metrics, "accuracy_given_form"),
            number(result.metrics, "well_formed"),
            number(result.metrics, "truncated"),
            str(result.metrics.get("unjudged") or ""),
        )
        for role, result in evaluations.items()
    ]
    constant = next((number(each.metrics, "constant_accuracy") for each in evaluations.values()), "")
    if constant and not by_model:
        rows.append(("best constant answer", constant, "", "", "", ""))
    shown, formed = ("mean score", "ended") if by_model else ("right", "well formed")
    # an answer that is not judged is in no other figure
    return Cells(("", f"{shown} {INTERVAL}", "right, given the form", formed, "cut off", "not judged"), rows)


def paid_cells(paid: Sequence[Mapping[str, Any]]) -> Cells:
    """Return what each source of reward said, and its share of the reward's variance, at first and at last."""
    rows = [
        (each["source"], _ends(each["raw"]), _ends(each["share"]), HACK if each["is_hacked"] else "") for each in paid
    ]
    return Cells(("source", "says", "share of variance", "named"), rows)


def cost_cells(costs: Sequence[Mapping[str, Any]]) -> Cells:
    """Return what each stage cost; of one from the store the time that it took another night, and no cost."""
    rows = [
        (
            each["stage"],
            duration(each["seconds"]),
            "stored before" if each["reused"] else f"{each['core_hours']:.2f}",
            f"{each['gpu_hours']:.2f}" if each["gpu_hours"] else "",
            size(each["bytes"]) if each["bytes"] else "",
            f"{each['money']:.2f}" if each["money"] else "",
        )
        for each in costs
    ]
    return Cells(("stage", "time", "core hours", "GPU hours", "stored", "cost"), rows)


def episodes_told(metrics: Mapping[str, Any]) -> str:
    """Return how many episodes PPO had, why no more, and which one's policy was kept; empty if it is not known."""
    if "episodes" not in metrics:
        return ""
    told = counted(metrics["episodes"], "episode")
    if PLANNED in metrics:
        told += f" of {metrics[PLANNED]}, as a night's budget ended"
    if STOPPED in metrics:
        told += f", stopped: {metrics[STOPPED]}"
    if KEPT in metrics:
        told += f", the policy is of episode {metrics[KEPT]} ({metrics[DEVELOPMENT]:.3f} on the development split)"
    return told


def change_cells(changes: Sequence[Sequence[Any]]) -> list[tuple[str, str, str]]:
    """Return the first lines of a difference: name, before, after."""
    rows = [(str(name), _value(before), _value(after)) for name, before, after in changes[:MOST_CHANGES]]
    left_out = len(changes) - len(rows)
    return [*rows, (f"and {left_out} more", "", "")] if left_out else rows


def number(metrics: Mapping[str, Any], name: str, pattern: str = "{:.3f}") -> str:
    """Return a figure, or nothing where there is none."""
    value = metrics.get(name)
    return pattern.format(value) if isinstance(value, int | float) and isfinite(value) else ""


def with_interval(metrics: Mapping[str, Any], name: str, prefix: str = "") -> str:
    """Return a figure with the ends of its interval, as far as they are known."""
    ends = [number(metrics, f"{prefix}{end}") for end in ("low", "high")]
    return number(metrics, name) + (f" [{ends[0]}, {ends[1]}]" if all(ends) else "")


def size(count: float) -> str:
    """Return a number of bytes as people read it.

    >>> size(12), size(3_450_000)
    ('12 B', '3.5 MB')
    """
    thousand = 1000.0
    for unit in ("B", "kB", "MB", "GB"):
        if count < thousand:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= thousand
    return f"{count:.1f} TB"


def _ends(values: Sequence[float | None]) -> str:
    known = [f"{value:.3f}" for value in values if value is not None]
    return " to ".join(dict.fromkeys(known))


def _value(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
