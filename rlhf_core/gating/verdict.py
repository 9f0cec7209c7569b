"""What becomes of tonight's candidate, and of the challenger that waits. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_core.gating.paired_test import Tally, improvement_p, least_gain_shown
from rlhf_core.gating.power import chance_to_pass

PROMISING = 0.1
"""A contender waits for more problems if it then passes with this probability at least."""


class Contender(NamedTuple):
    """A policy that may replace the champion."""

    found: Tally
    """Over all problems that it and the champion were asked, each problem once."""
    level: float
    """That its test has to reach tonight."""
    more: int = 0
    """New problems that the nights to come may bring it."""
    is_better: bool = True
    """Whether its side conditions hold, and, where scores have a size, their mean gain is above the least gain. A
    contender that is not neither replaces the champion nor waits."""

    @classmethod
    def after(
        cls, found: Tally, *, level: float, nights: int, new: int, most_nights: int, is_better: bool = True
    ) -> Contender:
        """Return a contender whose nights to come bring as many new problems as the last one.

        Args:
            found: over all its problems.
            level: of each of its tests.
            nights: whose problems these are.
            new: those of the last night that it had not been asked before; 0 where every night has the same.
            most_nights: that a contender may have.
            is_better: see above.
        """
        return cls(found, level, max(0, most_nights - nights) * new, is_better)


class Verdict(NamedTuple):
    """What the gate decides; p-values are of the null that the gain is at most the least gain."""

    candidate_p: float
    challenger_p: float | None = None
    """None where no challenger waited."""
    promoted: str | None = None
    """`candidate` or `challenger`."""
    waits: str | None = None
    """Who is the challenger from now on."""


def level_of_each(level: float, most_nights: int) -> float:
    """Return the level of each test of a candidate, which may be tested on so many nights.

    A candidate's tests share the level of the night on which it came, whether or not it is tested again: whoever waits
    has been lucky so far, so what a test spends must not depend on it.
    """
    return level / most_nights


def judge(candidate: Contender, challenger: Contender | None, *, min_gain: float = 0.0) -> Verdict:
    """Return who is promoted, and who waits for more problems.

    Of two that pass, the one with the higher lower bound is promoted. A
    challenger goes on waiting while it may pass; else the candidate takes its place, if it may.

    Args:
        candidate: tonight's, over tonight's problems.
        challenger: of an earlier night, over the problems since then; None if none waits.
        min_gain: that the true gain must exceed.
    """
    there = {"candidate": candidate} if challenger is None else {"challenger": challenger, "candidate": candidate}
    p = {name: improvement_p(each.found, min_gain) for name, each in there.items()}
    verdict = Verdict(p["candidate"], p.get("challenger"))
    passed = [name for name, each in there.items() if p[name] <= each.level and each.level > 0 and each.is_better]
    if len(passed) > 1:
        passed.sort(key=lambda name: -least_gain_shown(there[name].found, there[name].level))
    if passed:
        return verdict._replace(promoted=passed[0])
    waits = (name for name, each in there.items() if _may_pass(each, min_gain))
    return verdict._replace(waits=next(waits, None))


def _may_pass(each: Contender, min_gain: float) -> bool:
    if each.more == 0 or each.level == 0 or not each.is_better or each.found.gain <= min_gain:
        return False
    return chance_to_pass(each.found, each.level, each.more) >= PROMISING
