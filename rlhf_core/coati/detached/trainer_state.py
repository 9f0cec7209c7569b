"""The whole state of a detached PPO trainer on disk: safetensors and JSON, and never half a state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlhf_core.errors import ModelError
from rlhf_core.ppo.state import TrainingState, state_from_json, state_tensors, state_to_json
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.checkpoint import write_json
from rlhf_core.training.loaders import LoaderState

_STATE, _FACTS = "state.safetensors", "state.json"
_WRITING, _FORMER = ".writing", ".former"


class Stored(NamedTuple):
    """What is on disk."""

    state: TrainingState
    """Its tensors on the first rank alone when it is written."""
    demonstrations: LoaderState | None
    """Where this rank's loader stands; None without one."""


def write_trainer_state(directory: Path, stored: Stored, ranks: Ranks) -> None:
    """Write a state in place of the one that is there; called by all ranks, which share the file system.

    Whatever ends the processes, the one before or this one is there.

    Raises:
        TrainingError: on all ranks, if one cannot write.
    """
    writing, former = _beside(directory, _WRITING), _beside(directory, _FORMER)

    def begin() -> None:
        if ranks.is_first:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)

    def write() -> None:
        if ranks.is_first:
            save_file(state_tensors(stored.state), writing / _STATE)
            write_json(writing / _FACTS, state_to_json(stored.state))
        if stored.demonstrations is not None and ranks.speaks:
            save_file(stored.demonstrations.tensors, writing / f"rank-{ranks.rank}.safetensors")
            write_json(writing / f"rank-{ranks.rank}.json", stored.demonstrations.facts)

    def replace() -> None:
        if ranks.is_first:
            if directory.exists():  # else the former is the only whole state: somebody died between the two renames
                shutil.rmtree(former, ignore_errors=True)
                directory.rename(former)
            writing.rename(directory)
            shutil.rmtree(former, ignore_errors=True)

    together(ranks, begin, what=f"make room for its state in {directory}")
    together(ranks, write, what=f"write its state to {directory}")
    together(ranks, replace, what=f"put its state in place as {directory}")


def read_trainer_state(directory: Path, ranks: Ranks) -> Stored:
    """Return a state that `write_trainer_state` wrote, on every rank.

    Raises:
        ModelError: if there is none, or it is damaged.
    """
    place = directory if directory.is_dir() else _beside(directory, _FORMER)
    try:
        facts: dict[str, Any] = json.loads((place / _FACTS).read_text())
        tensors = load_file(place / _STATE)
        state = state_from_json(facts, tensors, where=f"the state in {directory}", otherwise="give another save_dir")
        return Stored(state, _loader_state(place, ranks.rank))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{directory} holds no state of a detached trainer ({error}); give a save_dir") from error


def _loader_state(place: Path, rank: int) -> LoaderState | None:
    facts = place / f"rank-{rank}.json"
    if not facts.is_file():
        return None
    return LoaderState(json.loads(facts.read_text()), load_file(place / f"rank-{rank}.safetensors"))


def _beside(directory: Path, mark: str) -> Path:
    return directory.with_name(directory.name + mark)
