"""What the trainer hands to whoever keeps its states, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.errors import ModelError
from rlhf_core.types import Sample

STATE_FORMAT = 1
"""Of a training state's facts and of its tensors' names. What older code could not read takes the next number, and a
step in `NEWER` that makes it of the former format; the first states named none."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode in the run's history; kept in every training state after it."""

    episode: int
    policy_version: int
    """Version that was published after this episode."""
    incarnation: str
    """Random name of the trainer group that ran it; a restored group has another."""
    metrics: dict[str, float]
    seconds: dict[str, float]
    """Time by phase: generate, score, learn, synchronise, commit (the learner's pause)."""

    def as_row(self) -> dict[str, Any]:
        """Return one flat row for tables and JSON lines."""
        times = {f"seconds_{phase}": value for phase, value in self.seconds.items()}
        return {"episode": self.episode, "policy_version": self.policy_version, **self.metrics, **times}


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """Where a trainer stands: with the run's name, the triple that must match before it is reused."""

    next_episode: int
    """Also the version of its weights."""
    incarnation: str
    has_all_makers: bool
    """Every maker lives, as far as is known, and has been given this trainer's weights."""
    last: EpisodeRecord | None
    """The episode before; None at the start."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A committed state, read back."""

    tensors: Mapping[str, Any]
    """Weights, optimizer moments and random state by name."""
    learner: dict[str, Any]
    """The learner's small facts: schedules and counters."""
    history: tuple[EpisodeRecord, ...]


Newer = Callable[[dict[str, Any], Mapping[str, Any]], tuple[dict[str, Any], Mapping[str, Any]]]
NEWER: dict[int, Newer] = {}
"""By format: makes facts and tensors of the next one. A format without a step, below our own, is no longer read."""
_BEGIN_AGAIN = "begin the stage ppo again under another seed, which keeps what it starts from"


class StateKeeper(Protocol):
    """Keeps training states and the finished policy; the artifact store behind it is not the core's to know."""

    def commit_state(
        self,
        *,
        tensors: Mapping[str, Any],
        learner: dict[str, Any],
        history: tuple[EpisodeRecord, ...],
        samples: list[Sample],
    ) -> None:
        """Store the state after `history[-1]`; return once nothing can lose it."""

    def last_state(self) -> TrainingState | None:
        """Return the last committed state, or None before the first."""

    def commit_policy(self, save: Callable[[Path], None], *, history: tuple[EpisodeRecord, ...]) -> None:
        """Store the finished policy, which `save` writes to a directory as `save_pretrained` does."""

    def keep_failed_batch(self, save: Callable[[Path], None]) -> str:
        """Keep a batch that could not be learnt from, which `save` writes to a directory; return where it is."""


def state_to_json(learner: Mapping[str, Any], history: tuple[EpisodeRecord, ...]) -> dict[str, Any]:
    """Return all of a training state but its tensors, as plain JSON values."""
    return {"format": STATE_FORMAT, "learner": dict(learner), "history": [asdict(record) for record in history]}


def state_from_json(facts: dict[str, Any], tensors: Mapping[str, Any], where: str) -> TrainingState:
    """Return the training state that `state_to_json` wrote, now or in an earlier release.

    Args:
        facts: what was written.
        tensors: the state's, by the names that they had then.
        where: the state, in words, for messages.

    Raises:
        ModelError: if its format is of a later release, or no longer read, or something is missing; the message says
            which stage is to begin again.
    """
    number = facts.get("format", 1)
    if not isinstance(number, int) or number > STATE_FORMAT:
        raise ModelError(
            f"{where} has format {number}, but this release reads formats up to {STATE_FORMAT}; upgrade rlhf-flows, "
            f"or {_BEGIN_AGAIN}"
        )
    for older in range(number, STATE_FORMAT):
        if older not in NEWER:
            raise ModelError(
                f"{where} has format {number}, which this release no longer reads; go on with the release that wrote "
                f"it, or {_BEGIN_AGAIN}"
            )
        facts, tensors = NEWER[older](facts, tensors)
    try:
        history = tuple(EpisodeRecord(**row) for row in facts["history"])
        return TrainingState(tensors, dict(facts["learner"]), history)
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{where} is incomplete or damaged ({error}); {_BEGIN_AGAIN}") from error
