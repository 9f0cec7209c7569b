"""Loaders that go on where ranks of another number stood."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from rlhf_core.errors import DataError
from rlhf_core.training.loaders import CycledLoader, LoaderProgress, progress_of_all

ROWS = 24


def loader(rank: int, world_size: int, *, rows: int = ROWS, batch_size: int = 2) -> CycledLoader:
    """This rank's share of a shuffled pass, as a distributed sampler gives it."""
    data: Any = list(range(rows))
    sampler: Any = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, seed=5)
    batches: Any = DataLoader(
        data, batch_size=batch_size, sampler=sampler, collate_fn=lambda ids: {"input_ids": torch.tensor(ids)}
    )
    return CycledLoader(batches, what="prompts")


def given(ours: CycledLoader, batches: int) -> list[int]:
    return [row for _ in range(batches) for row in ours.next()["input_ids"].tolist()]


@pytest.mark.parametrize("before", [1, 2, 3, 6])
@pytest.mark.parametrize("after", [1, 2, 3, 6])
def test_other_ranks_take_the_rest_of_a_pass_and_nothing_twice(before: int, after: int) -> None:
    stood = [loader(rank, before) for rank in range(before)]
    batches = 12 // before // 2  # half of the pass, whoever takes it
    first = [row for each in stood for row in given(each, batches)]
    known = progress_of_all([each.state().facts for each in stood])
    assert known == LoaderProgress(0, 12, 2 * before)
    second = []
    for rank in range(after):
        ours = loader(rank, after)
        ours.load_progress(known, stood[0].state().tensors, after)
        second += given(ours, (ROWS - 12) // after // 2)
    assert sorted(first + second) == list(range(ROWS))


def test_a_pass_that_cannot_be_shared_evenly_passes_over_up_to_a_batch_of_each_rank() -> None:
    stood = loader(0, 1)
    first = given(stood, 1)  # two samples: each of two ranks goes on behind a batch of its own, which has two
    rest = []
    for rank in range(2):
        ours = loader(rank, 2)
        ours.load_progress(progress_of_all([stood.state().facts]), stood.state().tensors, 2)
        assert ours.samples_given == 2
        rest += given(ours, 5)
    assert len(rest) == len(set(rest)) == ROWS - 4
    assert not {*first} & {*rest}


def test_samples_that_were_given_twice_to_fill_up_a_pass_are_not_missed_by_fewer_ranks() -> None:
    stood = [loader(rank, 2, rows=7) for rank in range(2)]  # four each: one of the seven is given twice
    for each in stood:
        given(each, 2)
    ours = loader(0, 1, rows=7)
    ours.load_progress(progress_of_all([each.state().facts for each in stood]), stood[0].state().tensors, 1)
    assert sorted(given(ours, 4)) == list(range(7))  # the next pass
    assert ours.state().facts["pass"] == 1


def test_a_pass_that_others_have_begun_is_gone_on_with() -> None:
    ahead = {"pass": 3, "batches": 1, "samples": 2}
    assert progress_of_all([{"pass": 2, "batches": 6, "samples": 12}, ahead]) == LoaderProgress(3, 2, 2)
    ours = loader(0, 3)
    ours.load_progress(progress_of_all([{"pass": -1, "batches": 0, "samples": 0}]), {}, 3)
    assert ours.state().facts["pass"] == -1


def test_data_with_fewer_samples_than_were_given_are_other_data() -> None:
    stood = loader(0, 1)
    given(stood, 12)
    ours = loader(0, 2, rows=8)
    with pytest.raises(DataError, match="prompts has 4 samples on each of 2 ranks, fewer than the 24"):
        ours.load_progress(progress_of_all([stood.state().facts]), stood.state().tensors, 2)
