"""The gate's budget of errors, as the store records it: the alias `policy/<name>@judged`.

Each comparison moves it to the policy that was judged, before anything is decided. The history is the ledger: its order
alone says which level a comparison has, so a run that is started again finds its own, and two at once never share one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple
from uuid import uuid4

from pydantic import JsonValue

from infra.errors import StoreError
from rlhf_core.config import GateConfig, PipelineConfig
from rlhf_core.gating import (
    Comparison,
    Tally,
    fewest_problems,
    improvement_p,
    level_of_each,
    levels,
    smallest_gain,
)
from rlhf_core.gating.power import CHANCE, DIFFERING, problems_needed
from tasks.context import Context, open_context
from tasks.progress import say
from tasks.results import StageResult

JUDGED = "judged"


class _Entry(NamedTuple):
    """One comparison in the ledger."""

    uri: str
    run: str
    comparison: Comparison


def spend(context: Context, policy: str, gate: GateConfig) -> float:
    """Return the level of a comparison, which is in the ledger from now on.

    Args:
        context: the open context.
        policy: reference of the candidate.
        gate: what its year is to hold.
    """
    name = context.store.resolve(policy).name
    run = context.flow_run or uuid4().hex  # outside Prefect each comparison is one of its own

    def place() -> int | None:
        moves = enumerate(_ledger(context, name))
        return next((at for at, move in moves if (move.uri, move.run) == (policy, run)), None)

    found = place()
    if found is None:
        facts: dict[str, JsonValue] = {"run": run, "year_error": gate.year_error, "nights_a_year": gate.nights_a_year}
        who = f"run {run}" if context.flow_run else "a run without Prefect"
        context.store.set_alias(policy, JUDGED, why="judged by the gate", who=who, facts=facts)
        found = place()
    if found is None:
        raise StoreError(f"the alias {JUDGED!r} of policy/{name} has lost what this run wrote there; start a new run")
    return levels(each.comparison for each in _ledger(context, name))[found]


def next_level(context: Context, name: str, gate: GateConfig) -> float:
    """Return the level that a comparison would have now."""
    before = [each.comparison for each in _ledger(context, name)]
    return levels([*before, Comparison(datetime.now(UTC), gate.year_error, gate.nights_a_year)])[-1]


def _ledger(context: Context, name: str) -> list[_Entry]:
    """Return all comparisons with champions of a name; a move that a person made is none."""
    alias = context.store.aliases("policy", name).get(JUDGED)
    return [
        _Entry(
            move.uri,
            str(move.facts["run"]),
            Comparison(move.when, float(str(move.facts["year_error"])), int(str(move.facts["nights_a_year"]))),
        )
        for move in (alias.history if alias else ())
        if move.facts is not None
    ]


def tell_power(config: PipelineConfig, dataset: StageResult) -> None:
    """Say before the night which gain its held-out problems can show, and whether they are too few for any.

    Args:
        config: the preset; its name is that of the policies.
        dataset: of the run.
    """
    problems, gate = int(dataset.metrics.get("problems_evaluation", 0)), config.gate
    if problems == 0:
        return
    nights = gate.challenger_nights if config.data.rotate_evaluation else 1
    level = level_of_each(next_level(open_context(), config.name, gate), nights)
    if level <= 0:
        return
    if config.evaluation.judge == "reward_model":  # no two scores are quite the same, and wins exceed min_gain already
        told = power_sentence(problems, level, nights=nights, differing=1.0)
        least = f"; better is by more than gate.min_gain = {gate.min_gain:g}" if gate.min_gain else ""
        say("gate", told + least)
        return
    say("gate", power_sentence(problems, level, nights=nights, min_gain=gate.min_gain))


def power_sentence(
    problems: int, level: float, *, nights: int, differing: float = DIFFERING, min_gain: float = 0.0
) -> str:
    """Return which gain a night's problems show, or that they show none.

    Args:
        problems: held out, at least 1.
        level: of the night's test, in (0, 1).
        nights: that a promising candidate may have.
        differing: share of problems on which two policies differ; of these, a gain is the share of better ones less
            that of worse ones.
        min_gain: that the gain must be shown to exceed.
    """
    needed = fewest_problems(level, min_gain)
    if problems < needed:
        best = improvement_p(Tally(problems, 0, problems), min_gain)
        less = f"{problems} held-out problems are too few for this gate: even if all of them were better, p would be "
        less += f"{best:.2g}, and {level:.2g} is needed; "
        if nights * problems >= needed:
            return f"{less}only a challenger can pass, with the problems of several nights"
        lower = ", or lower gate.min_gain or gate.nights_a_year" if min_gain else ", or lower gate.nights_a_year"
        return f"{less}it can promote nothing. Raise data.splits.evaluation{lower}"
    gain = smallest_gain(problems, level, differing, min_gain=min_gain)
    shown = f"no gain below {differing:g}" if gain is None else f"a gain of {gain:.2f} or more"
    shown += f" to be above gate.min_gain = {min_gain:g}" if min_gain else ""
    told = (
        f"{problems} held-out problems show {shown} with {CHANCE:.0%} probability, where the policies differ on "
        f"{differing:.0%} of them (p of {level:.2g} is needed)"
    )
    if min_gain:
        return told
    smaller = 0.08 if gain is None or gain > 0.08 else gain / 2  # noqa: PLR2004 - what a good night brings
    more = f"; +{smaller:.2f} needs {problems_needed(smaller, level, differing):,}"
    return told + more + (f", of up to {nights} nights" if nights > 1 else "")
