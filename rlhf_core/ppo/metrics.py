"""What PPO reports: of an optimizer step (`PPOStats`), of an episode, and as `PPOTrainer` logs both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import fsum, sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_core.counting import counted
from rlhf_core.rewards.abstaining import KINDS, kind_of
from rlhf_core.rewards.sources import VERIFIER
from rlhf_core.rewards.verifying import RIGHT
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.tracking import MeanMeter, Tracker, open_log
from rlhf_core.types import EpisodeControls, Experience, Sample

_LARGEST = 3.4028234663852886e38  # of float32, in which losses are summed: means of many in float64 stay finite


class PPOStats(NamedTuple):
    """One optimizer step in numbers; means are over the minibatch's response tokens, on all ranks.

    Losses are aggregated as `aggregation` says; everything else is a mean over tokens whatever it says.
    """

    actor_loss: float
    """The policy's loss alone: neither ptx nor entropy is in it."""
    critic_loss: float
    """Before `vf_coef`; 0 without a critic, as are all of the critic's figures."""
    clip_fraction: float
    """Share of tokens whose policy gradient the clip cut off."""
    value_clip_fraction: float
    """Share of tokens whose value gradient the clip cut off."""
    approx_kl: float
    """k3 estimate of KL(pi_old || pi) before the step, in nats per token."""
    entropy: float
    """Of the actor before the step, in nats per token."""
    explained_variance: float
    """How well the critic that made the experience predicted its returns."""
    actor_grad_norm: float
    """Before clipping; 0 if no step was taken."""
    critic_grad_norm: float
    """As the actor's."""
    actor_lr: float
    critic_lr: float
    ptx_loss: float
    """Of the demonstrations, before `ptx_coef`, in nats per token; 0 without them."""
    skipped: float
    """1 if the actor's step was left out because a ratio exploded, or because every response abstains."""
    actor_overflowed: float
    """1 if the actor's step was left out because its gradient overflowed in float16; the loss scale is halved then."""
    critic_overflowed: float
    """As the actor's."""
    max_ratio: float
    """Largest ratio of new to old probability among all tokens."""
    advantage_mean: float
    """Before whitening."""
    advantage_std: float
    """Before whitening."""
    value_mean: float
    """Of the critic that made the experience."""
    importance_weight: float
    """Mean weight of the correction for samples of another policy; 1 without one."""


def stats_from(figures: Mapping[str, float]) -> PPOStats:
    """Return the record of a step; what overflowed is the largest number, so that JSON can hold it.

    Only a step that was not taken has figures that are no finite numbers: after an explosion 0 stands for NaN.
    """
    return PPOStats(**{name: _finite(figures.get(name, 0.0)) for name in PPOStats._fields})


def _finite(value: float) -> float:
    return 0.0 if math.isnan(value) else max(-_LARGEST, min(_LARGEST, value))


SHARE = "reward_share_"
GIVEN_FORM = "accuracy_given_form"
SCORE_STD, VERIFIER_STD = "score_std", "verifier_std"
_ROUNDING = 1e-10
"""A total whose variance is a smaller part than this of its sources' squares varies by their rounding alone."""
_EQUAL = 1e-14
"""Values whose squared deviations are a smaller part than this of their squares are equal but for rounding."""
_SCORES, _SCORES_SQUARED, _VERIFIED, _VERIFIED_SQUARED = "scores", "scores squared", "verified", "verified squared"
_TOTAL, _TOTAL_SQUARED, _FORMED, _FORMED_RIGHT = "total", "total squared", "formed", "formed and right"
_ROWS_VERIFIED = "rows verified"
_MEAN, _CROSS, _SQUARED = "sum of ", "product with total of ", "squares of "


def judgement_sums(samples: Sequence[Sample], *, sources: Collection[str], terms: Collection[str]) -> dict[str, float]:
    """Return sums over samples from which `judgement_metrics` are made: those of several ranks may be added.

    Args:
        samples: those that were judged; may be none.
        sources: of reward, by name; the same on all ranks.
        terms: of the score, by name, as the samples' parts have them.
    """
    totals = [fsum(sample.parts.values()) for sample in samples]
    scores = [sample.score for sample in samples]
    sums: dict[str, float] = {_SCORES: fsum(scores), _SCORES_SQUARED: fsum(score * score for score in scores)}
    for name in sorted(terms):
        part = [sample.parts[name] for sample in samples]
        sums[_MEAN + name] = fsum(part)
        sums[_CROSS + name] = fsum(value * total for value, total in zip(part, totals, strict=True))
        sums[_SQUARED + name] = fsum(value * value for value in part)
    if terms:
        sums |= {_TOTAL: fsum(totals), _TOTAL_SQUARED: fsum(total * total for total in totals)}
    if VERIFIER in sources:
        verified = [sample for sample in samples if VERIFIER in sample.raw_scores]
        formed = [sample for sample in verified if sample.well_formed]
        sums |= {_FORMED: len(formed), _FORMED_RIGHT: sum(sample.verifier >= RIGHT for sample in formed)}
        sums[_ROWS_VERIFIED] = len(verified)
        sums[_VERIFIED] = fsum(sample.verifier for sample in verified)
        sums[_VERIFIED_SQUARED] = fsum(sample.verifier**2 for sample in verified)
    return sums


