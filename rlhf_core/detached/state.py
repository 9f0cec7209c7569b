"""What the trainer hands to whoever keeps its states, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhf_core.detached.maker import MadeChunk
from rlhf_core.errors import ModelError
from rlhf_core.types import EpisodeControls, Sample

STATE_FORMAT = 2
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
    """The trainer's time by phase: generate and score (its wait for the makers, shared out), learn, synchronise, commit
    (the learner's pause)."""
    dealing: dict[str, float] = field(default_factory=dict)
    """How trainer and makers kept each other busy, and the counts; unlike the metrics not the same in every run."""

    def as_row(self) -> dict[str, Any]:
        """Return one flat row for tables and JSON lines."""
        times = {f"seconds_{phase}": value for phase, value in self.seconds.items()}
        place = {"episode": self.episode, "policy_version": self.policy_version}
        return {**place, **self.metrics, **self.dealing, **times}


@dataclass(frozen=True, slots=True)
class TrainerPosition:
    """Where a trainer stands: with the run's name, the triple that must match before it is reused."""

    next_episode: int
    """Also the version of its weights."""
    incarnation: str
    has_all_makers: bool
    """No maker is given up; one that is being revived comes back by itself."""
    last: EpisodeRecord | None
    """The episode before; None at the start."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """What the makers were at when the state was taken; what was out on lease is dealt again."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """As `LeaseQueue.facts` returned them; empty where none were kept."""
    controls: Mapping[int, EpisodeControls] = field(default_factory=dict)
    """Of each episode that makers may work on; those of an episode not named are the trainer's current ones."""
    waiting: tuple[MadeChunk, ...] = ()
    """Made, and not learnt from."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """All that an exact continuation needs."""

    tensors: Mapping[str, Any]
    """Weights, optimizer moments and random state by name."""
    learner: Mapping[str, Any]
    """The learner's small facts: schedules and counters."""
    history: tuple[EpisodeRecord, ...]
    dealing: RolloutState = RolloutState()


Newer = Callable[[dict[str, Any], Mapping[str, Any]], tuple[dict[str, Any], Mapping[str, Any]]]
_WAITING = "waiting."
"""Begins the names of the tensors of chunks that wait: `waiting.EPISODE.INDEX.FIELD`."""


def _with_rollouts(facts: dict[str, Any], tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Format 1 knew lockstep alone: at the end of an episode, nothing was on its way."""
    return facts | {"dealing": {"books": {}, "controls": {}, "waiting": []}}, tensors


NEWER: dict[int, Newer] = {1: _with_rollouts}
"""By format: makes facts and tensors of the next one. A format without a step, below our own, is no longer read."""
_BEGIN_AGAIN = "begin the stage ppo again under another seed, which keeps what it starts from"


class StateKeeper(Protocol):
    """Keeps training states and the finished policy; the artifact store behind it is not the core's to know."""

    def commit_state(self, state: TrainingState, samples: list[Sample]) -> None:
        """Store the state after `state.history[-1]`, and that episode's samples; return once nothing can lose it."""

    def last_state(self) -> TrainingState | None:
        """Return the last committed state, or None before the first."""

    def commit_policy(self, save: Callable[[Path], None], *, history: tuple[EpisodeRecord, ...]) -> None:
        """Store the finished policy, which `save` writes to a directory as `save_pretrained` does."""

    def keep_failed_batch(self, save: Callable[[Path], None]) -> str:
        """Keep a batch that could not be learnt from, which `save` writes to a directory; return where it is."""


def state_to_json(state: TrainingState) -> dict[str, Any]:
    """Return all of a training state but its tensors, as plain JSON values."""
    dealing = state.dealing
    return {
        "format": STATE_FORMAT,
        "learner": dict(state.learner),
        "history": [asdict(record) for record in state.history],
        "dealing": {
            "books": dict(dealing.counts),
            "controls": {str(episode): list(controls) for episode, controls in dealing.controls.items()},
            "waiting": [asdict(replace(chunk, experience={})) for chunk in dealing.waiting],
        },
    }


def state_tensors(state: TrainingState) -> dict[str, Any]:
    """Return all tensors of a training state by name."""
    waiting = {
        f"{_prefix(chunk.episode, chunk.index)}{name}": torch.from_numpy(array)
        for chunk in state.dealing.waiting
        for name, array in chunk.experience.items()
    }
    return {**state.tensors, **waiting}


def state_from_json(facts: dict[str, Any], tensors: Mapping[str, Any], where: str) -> TrainingState:
    """Return the training state that `state_to_json` and `state_tensors` wrote, now or in an earlier release.

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
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_WAITING)}
        return TrainingState(own, dict(facts["learner"]), history, _rollouts(facts["dealing"], tensors))
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{where} is incomplete or damaged ({error}); {_BEGIN_AGAIN}") from error


def _rollouts(facts: Mapping[str, Any], tensors: Mapping[str, Any]) -> RolloutState:
    def waiting(row: Mapping[str, Any]) -> MadeChunk:
        prefix = _prefix(row["episode"], row["index"])
        arrays = {name.removeprefix(prefix): tensors[name].numpy() for name in tensors if name.startswith(prefix)}
        return MadeChunk(**{**row, "samples": [Sample(**sample) for sample in row["samples"]], "experience": arrays})

    controls = {int(episode): EpisodeControls(*values) for episode, values in facts["controls"].items()}
    return RolloutState(dict(facts["books"]), controls, tuple(waiting(row) for row in facts["waiting"]))


def _prefix(episode: int, index: int) -> str:
    return f"{_WAITING}{episode}.{index}."
