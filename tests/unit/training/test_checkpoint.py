"""A checkpoint is there whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rlhf_core.errors import DataError, ModelError, TrainingError
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.training import checkpoint as checkpoints
from rlhf_core.training.checkpoint import damage_of, find_checkpoint, list_checkpoints, write_checkpoint
from rlhf_core.training.loaders import CycledLoader
from rlhf_core.training.modes import random_states, set_random_states
from rlhf_core.training.run_directory import checkpoint_name

ROLES = ("actor", "critic", "trainer")


def save(directory: Path, *, step: int, content: str = "weights", episode: int = 0) -> checkpoints.Checkpoint:
    def write(path: Path) -> None:
        (path / "modeling").mkdir()
        (path / "modeling" / "file").write_text(content)

    name = checkpoint_name(episode=episode, step=step)
    return write_checkpoint(directory, name, dict.fromkeys(ROLES, write), ALONE)


def names(directory: Path) -> list[str]:
    return [found.name for found in list_checkpoints(directory)]


def test_a_checkpoint_has_coatis_layout_and_the_latest_is_found_by_its_step(tmp_path: Path) -> None:
    for step, episode in ((9, 1), (10, 1), (2, 0)):
        save(tmp_path, step=step, episode=episode)
    assert find_checkpoint(tmp_path).name == "epoch-1_step-10"
    assert (tmp_path / "actor" / "epoch-1_step-10" / "modeling" / "file").read_text() == "weights"
    manifest = json.loads((tmp_path / "trainer" / "epoch-1_step-10" / "manifest.json").read_text())
    assert manifest["files"]["critic/epoch-1_step-10/modeling/file"]["bytes"] == len("weights")
    assert find_checkpoint(tmp_path / "trainer" / "epoch-0_step-2").place == (2, 0)
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: (path / "critic/epoch-0_step-2/modeling/file").unlink(), "critic/.* is missing"),
        (lambda path: (path / "actor/epoch-0_step-2/modeling/file").write_text("w"), "has 1 bytes instead of 7"),
        (lambda path: (path / "actor/epoch-0_step-2/modeling/file").write_text("weight5"), "has changed"),
        (lambda path: (path / "trainer/epoch-0_step-2/manifest.json").unlink(), "never finished"),
    ],
)
def test_what_is_damaged_is_passed_over_or_refused_in_a_sentence(harm: object, says: str, tmp_path: Path) -> None:
    save(tmp_path, step=1)
    save(tmp_path, step=2)
    assert callable(harm)
    harm(tmp_path)
    assert find_checkpoint(tmp_path).name == "epoch-0_step-1"
    with pytest.raises(ModelError, match=says):
        find_checkpoint(tmp_path / "actor" / "epoch-0_step-2")


def test_a_directory_without_checkpoints_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no whole checkpoint; give the save_dir"):
        find_checkpoint(tmp_path)


def test_a_write_that_fails_leaves_the_last_good_checkpoint_and_no_trace(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    def full(path: Path) -> None:
        (path / "half").write_text("")
        raise OSError(28, "No space left on device")

    writers = {"actor": lambda path: (path / "file").touch(), "critic": full, "trainer": lambda _: None}
    with pytest.raises(TrainingError, match=r"epoch-0_step-2 could not be written.*No space left"):
        write_checkpoint(tmp_path, "epoch-0_step-2", writers, ALONE)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert names(tmp_path) == ["epoch-0_step-1"]


@pytest.mark.parametrize("renames", range(3))
def test_a_process_that_ends_between_two_renames_leaves_no_checkpoint(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=1)
    left = [renames]
    rename = Path.rename

    def ended(path: Path, target: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt  # nothing of ours catches it
        left[0] -= 1
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", ended)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, step=2)
    monkeypatch.setattr(Path, "rename", rename)
    assert find_checkpoint(tmp_path).name == "epoch-0_step-1"
    save(tmp_path, step=2, content="again")
    assert find_checkpoint(tmp_path).name == "epoch-0_step-2"
    assert not list(tmp_path.rglob(".*"))


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, step=1)
    replaced = save(tmp_path, step=1, content="others")
    assert damage_of(replaced) is None
    assert (replaced.path("actor") / "modeling" / "file").read_text() == "others"


def drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(), np.random.rand(), np.random.normal()]


def test_random_states_come_back_as_they_were() -> None:
    drawn()  # so that Gaussian numbers are held in reserve
    states = random_states()
    first = drawn()
    set_random_states(states)
    assert drawn() == first


def loader(*, generator: torch.Generator | None = None) -> CycledLoader:
    data = [{"input_ids": number} for number in range(10)]
    return CycledLoader(DataLoader(data, batch_size=3, shuffle=True, generator=generator), what="prompts")  # type: ignore[arg-type]


def given(cycled: CycledLoader, count: int) -> list[list[int]]:
    return [cycled.next()["input_ids"].tolist() for _ in range(count)]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("before", [0, 2, 4, 6])
def test_a_shuffling_loader_goes_on_where_it_was(own_generator: bool, before: int) -> None:
    def generator() -> torch.Generator | None:
        return torch.Generator().manual_seed(7) if own_generator else None

    torch.manual_seed(5)
    first = loader(generator=generator())
    given(first, before)
    torch.rand(3)  # training draws too
    state, states = first.state(), random_states()
    expected = given(first, 8)
    torch.manual_seed(99)
    second = loader(generator=generator())
    second.load_state(state.facts, state.tensors)
    set_random_states(states)
    assert given(second, 8) == expected
    assert second.samples_given == first.samples_given


def test_every_pass_of_a_distributed_sampler_is_another() -> None:
    sampler = torch.utils.data.DistributedSampler(range(8), num_replicas=2, rank=0, shuffle=True)  # type: ignore[arg-type, var-annotated]
    data = [{"input_ids": number} for number in range(8)]
    cycled = CycledLoader(DataLoader(data, batch_size=4, sampler=sampler), what="prompts")  # type: ignore[arg-type]
    assert len({tuple(batch) for batch in given(cycled, 4)}) > 1


def test_an_empty_loader_and_one_that_has_shrunk_are_refused_in_a_sentence() -> None:
    with pytest.raises(DataError, match="prompt_dataloader holds no batch"):
        CycledLoader([], what="prompt_dataloader").next()
    long = CycledLoader([{"input_ids": [1]}] * 3, what="prompt_dataloader")
    for _ in range(3):
        long.next()
    state = long.state()
    with pytest.raises(DataError, match="fewer batches than the 3"):
        CycledLoader([{"input_ids": [1]}], what="prompt_dataloader").load_state(state.facts, state.tensors)
