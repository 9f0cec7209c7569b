"""What a stage starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef, open_store
from infra.settings import Settings
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ModelError
from tasks import parents
from tasks.context import Context
from tasks.parents import ancestors, base_of
from tasks.results import Parent


def test_ancestors_are_all_digests_two_models_of_one_name_included(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    one, other = (ArtifactRef("model/base", digit * 64) for digit in "12")
    sft = store.commit("sft", "s", {"w": b"sft"}, parents=[one])
    policy = store.commit("policy", "p", {"w": b"policy"}, parents=[sft, other])
    assert ancestors(Context(store, Settings(), None), policy.uri) == {one.digest, sft.digest, other.digest}


def test_the_base_of_adapters_is_an_artifact_or_the_presets_model_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    context = Context(store, Settings(), None)
    config = PipelineConfig.model_validate({"name": "p", "data": {"task": "number_sorting"}})
    here = Parent(uri="model/llama", digest="1" * 64, path="/models/llama")
    monkeypatch.setattr(parents, "base_model", lambda *_: here)

    def over(uri: str, digest: str) -> Parent:
        made = store.commit("policy", "p", {"base.json": f'{{"uri": "{uri}", "digest": "{digest}"}}'.encode()})
        return Parent(uri=made.uri, digest=made.digest)

    whole = store.commit("sft", "s", {"w": b"sft"})
    as_parent = Parent(uri=whole.uri, digest=whole.digest)
    assert base_of(context, config, as_parent) == as_parent
    assert base_of(context, config, here) == here
    assert base_of(context, config, over(whole.uri, whole.digest)) == as_parent
    assert base_of(context, config, over(here.uri, here.digest)) == here
    with pytest.raises(
        ModelError, match=r"was trained over model/llama \(digest 222222222222\), but model.path leads to"
    ):
        base_of(context, config, over(here.uri, "2" * 64))
