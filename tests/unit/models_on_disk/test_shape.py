"""A decoder's shape by its configuration, and what PyTorch keeps of it against the formula."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Gemma2Config, GPT2Config, LlamaConfig, LlamaForCausalLM

from rlhf_core.config import LoRAConfig
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.models.shape import LOGITS_BYTES, SHORT_ROW, PassRows, Shape, shape_of
from rlhf_core.models.trunk import autocast

CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=50,
)  # fmt: skip
SHAPE = Shape(layers=2, hidden=128, intermediate=384, queries=128, keys=32, vocabulary=50, heads=8, head_is_cut=True)
ROWS = PassRows(4, 10, 6)


def test_the_shape_stands_in_the_configuration(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    assert shape_of(tmp_path) == SHAPE
    GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=70).save_pretrained(tmp_path)
    assert shape_of(tmp_path) == Shape(
        3, hidden=64, intermediate=256, queries=64, keys=64, vocabulary=70, heads=4, head_is_cut=True
    )
    Gemma2Config().save_pretrained(tmp_path)
    assert (found := shape_of(tmp_path)) is not None
    assert not found.head_is_cut
    (tmp_path / "config.json").write_text("{}")
    assert shape_of(tmp_path) is None


@pytest.mark.parametrize("rows", [ROWS, PassRows(4, SHORT_ROW - 6, 6)])
@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_what_is_kept_for_the_backward_pass(arithmetic: str, adapters: bool, rows: PassRows) -> None:
    dtype = getattr(torch, arithmetic)
    model = LlamaForCausalLM(CONFIG)
    if adapters:
        model = model.to(dtype)
        attach_lora(model, LoRAConfig(r=4), seed=0)
        trained = sum(weight.numel() for weight in trainable_parameters(model).values())
        assert SHAPE.adapter_parameters(4) == trained
    own = {weight.untyped_storage().data_ptr() for weight in (*model.parameters(), *model.buffers())}
    shapes = {shape for weight in model.parameters() for shape in (weight.shape, weight.shape[::-1])}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_cast_weight = tensor.shape in shapes  # by autocast, once for all passes
        if storage.data_ptr() not in own and not is_cast_weight:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(rows.number, rows.prompt + rows.response, dtype=torch.long)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, :3] = False  # padding, with which the kernel's keys and values are as wide as queries
    with saved_tensors_hooks(keep, lambda tensor: tensor), autocast(torch.device("cpu"), dtype):
        hidden = model.model(ids, attention_mask=mask).last_hidden_state
    assert hidden.requires_grad
    expected = SHAPE.learning_bytes(rows, arithmetic, adapters=adapters, checkpointing=False, head=False)
    assert sum(kept.values()) == pytest.approx(expected, rel=0.1)


def test_what_is_computed_again_is_not_kept() -> None:
    whole, again = (
        SHAPE.learning_bytes(ROWS, "float32", adapters=True, checkpointing=each, head=False) for each in (False, True)
    )
    assert again == whole // 2 + ROWS.tokens * 2 * 4 * 128  # a layer of two, and the layers' inputs
    with_logits = SHAPE.learning_bytes(ROWS, "float32", adapters=True, checkpointing=False, head=True)
    assert with_logits - whole == 8 * 4 * 6 * 50


def test_more_logits_than_fit_are_not_scored_or_learnt_at_once() -> None:
    wide = SHAPE._replace(vocabulary=10**6)
    many = PassRows(1000, 10, 6)
    learnt = partial(SHAPE.learning_bytes, many, "float32", adapters=True, checkpointing=False)
    whole, cut = (wide._replace(head_is_cut=each) for each in (False, True))
    assert whole.learning_bytes(many, "float32", adapters=True, checkpointing=False, head=True) == (
        learnt(head=False) + 2 * 4 * 6000 * 10**6
    )
    assert cut.learning_bytes(many, "float32", adapters=True, checkpointing=False, head=True) == (
        learnt(head=False) + 2 * LOGITS_BYTES
    )
    rows = PassRows(1000, 10, 6)
    alone = SHAPE._replace(vocabulary=0).sampling_bytes(rows, "float32", rank=0)
    assert wide.sampling_bytes(rows, "float32", rank=0) == alone + LOGITS_BYTES


def test_a_cache_that_is_kept_stands_beside_what_is_scored() -> None:
    rows = PassRows(8, 100, 20)
    apart = SHAPE.sampling_bytes(rows, "float32", rank=0)
    cache = 2 * (8 * 128 + 256) * SHAPE.layers * SHAPE.keys * 4  # 120 tokens take a block, and two are spare
    assert SHAPE.sampling_bytes(rows, "float32", rank=0, keeps_cache=True) == apart + cache
