"""A detached trainer's state on disk: whichever rename a death comes between, a whole one is left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf_core.coati.detached.ppo_trainer import controls_kept
from rlhf_core.coati.detached.trainer_state import Stored, read_trainer_state, write_trainer_state
from rlhf_core.errors import ModelError
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.state import TrainingState
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import EpisodeControls
from tests.unit.coati.detached.test_replay_buffer import rows as experience


def write(directory: Path, number: int) -> None:
    state = TrainingState(Position(number, 0, number), {}, None, {"a": torch.tensor([number])})
    write_trainer_state(directory, Stored(state, None), ALONE)


def number_in(directory: Path) -> int:
    return read_trainer_state(directory, ALONE).state.position.episode


def test_two_deaths_between_the_renames_leave_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "state"
    write(directory, 1)
    rename, remove = Path.rename, shutil.rmtree

    class DeathError(BaseException):
        pass

    def dies(self: Path, target: Path) -> Path:
        if self.name.endswith(".writing"):
            raise DeathError
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(DeathError):
        write(directory, 2)
    assert number_in(directory) == 1

    def dies_after_removing(path: Any, **options: Any) -> None:
        remove(path, **options)
        if str(path).endswith(".former"):
            raise DeathError

    monkeypatch.setattr(shutil, "rmtree", dies_after_removing)
    with pytest.raises(DeathError):
        write(directory, 3)
    assert number_in(directory) == 1
    monkeypatch.undo()
    write(directory, 4)
    assert number_in(directory) == 4
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_no_state_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no state of a detached trainer"):
        read_trainer_state(tmp_path / "none", ALONE)


FORMER = {
    "learner": {"learner": {"steps": 6, "value_line": None}},
    "position": {"episode": 3, "fit_began": 1, "version": 2},
    "controls": {
        "now": {"kl_coef": 0.5, "scores": [4, 0.0, 1.0]}, "after": [[2, 0.25, 0.0, 1.0]], "of": [[3, 0.125, 0.0, 1.0]],
    },
    "books": {"issued": 9, "learnt": 9},
    "train_batch_size": 4,
    "waiting": 1,
}  # fmt: skip
"""As the release wrote it whose states had no number. Never to be changed."""


def test_a_state_of_the_release_before_formats_had_numbers_is_read(tmp_path: Path) -> None:
    rows = {f"waiting.0.{name}": tensor.clone() for name, tensor in experience(1, 2).tensors().items()}
    save_file({"w": torch.ones(2), **rows}, tmp_path / "state.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(FORMER))
    state, demonstrations = read_trainer_state(tmp_path, ALONE)
    assert demonstrations is None
    assert (state.position, state.learner) == (Position(3, 0, 6), FORMER["learner"])
    assert list(state.tensors) == ["w"]
    assert state.controls == {"kl_coef": 0.5, "scores": [4, 0.0, 1.0]}
    assert state.front == {"fit_began": 1, "version": 2, "train_batch_size": 4, "after": [[2, 0.25, 0.0, 1.0]]}
    assert state.rollouts.counts == {"issued": 9, "learnt": 9}
    (pushed,) = state.rollouts.pushed
    assert all(torch.equal(pushed.tensors()[name.split(".", 2)[2]], tensor) for name, tensor in rows.items())
    # The fourth episode's controls are stored; the fifth's are those of the second that was learnt.
    assert controls_kept(state, completed=3, max_staleness=1) == {3: EpisodeControls(0.125), 4: EpisodeControls(0.25)}
