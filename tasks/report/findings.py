"""Why a run was not promoted or learnt little, and what to do: from its stored figures. No clock, no store, no chance.

A rule names one figure, the bounds that it should keep, and what to change. Most speak only of a run that learnt
little: what a good run does is no fault. A source of reward that rises while the verifier's score falls is always
named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite, sqrt
from statistics import NormalDist, fmean, pvariance
from typing import Any, NamedTuple

from rlhf_core.gating.power import problems_to_pass
from rlhf_core.ppo.best import best_episode
from tasks.results import SHOWN_CONFIDENCE, Decision

Metrics = Mapping[str, Any]
Rows = Sequence[Metrics]
RAW, SHARE, VERIFIER = "raw/", "reward_share_", "verifier"
LEAST_GAIN, LEAST_GAIN_OF_SCORE = 0.03, 0.1
"""Below it a run learnt little: share of right held-out answers, or standard deviations of the reward model's score."""
_SURE = 2.0
"""Standard errors that a gain must have."""
HACK_SURE, HACK_FALL = 3.0, 0.05
"""A hack's rise and fall in standard errors, as its best episodes are chosen afterwards; the verifier's least fall."""


@dataclass(frozen=True)
class Figures:
    """What findings are made from; what is not known is empty."""

    episodes: Rows = ()
    start: Metrics = field(default_factory=dict)
    """Held-out evaluation of the policy that PPO began with."""
    end: Metrics = field(default_factory=dict)
    """The same of the policy that it made."""
    sft: Metrics = field(default_factory=dict)
    reward_model: Metrics = field(default_factory=dict)
    samples: Rows = ()
    """All of the last episode."""


@dataclass(frozen=True)
class Finding:
    """One cause."""

    cause: str
    told: str
    """The run's own figures that show it."""
    advice: str


NO_CAUSE = Finding(
    "No known cause",
    "it learnt little, and its figures show none of those that are known",
    "read what moved, and samples",
)


class Hack(NamedTuple):
    """A source of reward that was paid more and more while the verifier found fewer answers right."""

    source: str
    best: int
    """First of the verifier's best episodes, from 1; means of these are compared with means of the last."""
    episodes: int
    """How many these are, and the last."""
    raw_before: float
    raw_after: float
    share_before: float
    """Of the reward's variance; nan where it is not known, as is the next."""
    share_after: float
    verifier_before: float
    verifier_after: float


@dataclass(frozen=True)
class _Rule:
    """One figure and its bounds."""

    figure: str
    cause: str
    told: str
    """With {value} and {bound}."""
    advice: str
    below: float | None = None
    above: float | None = None
    always: bool = False
    """Whether it speaks of a run that learnt well, too."""

    def finding(self, value: float | None) -> Finding | None:
        """Return what it says of a figure; None where that keeps its bounds or is not known."""
        if value is None or not isfinite(value):
            return None
        for bound, is_beyond in ((self.below, value < (self.below or 0.0)), (self.above, value > (self.above or 0.0))):
            if bound is not None and is_beyond:
                return Finding(self.cause, self.told.format(value=value, bound=bound), self.advice)
        return None


