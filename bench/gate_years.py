"""A year of nights through the gate's own code: how often it promotes chance, and how soon a gain.

    python bench/gate_years.py                     # all tables of docs/gate.md, some minutes on one core
    python bench/gate_years.py --years 50 --trials 200

Prints a JSON line for each row. Policies are right on about half of a pool of problems. A candidate differs from the
champion on a share of them, each problem by itself; promoted, it is the champion from which the next candidates come.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rlhf_core.gating import Comparison, Contender, Tally, Verdict, judge, level_of_each, levels, power

NIGHTS, YEAR_ERROR, MOST_NIGHTS = 365, 0.05, 3
A_NIGHT = 500
POOLS = (500, 2_000, 20_000, 182_500)
EPISODES, DEVELOPMENT = 5, 200
"""A candidate is the best of so many episodes on so many problems that the gate never asks."""
UNKNOWN = -1
Answers = npt.NDArray[np.int8]


def year_of_levels(nights: int = NIGHTS) -> list[float]:
    """Return the level of each night of a year that begins with an unspent budget."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return levels(Comparison(start + timedelta(days=day), YEAR_ERROR, NIGHTS) for day in range(nights))


@dataclass
class World:
    """One champion, its pool of problems, and how candidates differ from it."""

    rng: np.random.Generator
    pool: int
    """A multiple of `a_night`."""
    a_night: int
    differing: float
    leaks: bool = False
    """The best episode is chosen on the very problems of the gate."""
    gain_of_challenger: float = 0.0

    def __post_init__(self) -> None:
        self.champion: Answers = self.rng.integers(0, 2, self.pool, dtype=np.int8)
        self.challenger: Answers | None = None
        self.asked: set[int] = set()
        """Where the windows begin that the challenger was asked."""
        self.nights, self.level = 0, 0.0

    def candidate(self, at: slice, gain: float) -> Tally:
        """Return wins and losses of the best of tonight's episodes.

        Where the champion is wrong an episode wins, where it is right it loses, each problem by itself.
        """
        right = int(self.champion[at].sum())
        # half of the problems are right, so these rates give the gain and the share that differs
        wins = self.rng.binomial(self.a_night - right, self.differing + gain, EPISODES)
        losses = self.rng.binomial(right, self.differing - gain, EPISODES)
        chosen_by = wins - losses if self.leaks else self.rng.binomial(DEVELOPMENT, 0.5 + gain, EPISODES)
        best = int(np.argmax(chosen_by))
        return Tally(int(wins[best]), int(losses[best]), self.a_night)

    def night(self, night: int, level: float, gain: float = 0.0) -> Verdict:
        """Let the gate decide, and do as it says."""
        begins = night * self.a_night % self.pool  # the next problems, and at the end the first again
        at = slice(begins, begins + self.a_night)
        found = self.candidate(at, gain)
        level = level_of_each(level, MOST_NIGHTS)
        new = Contender.after(found, level=level, nights=1, new=self.a_night, most_nights=MOST_NIGHTS)
        verdict = judge(new, self.waiting(at))
        if "candidate" in {verdict.promoted, verdict.waits}:
            self.challenger = np.full(self.pool, UNKNOWN, dtype=np.int8)
            self.challenger[at] = self.with_tally(at, found)
            self.asked, self.nights, self.level = {begins}, 1, level
        elif verdict.waits is None and verdict.promoted is None:
            self.challenger = None
        if verdict.promoted is not None:
            self.promote()
        return verdict

    def with_tally(self, at: slice, found: Tally) -> Answers:
        """Return answers with so many wins and losses against the champion, on problems drawn by chance."""
        answers = self.champion[at].copy()
        wrong, right = np.flatnonzero(answers == 0), np.flatnonzero(answers == 1)
        answers[self.rng.choice(wrong, found.wins, replace=False)] = 1
        answers[self.rng.choice(right, found.losses, replace=False)] = 0
        return answers

    def waiting(self, at: slice) -> Contender | None:
        """Return the challenger with tonight's problems, if one waits; what it has answered before stays."""
        if self.challenger is None:
            return None
        self.answer(at)
        new = 0 if at.start in self.asked else self.a_night
        self.asked, self.nights = self.asked | {at.start}, self.nights + 1
        windows = [slice(begins, begins + self.a_night) for begins in self.asked]
        found = [self.tally(self.champion[each], self.challenger[each]) for each in windows]
        pooled = Tally(*map(sum, zip(*found, strict=True)))
        return Contender.after(pooled, level=self.level, nights=self.nights, new=new, most_nights=MOST_NIGHTS)

    def answer(self, at: slice) -> None:
        """Let the challenger answer what it was not asked before."""
        assert self.challenger is not None
        right, draws = self.champion[at] == 1, self.rng.random(len(self.champion[at]))
        differing, gain = self.differing, self.gain_of_challenger
        answers = np.where(right, draws >= differing - gain, draws < differing + gain)
        self.challenger[at] = np.where(self.challenger[at] == UNKNOWN, answers, self.challenger[at])

    def promote(self) -> None:
        """Make the challenger (tonight's candidate, where that one passed) the champion."""
        assert self.challenger is not None
        self.answer(slice(0, self.pool))
        self.champion, self.challenger = self.challenger, None

    @staticmethod
    def tally(before: Answers, after: Answers) -> Tally:
        """Return wins and losses."""
        difference = after - before
        return Tally(int((difference > 0).sum()), int((difference < 0).sum()), len(difference))