def judgement_metrics(sums: Mapping[str, float], rows: float) -> dict[str, float]:
    """Return how the scores vary, what share of that each source has, and the accuracy of well-formed answers.

        score_std      = sqrt(sum_i (score_i - mean(score))^2 / (rows - 1))
        reward_share_s = cov(part_s, total) / var(total)        total = sum_s part_s

    The shares sum to 1. A source that always says the same, or has no weight, has share 0; one that works against the
    others may have a share below 0, and another one above 1. All are 0 where the total does not vary.

    Args:
        sums: of `judgement_sums`, over all ranks.
        rows: number of samples, at least 1.

    Returns:
        `score_std`, 0 for a single sample; `reward_share_<source>` for each source; where a verifier judged,
        `verifier_std`, the same of what it says, and `accuracy_given_form`: the share of the well-formed answers that
        it finds right, 0 if none is well formed.
    """
    names = [name.removeprefix(_MEAN) for name in sums if name.startswith(_MEAN)]
    metrics = {SCORE_STD: _std(sums[_SCORES], sums[_SCORES_SQUARED], rows)}
    if names:
        mean = sums[_TOTAL] / rows
        variance = sums[_TOTAL_SQUARED] / rows - mean * mean
        varies = variance > _ROUNDING * sum(sums[_SQUARED + name] for name in names) / rows
        for name in names:
            covariance = sums[_CROSS + name] / rows - sums[_MEAN + name] / rows * mean
            metrics[SHARE + name] = covariance / variance if varies else 0.0
    if _FORMED in sums:
        metrics[GIVEN_FORM] = sums[_FORMED_RIGHT] / sums[_FORMED] if sums[_FORMED] else 0.0
        metrics[VERIFIER_STD] = _std(sums[_VERIFIED], sums[_VERIFIED_SQUARED], sums[_ROWS_VERIFIED])
    return metrics


def _std(total: float, squares: float, rows: float) -> float:
    """Return the standard deviation of a sample from its sum and the sum of its squares."""
    deviations = squares - total * total / max(rows, 1)
    return sqrt(deviations / (rows - 1)) if rows > 1 and deviations > _EQUAL * squares else 0.0


_COATIS = {
    "skipped": "skip_ratio",
    "advantage_mean": "advantages",
    "value_mean": "value",
    "actor_lr": "lr_actor",
    "critic_lr": "lr_critic",
}


class PPOLog:
    """What a run shows: every optimizer step, and every episode.

    Args:
        ranks: who trains together; the first has a tracker.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.meter = MeanMeter()
        """Of the optimizer steps of the episode; part of a checkpoint."""
        self._ranks = ranks
        self._tracker = Tracker()

    def open(self, log_dir: str | Path | None, use_wandb: bool) -> None:
        """Begin to write, on the first rank.

        Raises:
            ConfigError: on all ranks, if metrics cannot go where they are asked to go.
        """
        self._tracker = open_log(log_dir, "ppo", use_wandb, self._ranks)

    def close(self) -> None:
        """Write what is still held back."""
        self._tracker.close()

    def collected(self, samples: Sequence[Sample], controls: EpisodeControls, step: int) -> None:
        """Log what an episode collected, and some of it to read."""
        metrics = episode_metrics(samples, controls, self._ranks)
        self._tracker.log({f"episode/{name}": value for name, value in metrics.items()}, step)
        self._tracker.text("samples", sample_text(samples), step)

    def stepped(self, stats: PPOStats, experience: Experience, step: int) -> None:
        """Log one optimizer step."""
        metrics = step_metrics(stats, experience, self._ranks)
        self.meter.add(metrics)
        self._tracker.log({f"train/{name}": value for name, value in metrics.items()}, step)

    def learnt(self, step: int) -> None:
        """Log the means over the episode's optimizer steps."""
        self._tracker.log({f"episode_mean/{name}": value for name, value in self.meter.means().items()}, step)
        self.meter.reset()


def step_metrics(stats: PPOStats, experience: Experience, ranks: Ranks) -> dict[str, float]:
    """Return the numbers of one optimizer step, over all ranks.

    Args:
        stats: the learner's.
        experience: what this rank learnt from in it.
        ranks: who learnt together.

    Returns:
        Besides the learner's: `reward`, the KL penalty included, `kl` (nats) and `length` (tokens), each the mean per
        response that does not abstain.
    """
    mask = experience.action_mask
    sums = [
        torch.where(mask, experience.reward, 0.0).sum(),
        torch.where(mask, experience.kl, 0.0).sum(),
        mask.sum(),
        mask.any(dim=1).sum(),
    ]
    reward, kl, length, rows = ranks.sum(torch.stack([term.double() for term in sums])).tolist()
    named = {_COATIS.get(name, name): value for name, value in stats._asdict().items()}
    rows = max(rows, 1.0)
    return named | {"reward": reward / rows, "kl": kl / rows, "length": length / rows}


