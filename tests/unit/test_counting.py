"""Counts in sentences read as people write them."""

from __future__ import annotations

from rlhf_core.counting import counted, ordinal


def test_one_is_singular_and_nothing_else_is() -> None:
    assert [counted(count, "blob") for count in (0, 1, 2)] == ["0 blobs", "1 blob", "2 blobs"]
    assert [counted(count, "batch", "batches") for count in (1, 3)] == ["1 batch", "3 batches"]
    assert counted(1_234_567, "token") == "1234567 tokens"
    assert [counted(count, "GPU") for count in (1.0, 0.5, 2.0)] == ["1 GPU", "0.5 GPUs", "2 GPUs"]  # as Ray counts


def test_people_count_from_one() -> None:
    assert [ordinal(episode) for episode in range(3)] == [1, 2, 3]
