from __future__ import annotations

import pytest

from tasks.stages import stage_key

FACTS = {"config": {"lr": 1e-5, "r": 4}, "inputs": ["a", "b"], "seed": 0, "source": "s"}


def test_the_order_in_which_a_configuration_was_written_does_not_matter() -> None:
    other = FACTS | {"config": {"r": 4, "lr": 1e-5}}
    assert stage_key("sft", **FACTS) == stage_key("sft", **other)


@pytest.mark.parametrize(
    "change",
    [{"config": {"lr": 2e-5, "r": 4}}, {"inputs": ["b", "a"]}, {"seed": 1}, {"source": "t"}],
    ids=["configuration", "inputs", "seed", "source"],
)
def test_whatever_a_result_depends_on_changes_its_key(change: dict[str, object]) -> None:
    assert stage_key("sft", **FACTS) != stage_key("sft", **(FACTS | change))


def test_stages_with_the_same_facts_have_different_keys() -> None:
    assert stage_key("sft", **FACTS) != stage_key("ppo", **FACTS)
