"""The rules by which versions are kept, as people write them."""

from __future__ import annotations

import pytest

from infra.artifacts import Retention
from infra.errors import StoreError


@pytest.mark.parametrize(
    ("text", "newest"),
    [
        (None, {"ppo-state": 2}),
        ("", {"ppo-state": 2}),
        (" policy = 50 , sft=1,", {"ppo-state": 2, "policy": 50, "sft": 1}),
        ("ppo-state=3", {"ppo-state": 3}),
        ("ppo-state=all", {}),
        ("run=all", {"ppo-state": 2}),
    ],
)
def test_the_rules_are_read(text: str | None, newest: dict[str, int]) -> None:
    assert Retention.parse(text).newest == newest


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("polcy=3", r"names the kind 'polcy', which there is not \(did you mean policy\?\)"),
        ("policy", "keeps '' of policy; expected a number from 1 on"),
        ("policy=0", "keeps '0' of policy; expected a number from 1 on"),
        ("policy=-1", "keeps '-1' of policy"),
        ("policy=two", "keeps 'two' of policy"),
        ("run=5", "would retire reports; those of kind 'run' are all kept"),
    ],
)
def test_rules_that_cannot_be_read_are_refused_in_a_sentence(text: str, complaint: str) -> None:
    with pytest.raises(StoreError, match=complaint):
        Retention.parse(text)
