"""Comparisons of policies on the same problems, and their tables in markdown; arithmetic and text alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlhf_core.escaping import code, table
from rlhf_core.functional.intervals import Interval, paired_difference_interval, wilson_interval
from tasks.results import SHOWN_CONFIDENCE


class Outcome(Protocol):
    """What is compared of `rlhf_core.evaluation.Outcome`."""

    @property
    def key(self) -> str:
        """Of the problem."""

    @property
    def correct(self) -> bool:
        """Wholly right."""

    @property
    def well_formed(self) -> bool:
        """Of the form that was asked for."""

    @property
    def truncated(self) -> bool:
        """Cut off."""


CURVES = {
    "score": "score",
    "verifier": "verifier, 0 to 1",
    "kl": "KL, nats per response",
    "length": "tokens",
    "entropy": "entropy, nats per token",
    "explained_variance": "explained variance",
    "clip_fraction": "clip fraction",
    "well_formed": "well formed",
    "accuracy_given_form": "right given form",
}


def accuracy(outcomes: Sequence[Outcome]) -> Interval:
    """Return the share of right answers with Wilson's interval."""
    return wilson_interval(sum(each.correct for each in outcomes), len(outcomes), SHOWN_CONFIDENCE)


def gain(before: Sequence[Outcome], after: Sequence[Outcome]) -> Interval:
    """Return the paired difference in the share of right answers; problems are matched by their keys.

    Raises:
        ValueError: if the two did not answer the same problems.
    """
    first, second = ({each.key: each.correct for each in outcomes} for outcomes in (before, after))
    if first.keys() != second.keys():
        raise ValueError(f"{len(first.keys() ^ second.keys())} problems were answered by one of the two alone")
    keys = sorted(first)
    return paired_difference_interval([first[key] for key in keys], [second[key] for key in keys], SHOWN_CONFIDENCE)


def entry(outcomes: Sequence[Outcome], start: Sequence[Outcome] | None = None, **more: Any) -> dict[str, Any]:
    """Return one policy's figures: accuracy, form, and where there is a start, the gain over it."""
    figures: dict[str, Any] = {
        "accuracy": _rounded(accuracy(outcomes)),
        "well_formed": round(sum(each.well_formed for each in outcomes) / len(outcomes), 4),
        "truncated": round(sum(each.truncated for each in outcomes) / len(outcomes), 4),
    }
    if start is not None:
        figures["gain"] = _rounded(gain(start, outcomes))
    return figures | more


def document(lines: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return everything in markdown.

    Args:
        lines: one a seed, as the benchmark prints them.
        curves: rows of episodes by the title of their run.
    """
    parts = ["## Held-out problems, greedy answers", results(lines), constants(lines)]
    for title, rows in curves.items():
        parts += [f"### By episode: {title}", curve(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def results(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return one row a policy: who, how right, how much over SFT, at which cost; no column that is empty in all."""
    rows = []
    for line in lines:
        for policy, figures in line["policies"].items():
            seconds = figures.get("seconds")
            rows.append(
                [
                    str(line["seed"]),
                    policy,
                    _share(figures["accuracy"]),
                    _difference(figures["gain"]) if "gain" in figures else "",
                    _difference(figures["ppo_over_it"]) if "ppo_over_it" in figures else "",
                    f"{figures['well_formed']:.3f}",
                    f"{figures['truncated']:.3f}",
                    "" if seconds is None else f"{seconds:.0f}",
                ]
            )
    over = f"over SFT, paired [{SHOWN_CONFIDENCE:.0%}]"
    head = ["seed", "", f"right [{SHOWN_CONFIDENCE:.0%}]", over, "PPO over it", "well formed", "cut off", "seconds"]
    return table(head, rows)


def constants(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return what the best constant answer would have got, a sentence a seed; nothing where no evaluation says so."""
    found = ((line["seed"], line["policies"]["SFT"]) for line in lines)
    return "\n".join(
        f"* Seed {seed}: the best constant answer, {code(str(figures['constant_answer']))}, would be right "
        f"{figures['constant_accuracy']:.3f} of the time."
        for seed, figures in found
        if "constant_accuracy" in figures
    )


def curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one row an episode, of those quantities that the run kept."""
    names = [name for name in CURVES if all(name in row for row in rows)]
    body = [[str(int(row["episode"]) + 1), *(f"{row[name]:.3f}" for name in names)] for row in rows]
    return table(["episode", *(CURVES[name] for name in names)], body)


def _share(ends: Sequence[float]) -> str:
    return f"{ends[0]:.3f} [{ends[1]:.3f}, {ends[2]:.3f}]"


def _difference(ends: Sequence[float]) -> str:
    return f"{ends[0]:+.3f} [{ends[1]:+.3f}, {ends[2]:+.3f}]"


def _rounded(interval: Interval) -> list[float]:
    return [round(end, 4) for end in interval]
