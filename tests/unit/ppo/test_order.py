"""What each optimizer step of an episode learns from."""

from __future__ import annotations

from itertools import chain
from typing import Any

from rlhf_core.ppo.order import Window, drawn_rows, episode_windows, minibatch_order


def windows(**changes: Any) -> list[Window]:
    settings: dict[str, Any] = {
        "seed": 3, "episode": 1, "passes": 2, "samples": 6, "batch_size": 2, "accumulation_steps": 1, "sampled": False,
    }  # fmt: skip
    return episode_windows(**(settings | changes))


def rows(dealt: list[Window]) -> list[list[int]]:
    return [window.rows.tolist() for window in dealt]


def test_without_accumulation_the_steps_are_the_minibatches_of_the_common_order() -> None:
    expected = [
        batch.tolist()
        for epoch in range(2)
        for batch in minibatch_order(seed=3, episode=1, epoch=epoch, samples=6, batch_size=2)
    ]
    assert rows(windows()) == expected


def test_accumulated_batches_are_one_larger_batch() -> None:
    assert rows(windows(accumulation_steps=3)) == rows(windows(batch_size=6))
    assert [window.batches for window in windows(accumulation_steps=3)] == [3, 3]


def test_a_step_may_end_one_pass_and_begin_the_next_and_the_last_one_is_shorter() -> None:
    dealt = windows(passes=3, accumulation_steps=4)  # nine batches of three passes
    assert [(window.batches, window.begins, window.ends) for window in dealt] == [
        (4, (0, 1), (0,)),
        (4, (2,), (1,)),
        (1, (), (2,)),
    ]
    assert list(chain(*rows(dealt))) == list(chain(*rows(windows(passes=3))))


def test_a_batch_that_is_not_full_is_learnt_from_too() -> None:
    assert [len(window.rows) for window in windows(samples=5, passes=1)] == [2, 2, 1]


def test_in_sampled_mode_each_pass_is_one_random_batch() -> None:
    dealt = windows(sampled=True, passes=5, accumulation_steps=2)
    assert [(window.batches, window.begins, window.ends) for window in dealt] == [
        (2, (0, 1), (0, 1)),
        (2, (2, 3), (2, 3)),
        (1, (4,), (4,)),
    ]
    drawn = [drawn_rows(seed=3, episode=1, draw=draw, samples=6, batch_size=2).tolist() for draw in range(5)]
    assert rows(dealt) == [drawn[0] + drawn[1], drawn[2] + drawn[3], drawn[4]]
    assert len({tuple(batch) for batch in drawn}) > 1
    assert drawn == [drawn_rows(seed=3, episode=1, draw=d, samples=6, batch_size=2).tolist() for d in range(5)]


def test_a_random_batch_larger_than_the_buffer_is_the_whole_buffer() -> None:
    assert sorted(drawn_rows(seed=0, episode=0, draw=0, samples=3, batch_size=8).tolist()) == [0, 1, 2]
