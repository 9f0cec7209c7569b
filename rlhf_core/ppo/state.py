"""All that an exact continuation of PPO needs, under every front, and how JSON and safetensors hold it.

States of every earlier format are read, whichever front wrote them: `NEWER` makes each of them one of today's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import ModelError
from rlhf_core.ppo.episode import Learning, Position
from rlhf_core.ppo.former_names import current_names
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.training.state import prefixed, under
from rlhf_core.types import EpisodeControls, Experience, Sample

STATE_FORMAT = 3
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
    rollouts: dict[str, float] = field(default_factory=dict)
    """How trainer and makers kept each other busy, and the counts; unlike the metrics not the same in every run."""

    def as_row(self) -> dict[str, Any]:
        """Return one flat row for tables and JSON lines."""
        times = {f"seconds_{phase}": value for phase, value in self.seconds.items()}
        place = {"episode": self.episode, "policy_version": self.policy_version}
        return {**place, **self.metrics, **self.rollouts, **times}


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Experience that is made and not learnt from, and the makers' counts; a chunk on lease is leased again."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """As `LeaseQueue.facts` returned them; empty where none were kept."""
    controls: Mapping[int, EpisodeControls] = field(default_factory=dict)
    """Of each episode that makers may work on; those of an episode not named are the trainer's current ones."""
    waiting: tuple[MadeChunk, ...] = ()
    """Made, and not learnt from; of each, no call of a judge failed."""
    pushed: tuple[Experience, ...] = ()
    """Put into the trainer's buffer by somebody, and not learnt from."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Where a run stands, with all that its next step depends on."""

    position: Position
    learner: Mapping[str, Any]
    """The learner's small facts: with its tensors what `PPOLearner.state` returned, without them `PPOLearner.facts`."""
    controls: Mapping[str, Any] | None
    """As `RewardControls.state` returned them; None where no rewards were set yet."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights, optimizer moments and random state by name, as far as the front has no files of its own for them."""
    learning: Learning | None = None
    """What the episode that is under way is learnt from, on this rank; None between two."""
    history: tuple[EpisodeRecord, ...] = ()
    rollouts: RolloutState = RolloutState()
    front: Mapping[str, Any] = field(default_factory=dict)
    """What one front adds, as JSON holds it."""


def state_to_json(state: TrainingState) -> dict[str, Any]:
    """Return all of a training state but its tensors, as plain JSON values."""
    rollouts = state.rollouts
    return {
        "format": STATE_FORMAT,
        "position": asdict(state.position),
        "learner": dict(state.learner),
        "controls": state.controls,
        "history": [asdict(record) for record in state.history],
        "rollouts": {
            "counts": dict(rollouts.counts),
            "controls": {str(episode): list(controls) for episode, controls in rollouts.controls.items()},
            "waiting": [_row_of(chunk) for chunk in rollouts.waiting],
            "pushed": len(rollouts.pushed),
        },
        "front": dict(state.front),
    }


def _row_of(chunk: MadeChunk) -> dict[str, Any]:
    row = asdict(replace(chunk, experience={}))
    for sample in row["samples"]:  # empty in every state, and releases up to 0.3 know no such fields
        del sample["failures"], sample["abstains"]
    return row


def state_tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return all tensors of a training state by name, on the CPU."""
    found = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    if state.learning is not None:
        collected, learnt = (_on_cpu(experience) for experience in state.learning)
        restated = {name: tensor for name, tensor in learnt.items() if not torch.equal(tensor, collected[name])}
        found |= prefixed(_COLLECTED, collected) | prefixed(_LEARNT, restated)
    for chunk in state.rollouts.waiting:
        arrays = {name: torch.from_numpy(array) for name, array in chunk.experience.items()}
        found |= prefixed(_waiting(chunk.episode, chunk.index), arrays)
    for place, experience in enumerate(state.rollouts.pushed):
        found |= prefixed(f"{_PUSHED}.{place}", _on_cpu(experience))
    return found


def state_from_json(
    facts: Mapping[str, Any], tensors: Mapping[str, Tensor], *, where: str, otherwise: str
) -> TrainingState:
    """Return the training state that `state_to_json` and `state_tensors` wrote, now or in an earlier release.

    Args:
        facts: what was written.
        tensors: the state's, by the names that they had then.
        where: the state, in words, for messages.
        otherwise: what to do without it, for messages.

    Raises:
        ModelError: if its format is of a later release, or no longer read, or something is missing.
    """
    number = facts.get("format", _format_without_number(facts))
    if not isinstance(number, int) or number > STATE_FORMAT:
        raise ModelError(
            f"{where} has format {number}, but this release reads formats up to {STATE_FORMAT}; upgrade rlhf-flows, "
            f"or {otherwise}"
        )
    try:
        while number != STATE_FORMAT:
            if number not in NEWER:
                raise ModelError(
                    f"{where} has format {number}, which this release no longer reads; go on with the release that "
                    f"wrote it, or {otherwise}"
                )
            facts, tensors = NEWER[number](facts, tensors)
            number = facts["format"]
        return _state(facts, tensors)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where} is incomplete or damaged ({error}); {otherwise}") from error


def _state(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TrainingState:
    def waiting(row: Mapping[str, Any]) -> MadeChunk:
        arrays = {name: each.numpy() for name, each in under(_waiting(row["episode"], row["index"]), tensors).items()}
        return MadeChunk(**{**row, "samples": [Sample(**sample) for sample in row["samples"]], "experience": arrays})

    rollouts = facts["rollouts"]
    return TrainingState(
        position=Position(**facts["position"]),
        learner=dict(facts["learner"]),
        controls=facts["controls"],
        tensors={name: tensor for name, tensor in tensors.items() if name.partition(".")[0] not in _NOT_LEARNERS},
        learning=_learning(under(_COLLECTED, tensors), under(_LEARNT, tensors)),
        history=tuple(EpisodeRecord(**row) for row in facts["history"]),
        rollouts=RolloutState(
            counts=dict(rollouts["counts"]),
            controls={int(episode): EpisodeControls(*values) for episode, values in rollouts["controls"].items()},
            waiting=tuple(waiting(row) for row in rollouts["waiting"]),
            pushed=tuple(_experience(under(f"{_PUSHED}.{place}", tensors)) for place in range(rollouts["pushed"])),
        ),
        front=dict(facts["front"]),
    )


def _learning(collected: dict[str, Tensor], restated: dict[str, Tensor]) -> Learning | None:
    if not collected:
        return None
    experience = _experience(collected)
    return Learning(experience, experience.replace(**restated))


def _experience(tensors: Mapping[str, Tensor]) -> Experience:
    fields: dict[str, Any] = {"returns": None, **tensors}
    return Experience(**fields)


def _on_cpu(experience: Experience) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in experience.tensors().items()}


def _waiting(episode: int, index: int) -> str:
    return f"{_WAITING}.{episode}.{index}"


_COLLECTED, _LEARNT, _WAITING, _PUSHED = "collected", "learnt", "waiting", "pushed"
_NOT_LEARNERS = {_COLLECTED, _LEARNT, _WAITING, _PUSHED}
"""Begin the names of the tensors that are not the learner's: `waiting.EPISODE.INDEX.FIELD`, `pushed.PLACE.FIELD`."""


