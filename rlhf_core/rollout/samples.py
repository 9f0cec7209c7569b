"""What was made: for the learner, for people (one `Sample` for each row), and on its way between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.data.verifiers import is_well_formed
from rlhf_core.rewards.scoring import REWARD_MODEL, VERIFIER, Scores, ScoringBatch
from rlhf_core.types import Experience, Sample


class MadeExperience(NamedTuple):
    """The same rows twice: for the learner, and for people."""

    experience: Experience
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class MadeChunk:
    """What comes back for one chunk."""

    index: int
    maker: str
    experience: dict[str, NDArray[Any]]
    """`Experience.to_numpy`: plain arrays cross processes without pickling tensors."""
    samples: list[Sample]
    seconds: dict[str, float]
    """Time by phase: generate, score."""
    episode: int
    version: int
    """Of the policy that sampled it."""

    def owned(self) -> Self:
        """Return it with arrays of its own: those that came lie in the object store for as long as they are held."""
        return replace(self, experience={name: array.copy() for name, array in self.experience.items()})


def describe(
    batch: ScoringBatch, samples: Sequence[int], scores: Scores, divergence: Tensor, *, tag: str
) -> list[Sample]:
    """Return a chunk's rows for people and for the store.

    Args:
        batch: prompts and responses.
        samples: which of its prompt's samples each row is.
        scores: what the sources said.
        divergence: [B A], from the initial model, zero on padding.
        tag: of the answer, which alone makes the form where no source looks at it.
    """
    lengths = batch.action_mask.sum(dim=1).tolist()
    summed = divergence.sum(dim=1).tolist()
    raw = {name: values.tolist() for name, values in scores.raw.items()}
    parts = {name: values.tolist() for name, values in scores.parts.items()}
    described = []
    for row, prompt in enumerate(batch.prompts):
        failures = scores.failures[row]
        said = {name: values[row] for name, values in raw.items() if name not in failures}
        text, ended = batch.responses[row], bool(batch.ended[row])
        formed = is_well_formed(text, ended=ended, tag=tag) if scores.well_formed is None else scores.well_formed[row]
        described.append(
            Sample(
                prompt=prompt.text,
                answer=prompt.answer or "",
                response=text,
                key=prompt.key,
                score=scores.total[row].item(),
                verifier=said.get(VERIFIER, 0.0),
                well_formed=bool(formed),
                rm_score=said.get(REWARD_MODEL),
                kl=summed[row],
                length=lengths[row],
                ended=ended,
                index=samples[row],
                raw_scores=said,
                parts={name: values[row] for name, values in parts.items()},
                failures=failures,
                abstains=bool(scores.abstains[row]),
            )
        )
    return described