def episode_metrics(samples: Sequence[Sample], controls: EpisodeControls, ranks: Ranks) -> dict[str, float]:
    """Return the numbers of what an episode collected, over all ranks.

    Args:
        samples: this rank's, at least one.
        controls: what the episode's rewards were made with.
        ranks: who collected together; all have the same sources of reward.

    Returns:
        The number of `samples`, and the share of them that `abstained`, of which nothing else speaks. Means per
        response of `score`, of what the `verifier` and the reward model (`rm_score`) say, of `kl` (nats) and `length`
        (tokens); the shares that `ended` with a stop token and are `well_formed`; the mean of each source's raw value;
        `judgement_metrics`; and `kl_coef` and `score_scale`, by which scores were divided. Where a source failed,
        `failed/<source>/<kind>`: how often, and how (`rewards.abstaining.KINDS`).
    """
    judged = [sample for sample in samples if not sample.abstains]
    sources = sorted({*samples[0].raw_scores, *samples[0].failures})  # a source has spoken or failed
    known = [[sample for sample in judged if source in sample.raw_scores] for source in sources]
    columns = {
        "score": [sample.score for sample in judged],
        "verifier": [sample.verifier for sample in judged if VERIFIER not in sample.failures],
        "well_formed": [float(sample.well_formed) for sample in judged],
        "kl": [sample.kl for sample in judged],
        "length": [float(sample.length) for sample in judged],
        "ended": [float(sample.ended) for sample in judged],
    }
    if samples[0].rm_score is not None:
        columns["rm_score"] = [sample.rm_score or 0.0 for sample in judged]
    for source, those in zip(sources, known, strict=True):
        columns[f"raw/{source}"] = [sample.raw_scores[source] for sample in those]
    failed = Counter((source, kind_of(told)) for sample in samples for source, told in sample.failures.items())
    sums = judgement_sums(judged, sources=sources, terms=samples[0].parts)
    own = {"samples": float(len(samples)), "judged": float(len(judged))}
    own |= {f"sum of {name}": fsum(column) for name, column in columns.items()}
    own |= {f"number of {name}": float(len(column)) for name, column in columns.items()}
    own |= {f"failed/{source}/{kind}": float(failed[source, kind]) for source in sources for kind in KINDS}
    added = ranks.sum(torch.tensor([*own.values(), *sums.values()], dtype=torch.float64)).tolist()
    of_all = dict(zip(own, added, strict=False))
    means = {name: of_all[f"sum of {name}"] / max(of_all[f"number of {name}"], 1.0) for name in columns}
    judgement = judgement_metrics(dict(zip(sums, added[len(own) :], strict=True)), max(of_all["judged"], 1.0))
    failures = {name: count for name, count in of_all.items() if name.startswith("failed/") and count}
    return {
        "samples": of_all["samples"], "abstained": (of_all["samples"] - of_all["judged"]) / of_all["samples"],
        **means, **judgement, "kl_coef": controls.kl_coef, "score_scale": controls.score_std, **failures,
    }  # fmt: skip


def staleness(versions: Tensor, *, learnt_at: int) -> dict[str, float]:
    """Return how many versions old samples are, `staleness` on average and `staleness_max` at most.

    Args:
        versions: of the policy that drew each sample, [B].
        learnt_at: version of the policy that learns from them, when it begins.
    """
    return {
        "staleness": float(learnt_at - versions.double().mean().item()),
        "staleness_max": float(learnt_at - int(versions.min())),
    }


def step_means(stats: Sequence[PPOStats]) -> dict[str, float]:
    """Return the means over an episode's optimizer steps; norms are those of the steps that were taken."""
    means = {name: fmean(float(getattr(stat, name)) for stat in stats) for name in PPOStats._fields if stats}
    actor = [stat.actor_grad_norm for stat in stats if not stat.skipped and not stat.actor_overflowed]
    critic = [stat.critic_grad_norm for stat in stats if not stat.critic_overflowed]
    norms = {"actor_grad_norm": fmean(actor or [0.0]), "critic_grad_norm": fmean(critic or [0.0])}
    return means | (norms if stats else {})


def sample_text(samples: Sequence[Sample]) -> str:
    """Return the first, the best and the worst response as a person reads them."""
    judged = [sample for sample in samples if not sample.abstains] or samples
    best = max(judged, key=lambda sample: sample.score)
    worst = min(judged, key=lambda sample: sample.score)
    shown = {"first": samples[0], "best": best, "worst": worst}
    return "\n\n".join(
        f"--- {which}: {_score_text(sample)}, KL {sample.kl:.4g}, {counted(sample.length, 'token')} ---\n"
        f"{sample.prompt}\n>>> {sample.response}"
        for which, sample in shown.items()
    )


def _score_text(sample: Sample) -> str:
    return "abstains" if sample.abstains else f"score {sample.score:.4g}"
