"""What flows between the stages: `Experience`, and `Sample` for people and for the store.

Shape letters: B sequences, P prompt tokens, A response tokens, S = P + A. Prompts are padded left, responses
right, masks are True where a token counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_PROMPT_AND_RESPONSE = ("sequences", "attention_mask")
_PER_SAMPLE = ("policy_version",)


@dataclass(slots=True, eq=False)
class Experience:
    """One rollout batch, detached from every graph; built with keywords, rewritten only by `to_device`."""

    sequences: Int[Tensor, "B S"]
    """Token ids: prompt, then response."""
    action_log_probs: Float[Tensor, "B A"]
    """log pi_old of each response token."""
    values: Float[Tensor, "B A"]
    """Critic's value of the state before each response token."""
    reward: Float[Tensor, "B A"]
    """Per token: the KL penalty, and the score at the last token."""
    kl: Float[Tensor, "B A"]
    """Estimate of the divergence from the initial model at each response token, in nats."""
    advantages: Float[Tensor, "B A"]
    """Not whitened here: `PPOLearner.training_step` whitens them once over the minibatch."""
    attention_mask: Bool[Tensor, "B S"]
    """True on tokens of prompt and response, False on padding."""
    action_mask: Bool[Tensor, "B A"]
    """True on response tokens that are learnt from, the stop token included: a prefix of each row, and nowhere in the
    row of a sample that abstains (ADR 48)."""
    policy_version: Int[Tensor, " B"]
    """Version of the weights that sampled each sequence."""
    rollout_log_probs: Float[Tensor, "B A"]
    """Log-probability of each response token as the generating engine drew it."""
    returns: Float[Tensor, "B A"] | None
    """Regression target of the critic, from unwhitened advantages; None without a critic."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.sequences.shape[0]

    @property
    def num_actions(self) -> int:
        """Width of the response part, A."""
        return self.action_mask.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by name, in their order."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to_device(self, device: torch.device | str) -> None:
        """Move every tensor to `device`, in place."""
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.to(device))

    def select(self, rows: Sequence[int] | Int[Tensor, " N"] | np.ndarray) -> Experience:
        """Return the sequences at `rows`, in that order."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.sequences.device)
        return _build({name: tensor[index] for name, tensor in self.tensors().items()})

    def split(self, size: int) -> list[Experience]:
        """Return pieces of `size` sequences, in order; the last one may be smaller."""
        rows = range(len(self))
        return [self.select(rows[start : start + size]) for start in rows[::size]]

    def replace(self, **changes: Tensor | None) -> Experience:
        """Return a copy that shares all tensors but those in `changes`."""
        return _build({**self.tensors(), **changes})

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Return plain arrays for transport; `returns` is left out when it is None."""
        return {name: tensor.cpu().numpy() for name, tensor in self.tensors().items()}

    @staticmethod
    def from_numpy(arrays: Mapping[str, np.ndarray]) -> Experience:
        """Return the experience that `to_numpy` took apart; arrays are copied, as transport may lend them."""
        return _build({name: torch.tensor(array) for name, array in arrays.items()})

    @staticmethod
    def concat(parts: Sequence[Experience]) -> Experience:
        """Return all sequences of `parts`, in order, padded again to the longest prompt and response.

        Raises:
            ValueError: if there are no parts, or only some of them have returns.
        """
        if not parts:
            raise ValueError("expected at least one Experience to concatenate, got none")
        if len({part.returns is None for part in parts}) > 1:
            raise ValueError("expected returns in all parts or in none, got both kinds")
        prompt = max(part.sequences.shape[1] - part.num_actions for part in parts)
        actions = max(part.num_actions for part in parts)
        padded = [_pad(part, prompt=prompt, actions=actions) for part in parts]
        return _build({name: torch.cat([part[name] for part in padded]) for name in padded[0]})


class Prompt(NamedTuple):
    """What one response is sampled for: token ids, and what its judges need to know."""

    ids: tuple[int, ...]
    """Token ids that the model is given, template included."""
    text: str
    """As it stands in the data, without the template."""
    answer: str | None
    """The reference answer; None if only a reward model judges."""
    key: str
    """Names the prompt in random streams and outcomes."""
    entry: str | None = None
    """The task's own record of the problem, as JSON, for scorers that need more than the answer."""


class EpisodeControls(NamedTuple):
    """What the trainer sets for one episode's rewards."""

    kl_coef: float
    """Weight of the per-token KL penalty, per nat."""
    score_mean: float = 0.0
    """Taken off every score, before it is divided."""
    score_std: float = 1.0
    """What every score is divided by."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response and what was thought of it, for people and for the store."""

    prompt: str
    answer: str
    """The reference answer; empty if there is none."""
    response: str
    key: str
    """The problem's key."""
    score: float
    """Weighted sum of the sources, before it is normalised or clipped over episodes."""
    verifier: float
    """From 0 to 1, where 1 is right."""
    well_formed: bool
    rm_score: float | None
    """The reward model's own score, not standardised; None without a reward model."""
    kl: float
    """Summed over the response, in nats."""
    length: int
    """Response tokens, the stop token included."""
    ended: bool
    """Whether the response ended with a stop token within the limit."""
    index: int = 0
    """Which of the problem's samples this is."""
    raw_scores: Mapping[str, float] = field(default_factory=dict)
    """What each source of reward said, by its name, unscaled; none of a source that failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What each source of reward contributed, scaled and weighted: they sum to the score."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """By source that failed, why, as `rewards.abstaining.failure` puts it."""
    abstains: bool = False
    """Whether one of these has a weight: then the score is not known, stands as 0, and nothing is learnt from it."""


def _build(tensors: Mapping[str, Tensor | None]) -> Experience:
    named: dict[str, Any] = {"returns": None, **tensors}
    return Experience(**named)


def _pad(part: Experience, *, prompt: int, actions: int) -> dict[str, Tensor]:
    """Pad prompts on the left and responses on the right, with zeros, which every mask hides."""
    left = prompt - (part.sequences.shape[1] - part.num_actions)
    right = actions - part.num_actions
    padded = {}
    for name, tensor in part.tensors().items():
        if name in _PER_SAMPLE:
            padded[name] = tensor
        else:
            sides = (left if name in _PROMPT_AND_RESPONSE else 0, right)
            padded[name] = torch.nn.functional.pad(tensor, sides)
    return padded
