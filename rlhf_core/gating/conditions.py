"""The side conditions of a promotion: what a policy must not lose while it gains.

Each is arithmetic over stored outcomes, measures and figures of both policies. One whose figures do not exist is not
measured, and blocks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config.conditions import ConditionsConfig
from rlhf_core.counting import counted
from rlhf_core.forgetting.measures import TEXT, Measure
from rlhf_core.gating.answers import copies_prompt, is_empty, loops, same_answers
from rlhf_core.gating.paired_test import rejected, sign_test, symmetric_bound

if TYPE_CHECKING:
    from rlhf_core.evaluation import Outcome

Figures = Mapping[str, Any]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Condition:
    """One condition of a promotion, and what came of it."""

    name: str
    figure: float | None
    """None: it was not measured."""
    threshold: float
    """Beyond which the figure must not be."""
    holds: bool
    told: str
    """What the figure is, in a few words."""
    is_least: bool = False
    """The figure must be the threshold at least; else at most."""

    @property
    def asked(self) -> str:
        """What the figure must be.

        >>> Condition("length", 2.0, 1.5, holds=False, told="").asked
        'at most 1.5'
        """
        return f"at {'least' if self.is_least else 'most'} {self.threshold:g}"


class Known(NamedTuple):
    """What the store has of one policy."""

    outcomes: Sequence[Outcome]
    measures: Mapping[str, Measure] = {}
    """By suite."""


@dataclass(frozen=True)
class Compared:
    """What the conditions are computed from."""

    incumbent: Known
    candidate: Known
    base: Mapping[str, Measure] = field(default_factory=dict)
    """Measures of the base model, as far as there are."""
    by_score: bool = False
    """A reward model judged the answers."""
    ppo: Figures = field(default_factory=dict)
    """The candidate's run: figures of its first and last episode."""
    reward_model: Figures | None = None
    """Held-out figures of the reward model that paid or judged; None where none did."""


@dataclass(frozen=True)
class _Finding:
    """A condition before it is known which of all findings chance explains."""

    name: str
    figure: float | None
    threshold: float
    told: str
    chance: float | None = None
    """p-value of so much between equal policies; None: there is no chance in the figure."""
    is_beyond: bool | None = None
    """None: if the figure is on the wrong side of the threshold."""
    is_least: bool = False

    @property
    def beyond(self) -> bool:
        if self.figure is None or self.is_beyond is not None:
            return bool(self.is_beyond)
        return self.figure < self.threshold if self.is_least else self.figure > self.threshold


def side_conditions(compared: Compared, config: ConditionsConfig) -> tuple[Condition, ...]:
    """Return the outcome of each condition that is switched on.

    One breaks if its figure is beyond its threshold and, where chance plays a part, Holm's procedure over all of them
    rejects that the policies are equal. So with probability `config.level` at most does chance alone break any of them.

    Args:
        compared: both policies; problems and items that only one was asked count for nothing.
        config: thresholds; None switches one off.
    """
    pairs = _pairs(compared)
    findings = [
        *_kl(compared.ppo, config),
        *_length(pairs, config),
        *_faults(pairs, config, by_score=compared.by_score),
        *_categories([pair for pair in pairs if pair.is_judged], config, by_score=compared.by_score),
        *_reward_model(compared.reward_model, config),
        *_proxy(compared.ppo, config),
        *_forgetting(compared, config),
    ]
    by_chance = [each for each in findings if each.figure is not None and each.chance is not None]
    surprising = rejected([each.chance for each in by_chance if each.chance is not None], config.level)
    explained = {each.name for each, is_surprising in zip(by_chance, surprising, strict=True) if not is_surprising}
    return tuple(
        Condition(
            each.name,
            each.figure,
            each.threshold,
            holds=each.figure is None or not each.beyond or each.name in explained,
            told=each.told
            + ("; beyond what is asked, as chance alone may do" if each.beyond and each.name in explained else ""),
            is_least=each.is_least,
        )
        for each in findings
    )


def broken_in_words(conditions: Sequence[Condition]) -> str:
    """Return the conditions that broke, each with figure and threshold; empty if all hold."""
    return "; ".join(
        f"{each.name}: {each.figure:.3g}, {each.asked} is asked ({each.told})" for each in conditions if not each.holds
    )


class _Pair(NamedTuple):
    """The answers of both to one problem."""

    before: Outcome
    after: Outcome

    @property
    def is_judged(self) -> bool:
        return not (self.before.failure or self.after.failure)


def _pairs(compared: Compared) -> list[_Pair]:
    after = {each.key: each for each in compared.candidate.outcomes}
    return [_Pair(each, after[each.key]) for each in compared.incumbent.outcomes if each.key in after]


def _missing(name: str, threshold: float, why: str, *, is_least: bool = False) -> _Finding:
    return _Finding(name, None, threshold, f"{NOT_MEASURED}: {why}", is_least=is_least)


