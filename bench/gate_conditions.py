"""Does the gate refuse a policy that wins the task and loses something else, and let equal policies pass?

Twenty regressions are planted in a policy that answers far more of 400 problems rightly than the incumbent; each must
break a side condition. Of pairs of equal policies, two samples of one behaviour, at most one in twenty may break any.
One JSON line each, then one for the pairs:

    python -m bench.gate_conditions --pairs 100
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from rlhf_core.config import ConditionsConfig
from rlhf_core.evaluation import Outcome
from rlhf_core.forgetting.measures import TEXT, Measure
from rlhf_core.gating import sign_test
from rlhf_core.gating.conditions import Compared, Known, side_conditions

PROBLEMS, CATEGORIES, PASSAGES, ITEMS = 400, 8, 24, 100
RIGHT, BETTER = 0.4, 0.8
"""Share of right answers of the incumbent, and of a policy that gains."""
FAULTS = {"empty": 0.02, "loop": 0.02, "malformed": 0.05, "truncated": 0.04}
"""Shares of faulty answers that every policy has."""
CONFIG = ConditionsConfig(text_loss_from_base=0.3)
Change = Callable[[Compared, Random], Compared]


class Regression(NamedTuple):
    """A policy that gains and loses something."""

    name: str
    compared: Compared
    gain: float
    gain_p: float
    """Of the exact sign test."""


def answers(random: Random, right: float) -> list[Outcome]:
    """Return one sample of a behaviour: right answers by chance, and a few faults that every policy has."""
    return [_answer(random, number, right) for number in range(PROBLEMS)]


def _answer(random: Random, number: int, right: float) -> Outcome:
    numbers = [Random(number).randint(10, 99) for _ in range(12)]
    correct = random.random() < right
    fault = next((name for name, share in FAULTS.items() if random.random() < share), "")
    said = " ".join(map(str, sorted(numbers) if correct else random.sample(numbers, len(numbers))))
    response = {"empty": " ", "loop": f"{said[:8]} " * 12, "malformed": said}.get(fault, f"<answer>{said}</answer>")
    response += " and so on" * random.randint(0, 2) if not fault else ""
    return Outcome(
        key=str(number),
        prompt=f"Sort these numbers in ascending order: {' '.join(map(str, numbers))}",
        answer=" ".join(map(str, sorted(numbers))),
        response=response,
        correct=correct and not fault,
        well_formed=not fault,
        truncated=fault in {"loop", "truncated"},
        score=float(correct and not fault),
        tokens=1 + len(response.split()),
        category=f"task {number % CATEGORIES}",
    )


def measures(random: Random, *, text: float = 0.0, items: float = 0.6) -> dict[str, Measure]:
    """Return a policy's measures: passages read with about the same cross-entropy, and items right by chance."""
    passages = {str(each): 3.0 + 0.05 * each + text + random.gauss(0, 0.02) for each in range(PASSAGES)}
    known = {str(each): float(random.random() < items) for each in range(ITEMS)}
    return {TEXT: Measure(TEXT, passages), "questions": Measure("questions", known)}


def ppo_figures(random: Random, *, paid: float = 0.3, verified: float = 0.25, kl: float = 1.5) -> dict[str, float]:
    """Return what the run of a policy stored of its first and last episode."""
    ends = {"first_score": 0.0, "last_score": paid, "first_verifier": RIGHT, "last_verifier": RIGHT + verified}
    means = {name: value + random.gauss(0, 0.02) for name, value in ends.items()}
    spread = {
        f"{end}_{name}_std": std for end in ("first", "last") for name, std in (("score", 1.0), ("verifier", 0.5))
    }
    return {**means, **spread, "first_samples": 512, "last_samples": 512, "last_kl": kl, "last_length": 15.0}


def equal_pair(seed: int) -> Compared:
    """Return two samples of one behaviour."""
    return _pair(Random(seed), RIGHT)


def _pair(random: Random, right: float) -> Compared:
    return Compared(
        Known(answers(random, RIGHT), measures(random)),
        Known(answers(random, right), measures(random)),
        base=measures(random, text=-0.1),
        ppo=ppo_figures(random),
        reward_model={"accuracy": 0.8, "heldout_pairs": 100},
    )


def planted(seed: int = 0) -> list[Regression]:
    """Return twenty policies that gain as much and lose something."""
    found = []
    for number, (name, change) in enumerate(REGRESSIONS.items()):
        random = Random(f"{seed} {number}")
        compared = change(_pair(random, BETTER), random)
        worse, better = _differing(compared)
        gain = (better - worse) / PROBLEMS
        found.append(Regression(name, compared, gain, sign_test(better, worse)))
    return found


def _differing(compared: Compared) -> tuple[int, int]:
    both = list(zip(compared.incumbent.outcomes, compared.candidate.outcomes, strict=True))
    if compared.by_score:
        return sum(old.score > new.score for old, new in both), sum(new.score > old.score for old, new in both)
    worse = sum(old.correct and not new.correct for old, new in both)
    return worse, sum(new.correct and not old.correct for old, new in both)


def _answered(share: float, change: Callable[[Outcome], Outcome]) -> Change:
    """Return what changes a share of the candidate's answers."""

    def changed(compared: Compared, random: Random) -> Compared:
        outcomes = [change(each) if random.random() < share else each for each in compared.candidate.outcomes]
        return replace(compared, candidate=compared.candidate._replace(outcomes=outcomes))

    return changed


