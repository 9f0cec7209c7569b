"""What the models of four groups contribute to a batch of experience, on its way between them, and what comes of it.

Everything crosses as plain arrays: Ray hands them on without a copy, where it would pickle tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.coati.ppo_setup import checked
from rlhf_core.config import PPOOptions, RolloutConfig, TemplateConfig
from rlhf_core.generation import Generation
from rlhf_core.rewards.scoring import Scores, ScoringBatch
from rlhf_core.rollout.advantages import Forwards
from rlhf_core.rollout.experience import assemble
from rlhf_core.rollout.samples import MadeExperience
from rlhf_core.types import EpisodeControls, Experience, Prompt, Sample

Array = NDArray[Any]


class MadeSequences(NamedTuple):
    """Responses of one actor rank to the prompts of one time step."""

    sequences: Array
    """[B S], token ids: prompt, then response."""
    attention_mask: Array
    """[B S], True on tokens."""
    action_mask: Array
    """[B A], True on response tokens."""
    rollout_log_probs: Array
    """[B A], of the distribution that responses were drawn from."""
    ended: Array
    """[B], True where a stop token ended the response."""
    prompts: Sequence[Prompt]
    responses: Sequence[str]
    samples: Sequence[int]
    """Which of its prompt's samples in this round each row is."""
    policy_version: int
    """Rounds that the actor had learnt from."""

    @classmethod
    def of(cls, drawn: Generation, batch: ScoringBatch, samples: Sequence[int], policy_version: int) -> MadeSequences:
        """Return what was drawn and read."""
        return cls(
            as_array(drawn.sequences),
            as_array(drawn.attention_mask),
            as_array(drawn.action_mask),
            as_array(drawn.log_probs),
            as_array(drawn.ended),
            batch.prompts,
            batch.responses,
            samples,
            policy_version,
        )

    def batch(self) -> ScoringBatch:
        """Return the responses as judges take them; arrays are copied, as Ray only lends them."""
        ended, sequences, attended, acting = (
            torch.tensor(each) for each in (self.ended, self.sequences, self.attention_mask, self.action_mask)
        )
        return ScoringBatch(self.prompts, self.responses, ended, sequences, attended, acting)


class MadeArrays(NamedTuple):
    """`MadeExperience` on its way."""

    experience: Mapping[str, Array]
    samples: list[Sample]

    def unpacked(self) -> MadeExperience:
        """Return it as it was."""
        return MadeExperience(Experience.from_numpy(self.experience), self.samples)


class ScoreArrays(NamedTuple):
    """`Scores` on their way."""

    total: Array
    raw: Mapping[str, Array]
    parts: Mapping[str, Array]
    well_formed: Array | None
    abstains: Array
    failures: list[dict[str, str]]

    @classmethod
    def of(cls, scores: Scores) -> ScoreArrays:
        """Return what the judges said."""
        raw, parts = ({name: each.numpy() for name, each in named.items()} for named in (scores.raw, scores.parts))
        formed = None if scores.well_formed is None else scores.well_formed.numpy()
        return cls(scores.total.numpy(), raw, parts, formed, scores.abstains.numpy(), scores.failures)

    def unpacked(self) -> Scores:
        """Return them as they were."""
        raw, parts = ({name: torch.tensor(each) for name, each in named.items()} for named in (self.raw, self.parts))
        formed = None if self.well_formed is None else torch.tensor(self.well_formed)
        return Scores(torch.tensor(self.total), raw, parts, formed, torch.tensor(self.abstains), self.failures)


PARTS = (
    "the actor's responses",
    "the actor's log-probabilities",
    "the initial model's log-probabilities",
    "the critic's values",
    "the reward model's scores",
)
"""What `ExperienceCompositionRefs.all` returns, in words."""


class ExperienceCompositionRefs:
    """Ray's references of what one batch of experience is made of.

    Args:
        sequences_attention_mask_action_mask_ref: of `MadeSequences`, from an actor rank.
        action_log_probs_ref: of the same rank's log-probability of each response token, [B A].
        base_action_log_probs_ref: of the initial model's.
        value_ref: of the critic's value of the state before each response token, [B A].
        r_ref: of the reward model's `ScoreArrays`.
    """

    def __init__(
        self,
        sequences_attention_mask_action_mask_ref: Any,
        action_log_probs_ref: Any,
        base_action_log_probs_ref: Any,
        value_ref: Any,
        r_ref: Any,
    ) -> None:
        self.sequences_attention_mask_action_mask_ref = sequences_attention_mask_action_mask_ref
        self.action_log_probs_ref = action_log_probs_ref
        self.base_action_log_probs_ref = base_action_log_probs_ref
        self.value_ref = value_ref
        self.r_ref = r_ref

    def all(self) -> list[Any]:
        """Return the five references, in the order of the parameters."""
        return [
            self.sequences_attention_mask_action_mask_ref,
            self.action_log_probs_ref,
            self.base_action_log_probs_ref,
            self.value_ref,
            self.r_ref,
        ]


class ExperienceMaker:
    """Makes experience of what the four models contributed; which process does so decides nothing.

    Args:
        kl_coef: weight of the KL penalty, per nat.
        options: the algorithm's choices.
        timeout_s: longest wait for the contributions.
    """

    def __init__(
        self,
        kl_coef: float,
        *,
        options: PPOOptions = PPOOptions(lam=0.95),  # noqa: B008 - frozen
        timeout_s: float = 600.0,
    ) -> None:
        self.kl_coef = kl_coef
        self._config = checked(RolloutConfig, **options.model_dump(), kl_coef=kl_coef)
        self._timeout_s = timeout_s

    def make_experience(self, experiment_computation_refs: ExperienceCompositionRefs) -> MadeExperience:
        """Return the experience, and its rows for people.

        Args:
            experiment_computation_refs: what it is made of.
        """
        found = ray.get(experiment_computation_refs.all(), timeout=self._timeout_s)
        made: MadeSequences = found[0]
        logprobs, ref_logprobs, values = (torch.tensor(each) for each in found[1:4])
        scores: ScoreArrays = found[4]
        batch = made.batch()
        return assemble(
            batch,
            made.samples,
            rollout_log_probs=torch.tensor(made.rollout_log_probs),
            forwards=Forwards(logprobs, ref_logprobs, values, batch.action_mask),
            scores=scores.unpacked(),
            policy_version=made.policy_version,
            config=self._config,
            controls=EpisodeControls(self.kl_coef),
            tag=TemplateConfig().answer_tag,
        )


def packed(made: MadeExperience) -> MadeArrays:
    """Return experience as it crosses to the learners."""
    return MadeArrays(made.experience.to_numpy(), made.samples)


def as_array(tensor: Tensor) -> Array:
    """Return a tensor as it crosses."""
    found: Array = tensor.cpu().numpy()
    return found
