"""What `PPOTrainer` logs: coati's names first, then what coati never showed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_core.counting import counted
from rlhf_core.ppo.judgement import judgement_metrics, judgement_sums
from rlhf_core.ppo.learner import PPOStats
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.tracking import MeanMeter, Tracker, open_log
from rlhf_core.types import EpisodeControls, Experience, Sample

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
        response.
    """
    mask = experience.action_mask
    sums = [
        torch.where(mask, experience.reward, 0.0).sum(),
        torch.where(mask, experience.kl, 0.0).sum(),
        mask.sum(),
        torch.tensor(len(experience), device=mask.device),
    ]
    reward, kl, length, rows = ranks.sum(torch.stack([term.double() for term in sums])).tolist()
    named = {_COATIS.get(name, name): value for name, value in stats._asdict().items()}
    return named | {"reward": reward / rows, "kl": kl / rows, "length": length / rows}


def episode_metrics(samples: Sequence[Sample], controls: EpisodeControls, ranks: Ranks) -> dict[str, float]:
    """Return the numbers of what an episode collected, over all ranks.

    Args:
        samples: this rank's, at least one.
        controls: what the episode's rewards were made with.
        ranks: who collected together; all have the same sources of reward.

    Returns:
        Means per response of score, KL (nats), length (tokens), of the share that ended with a stop token, and of each
        source's raw value; and `judgement_metrics`.
    """
    columns = {
        "score": [sample.score for sample in samples],
        "kl": [sample.kl for sample in samples],
        "length": [float(sample.length) for sample in samples],
        "ended": [float(sample.ended) for sample in samples],
    }
    for source in sorted(samples[0].raw_scores):
        columns[f"raw/{source}"] = [sample.raw_scores[source] for sample in samples]
    judged = judgement_sums(samples)
    own = [float(len(samples)), *(sum(column) for column in columns.values()), *judged.values()]
    rows, *sums = ranks.sum(torch.tensor(own, dtype=torch.float64)).tolist()
    means = {name: total / rows for name, total in zip(columns, sums[: len(columns)], strict=True)}
    judgement = judgement_metrics(dict(zip(judged, sums[len(columns) :], strict=True)), rows)
    return means | judgement | {"kl_coef": controls.kl_coef, "score_std": controls.score_std}


def sample_text(samples: Sequence[Sample]) -> str:
    """Return the first, the best and the worst response as a person reads them."""
    best = max(samples, key=lambda sample: sample.score)
    worst = min(samples, key=lambda sample: sample.score)
    shown = {"first": samples[0], "best": best, "worst": worst}
    return "\n\n".join(
        f"--- {which}: score {sample.score:.4g}, KL {sample.kl:.4g}, {counted(sample.length, 'token')} ---\n"
        f"{sample.prompt}\n>>> {sample.response}"
        for which, sample in shown.items()
    )
