"""An episode's learning, and what is kept of a batch that it fails on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_core.detached.run.state import StateKeeper
from rlhf_core.errors import TrainingError
from rlhf_core.trainer.ppo.failed_batch import check_finite, write_failed_batch
from rlhf_core.trainer.ppo.learner import PPOLearner, PPOStats
from rlhf_core.types import Experience, Sample


def learn_or_keep(
    learner: PPOLearner,
    experience: Experience,
    samples: Sequence[Sample],
    *,
    seed: int,
    episode: int,
    keeper: StateKeeper,
) -> list[PPOStats]:
    """Learn an episode's experience; where that fails, keep the batch for whoever looks for the reason.

    Args:
        learner: takes the steps.
        experience: all of the episode, in the order of the samples' keys.
        samples: the same rows as text, in any order.
        seed: of the run.
        episode: from 0.
        keeper: knows where a failed batch belongs.

    Raises:
        TrainingError: before the first step if a reward or log-probability is not finite, later if a loss or gradient
            is not; it says where the batch is kept.
    """
    try:
        check_finite(experience)
        return learner.learn(experience, seed=seed, episode=episode)
    except TrainingError as error:
        reason = str(error)
        ordered = sorted(samples, key=lambda sample: (sample.key, sample.index))

        def save(directory: Path) -> None:
            # The samples hold prompt and response as text; the trainer has no tokenizer.
            write_failed_batch(directory, reason, experience, ordered, decode=lambda ids: " ".join(map(str, ids)))

        try:
            place = keeper.keep_failed_batch(save)
        except Exception as failure:  # the reason for the failure counts more than where its batch is
            raise TrainingError(f"{reason}; the batch could not be kept ({failure})") from error
        raise TrainingError(f"{reason}; the batch is kept in {place}") from error
