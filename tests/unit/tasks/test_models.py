"""A stage's models: mapped where a run shares a base, and of what was meant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.artifacts.manifest import BASE_FILE
from infra.artifacts.ref import EXTERNAL_PREFIX
from rlhf_core.config import PipelineConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import BaseChangedError, ModelError
from rlhf_core.models.base import WEIGHTS, copies_of, is_shared
from rlhf_core.models.loading import load_tokenizer, model_digest
from tasks import preferences
from tasks.context import Context
from tasks.models import NotedBase, load_policy, opened_base, read_base, write_base
from tasks.parents import base_model
from tasks.results import Parent
from tests.tiny_llama import write_tiny_llama

torch.set_num_threads(1)
IDS = torch.arange(3, 15).reshape(2, 6)
COMMIT = "abc123" + "0" * 34


def external(directory: Path) -> Parent:
    return Parent(uri=f"{EXTERNAL_PREFIX}llama", digest=model_digest(directory), path=str(directory))


def test_a_whole_model_is_mapped_where_a_run_shares_it_and_answers_as_one_of_its_own(
    context: Context, model: Path
) -> None:
    base = external(model)
    own = load_policy(context, base, base, "float32", shares_base=False)
    assert not any(is_shared(each) for each in own.parameters())
    assert not copies_of(base.digest, context.settings.models_dir)
    mapped = load_policy(context, base, base, "float32", shares_base=True)
    assert all(is_shared(each) for each in mapped.parameters())
    with torch.no_grad():
        torch.testing.assert_close(mapped(IDS).logits, own(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_base_that_is_another_than_was_planned_is_not_copied(context: Context, tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model")
    base = external(directory)
    write_tiny_llama(directory, initializer_range=0.3)
    with pytest.raises(ModelError, match="holds another model than when this run was planned"):
        opened_base(context, base, "float32")
    assert not copies_of(base.digest, context.settings.models_dir)


def test_a_copy_that_is_there_is_used_whatever_became_of_its_source(context: Context, tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model")
    base = external(directory)
    first = opened_base(context, base, "float32")
    write_tiny_llama(directory, initializer_range=0.3)
    assert opened_base(context, base, "float32") == first


def test_a_base_that_is_changed_while_it_is_sampled_leaves_no_pairs(
    context: Context, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = external(model)

    def changed(*_: Any, **__: Any) -> None:
        [copy] = copies_of(base.digest, context.settings.models_dir)
        os.utime(copy.directory / WEIGHTS, (1, 1))

    monkeypatch.setattr("rlhf_core.rollout.preferences.sample_pairs", changed)
    facts = {"name": "test", "data": {"problems": "x.jsonl"}, "reward_model": {"lora": {"r": 2}}}
    config = PipelineConfig.model_validate(facts)
    template = PromptTemplate(load_tokenizer(model), config.template)
    with pytest.raises(BaseChangedError, match="was changed or removed"):
        preferences._sampled(context, config, base, template, [])


def test_a_base_from_the_hub_is_noted_with_its_name_and_revision(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--llama" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    here = Parent(uri="model/llama", digest="1" * 64, path=str(snapshot))
    write_base(tmp_path, here)
    note = tmp_path / BASE_FILE
    hub = f"some/llama@{COMMIT}"
    assert NotedBase.model_validate_json(note.read_bytes()) == NotedBase(uri=here.uri, digest=here.digest, hub=hub)
    write_base(tmp_path, here.model_copy(update={"path": str(tmp_path)}))
    assert NotedBase.model_validate_json(note.read_bytes()) == NotedBase(uri=here.uri, digest=here.digest)


def test_a_reference_of_a_base_that_cannot_be_read_is_told_in_a_sentence(context: Context) -> None:
    damaged = context.store.commit("policy", "x", {BASE_FILE: b"{}"})
    with pytest.raises(ModelError, match=r"base\.json of policy/x@1 does not say what its adapters are over"):
        read_base(context.store, context.store.resolve(damaged))


@pytest.mark.parametrize("name", ["ada@corp/llama", "@scratch/llama", "llama"])
def test_a_base_in_a_directory_is_called_after_the_directory(context: Context, tmp_path: Path, name: str) -> None:
    directory = write_tiny_llama(tmp_path / name)
    facts = {"name": "test", "data": {"problems": "x.jsonl"}, "model": {"path": str(directory)}}
    assert base_model(context, PipelineConfig.model_validate(facts)).uri == "model/llama"
