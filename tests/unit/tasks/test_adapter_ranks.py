"""What is said of a policy whose adapters have grown from night to night."""

from __future__ import annotations

import json
import re

import pytest

from infra.artifacts import ArtifactStore
from tasks.ppo import HIGH_RANK, _tell_of_high_rank


@pytest.mark.parametrize(("below", "told"), [(HIGH_RANK - 17, False), (HIGH_RANK - 16, True), (None, False)])
def test_the_log_says_how_to_begin_from_one_whole_model(
    store: ArtifactStore, caplog: pytest.LogCaptureFixture, below: int | None, *, told: bool
) -> None:
    ranks = {"adapter_config.json": 16} | ({} if below is None else {"below/adapter_config.json": below})
    files = {file: json.dumps({"r": rank}).encode() for file, rank in ranks.items()}
    made = store.commit("policy", "llama7b", files | {"adapter_model.safetensors": b"factors"})
    _tell_of_high_rank(store, made.uri)
    wanted = rf"rank {HIGH_RANK} in all.* fetch policy/llama7b@1 DIR --merged, then -p model=DIR without -p actor"
    assert [bool(re.search(wanted, line)) for line in caplog.messages] == [True] * told


def test_of_a_whole_model_nothing_is_said(store: ArtifactStore, caplog: pytest.LogCaptureFixture) -> None:
    _tell_of_high_rank(store, store.commit("policy", "quickstart", {"config.json": b"{}"}).uri)
    assert caplog.messages == []


def test_a_store_that_cannot_be_read_ends_no_run_whose_policy_is_stored(store: ArtifactStore) -> None:
    _tell_of_high_rank(store, "policy/nowhere@7")
