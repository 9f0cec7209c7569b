"""When processes map one base, and what keeps them from it."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config import PPOConfig, RewardModelConfig, SFTConfig


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lora": None}, "all weights are trained"),
        ({"lora": {"init": "pissa"}}, "lora.init pissa with lora.bias none changes what is below the adapters"),
        ({"lora": {"bias": "all"}}, "lora.init kaiming_uniform with lora.bias all changes what is below the adapters"),
        ({"lora": {}, "strategy": "zero2"}, "strategy zero2 lays out weights itself"),
        ({"lora": {}}, None),
        ({"lora": {}, "strategy": "ddp", "num_trainers": 2}, None),
    ],
)
def test_adapters_share_their_base_unless_something_changes_or_shards_it(
    changes: dict[str, Any], why: str | None
) -> None:
    for kind in (PPOConfig, SFTConfig, RewardModelConfig):
        config = kind.model_validate(changes)
        assert config.not_shared == why  # type: ignore[attr-defined]
        assert config.shares_base == (why is None)  # type: ignore[attr-defined]


def test_merged_weights_for_makers_are_weights_of_their_own() -> None:
    config = PPOConfig(update_lora_weights=False)
    assert (config.not_shared, config.shares_base) == ("update_lora_weights is false", False)
    assert PPOConfig().shares_base
    assert PPOConfig(update_lora_weights=True).shares_base
