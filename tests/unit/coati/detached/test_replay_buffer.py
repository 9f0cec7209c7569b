"""The buffer of a detached trainer: batches first in, first out, and no wait without an end."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rlhf_core.coati.detached.replay_buffer import BufferTimeoutError, DetachedReplayBuffer
from rlhf_core.errors import ConfigError
from rlhf_core.types import Experience


def rows(*numbers: int) -> Experience:
    """Return an experience whose rows are known by their one response token."""
    column = torch.tensor([[float(number)] for number in numbers])
    return Experience(
        sequences=torch.tensor([[7, number] for number in numbers]), action_log_probs=column, values=column,
        reward=column, kl=column, advantages=column, attention_mask=torch.ones(len(numbers), 2, dtype=torch.bool),
        action_mask=torch.ones(len(numbers), 1, dtype=torch.bool), policy_version=torch.zeros(len(numbers)).long(),
        rollout_log_probs=column, returns=column,
    )  # fmt: skip


def numbers(batch: Experience) -> list[int]:
    return batch.sequences[:, 1].tolist()


def test_rows_leave_in_batches_in_the_order_in_which_they_came_and_leftovers_wait() -> None:
    buffer = DetachedReplayBuffer(2)
    buffer.append(rows(1, 2, 3))
    assert buffer.get_length() == 1
    buffer.extend([rows(4), rows(5)])
    assert buffer.get_length() == 2
    assert [numbers(buffer.sample()) for _ in range(2)] == [[1, 2], [3, 4]]
    assert buffer.get_length() == 0
    buffer.append(rows(6))
    assert numbers(buffer.sample()) == [5, 6]
    assert buffer.is_empty


def test_a_buffer_that_holds_what_waited_in_another_goes_on_as_that_one() -> None:
    former, buffer = DetachedReplayBuffer(2), DetachedReplayBuffer(2)
    former.append(rows(1, 2, 3))
    buffer.append(rows(9))
    buffer.restore(former.waiting())
    buffer.append(rows(4))
    assert [numbers(buffer.sample()) for _ in range(2)] == [[1, 2], [3, 4]]
    assert buffer.is_empty


def test_an_empty_buffer_makes_who_takes_wait_and_says_what_came() -> None:
    buffer = DetachedReplayBuffer(2, timeout_s=0.05)
    buffer.append(rows(1))
    with pytest.raises(BufferTimeoutError, match=r"waited 0.05 s for a batch of 2 rows .* has 1; is anybody left"):
        buffer.sample()
    threading.Timer(0.05, lambda: buffer.append(rows(2))).start()
    assert numbers(buffer.sample(timeout_s=30)) == [1, 2]


def test_a_full_buffer_makes_who_adds_wait_until_there_is_room() -> None:
    buffer = DetachedReplayBuffer(2, limit=1, timeout_s=30)
    adding = threading.Thread(target=buffer.append, args=(rows(1, 2, 3, 4, 5),))
    adding.start()
    time.sleep(0.1)
    assert buffer.get_length() == 1
    assert adding.is_alive()
    assert numbers(buffer.sample()) == [1, 2]
    adding.join(30)
    assert not adding.is_alive()
    assert numbers(buffer.sample()) == [3, 4]


def test_nobody_waits_for_room_for_ever() -> None:
    buffer = DetachedReplayBuffer(2, limit=1, timeout_s=0.05)
    with pytest.raises(BufferTimeoutError, match=r"room for 2 more rows .* its limit of 1 batch of 2"):
        buffer.append(rows(1, 2, 3, 4))
    assert numbers(buffer.sample()) == [1, 2]


def test_clearing_leaves_nothing_and_makes_room() -> None:
    buffer = DetachedReplayBuffer(2, limit=1, timeout_s=30)
    buffer.append(rows(1, 2, 3))
    adding = threading.Thread(target=buffer.append, args=(rows(4, 5),))
    adding.start()
    time.sleep(0.1)
    buffer.clear()
    adding.join(30)
    assert numbers(buffer.sample()) == [4, 5] or buffer.get_length() == 0
    buffer.clear()
    assert buffer.get_length() == 0
    buffer.append(rows(8, 9))
    assert numbers(buffer.sample()) == [8, 9]


@pytest.mark.parametrize(("size", "limit"), [(0, 0), (1, -1)])
def test_sizes_that_cannot_be_are_refused(size: int, limit: int) -> None:
    with pytest.raises(ConfigError, match="sample_batch_size of at least 1"):
        DetachedReplayBuffer(size, limit)
