"""Models on disk are loaded whole or refused, and written in small shards that load again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.errors import ModelError
from rlhf_core.models.loading import (
    count_parameters,
    load_causal_lm,
    load_tokenizer,
    model_digest,
    save_model,
    save_weights,
)
from tests.tiny_llama import tiny_llama, tiny_tokenizer, write_tiny_llama


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[1, 5, 9, 200]])).logits


def test_a_saved_model_loads_with_the_same_logits(tmp_path: Path) -> None:
    model = tiny_llama(seed=3)
    save_model(model, tiny_tokenizer(), tmp_path / "saved")
    loaded = load_causal_lm(tmp_path / "saved", "float32")
    assert not loaded.training
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("Sort: 2 1") == tiny_tokenizer()("Sort: 2 1")


@pytest.mark.parametrize("note", range(0, 64, 8))
def test_where_weights_lie_in_memory_does_not_depend_on_the_files_header(note: int, directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "note": "x" * note})
    model = load_causal_lm(directory, "float32")
    assert {weight.data_ptr() % 64 for weight in model.parameters()} == {0}


def test_the_dtype_is_the_one_asked_for(directory: Path) -> None:
    assert {p.dtype for p in load_causal_lm(directory, "bfloat16").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("with_tied_head", [True, False])
def test_named_weights_are_saved_as_their_model(tmp_path: Path, with_tied_head: bool) -> None:
    model = tiny_llama(seed=4)
    weights = dict(model.state_dict())
    if not with_tied_head:
        del weights["lm_head.weight"]
    save_weights(model.config, weights, tiny_tokenizer(), tmp_path / "saved")
    assert torch.equal(logits(load_causal_lm(tmp_path / "saved", "float32")), logits(model))
    assert load_tokenizer(tmp_path / "saved").eos_token == "<|im_end|>"
    assert count_parameters(tmp_path / "saved") == model.num_parameters()


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    weights = dict(model.state_dict())
    weights["model.norms.weight"] = weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unexpected \['model.norms.weight'\]"):
        save_weights(model.config, weights, tiny_tokenizer(), tmp_path / "saved")


def test_parameters_are_counted_from_the_headers(directory: Path) -> None:
    # 259 x 64 embeddings (tied); per layer: q and o 64 x 64, k and v 64 x 32, three of 64 x 128, two norms; last norm
    assert count_parameters(directory) == 259 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64


def test_a_truncated_weights_file_is_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        count_parameters(directory)
    with pytest.raises(ModelError, match="no causal language model can be loaded from"):
        load_causal_lm(directory, "float32")


def test_a_file_that_is_not_safetensors_is_named(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        count_parameters(directory)


def test_missing_weights_are_not_replaced_by_random_ones(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weight of its model, such as model\.norm\.weight"):
        load_causal_lm(directory, "float32")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    for load in (lambda: load_causal_lm(tmp_path, "float32"), lambda: load_tokenizer(tmp_path)):
        with pytest.raises(ModelError, match=r"has no .*\.json, but notes\.txt"):
            load()
    with pytest.raises(ModelError, match="holds no weights in safetensors"):
        count_parameters(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        load_causal_lm(tmp_path / "no", "float32")


def test_code_that_comes_with_a_model_is_not_run(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config.update(model_type="ours", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(f"open({str(directory / 'was_run')!r}, 'w')")
    with pytest.raises(ModelError, match="no causal language model can be loaded"):
        load_causal_lm(directory, "float32")
    assert not (directory / "was_run").exists()


def test_the_digest_is_of_content_and_not_of_place(tmp_path: Path, directory: Path) -> None:
    copy = write_tiny_llama(tmp_path / "copy")
    other = write_tiny_llama(tmp_path / "other", seed=1)
    assert model_digest(directory) == model_digest(copy) != model_digest(other)
    (copy / "README.md").write_text("no part of the model")
    assert model_digest(copy) == model_digest(directory)


def test_a_remembered_digest_is_used_until_a_file_changes(tmp_path: Path, directory: Path) -> None:
    models_dir = tmp_path / "models"
    before = model_digest(directory, models_dir=models_dir)
    [sidecar] = (models_dir / "digests").iterdir()
    assert before == model_digest(directory)
    rows = json.loads(sidecar.read_text())
    rows["config.json"][2] = "0" * 64
    sidecar.write_text(json.dumps(rows))
    assert model_digest(directory, models_dir=models_dir) != before, "the remembered hash was not read"
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    changed = model_digest(directory, models_dir=models_dir)
    assert changed == model_digest(directory) != before
    sidecar.write_text("damaged")
    assert model_digest(directory, models_dir=models_dir) == changed


def test_a_directory_without_a_model_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        model_digest(tmp_path)