def _kl(ppo: Figures, config: ConditionsConfig) -> Iterator[_Finding]:
    if config.kl_per_token is None:
        return
    end = _end(ppo)
    name, kl, length = "KL per token", ppo.get(f"{end}_kl"), ppo.get(f"{end}_length")
    if kl is None or not length:
        yield _missing(name, config.kl_per_token, "the policy's run stored no KL")
        return
    told = f"{kl:.3g} nats an answer of {length:.1f} tokens, from the policy that PPO started from"
    yield _Finding(name, kl / length, config.kl_per_token, told)


def _length(pairs: Sequence[_Pair], config: ConditionsConfig) -> Iterator[_Finding]:
    if config.length_ratio is None:
        return
    in_tokens = all(each.tokens is not None for pair in pairs for each in pair)
    lengths = [[(each.tokens or 0) if in_tokens else len(each.response) for each in pair] for pair in pairs]
    before, after = (fmean(column) if lengths else 0.0 for column in (*zip(*lengths, strict=True),) or ((), ()))
    if not before:
        yield _missing("length", config.length_ratio, "the incumbent's answers have no length")
        return
    unit = "tokens" if in_tokens else "characters"
    told = f"times the incumbent's mean: {after:.1f} {unit} after {before:.1f}"
    chance = symmetric_bound([float(new - old) for old, new in lengths])
    yield _Finding("length", after / before, config.length_ratio, told, chance)


def _faults(pairs: Sequence[_Pair], config: ConditionsConfig, *, by_score: bool) -> Iterator[_Finding]:
    """Yield by how much the share of each fault has risen."""
    before, after = ([pair[side] for pair in pairs] for side in (0, 1))
    found = {
        "empty answers": (config.empty, _each(is_empty, before), _each(is_empty, after)),
        "loops": (config.loops, _each(loops, before), _each(loops, after)),
        "copies of the prompt": (config.copies_prompt, _copies(before), _copies(after)),
        "the same wrong answer": (config.same_answer, _same(before), _same(after)),
        "cut off": (config.cut_off, [each.truncated for each in before], [each.truncated for each in after]),
    }
    if not by_score:
        found["malformed"] = (
            config.malformed,
            [not each.well_formed and not each.failure for each in before],
            [not each.well_formed and not each.failure for each in after],
        )
    for name, (threshold, old, new) in found.items():
        if threshold is None:
            continue
        if not pairs:
            yield _missing(name, threshold, "no problem was asked of both")
            continue
        told = f"rise of the share: {fmean(new):.3f} after {fmean(old):.3f}"
        chance = sign_test(_only(new, old), _only(old, new))
        yield _Finding(name, fmean(new) - fmean(old), threshold, told, chance)


def _only(these: Sequence[bool], those: Sequence[bool]) -> int:
    return sum(this and not that for this, that in zip(these, those, strict=True))


def _each(fault: Any, outcomes: Sequence[Outcome]) -> list[bool]:
    return [fault(each.response) for each in outcomes]


def _copies(outcomes: Sequence[Outcome]) -> list[bool]:
    return [copies_prompt(each.prompt, each.response) for each in outcomes]


def _same(outcomes: Sequence[Outcome]) -> list[bool]:
    # one that nobody judged is not known to be wrong
    return same_answers([each.response for each in outcomes], [each.correct or bool(each.failure) for each in outcomes])


class _Loss(NamedTuple):
    """How much one category lost."""

    category: str
    loss: float
    chance: float
    problems: int


def _categories(pairs: Sequence[_Pair], config: ConditionsConfig, *, by_score: bool) -> Iterator[_Finding]:
    """Yield how much the category lost that chance explains least; of those within the threshold, the most."""
    if config.category_loss is None:
        return
    name, limit = "a category", config.category_loss
    by_category: dict[str, list[_Pair]] = {}
    for pair in pairs:
        by_category.setdefault(pair.after.category, []).append(pair)
    by_category.pop("", None)
    if len(by_category) < 2:  # noqa: PLR2004 - one is the whole task, which the gain is of
        yield _missing(
            name,
            limit,
            "the problems are of " + (f"one category, {next(iter(by_category))}" if by_category else "no category"),
        )
        return
    losses = [_loss(category, own, by_score=by_score) for category, own in sorted(by_category.items())]
    surprising = rejected([each.chance for each in losses], config.level)
    fell = [each for each, surprises in zip(losses, surprising, strict=True) if surprises and each.loss > limit]
    worst = min(
        [each for each in losses if each.loss > limit] or losses,
        key=lambda each: (each.chance, -each.loss) if each.loss > limit else (-each.loss, each.chance),
    )
    named = ", ".join(f"{each.category} {each.loss:+.3f}" for each in fell if each is not worst)
    told = f"loss of {worst.category} on {counted(worst.problems, 'problem')}, of {len(losses)} categories"
    yield _Finding(
        name, worst.loss, limit, told + (f"; also {named}" if named else ""), min(1.0, len(losses) * worst.chance)
    )