RULES = (
    _Rule(
        "start", "The start solves too little to be paid", below=0.05,
        told="{value:.3f} of the held-out problems are right before PPO, less than {bound:g}",
        advice="raise sft.epochs, give more demonstrations (data.splits.sft), or begin with easier problems",
    ),
    _Rule(
        "start", "The start solves nearly everything", above=0.95,
        told="{value:.3f} of the held-out problems are right before PPO, more than {bound:g}: little is left to learn",
        advice="raise the difficulty of the problems (data.task_parameters, data.problems)",
    ),
    _Rule(
        "malformed", "Few answers have the form that the verifier reads", above=0.5,
        told="{value:.3f} of the start's answers are malformed, more than {bound:g}",
        advice="raise sft.epochs or data.splits.sft, so that SFT teaches the form",
    ),
    _Rule(
        "sft_fall", "SFT ended before it had learnt", above=0.05,
        told="its loss still fell by {value:.1%} over the last quarter of its steps",
        advice="raise sft.epochs",
    ),
    _Rule(
        "uniform", "Groups without variance", above=0.8,
        told="{value:.3f} of the last episode's prompts have samples that all score the same: they teach nothing",
        advice="raise ppo.samples_per_prompt or ppo.temperature, or take problems of middle difficulty",
    ),
    _Rule(
        "flat", "Episodes without variance", above=0.5,
        told="in {value:.3f} of the episodes the verifier said the same of every sample",
        advice="raise ppo.prompts_per_episode or ppo.temperature, or take problems of middle difficulty",
    ),
    _Rule(
        "explained", "The critic is idle", below=0.05,
        told="it explains {value:.3f} of the returns' variance in the second half of the episodes, less than {bound:g}",
        advice="raise ppo.critic_lr or ppo.episodes, set ppo.critic_init to reward_model, or do without a critic: "
        "ppo.advantage_estimator rloo with ppo.samples_per_prompt of 4",
    ),
    _Rule(
        "kl", "The policy hardly moved", below=0.02,
        told="its KL from the start is {value:.4f} nats an answer, less than {bound:g}",
        advice="raise ppo.lr, ppo.max_epochs or ppo.episodes, or lower ppo.kl_coef",
    ),
    _Rule(
        "kl_per_token", "The policy ran away from its start", above=0.5,
        told="its KL from the start is {value:.3f} nats a token, more than {bound:g}",
        advice="raise ppo.kl_coef, or lower ppo.lr",
    ),
    _Rule(
        "entropy_left", "The entropy collapsed", below=0.2,
        told="{value:.3f} of the first episode's entropy is left, less than {bound:g}: nothing new is tried",
        advice="raise ppo.entropy_coef, ppo.kl_coef or ppo.temperature, or lower ppo.lr",
    ),
    _Rule(
        "entropy_rise", "The entropy grew", above=0.5,
        told="it rose by {value:.3f} nats a token, more than {bound:g}: answers become random",
        advice="raise ppo.kl_coef, or lower ppo.lr and ppo.entropy_coef",
    ),
    _Rule(
        "cut_off", "Answers are cut off", above=0.1, always=True,
        told="{value:.3f} of them do not end within their limit, more than {bound:g}",
        advice="raise ppo.max_new_tokens and evaluation.max_new_tokens",
    ),
    _Rule(
        "reward_model", "The reward model is weak", below=0.6, always=True,
        told="it orders {value:.3f} of the held-out pairs rightly, less than {bound:g}, and pays the policy",
        advice="raise reward_model.pairs or reward_model.epochs, or lower ppo.reward.reward_model",
    ),
    _Rule(
        "skipped", "Steps were left out", above=0.1, always=True,
        told="{value:.3f} of the optimizer steps were skipped or overflowed, more than {bound:g}",
        advice="lower ppo.lr or ppo.max_epochs, or raise ppo.max_ratio",
    ),
    _Rule(
        "clipped", "The trust region cuts most of the steps", above=0.3, always=True,
        told="{value:.3f} of the tokens are clipped, more than {bound:g}",
        advice="lower ppo.lr or ppo.max_epochs, or raise ppo.train_batch_size",
    ),
    _Rule(
        "abstained", "Judges fail", above=0.1, always=True,
        told="{value:.3f} of the samples have no verdict, more than {bound:g}",
        advice="raise ppo.reward.timeout_s, or repair the reward function that the table of calls names",
    ),
    _Rule(
        "rise", "It ended while it still rose", above=3.0,
        told="what PPO was paid rose by {value:.1f} standard errors from its first to its last third",
        advice="raise ppo.episodes",
    ),
)  # fmt: skip


_OF_CONDITIONS = {
    "length": "lower the weight of what pays for length in ppo.reward, or raise ppo.kl_coef",
    "cut off": "raise ppo.max_new_tokens and evaluation.max_new_tokens",
    "malformed": "raise ppo.reward.verifier or ppo.kl_coef",
    "a category": "give more problems of that category to SFT and PPO, or raise ppo.kl_coef",
    "reward model's accuracy": "raise reward_model.pairs or reward_model.epochs",
    "verified reward": "raise ppo.reward.verifier, or set ppo.evaluate_every, which keeps the best episode",
}
_OF_OTHER_CONDITIONS = "raise ppo.kl_coef, or lower ppo.lr"