def former_gate_promotes(found: Tally) -> bool:
    """Return whether the paired interval at 95 %, by the normal approximation, lies above 0."""
    n, gain = found.problems, found.gain
    variance = (found.wins + found.losses - n * gain**2) / (n - 1)
    return gain - NormalDist().inv_cdf(0.975) * sqrt(variance / n) > 0


def null_years(
    years: int, *, pool: int, differing: float, a_night: int = A_NIGHT, leaks: bool = False
) -> dict[str, Any]:
    """Return in how many years without any gain a night is promoted, by this gate and by the former one."""
    spent, false, former = year_of_levels(), 0, 0
    shares = [differing / 2, differing / 2, 1 - differing]
    for year in range(years):
        rng = np.random.default_rng([pool, round(1000 * differing), year])
        world = World(rng, pool, a_night, differing, leaks)
        false += any(world.night(night, level).promoted for night, level in enumerate(spent))
        counts = rng.multinomial(a_night, shares, NIGHTS)
        former += any(former_gate_promotes(Tally(wins, losses, a_night)) for wins, losses, _ in counts.tolist())
    row = {"table": "null years", "pool": pool, "a_night": a_night, "differing": differing, "years": years}
    return row | {"leaks": leaks, "false_years": false / years, "former_gate": former / years}


def promoted_within(nights: int, trials: int, *, a_night: int, gain: float, differing: float) -> float:
    """Return how often a candidate with a gain is promoted, the nights after it bringing none."""
    spent, found = year_of_levels(nights), 0
    for trial in range(trials):
        world = World(
            np.random.default_rng([a_night, round(1000 * differing), trial]), 10 * a_night, a_night, differing
        )
        world.gain_of_challenger = gain
        first = world.night(0, spent[0], gain)
        found += first.promoted is not None or _challenge_wins(world, spent)
    return found / trials


def _challenge_wins(world: World, spent: list[float]) -> bool:
    for night in range(1, len(spent)):
        if world.challenger is None:
            return False
        verdict = world.night(night, spent[night])
        if verdict.promoted is not None:
            return verdict.promoted == "challenger"
        if verdict.waits != "challenger":
            return False
    return False


def year_rows(years: int) -> Iterator[dict[str, Any]]:
    """Yield what a year without any gain promotes."""
    for pool in POOLS:
        yield null_years(years, pool=pool, differing=0.25)
    yield null_years(years, pool=2_000, differing=0.1)
    yield null_years(years, pool=2_000, differing=0.25, leaks=True)


def gain_rows(trials: int) -> Iterator[dict[str, Any]]:
    """Yield how soon a gain is promoted."""
    for differing in (0.15, 0.2, 0.25, 0.3):
        found = [promoted_within(n, trials, a_night=A_NIGHT, gain=0.08, differing=differing) for n in (1, 2, 3)]
        yield {"table": "+8 points", "a_night": A_NIGHT, "differing": differing, "by_night": found}
    level = YEAR_ERROR / NIGHTS
    for problems in (200, 300, 500, 700, 1000):
        for gain in (0.04, 0.08):
            one = power(problems=problems, gain=gain, differing=0.25, level=level)
            three = promoted_within(3, trials, a_night=problems, gain=gain, differing=0.25)
            row = {"table": "power", "problems": problems, "gain": gain, "differing": 0.25}
            yield row | {"one_night": round(one, 3), "three_nights": three}


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--years", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=2000)
    given = parser.parse_args()
    for row in chain(year_rows(given.years), gain_rows(given.trials)):
        print(json.dumps(row), flush=True)  # noqa: T201 - the benchmark's line


if __name__ == "__main__":
    main()
