"""What a stage starts from."""

from __future__ import annotations

from pathlib import Path

from infra.artifacts import ArtifactRef, open_store
from infra.settings import Settings
from tasks.context import Context
from tasks.parents import ancestors


def test_ancestors_are_all_digests_two_models_of_one_name_included(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    one, other = (ArtifactRef("model/base", digit * 64) for digit in "12")
    sft = store.commit("sft", "s", {"w": b"sft"}, parents=[one])
    policy = store.commit("policy", "p", {"w": b"policy"}, parents=[sft, other])
    assert ancestors(Context(store, Settings(), None), policy.uri) == {one.digest, sft.digest, other.digest}