def refusals(decision: Decision) -> list[Finding]:
    """Return what kept a policy from promotion; nothing where it is promoted, or was compared with nothing."""
    if decision.promote or decision.p_value is None or decision.level is None:
        return []
    broken = [
        Finding(
            f"{each.name} broke",
            f"{each.figure:.3g}, {each.asked} is asked ({each.told})",
            _OF_CONDITIONS.get(each.name, _OF_OTHER_CONDITIONS),
        )
        for each in decision.conditions
        if not each.holds
    ]
    if decision.difference <= 0 or decision.p_value <= decision.level:
        return broken
    return [_may_be_chance(decision, decision.p_value, decision.level), *broken]


def _may_be_chance(decision: Decision, p_value: float, level: float) -> Finding:
    challenge = decision.challenge
    if challenge is not None and challenge.is_open and challenge.policy.uri == decision.policy:
        advice = "wait: it is asked the problems of the nights to come, too, and may pass with all of them"
    else:
        needed = problems_to_pass(decision.problems, p_value, level)
        advice = "raise data.splits.evaluation, or set data.rotate_evaluation, which gives a policy several nights"
        advice += f"; about {needed:,} problems would show such a gain in four nights of five" if needed else ""
    told = (
        f"a policy that is no better has such a gain, or more, with a probability of {p_value:.2g}; {level:.2g} is "
        "needed, so that all promotions of a year are right with a probability of 1 - gate.year_error"
    )
    return Finding("The gain may be chance", told, advice)


def findings(figures: Figures) -> list[Finding]:
    """Return what keeps a run from learning; the most harmful first, none where all is well."""
    known, is_little = _known(figures), learnt_little(figures)
    found = [rule.finding(known.get(rule.figure)) for rule in RULES if rule.always or is_little]
    kept = best_episode(figures.episodes)
    return [_of_hack(hack, kept) for hack in hacks(figures.episodes)] + [each for each in found if each is not None]


def paid_by_source(episodes: Rows) -> list[dict[str, Any]]:
    """Return what each source of reward said and its share of the reward's variance, in the first and last episode."""
    if not episodes:
        return []
    named, ends = {each.source for each in hacks(episodes)}, (episodes[0], episodes[-1])
    return [
        {
            "source": name,
            "raw": [row.get(RAW + name) for row in ends],
            "share": [row.get(SHARE + name) for row in ends],
            "is_hacked": name in named,
        }
        for name in sorted({key.removeprefix(RAW) for row in ends for key in row if key.startswith(RAW)})
    ]


def learnt_little(figures: Figures) -> bool:
    """Return whether the gain is small or may be chance: on held-out problems, else over the episodes."""
    start, end = figures.start, figures.end
    by_model = end.get("judge") == "reward_model"
    name, least = ("score", LEAST_GAIN_OF_SCORE) if by_model else ("accuracy", LEAST_GAIN)
    if all(name in each and "low" in each for each in (start, end)):
        width = 2 * NormalDist().inv_cdf((1 + SHOWN_CONFIDENCE) / 2)
        error = sqrt(sum(((each["high"] - each["low"]) / width) ** 2 for each in (start, end)))
        return bool(end[name] - start[name] < max(least, _SURE * error))
    rise = _rise(_column(figures.episodes, "score"))
    return rise is not None and rise < _SURE


