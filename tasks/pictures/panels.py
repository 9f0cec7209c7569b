"""What the curves of a PPO run show: one panel a quantity, from the rows of its episodes. Knows no matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

from rlhf_core.functional.intervals import normal_interval, wilson_interval
from rlhf_core.ppo.best import DEVELOPMENT, best_episode
from tasks.results import SHOWN_CONFIDENCE

Rows = Sequence[Mapping[str, Any]]
Ends = tuple[float, float]
"""Of an interval: lower, upper."""
_UNKNOWN: Ends = (nan, nan)
_ROUNDING = 1e-6
PHASES = ("generate", "score", "learn", "synchronise", "commit", "measure")
START, CONSTANT, ZERO = "start, sampled (episode 1)", "best constant answer", "zero"
LOWEST_EXPLAINED = -1.0  # a new critic's first episode may lie far below and flatten all that follows


@dataclass(frozen=True)
class Line:
    """One value an episode; nan where there is none."""

    name: str
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Ends of the interval of each value, nan where it is not known; empty without intervals."""


@dataclass(frozen=True)
class Reference:
    """A level to compare with."""

    name: str
    value: float


@dataclass(frozen=True)
class Panel:
    """One quantity over the episodes."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    references: tuple[Reference, ...] = ()
    floor: float | None = None
    """Lower end of the axis; None leaves it to the data."""
    ceiling: float | None = None


def curves(rows: Rows, *, evaluations: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """Return the panels for which the rows hold anything.

    Args:
        rows: of the episodes, in order.
        evaluations: metrics of the policies to compare with, by the name that is shown; empty before evaluation.
    """
    panels = [
        Panel("Score", "mean per response", (_mean(rows, "score"),), _start(rows, "score")),
        *_shares(rows, evaluations),
        *_development(rows),
        Panel("KL from the start", "nats per response", (_line(rows, "kl"),), (Reference(START, 0.0),)),
        Panel("Length of responses", "tokens", (_line(rows, "length"),), _start(rows, "length")),
        Panel("Entropy", "nats per token", (_line(rows, "entropy"),), _start(rows, "entropy")),
        Panel("Clipped by the trust region", "share of tokens", (_line(rows, "clip_fraction"),), floor=0.0),
        *_critic(rows),
        *_sources(rows, evaluations),
        *_overlap(rows),
    ]
    return [panel for panel in panels if any(isfinite(value) for line in panel.lines for value in line.values)]


def seconds_by_phase(rows: Rows) -> dict[str, tuple[float, ...]]:
    """Return the seconds of each episode by phase, in the order in which the phases come."""
    named = {name.removeprefix("seconds_") for row in rows for name in row if name.startswith("seconds_")}
    ordered = [phase for phase in PHASES if phase in named] + sorted(named.difference(PHASES))
    found = {phase: values(rows, f"seconds_{phase}") for phase in ordered}
    return {phase: tuple(value if isfinite(value) else 0.0 for value in row) for phase, row in found.items()}


def values(rows: Rows, name: str) -> tuple[float, ...]:
    """Return a column of the rows as numbers; nan where a row has none."""
    found = (row.get(name) for row in rows)
    return tuple(float(value) if isinstance(value, int | float) else nan for value in found)


def _judged(rows: Rows) -> tuple[float, ...]:
    """Return of how many samples each episode's figures speak; in rows of earlier releases none abstained."""
    return tuple(
        count - (round(count * share) if isfinite(share) else 0)
        for count, share in zip(values(rows, "samples"), values(rows, "abstained"), strict=True)
    )


