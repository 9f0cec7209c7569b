"""Made histories of runs: healthy ones, and ones in which a cause for learning little, or a reward hack, is planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from random import Random
from typing import Any

from tasks.report.findings import Figures

SAMPLES, PROBLEMS = 64, 200
Row = dict[str, Any]


def evaluation(share: float, **changed: Any) -> Row:
    half = 1.96 * sqrt(max(share * (1 - share), 0.004) / PROBLEMS)
    row = {"accuracy": share, "low": share - half, "high": share + half, "judge": "exact", "problems": PROBLEMS}
    return row | {"well_formed": 0.98, "truncated": 0.01} | changed


def episode(draw: Random, at: int, right: float, **changed: float) -> Row:
    """Return the row of an episode in which each sample is right with this probability."""
    seen = sum(draw.random() < right for _ in range(SAMPLES)) / SAMPLES
    model = 2 * right - 1 + draw.gauss(0, 0.1)
    row = {"episode": at, "samples": float(SAMPLES), "abstained": 0.0, "verifier": seen, "score": seen + 0.1 * model}
    row |= {"raw/verifier": seen, "raw/reward_model": model, "verifier_std": sqrt(seen * (1 - seen))}
    row |= {"score_std": sqrt(seen * (1 - seen)) + 0.05, "well_formed": 0.98, "ended": 0.99, "length": 15.0}
    row |= {"reward_share_verifier": 0.87, "reward_share_reward_model": 0.13 + draw.gauss(0, 0.02)}
    row |= {"kl": max(0.0, 0.06 * at + draw.gauss(0, 0.02)), "entropy": 0.3 - 0.01 * at + draw.gauss(0, 0.01)}
    row |= {"explained_variance": 0.15 + draw.gauss(0, 0.05), "critic_loss": 0.2, "clip_fraction": 0.01}
    return row | {"skipped": 0.0, "actor_overflowed": 0.0} | changed


def healthy(seed: int, *, episodes: int = 12) -> Figures:
    """Return a run without a fault: most learn a lot, some little, as when the champion was good already."""
    draw = Random(seed)
    start = draw.uniform(0.15, 0.75)
    gain = draw.choice((0.02, 0.1, 0.2, 0.3)) * (1 - start) / 0.6
    rows = [episode(draw, at, start + gain * at / (episodes - 1)) for at in range(episodes)]
    samples = [{"prompt": str(at // 4), "score": float(draw.random() < start + gain)} for at in range(SAMPLES)]
    return Figures(
        episodes=rows, start=evaluation(start), end=evaluation(start + gain), samples=samples,
        sft={"flatness": 0.01, "flatness_error": 0.01}, reward_model={"accuracy": 0.8, "low": 0.7},
    )  # fmt: skip


def little(seed: int, right: float = 0.4) -> Figures:
    """Return a healthy run that learnt next to nothing."""
    draw = Random(seed)
    rows = [episode(draw, at, right) for at in range(12)]
    return replace(healthy(seed), episodes=rows, start=evaluation(right), end=evaluation(right + 0.005))


def changed(figures: Figures, **columns: Callable[[int], float]) -> Figures:
    """Return a history with other columns, each by the number of the episode."""
    rows = [{**row, **{name: value(at) for name, value in columns.items()}} for at, row in enumerate(figures.episodes)]
    return replace(figures, episodes=rows)


def _uniform(seed: int) -> Figures:
    return replace(
        little(seed), samples=[{"prompt": str(at // 4), "score": float(at // 4 % 2)} for at in range(SAMPLES)]
    )


PLANTED: dict[str, Callable[[int], Figures]] = {
    "The start solves too little to be paid": lambda seed: little(seed, 0.005),
    "The start solves nearly everything": lambda seed: little(seed, 0.97),
    "Few answers have the form that the verifier reads": lambda seed: replace(
        little(seed, 0.2), start=evaluation(0.2, well_formed=0.3)
    ),
    "SFT ended before it had learnt": lambda seed: replace(little(seed), sft={"flatness": 0.2, "flatness_error": 0.02}),
    "Groups without variance": _uniform,
    "Episodes without variance": lambda seed: changed(little(seed), verifier_std=lambda at: 0.3 * (at % 4 == 0)),
    "The critic is idle": lambda seed: changed(little(seed), explained_variance=lambda at: 0.002 * (at % 3 - 1)),
    "The policy hardly moved": lambda seed: changed(little(seed), kl=lambda at: 1e-4 * at),
    "The policy ran away from its start": lambda seed: changed(little(seed), kl=lambda at: 2.0 * at),
    "The entropy collapsed": lambda seed: changed(little(seed), entropy=lambda at: 0.3 * 0.6**at),
    "The entropy grew": lambda seed: changed(little(seed), entropy=lambda at: 0.3 + 0.2 * at),
    "Answers are cut off": lambda seed: replace(healthy(seed), end=evaluation(0.5, truncated=0.4)),
    "The reward model is weak": lambda seed: replace(healthy(seed), reward_model={"accuracy": 0.52, "low": 0.4}),
    "Steps were left out": lambda seed: changed(healthy(seed), skipped=lambda at: 0.5 * (at % 2)),
}
"""Histories by the cause that is planted in them."""


def hacked(seed: int, source: str) -> Figures:
    """Return a run that learns for four episodes; then a source is paid more and more, and fewer answers are right."""
    draw = Random(seed)
    rows = []
    for at in range(14):
        over = max(0, at - 4) / 9
        right = 0.5 + 0.05 * min(at, 4) - draw.uniform(0.25, 0.5) * over
        paid = {f"raw/{source}": 0.2 + 0.03 * at + draw.uniform(0.6, 1.2) * over + draw.gauss(0, 0.03)}
        rows.append(episode(draw, at, max(0.02, right), **paid, **{f"reward_share_{source}": 0.1 + 0.6 * over}))
    return replace(healthy(seed), episodes=rows, end=evaluation(0.35))