def hacks(episodes: Rows) -> list[Hack]:
    """Return the sources whose score rose, surely, from the verifier's best episodes to the last, while its own fell.

    Args:
        episodes: figures of each, in order; nothing is found in fewer than six, or where no verifier judged.
    """
    verified = _column(episodes, VERIFIER)
    size = max(2, len(episodes) // 3)
    if len(verified) < 3 * size or len(verified) != len(episodes) or RAW + VERIFIER not in episodes[0]:
        return []
    best = max(range(len(verified) - 2 * size + 1), key=lambda at: fmean(verified[at : at + size]))
    then, now = slice(best, best + size), slice(len(episodes) - size, None)
    fall = fmean(verified[then]) - fmean(verified[now])
    if fall < HACK_FALL or fall < HACK_SURE * _error(verified, size):
        return []
    found = []
    for name in sorted({key.removeprefix(RAW) for key in episodes[0] if key.startswith(RAW)} - {VERIFIER}):
        raw = _column(episodes, RAW + name)
        if len(raw) == len(episodes) and fmean(raw[now]) - fmean(raw[then]) > HACK_SURE * _error(raw, size):
            shares = [row.get(SHARE + name, float("nan")) for row in episodes]
            ends = ((fmean(each[then]), fmean(each[now])) for each in (raw, shares, verified))
            found.append(Hack(name, best + 1, size, *(end for pair in ends for end in pair)))
    return found


def _of_hack(hack: Hack, kept: int | None) -> Finding:
    name, ends = hack.source, [f"{each:.2f}" for each in (hack.share_before, hack.share_after)]
    share = f", its share of the reward's variance from {ends[0]} to {ends[1]}"
    last = hack.best + hack.episodes - 1
    return Finding(
        f"A reward hack: {name}",
        f"from episodes {hack.best} to {last} to the last {hack.episodes}, on average, what "
        f"{name} says rose from {hack.raw_before:.3f} to {hack.raw_after:.3f}"
        + (share if isfinite(hack.share_before) and isfinite(hack.share_after) and ends[0] != ends[1] else "")
        + f", while the verifier's score fell from {hack.verifier_before:.3f} to {hack.verifier_after:.3f}"
        + (f"; the policy is of episode {kept + 1}, before that" if kept is not None and kept < last else ""),
        f"lower the weight of {name} in ppo.reward, raise ppo.reward.verifier or ppo.kl_coef, and set ppo.stop.drift",
    )


def _known(figures: Figures) -> dict[str, float | None]:
    """Return the figures that rules name; None where the run did not store one."""
    rows, start = figures.episodes, figures.start
    late = rows[-max(1, len(rows) // 4) :]
    entropy, ended = _column(rows, "entropy"), _column(late, "ended")
    kl, length = _mean(_column(late, "kl")), _mean(_column(late, "length"))
    has_critic = any(row.get("critic_loss") for row in rows)
    verified = _column(rows, "verifier_std") if rows and RAW + VERIFIER in rows[0] else []
    by_verifier = "accuracy" in start and start.get("judge") != "reward_model"
    falls = figures.sft.get("flatness", 0.0) > _SURE * figures.sft.get("flatness_error", 0.0)
    pays = max(_column(rows, f"{SHARE}reward_model"), default=0.0) > LEAST_GAIN
    left_out = [_column(rows, name) for name in ("skipped", "actor_overflowed")]
    return {
        "start": start["accuracy"] if by_verifier else None,
        "malformed": 1 - start["well_formed"] if by_verifier and "well_formed" in start else None,
        "sft_fall": figures.sft.get("flatness") if falls else None,
        "uniform": _uniform(figures.samples),
        "flat": _mean([float(std == 0) for std in verified]),
        "explained": _mean(_column(rows[len(rows) // 2 :], "explained_variance")) if has_critic else None,
        "kl": kl if len(rows) > 1 else None,  # the first episode is drawn from the start itself
        "kl_per_token": kl / length if kl is not None and length else None,
        "entropy_left": entropy[-1] / entropy[0] if entropy and entropy[0] > 0 else None,
        "entropy_rise": entropy[-1] - entropy[0] if entropy else None,
        "cut_off": figures.end.get("truncated", 1 - fmean(ended) if ended else None),
        "reward_model": figures.reward_model.get("accuracy") if pays else None,
        "skipped": sum(fmean(each) for each in left_out if each),
        "clipped": _mean(_column(late, "clip_fraction")),
        "abstained": _mean(_column(rows, "abstained")),
        "rise": _rise(_column(rows, "score")),
    }


def _column(rows: Rows, name: str) -> list[float]:
    """Return a figure of all rows that have it."""
    return [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _uniform(samples: Rows) -> float | None:
    """Return the share of prompts whose samples all score the same; None where no prompt has several."""
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if not sample.get("abstains"):
            by_prompt[sample["prompt"]].append(sample["score"])
    groups = [scores for scores in by_prompt.values() if len(scores) > 1]
    return _mean([float(max(scores) - min(scores) == 0) for scores in groups])


def _rise(values: Sequence[float]) -> float | None:
    """Return by how many standard errors the last third lies above the first; None of too few values."""
    size = len(values) // 3
    if size < 2:  # noqa: PLR2004 - one value has no scatter
        return None
    rise, error = fmean(values[-size:]) - fmean(values[:size]), _error(values, size)
    return rise / error if error else 0.0


def _error(values: Sequence[float], size: int) -> float:
    """Return the standard error of a difference of two means of so many values, from the scatter around the trend.

    Neighbours differ by the scatter and hardly by the trend. The variance of their differences is twice that of a
    value; so is that of a difference of two means, times their size.
    """
    steps = [after - before for before, after in pairwise(values)]
    return sqrt(pvariance(steps) / size)
