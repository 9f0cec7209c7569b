"""A detached trainer's state on disk: whichever rename a death comes between, a whole one is left."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.coati.detached.trainer_state import PPOTrainerState, read_trainer_state, write_trainer_state
from rlhf_core.errors import ModelError
from rlhf_core.strategy.ranks import ALONE


def write(directory: Path, number: int) -> None:
    write_trainer_state(directory, PPOTrainerState({"a": torch.tensor([number])}, {"number": number}, None), ALONE)


def number_in(directory: Path) -> int:
    return int(read_trainer_state(directory, ALONE).facts["number"])


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
