"""Run all rules over the sets of a run, and do with the accused rows what the configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.data.linting.findings import Accused, Finding, quoted
from rlhf_core.data.linting.repeats import near_prompts
from rlhf_core.data.linting.rows import LintSet
from rlhf_core.data.linting.rules import OVERLAP, ROW_RULES, SET_RULES
from rlhf_core.errors import DataError, TooFewRowsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.config.lint import LintConfig
    from rlhf_core.data.preparing.lengths import TokenMeter
    from rlhf_core.data.reading import ReadSet

EVALUATION = "evaluation"
_SAYS_OVERLAP = "have a prompt that is nearly one that is held out"
_ADVICE_OVERLAP = "leave them out of what is learnt from: else the evaluation asks what is known"


class Linted(NamedTuple):
    """What the rules say, and the sets less the rows that are to be dropped."""

    sets: dict[str, ReadSet[Any]]
    findings: tuple[Finding, ...]
    dropped: dict[str, frozenset[int]]
    """By set, places of the rows that are no longer in it."""


def lint_sets(
    sets: Mapping[str, ReadSet[Any]],
    config: PipelineConfig,
    meter: TokenMeter | None = None,
    *,
    is_held_out: Callable[[str, str], bool] | None = None,
    earlier: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
) -> Linted:
    """Return what the rules say of a run's sets, and the sets that the run goes on with.

    Args:
        sets: what was read, by the configuration's key.
        config: says what is done about each rule, and how much of a pair its stage reads.
        meter: counts tokens as the model does; None does not look how far responses are equal.
        is_held_out: says of a set and a prompt of it whether it may be evaluated on; None for sets that are only
            looked at.
        earlier: by the configuration's key, and by where they are, rows that were learnt before.

    Raises:
        DataError: a rule found something, and its action is `refuse`.
        TooFewRowsError: every row of a set would be dropped.
    """
    actions = config.data.lint
    before, limit = earlier or {}, config.reward_model.max_length
    given = {role: LintSet.of(role, read, meter, limit, before.get(role)) for role, read in sets.items()}
    findings = [found for each in given.values() for found in lint_set(each, actions)]
    if is_held_out is not None and actions.action(OVERLAP) != "off":
        findings += _overlaps(given, actions, is_held_out)
    refused = [found for found in findings if found.action == "refuse"]
    if refused:
        raise DataError(
            f"{'; '.join(found.sentence for found in refused)} (data.lint refuses "
            f"{', '.join(dict.fromkeys(found.rule for found in refused))}; `rlhf data check` shows more)"
        )
    faults = {role: _faults(role, findings) for role in sets}
    left = {role: _less(role, read, faults[role]) for role, read in sets.items()}
    return Linted(left, tuple(findings), {role: frozenset(each) for role, each in faults.items()})


def lint_set(given: LintSet, actions: LintConfig) -> list[Finding]:
    """Return what the rules say of one set."""
    findings = []
    for rule in ROW_RULES:
        action = actions.action(rule.name)
        accused = list(rule.find(given)) if action != "off" else []
        if accused:
            findings.append(_finding(given, rule.name, rule.says, rule.advice, accused, actions))
    for judged in SET_RULES:
        action = actions.action(judged.name)
        for sentence in judged.find(given) if action != "off" else ():
            told = "warn" if action == "drop" else action
            findings.append(Finding(judged.name, given.role, told, sentence, judged.advice, len(given.rows), (), ()))
    return findings


def _finding(
    given: LintSet, rule: str, says: str, advice: str, accused: Sequence[Accused], actions: LintConfig
) -> Finding:
    ordered = tuple(sorted(accused))
    named = tuple(given.rows[each.place].where for each in ordered)
    return Finding(rule, given.role, actions.action(rule), says, advice, len(given.rows), ordered, named)


def _overlaps(
    given: Mapping[str, LintSet], actions: LintConfig, is_held_out: Callable[[str, str], bool]
) -> list[Finding]:
    """Return the rows that are learnt from and nearly ask what is held out, in whichever set that stands."""
    sides = {role: [is_held_out(role, row.key) for row in each.rows] for role, each in given.items()}
    held_out = [row for role, each in given.items() for row, out in zip(each.rows, sides[role], strict=True) if out]
    findings = []
    for role, each in given.items():
        places = [place for place, out in enumerate(sides[role]) if not out]
        learnt = [each.rows[place] for place in places]
        accused = [
            Accused(places[one], f"{quoted(learnt[one].asked)}, held out in {held_out[other].where}")
            for one, other in near_prompts(learnt, held_out)
        ]
        if accused:
            findings.append(_finding(each, OVERLAP, _SAYS_OVERLAP, _ADVICE_OVERLAP, accused, actions))
    return findings


def _faults(role: str, findings: Sequence[Finding]) -> dict[int, tuple[str, str]]:
    """Return, by the place of each row that is to be dropped, the rule and what it found."""
    faults: dict[int, tuple[str, str]] = {}
    for found in findings:
        if found.role == role and found.action == "drop":
            for where, (place, detail) in zip(found.named, found.accused, strict=True):
                faults.setdefault(place, (f"lint: {found.rule}", f"{where}: {detail}"))
    return faults


def _less(role: str, read: ReadSet[Any], faults: Mapping[int, tuple[str, str]]) -> ReadSet[Any]:
    if not faults:
        return read
    if len(faults) == len(read.rows):
        raise TooFewRowsError(
            f"data.lint drops every row of data.{role}, the first because {next(iter(faults.values()))[1]}; set rules "
            "that do not suit the set to warn or off"
        )
    return read.without(faults)
