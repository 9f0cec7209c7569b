"""What the trainer hands to whoever keeps its states, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.types import Sample


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


def history_to_json(history: tuple[EpisodeRecord, ...]) -> list[dict[str, Any]]:
    """Return the history as plain JSON values."""
    return [asdict(record) for record in history]


def history_from_json(rows: list[dict[str, Any]]) -> tuple[EpisodeRecord, ...]:
    """Return the history that `history_to_json` wrote."""
    return tuple(EpisodeRecord(**row) for row in rows)
