"""A model of adapters leaves the store whole, or leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.artifacts import ArtifactRef, open_store
from infra.errors import StoreError
from infra.settings import Settings
from rlhf_core.errors import ModelError
from tasks.export import export


@pytest.mark.parametrize("merged", [False, True])
def test_what_cannot_be_joined_leaves_no_directory_and_no_traceback(tmp_path: Path, merged: bool) -> None:
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    base = store.commit("sft", "s", {"config.json": b"{}"})
    named = f'{{"uri": "{base.uri}", "digest": "{base.digest}"}}'.encode()
    files = {"base.json": named, "adapter_config.json": b"{}", "adapter_model.safetensors": b"damaged"}
    made = store.commit("policy", "p", files, parents=[ArtifactRef(base.uri, base.digest)])
    target = tmp_path / "out"
    for _ in range(2):  # the second try finds nothing of the first
        with pytest.raises(ModelError, match="cannot be read as the weights of adapters"):
            export(store, Settings(home=tmp_path / "home"), store.resolve(made.uri), target, merged=merged)
        assert not target.exists()


def test_a_file_and_a_directory_with_anything_in_it_are_left_alone(tmp_path: Path) -> None:
    store = open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache")
    made = store.resolve(store.commit("policy", "p", {"base.json": b"{}"}).uri)
    (tmp_path / "full").mkdir()
    for taken in (tmp_path / "full" / "mine", tmp_path / "file"):
        taken.write_text("mine")
    for place in (tmp_path / "full", tmp_path / "file"):
        with pytest.raises(StoreError, match="is not an empty directory; give an empty directory"):
            export(store, Settings(home=tmp_path / "home"), made, place, merged=False)
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