Facts = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
Newer = Callable[[Facts, Tensors], tuple[Facts, Tensors]]
_TRAINER, _DETACHED = -1, -2
"""What `PPOTrainer` and the detached trainer wrote before their states had a number."""


def _format_without_number(facts: Mapping[str, Any]) -> int:
    return _TRAINER if "world_size" in facts else _DETACHED if "books" in facts else 1


def _with_rollouts(facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
    """Format 1 knew lockstep alone: at the end of an episode, nothing was on its way."""
    return {**facts, "format": 2, "dealing": {"books": {}, "controls": {}, "waiting": []}}, tensors


def _of_every_front(facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
    """Format 2 was the flow's alone, which kept the controls among the learner's facts."""
    learner, dealing = dict(facts["learner"]), facts["dealing"]
    controls = learner.pop("controls", None)
    history = []
    for row in facts["history"]:
        renamed = {("rollouts" if name == "dealing" else name): value for name, value in row.items()}
        history.append({**renamed, "metrics": current_names(row["metrics"])})
    rollouts = {"counts": dealing["books"], "controls": dealing["controls"], "waiting": dealing["waiting"], "pushed": 0}
    steps = learner.get("learner", {}).get("steps", 0)
    position = asdict(Position(len(history), 0, steps))
    return _facts_of_format_3(position, learner, controls, history=history, rollouts=rollouts), tensors


def _of_a_trainer(facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
    own = ("world_size", "shapes", "meter", "forms", "settings")
    front = {name: facts[name] for name in own}
    return _facts_of_format_3(facts["position"], facts["learner"], facts["controls"], front=front), tensors


def _of_a_detached_trainer(facts: Facts, tensors: Tensors) -> tuple[Facts, Tensors]:
    position, controls = facts["position"], facts["controls"]
    front = {name: position[name] for name in ("fit_began", "version")} | {"after": controls["after"]}
    rollouts = {
        "counts": facts["books"] or {},
        "controls": {str(episode): values for episode, *values in controls["of"]},
        "waiting": [],
        "pushed": facts["waiting"],
    }
    steps = facts["learner"].get("learner", {}).get("steps", 0)
    found = _facts_of_format_3(
        asdict(Position(position["episode"], 0, steps)), facts["learner"], controls["now"], rollouts=rollouts,
        front=front | {"train_batch_size": facts["train_batch_size"]},
    )  # fmt: skip
    renamed = {
        f"{_PUSHED}{name.removeprefix(_WAITING)}" if name.startswith(f"{_WAITING}.") else name: tensor
        for name, tensor in tensors.items()
    }
    return found, renamed


def _facts_of_format_3(position: Facts, learner: Facts, controls: Facts | None, **others: Any) -> Facts:
    """Return facts of format 3."""
    empty = {"history": [], "rollouts": {"counts": {}, "controls": {}, "waiting": [], "pushed": 0}, "front": {}}
    return {"format": 3, "position": position, "learner": learner, "controls": controls, **empty, **others}


NEWER: dict[int, Newer] = {
    1: _with_rollouts,
    2: _of_every_front,
    _TRAINER: _of_a_trainer,
    _DETACHED: _of_a_detached_trainer,
}
"""By format: makes facts and tensors of a later one. A format without a step, below our own, is no longer read."""
