"""What a learner refuses before it learns."""

from __future__ import annotations

import zlib

import torch

from rlhf_core.config import LearningConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.types import Experience


def check_same(experience: Experience, ranks: Ranks) -> None:
    """See that every rank was handed the same rows, and that there are some.

    Raises:
        TrainingError: on all ranks, otherwise.
    """
    if ranks.any(not len(experience)):
        raise TrainingError("expected experience with at least one response on every rank, got none; collect some")
    digest = zlib.crc32(experience.sequences.cpu().contiguous().numpy().tobytes())
    if len(set(ranks.gather(torch.tensor([digest])).tolist())) > 1:
        raise TrainingError("expected all rows of the episode on every rank, got others on each; hand all the same")


def check_demonstrations(config: LearningConfig, *, has_some: bool) -> None:
    """See that there are demonstrations if any are to be learnt.

    Raises:
        ConfigError: otherwise.
    """
    if config.ptx_coef > 0 and not has_some:
        raise ConfigError(
            f"ppo.ptx_coef is {config.ptx_coef}, but there are no demonstrations; give some, or set it to 0"
        )


def check_options(config: LearningConfig, *, has_critic: bool) -> None:
    """See that the choices go together.

    Raises:
        ConfigError: otherwise.
    """
    if config.advantage_estimator == "gae" and not has_critic:
        raise ConfigError(
            "ppo.advantage_estimator gae needs a critic, and there is none; give one, or compare samples with rloo, "
            "grpo, dr_grpo or reinforce_pp"
        )
    if config.legacy and config.critic_init == "reward_model":
        raise ConfigError(
            "ppo.legacy judges by rules of its own, to whose returns no critic is fitted; set ppo.critic_init to policy"
        )
