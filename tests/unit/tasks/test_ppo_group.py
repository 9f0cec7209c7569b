"""What a run asks of its cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.presets import resolve
from infra.artifacts import open_store
from infra.settings import Settings
from rlhf_core.models import loading
from tasks import ppo_group
from tasks.context import Context
from tasks.results import Parent, PPORun

MILLION = 1_000_000


def test_a_policy_is_looked_at_once_however_many_episodes_lease_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look hashes all its files: minutes for a large model, in each episode."""
    config = resolve("quickstart", overrides={"ppo.rollout_dtype": "bfloat16"})
    run = PPORun(
        name="night",
        key="k",
        preset="night",
        config=config,
        actor=Parent(uri="sft/night@1", digest="0" * 64),
        reward_model=None,
        dataset=Parent(uri="dataset/night@1", digest="0" * 64),
        source_digest="0" * 64,
        flow_run=None,
    )
    store = open_store(f"file://{tmp_path}/store", cache_dir=tmp_path / "cache")
    looked: list[Parent] = []

    def directory_of(_context: Context, parent: Parent) -> Path:
        looked.append(parent)
        return tmp_path

    monkeypatch.setattr(ppo_group, "open_context", lambda: Context(store, Settings(), None))
    monkeypatch.setattr(ppo_group, "materialise", directory_of)
    monkeypatch.setattr(loading, "count_parameters", lambda _: MILLION)
    # two models, going and coming, of 2 bytes a parameter, a tenth on top, and Ray's own 128 MB
    expected = 128 + 9
    assert [ppo_group._object_store_mb(run) for _ in range(3)] == [expected] * 3
    assert looked == [run.actor]
    ppo_group._parameters.cache_clear()
