"""A model of adapters leaves the store whole, or leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModel

from infra.artifacts import ArtifactRef, open_store
from infra.errors import StoreError
from infra.settings import Settings
from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.loading import load_causal_lm
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.models.reward_model import RewardModel
from tasks.export import export
from tasks.models import write_base
from tasks.results import Parent
from tests.tiny_llama import write_tiny_llama


def test_a_reward_model_of_adapters_scores_as_before_with_peft_and_merged(tmp_path: Path) -> None:
    store, ids = (
        open_store((tmp_path / "store").as_uri(), cache_dir=tmp_path / "cache"),
        torch.tensor([[5, 17, 40, 99]]),
    )
    base = store.commit("sft", "s", write_tiny_llama(tmp_path / "tiny"))
    ours = RewardModel.from_causal_lm(load_causal_lm(tmp_path / "tiny", "float32"))
    attach_lora(ours.trunk, LoRAConfig(r=4), seed=0)
    with torch.no_grad():
        for parameter in trainable_parameters(ours.trunk).values():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        expected = ours(ids, torch.ones_like(ids))
    ours.save_adapters(tmp_path / "made")
    write_base(tmp_path / "made", Parent(uri=base.uri, digest=base.digest))
    made = store.resolve(store.commit("reward-model", "r", tmp_path / "made", parents=[base]).uri)
    for merged in (False, True):
        export(store, Settings(home=tmp_path / "home"), made, tmp_path / str(merged), merged=merged)

    head = load_file(tmp_path / "False" / "head.safetensors")
    with torch.no_grad():
        trunk = PeftModel.from_pretrained(AutoModel.from_pretrained(tmp_path / "False" / "base"), tmp_path / "False")
        theirs = trunk(ids).last_hidden_state[:, -1] @ head["weight"][0] + head["bias"]
        whole = RewardModel.from_pretrained(tmp_path / "True", torch.float32)(ids, torch.ones_like(ids))
    torch.testing.assert_close(theirs, expected)
    torch.testing.assert_close(whole, expected)


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
