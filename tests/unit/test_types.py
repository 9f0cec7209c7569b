"""Experience is cut, joined and carried without losing or mixing anything."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from rlhf_core.types import Experience


def experience(*, rows: int, prompt: int, actions: int, start: int = 0, returns: bool = True) -> Experience:
    """Every number names its row, so that a mix-up shows."""
    per_row = torch.arange(start, start + rows, dtype=torch.float32)[:, None]
    table = per_row + torch.arange(actions) / 10
    names = ("action_log_probs", "values", "reward", "kl", "advantages", "rollout_log_probs")
    return Experience(
        sequences=(per_row.long() * 100 + torch.arange(prompt + actions)),
        attention_mask=torch.ones(rows, prompt + actions, dtype=torch.bool),
        action_mask=torch.ones(rows, actions, dtype=torch.bool),
        policy_version=torch.arange(start, start + rows),
        returns=table + 7 if returns else None,
        **{name: table + i for i, name in enumerate(names)},
    )


def assert_same(first: Experience, second: Experience) -> None:
    assert first.tensors().keys() == second.tensors().keys()
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name


def test_inherited_fields_keep_their_order_and_new_ones_come_last() -> None:
    assert [field.name for field in fields(Experience)] == [
        "sequences",
        "action_log_probs",
        "values",
        "reward",
        "kl",
        "advantages",
        "attention_mask",
        "action_mask",
        "policy_version",
        "rollout_log_probs",
        "returns",
    ]


def test_a_wrong_shape_is_refused_under_the_type_checker() -> None:
    good = experience(rows=2, prompt=3, actions=4)
    with pytest.raises(Exception, match="values"):
        good.replace(values=torch.zeros(2, 5))


def test_splitting_and_concatenating_gives_the_experience_back() -> None:
    whole = experience(rows=5, prompt=3, actions=4)
    parts = whole.split(2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert_same(Experience.concat(parts), whole)


def test_select_takes_rows_in_the_given_order() -> None:
    whole = experience(rows=4, prompt=2, actions=3)
    chosen = whole.select([3, 0])
    assert chosen.policy_version.tolist() == [3, 0]
    assert chosen.sequences[:, 0].tolist() == [300, 0]
    assert chosen.returns is not None
    assert chosen.returns[:, 0].tolist() == [10.0, 7.0]


def test_concat_pads_prompts_left_and_responses_right() -> None:
    short = experience(rows=1, prompt=1, actions=2)
    long = experience(rows=1, prompt=2, actions=3, start=1)
    both = Experience.concat([short, long])
    assert both.sequences.tolist() == [[0, 0, 1, 2, 0], [100, 101, 102, 103, 104]]
    assert both.attention_mask.tolist() == [[False, True, True, True, False], [True] * 5]
    assert both.action_mask.tolist() == [[True, True, False], [True] * 3]
    assert both.values[0].tolist() == pytest.approx([1.0, 1.1, 0.0])


def test_numpy_transport_gives_equal_tensors_even_from_read_only_arrays() -> None:
    whole = experience(rows=2, prompt=2, actions=2)
    arrays = whole.to_numpy()
    for array in arrays.values():
        array.setflags(write=False)
    assert_same(Experience.from_numpy(arrays), whole)
    assert all(isinstance(array, np.ndarray) for array in arrays.values())


def test_returns_may_be_absent() -> None:
    whole = experience(rows=3, prompt=2, actions=2, returns=False)
    assert "returns" not in whole.to_numpy()
    assert Experience.from_numpy(whole.to_numpy()).returns is None
    assert Experience.concat(whole.split(1)).returns is None
    with pytest.raises(ValueError, match="returns in all parts or in none"):
        Experience.concat([whole, experience(rows=1, prompt=2, actions=2)])


def test_nothing_to_concatenate_is_said() -> None:
    with pytest.raises(ValueError, match="at least one Experience"):
        Experience.concat([])


def test_to_device_rewrites_in_place() -> None:
    whole = experience(rows=1, prompt=1, actions=1)
    whole.to_device("meta")
    assert all(tensor.device.type == "meta" for tensor in whole.tensors().values())