def _loss(category: str, pairs: Sequence[_Pair], *, by_score: bool) -> _Loss:
    if by_score:
        falls = [pair.before.score - pair.after.score for pair in pairs]
        return _Loss(category, fmean(falls), symmetric_bound(falls), len(pairs))
    worse = sum(pair.before.correct and not pair.after.correct for pair in pairs)
    better = sum(pair.after.correct and not pair.before.correct for pair in pairs)
    return _Loss(category, (worse - better) / len(pairs), sign_test(worse, better), len(pairs))


def _reward_model(figures: Figures | None, config: ConditionsConfig) -> Iterator[_Finding]:
    if config.reward_model_accuracy is None:
        return
    name, least = "reward model's accuracy", config.reward_model_accuracy
    if figures is None or "accuracy" not in figures:
        why = "no reward model paid or judged" if figures is None else "it was measured on no held-out pairs"
        yield _missing(name, least, why, is_least=True)
        return
    accuracy, pairs = figures["accuracy"], figures.get("heldout_pairs")
    told = "share right" + (f" of {counted(pairs, 'held-out pair')}" if pairs else "")
    yield _Finding(name, accuracy, least, told, is_least=True)


def _proxy(ppo: Figures, config: ConditionsConfig) -> Iterator[_Finding]:
    """Yield how much verified reward fell, and whether what was paid rose meanwhile."""
    if config.verified_loss is None:
        return
    name = "verified reward"
    paid, verified = _change(ppo, "score"), _change(ppo, "verifier")
    if paid is None or verified is None:
        yield _missing(name, config.verified_loss, "no verifier beside what PPO was paid")
        return
    told = f"fall over PPO's episodes, while what was paid changed by {paid.by:+.3f}"
    chance = max(NormalDist().cdf(-paid.z), NormalDist().cdf(verified.z))  # both must be shown
    is_beyond = paid.by > 0 and -verified.by > config.verified_loss
    yield _Finding(name, -verified.by, config.verified_loss, told, chance, is_beyond)


def _end(ppo: Figures) -> str:
    """Return which episode's weights the policy has: the kept one's, where the best is kept, or the last one's."""
    return "kept" if "kept_samples" in ppo else "last"


class _Change(NamedTuple):
    by: float
    z: float
    """In standard errors."""


def _change(ppo: Figures, name: str) -> _Change | None:
    """Return how a mean changed from the first episode to the policy's; None where its spread was not stored."""
    ends = ("first", _end(ppo))
    try:
        first, last = (float(ppo[f"{end}_{name}"]) for end in ends)
        judged = [float(ppo[f"{end}_samples"]) * (1 - float(ppo.get(f"{end}_abstained", 0.0))) for end in ends]
        errors = [float(ppo[f"{end}_{name}_std"]) / sqrt(each) for end, each in zip(ends, judged, strict=True) if each]
    except KeyError:
        return None
    error = sqrt(sum(each * each for each in errors))
    return _Change(last - first, (last - first) / error if error else 0.0)


def _forgetting(compared: Compared, config: ConditionsConfig) -> Iterator[_Finding]:
    """Yield how much worse the candidate reads packaged text, and answers each suite."""
    candidate, incumbent = compared.candidate.measures, compared.incumbent.measures
    if config.text_loss is not None:
        yield _worse("forgotten text", config.text_loss, incumbent.get(TEXT), candidate.get(TEXT))
    if config.text_loss_from_base is not None:
        against = compared.base.get(TEXT)
        yield _worse("forgotten text, of the base", config.text_loss_from_base, against, candidate.get(TEXT))
    if config.suite_loss is not None:
        for suite in sorted({*candidate, *incumbent} - {TEXT}):
            yield _worse(suite, config.suite_loss, incumbent.get(suite), candidate.get(suite))


def _worse(name: str, threshold: float, before: Measure | None, after: Measure | None) -> _Finding:
    if before is None or after is None:
        return _missing(name, threshold, "not by both policies")
    is_text = after.suite == TEXT
    sign = 1.0 if is_text else -1.0
    shared = [item for item in before.values if item in after.values]
    if not shared:
        return _missing(name, threshold, "the two have no item in common")
    rises = [sign * (after.values[item] - before.values[item]) for item in shared]
    old, new = (fmean(each.values[item] for item in shared) for each in (before, after))
    what = "rise, nats per token" if is_text else "fall"
    told = f"{what}: {new:.3f} after {old:.3f} on {counted(len(shared), 'passage' if is_text else 'item')}"
    # the same text is read to the same figure again: which passages were chosen is no chance that the policies had
    return _Finding(name, fmean(rises), threshold, told, None if is_text else symmetric_bound(rises))
