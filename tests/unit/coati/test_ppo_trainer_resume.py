"""Five steps straight are three steps, the end of the process, and two steps: to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.coati import ppo_checkpoint
from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, ModelError, TrainingError
from rlhf_core.ppo.state import TrainingState, state_from_json
from rlhf_core.training.checkpoint import list_checkpoints
from tests.forked import exit_of
from tests.unit.coati.ppo_resume_cases import CASES, ENDS_AFTER, build, directory, fit, leave_checkpoints
from tests.unit.coati.ppo_trainers import (
    differences,
    first_difference,
    metrics,
    prompts,
    trainer,
    weights,
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a process left its checkpoints of all cases before it died."""
    root = tmp_path_factory.mktemp("ended")
    assert exit_of(leave_checkpoints, root) == 9
    return root


def from_the_former_form(facts: dict[str, Any], tensors: dict[str, torch.Tensor], **said: str) -> TrainingState:
    """Read a state as if the release had written it whose states had no number; its names are never to be changed."""
    front = facts["front"]
    former = {
        "position": facts["position"],
        "controls": facts["controls"],
        "learner": facts["learner"],
        "world_size": front["world_size"],
        "shapes": front["shapes"],
        "meter": front["meter"],
        "forms": front["forms"],
        "settings": front["settings"],
    }
    return state_from_json(former, tensors, **said)


@pytest.mark.integration
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_ended_after_three_steps_goes_on_as_if_it_had_not(
    name: str, ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = build(name)
    fit(straight, name, tmp_path / "straight")

    resumed = build(name, save_dir=tmp_path / "saved")
    torch.manual_seed(99)  # whatever a new process begins with
    if name != "between episodes, all weights, demonstrations":  # which is read as it is written now
        monkeypatch.setattr(ppo_checkpoint, "state_from_json", from_the_former_form)
    resumed.load_checkpoint(directory(ended, name) / "saved")
    assert resumed.position.step == ENDS_AFTER
    fit(resumed, name, tmp_path / "resumed")

    assert resumed.position == straight.position
    expected, found = weights(straight), weights(resumed)
    assert expected.keys() == found.keys()
    after, again = (
        [line for line in metrics(tmp_path / run) if line["step"] > ENDS_AFTER] for run in ("straight", "resumed")
    )
    said = f"{first_difference(after, again)} {differences(expected, found)}".strip()
    assert not said, said
    assert {line["step"] for line in after if "train/actor_loss" in line} >= {4, 5}
    before = [line for line in metrics(directory(ended, name) / "first") if "train/actor_loss" in line]
    assert [line["step"] for line in before] == [1, 2, 3]


@pytest.mark.integration
def test_a_checkpoint_holds_what_coatis_does(ended: Path) -> None:
    saved = directory(ended, "between episodes, all weights, demonstrations") / "saved"
    (found,) = list_checkpoints(saved)
    assert found.name == "epoch-2_step-3"
    for role in ("actor", "critic"):
        assert {path.name for path in found.path(role).iterdir()} == {
            "modeling", "optimizer", "lr_scheduler", "running_states.json",
        }  # fmt: skip
        facts = json.loads((found.path(role) / "running_states.json").read_text())
        assert facts == {"epoch": 2, "step": 3, "sample_start_index": 6}  # three batches of two


def test_the_end_of_a_fit_is_a_checkpoint_and_going_on_from_it_does_nothing_more(tmp_path: Path) -> None:
    first = trainer(save_dir=tmp_path)
    first.fit(1, 1, 2, prompts())
    assert [found.name for found in list_checkpoints(tmp_path)] == ["epoch-0_step-2"]
    second = trainer(save_dir=tmp_path)
    second.load_checkpoint(tmp_path)
    second.fit(1, 1, 2, prompts())
    assert all(torch.equal(one, weights(second)[name]) for name, one in weights(first).items())
    second.fit(2, 1, 2, prompts())
    assert [found.name for found in list_checkpoints(tmp_path)] == ["epoch-0_step-2", "epoch-1_step-4"]


def test_a_new_run_does_not_write_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    trainer(save_dir=tmp_path).fit(1, 1, 1, prompts())
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run, up to epoch-0_step-1"):
        trainer(save_dir=tmp_path).fit(1, 1, 1, prompts())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    trainer(save_dir=root, save_interval=1).fit(1, 1, 2, prompts())
    return root


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    file = copy / "actor" / "epoch-0_step-2" / "modeling" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    ours = trainer()
    before = weights(ours)
    with pytest.raises(ModelError, match=r"not whole: actor/epoch-0_step-2/modeling/model.safetensors has 1000 bytes"):
        ours.load_checkpoint(copy / "actor" / "epoch-0_step-2")
    assert all(torch.equal(weights(ours)[name], weight) for name, weight in before.items())
    ours.load_checkpoint(copy)
    assert (ours.position.step, ours.position.windows) == (1, 1)


def test_a_checkpoint_of_another_shape_changes_nothing(saved: Path) -> None:
    ours = trainer(lora=LoRAConfig(r=2))
    before = weights(ours)
    with pytest.raises(ModelError, match=r"does not fit the actor: .* such as model\..*; build the models as the run"):
        ours.load_checkpoint(saved)
    assert ours.position.step == 0
    assert all(torch.equal(weights(ours)[name], weight) for name, weight in before.items())


def test_the_middle_of_an_episode_is_not_gone_on_with_under_other_settings(saved: Path) -> None:
    with pytest.raises(ConfigError, match="from mid-episode with train_batch_size 2, but this trainer has 1"):
        trainer(train_batch_size=1).load_checkpoint(saved / "trainer" / "epoch-0_step-1")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ppo_checkpoint.write_state
    calls = []

    def full(*arguments: object) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ppo_checkpoint, "write_state", full)
    with pytest.raises(TrainingError, match=r"epoch-0_step-2 could not be written.*No space left"):
        trainer(save_dir=tmp_path, save_interval=1).fit(1, 1, 2, prompts())
    monkeypatch.undo()
    ours = trainer(save_dir=tmp_path)
    ours.load_checkpoint(tmp_path)
    ours.fit(1, 1, 2, prompts())
    assert ours.position.step == 2