def _shares(rows: Rows, evaluations: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    samples, formed = _judged(rows), values(rows, "well_formed")
    verified = any("raw/verifier" in row for row in rows)
    panels = []
    if verified:
        counts = [number * share for number, share in zip(samples, formed, strict=True)]
        panels.append(("Verifier's score", "mean, 1 is right", _verified(rows)))
        given_form = _share(rows, "accuracy_given_form", counts)
        panels.append(("Right, given the form", "share of well formed", given_form))
    if verified or any(row.get("well_formed") for row in rows):  # else there is no form to hold
        panels.append(("Well formed", "share of samples", _share(rows, "well_formed", samples)))
    levels = {
        "verifier": _levels(evaluations, "score") + _constant(evaluations),
        "accuracy_given_form": _levels(evaluations, "accuracy_given_form"),
        "well_formed": _levels(evaluations, "well_formed"),
    }
    return [Panel(title, unit, (line,), levels[line.name], floor=0.0, ceiling=1.0) for title, unit, line in panels]


def _development(rows: Rows) -> list[Panel]:
    """Return the panel of the development split, with the kept episode as a level; none where nothing was measured."""
    best = best_episode(rows)
    if best is None:
        return []
    kept = Reference(f"kept: episode {best + 1}", float(rows[best][DEVELOPMENT]))
    return [Panel("Development split", "right, or the judge's score", (_line(rows, DEVELOPMENT),), (kept,))]


def _constant(evaluations: Mapping[str, Mapping[str, Any]]) -> tuple[Reference, ...]:
    """Return what the best constant answer scores; the problems are the same for all, so any evaluation says it."""
    found = [metrics["constant_accuracy"] for metrics in evaluations.values() if "constant_accuracy" in metrics]
    return (Reference(CONSTANT, float(found[0])),) if found else ()


def _critic(rows: Rows) -> list[Panel]:
    if not any(row.get("critic_loss") for row in rows):  # its figures are 0 where there is none
        return []
    explained = values(rows, "explained_variance")
    cut = any(value < LOWEST_EXPLAINED for value in explained)
    unit = f"share (axis ends at {LOWEST_EXPLAINED:.0f})" if cut else "share of variance"
    floor = LOWEST_EXPLAINED if cut else None
    line = Line("explained_variance", explained)
    return [Panel("Explained by the critic", unit, (line,), (Reference(ZERO, 0.0),), floor=floor)]


def _sources(rows: Rows, evaluations: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """Return what each source of reward said, and how much of the reward's variation is its own."""
    raw = [Line(name, values(rows, f"raw/{name}")) for name in _named(rows, "raw/") if name != "verifier"]
    shares = [Line(name, values(rows, f"reward_share_{name}")) for name in _named(rows, "reward_share_")]
    title = f"Score of {raw[0].name.replace('_', ' ')}" if len(raw) == 1 else "Other sources of reward"
    alone = len(raw) == 1 and raw[0].name == "reward_model"
    panels = [Panel(title, "mean, unweighted", tuple(raw), _scored(evaluations) if alone else ())]
    if any(row.get("abstained") for row in rows):
        panels.append(Panel("Abstained", "share of samples", (_line(rows, "abstained"),), floor=0.0, ceiling=1.0))
    if len(shares) > 1:  # a single source always has all of it
        regular = all(0 <= value <= 1 for line in shares for value in line.values if isfinite(value))
        floor, ceiling = (0.0, 1.0) if regular else (None, None)  # sources that work against each other leave [0, 1]
        panels.append(
            Panel("Share of reward's variance", "share, by source", tuple(shares), floor=floor, ceiling=ceiling)
        )
    return panels


def _overlap(rows: Rows) -> list[Panel]:
    """Return how making and learning went side by side; where they took turns, that says little."""
    if not any(row.get("staleness") for row in rows):
        return []
    ages = (Line("mean", values(rows, "staleness")), Line("oldest", values(rows, "staleness_max")))
    idle = tuple(Line(side, values(rows, f"idle_{side}")) for side in ("trainer", "makers"))
    return [
        Panel("Age of the samples", "versions", ages, floor=0.0),
        Panel("Samples ready to learn from", "samples", (_line(rows, "queue_depth"),), floor=0.0),
        Panel("Idle", "share of the time", idle, floor=0.0, ceiling=1.0),
    ]


def _named(rows: Rows, prefix: str) -> list[str]:
    return sorted({name.removeprefix(prefix) for row in rows for name in row if name.startswith(prefix)})


def _line(rows: Rows, name: str) -> Line:
    return Line(name, values(rows, name))


def _share(rows: Rows, name: str, counts: Sequence[float]) -> Line:
    """Return a share with its Wilson interval over as many as it is of in each episode."""
    shares = values(rows, name)
    return _with_ends(name, shares, [_wilson(share, count) for share, count in zip(shares, counts, strict=True)])


def _mean(rows: Rows, name: str) -> Line:
    """Return a mean with its normal interval over each episode's samples, as if no two shared a prompt."""
    columns = (values(rows, name), values(rows, f"{name}_std"), _judged(rows))
    return _with_ends(name, values(rows, name), [_normal(*figures) for figures in zip(*columns, strict=True)])


def _verified(rows: Rows) -> Line:
    """Return the verifier's mean: where it says 0 or 1 alone, it is a share; of parts of a point, it is any mean."""
    columns = (values(rows, "verifier"), values(rows, "verifier_std"), _judged(rows))
    ends = [
        _normal(mean, std, count) if _has_parts(mean, std, count) else _wilson(mean, count)
        for mean, std, count in zip(*columns, strict=True)
    ]
    return _with_ends("verifier", values(rows, "verifier"), ends)


def _has_parts(mean: float, std: float, count: float) -> bool:
    """Return whether values from 0 to 1 have any between: they vary less than zeros and ones of the same mean."""
    return count > 1 and 0 < mean < 1 and std**2 < (1 - _ROUNDING) * mean * (1 - mean) * count / (count - 1)


def _wilson(share: float, count: float) -> Ends:
    n = round(count) if isfinite(count) else 0
    if n < 1 or not 0 <= share <= 1:
        return _UNKNOWN
    interval = wilson_interval(round(share * n), n, SHOWN_CONFIDENCE)
    return interval.low, interval.high


def _normal(mean: float, std: float, count: float) -> Ends:
    if not (isfinite(mean) and isfinite(std) and count > 1):
        return _UNKNOWN
    interval = normal_interval(mean=mean, std=std, n=round(count), confidence=SHOWN_CONFIDENCE)
    return interval.low, interval.high


def _with_ends(name: str, found: tuple[float, ...], ends: Sequence[Ends]) -> Line:
    return Line(name, found, tuple(low for low, _ in ends), tuple(high for _, high in ends))


def _start(rows: Rows, name: str) -> tuple[Reference, ...]:
    """Return the level at which the run began: its first episode is sampled before anything was learnt."""
    found = values(rows, name)
    return (Reference(START, found[0]),) if len(found) > 1 and isfinite(found[0]) else ()


def _scored(evaluations: Mapping[str, Mapping[str, Any]]) -> tuple[Reference, ...]:
    """Return what the reward model says of greedy answers, where it judged them."""
    return tuple(
        Reference(f"{role}, greedy", float(metrics["score"]))
        for role, metrics in evaluations.items()
        if metrics.get("judge") == "reward_model" and isinstance(metrics.get("score"), int | float)
    )


def _levels(evaluations: Mapping[str, Mapping[str, Any]], name: str) -> tuple[Reference, ...]:
    return tuple(
        Reference(f"{role}, greedy", float(metrics[name]))
        for role, metrics in evaluations.items()
        if isinstance(metrics.get(name), int | float) and "accuracy" in metrics  # no form from a reward model
    )