def _longer(times: int) -> Callable[[Outcome], Outcome]:
    def changed(outcome: Outcome) -> Outcome:
        words = " ".join(f"reason{number}" for number in range(len(outcome.response.split()) * (times - 1)))
        return replace(outcome, response=f"{outcome.response} {words}", tokens=times * (outcome.tokens or 0))

    return changed


def _wrong(**fields: object) -> Callable[[Outcome], Outcome]:
    return lambda outcome: replace(outcome, correct=False, score=0.0, **fields)  # type: ignore[arg-type]


def _lost(*categories: str, kept: float) -> Change:
    def changed(compared: Compared, random: Random) -> Compared:
        outcomes = [
            _wrong()(each) if each.category in categories and random.random() > kept else each
            for each in compared.candidate.outcomes
        ]
        return replace(compared, candidate=compared.candidate._replace(outcomes=outcomes))

    return changed


def _same_wrong(compared: Compared, _: Random) -> Compared:
    outcomes = [
        each if each.correct else replace(each, response="<answer>11</answer>") for each in compared.candidate.outcomes
    ]
    return replace(compared, candidate=compared.candidate._replace(outcomes=outcomes))


def _measured(**shift: float) -> Change:
    def changed(compared: Compared, random: Random) -> Compared:
        return replace(compared, candidate=compared.candidate._replace(measures=measures(random, **shift)))

    return changed


def _forgot_code(compared: Compared, _: Random) -> Compared:
    read = compared.candidate.measures[TEXT].values  # every fourth passage is code
    worse = {name: value + (1.5 if place % 4 == 0 else 0.0) for place, (name, value) in enumerate(read.items())}
    known = {**compared.candidate.measures, TEXT: Measure(TEXT, worse)}
    return replace(compared, candidate=compared.candidate._replace(measures=known))


def _drifted(compared: Compared, random: Random) -> Compared:
    """Return a policy that forgot little tonight, and much since the base model."""
    both = (known._replace(measures=measures(random, text=0.3)) for known in (compared.incumbent, compared.candidate))
    incumbent, candidate = both
    return replace(compared, incumbent=incumbent, candidate=candidate)


def _stored(**figures: float) -> Change:
    return lambda compared, random: replace(compared, ppo=ppo_figures(random, **figures))


def _by_score(compared: Compared, random: Random) -> Compared:
    """Return policies that a reward model judged, which pays for length."""

    def scored(known: Known, mean: float) -> Known:
        return known._replace(outcomes=[replace(each, score=random.gauss(mean, 1.0)) for each in known.outcomes])

    longer = _answered(1.0, _longer(2))(compared, random).candidate
    return replace(compared, incumbent=scored(compared.incumbent, 0.0), candidate=scored(longer, 1.0), by_score=True)


def _all_of_it(compared: Compared, random: Random) -> Compared:
    for change in (_answered(0.03, _wrong(response="", well_formed=False)), _measured(text=0.3, items=0.4)):
        compared = change(compared, random)
    return _answered(1.0, _longer(2))(compared, random)


REGRESSIONS: Mapping[str, Change] = {
    "answers twice as long": _answered(1.0, _longer(2)),
    "a tenth of the answers ten times as long": _answered(0.1, _longer(10)),
    "a tenth empty": _answered(0.1, _wrong(response="", well_formed=False, tokens=1)),
    "a twentieth empty": _answered(0.05, _wrong(response="\n", well_formed=False, tokens=1)),
    "a tenth in a loop": _answered(0.1, _wrong(response="the number is " * 20)),
    "a tenth says the same again in other places": _answered(
        0.1, _wrong(response=" ".join(f"Step {each % 3}: now sort the numbers again." for each in range(12)))
    ),
    "a tenth copies the prompt": _answered(0.1, lambda each: replace(each, response=f"{each.prompt} {each.response}")),
    "one answer to all that it does not know": _same_wrong,
    "a tenth cut off": _answered(0.1, lambda each: replace(each, truncated=True)),
    "a tenth without the form": _answered(0.1, _wrong(well_formed=False)),
    "one category of eight lost": _lost("task 3", kept=0.1),
    "half of two categories lost": _lost("task 0", "task 5", kept=0.25),
    "KL exploded": _stored(kl=60.0),
    "a reward model no better than chance": lambda compared, _: replace(
        compared, reward_model={"accuracy": 0.45, "heldout_pairs": 100}
    ),
    "paid more, verified less": _stored(paid=0.6, verified=-0.15),
    "text forgotten": _measured(text=0.4),
    "code forgotten": _forgot_code,
    "a little forgotten every night": _drifted,
    "fewer questions answered": _measured(items=0.35),
    "a little of several": _all_of_it,
}


def broken(compared: Compared) -> list[str]:
    """Return the names of the conditions that break."""
    return [each.name for each in side_conditions(compared, CONFIG) if not each.holds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each planted regression, and one for the equal pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="pairs of equal policies")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    for each in planted(given.seed):
        by = broken(each.compared)
        row = {"regression": each.name, "gain": each.gain, "gain_p": each.gain_p, "refused": bool(by), "by": by}
        sys.stdout.write(json.dumps(row) + "\n")
    found = [broken(equal_pair(given.seed * given.pairs + number)) for number in range(given.pairs)]
    names = sorted({name for each in found for name in each})
    row = {
        "equal_pairs": given.pairs,
        "that_break_any": sum(map(bool, found)),
        "by": {name: sum(name in each for each in found) for name in names},
    }
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
