"""Packed demonstrations give the numbers of unpacked ones, and models that cannot keep them apart are refused."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import SFTConfig
from rlhf_core.errors import ConfigError
from rlhf_core.supervised.batches import MaskedTokens, as_masked
from rlhf_core.supervised.sft import SHORT, check_packing, packed_batches, train_sft
from rlhf_core.supervised.step import token_loss
from tests.tiny_llama import tiny_llama
from tests.unit.models.architectures import WINDOW, tiny_causal_lm

FP32, CPU = torch.float32, torch.device("cpu")
EXAMPLES = [
    ([5, 6, 7], [10, 11, 2]),
    ([8], [12, 2]),
    ([5, 9], [13, 14, 15, 16, 2]),
    ([7, 7, 7, 7], [17, 2]),
    ([30, 31, 32, 33, 34], [35, 36, 37, 2]),
]
ROWS = [as_masked(example) for example in EXAMPLES]
CONFIG = SFTConfig(epochs=2, batch_size=5, micro_batch_size=2, lr=1e-3, warmup_steps=0, max_length=14)


def packed_loss(model: torch.nn.Module, rows: list[MaskedTokens], *, capacity: int, size: int = 1) -> float:
    batches = packed_batches(rows, capacity=capacity, size=size)
    with torch.no_grad():
        losses = [token_loss(model, batch, denominator=1.0, device=CPU, autocast_dtype=FP32) for batch in batches]
    return sum(loss.item() for loss in losses)


def alone_loss(model: torch.nn.Module, rows: list[MaskedTokens]) -> float:
    """Each sequence by itself, without padding, mask or positions, by the whole log-softmax."""
    total = 0.0
    with torch.no_grad():
        for ids, learnt in rows:
            whole = torch.log_softmax(model(torch.tensor([list(ids)])).logits[0], dim=-1)
            total -= sum(whole[t - 1, ids[t]].item() for t in range(1, len(ids)) if learnt[t])
    return total


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "qwen2", "qwen3"])
def test_a_packed_demonstration_has_the_loss_that_it_has_alone(architecture: str) -> None:
    model = tiny_causal_lm(architecture)
    check_packing(model, longest=9, vocabulary=259)
    for capacity, size in ((9, 1), (14, 2), (40, 1)):
        assert packed_loss(model, ROWS, capacity=capacity, size=size) == pytest.approx(
            alone_loss(model, ROWS), rel=1e-5
        )


def test_what_a_row_shares_changes_no_other_demonstration_in_it() -> None:
    model = tiny_causal_lm("llama")
    quiet = MaskedTokens(range(40, 49), [False] * 9)
    other = MaskedTokens(range(60, 69), [False] * 9)
    for rows in ([quiet, ROWS[0]], [other, ROWS[0]]):
        assert packed_loss(model, rows, capacity=20) == pytest.approx(alone_loss(model, ROWS[:1]), rel=1e-5)


def test_eager_attention_takes_the_same_mask() -> None:
    model = tiny_causal_lm("llama")
    model.set_attn_implementation("eager")
    check_packing(model, longest=9, vocabulary=259)
    assert packed_loss(model, ROWS, capacity=40) == pytest.approx(alone_loss(model, ROWS), rel=1e-5)


def test_packing_changes_neither_losses_nor_steps_but_only_the_rows() -> None:
    runs, slots = [], []
    for packing in (False, True):
        model = tiny_llama(initializer_range=0.2)
        seen: list[int] = []
        model.model.embed_tokens.register_forward_hook(lambda _, ids, __, seen=seen: seen.append(ids[0].numel()))
        config = CONFIG.model_copy(update={"packing": packing})
        runs.append((train_sft(model, EXAMPLES, config, seed=3, autocast_dtype=FP32).history, model))
        slots.append(sum(seen))
    (plain, plain_model), (packed, packed_model) = runs
    # Lengths 6, 3, 7, 6, 9, two rows at once. Plain, twice: those tokens, of which two begin with the same one.
    # Packed: rows of 9 + 3, 7 + 6 and 6, so 2 x 13 + 6 twice; and the probe's two sequences in one row and apart.
    assert slots == [2 * 30, 2 * 32 + 2 * (9 + SHORT)]
    assert [step["tokens"] for step in plain] == [step["tokens"] for step in packed] == [16, 16]
    for one, other in zip(plain, packed, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    torch.testing.assert_close(
        plain_model.model.layers[0].mlp.up_proj.weight,
        packed_model.model.layers[0].mlp.up_proj.weight,
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_packed_row_restarts_positions_and_pads_with_tokens_that_see_themselves() -> None:
    [batch] = packed_batches(
        [MaskedTokens([1, 2, 3], [True] * 3), MaskedTokens([4, 5], [True] * 2)], capacity=5, size=2
    )
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, True]]  # nothing predicts a first token
    assert batch.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    [uneven] = packed_batches([MaskedTokens([1, 2, 3], [True] * 3), MaskedTokens([4], [True])], capacity=3, size=2)
    assert uneven.attention_mask[1, 0].diagonal().all()
    assert uneven.attention_mask[1, 0].sum() == 1 + 1 + 2  # the token, and two of padding among themselves


@pytest.mark.parametrize("architecture", ["bloom", "mistral"])
def test_a_model_that_cannot_keep_packed_rows_apart_is_refused_before_training(architecture: str) -> None:
    model = tiny_causal_lm(architecture)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ConfigError, match=r"cannot keep packed demonstrations apart, .*set sft.packing to false"):
        train_sft(model, EXAMPLES, CONFIG.model_copy(update={"packing": True}), seed=0, autocast_dtype=FP32)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_window_as_long_as_the_longest_demonstration_is_no_hindrance() -> None:
    model = tiny_causal_lm("mistral")
    with pytest.raises(ConfigError, match="logits differ by"):
        check_packing(model, longest=WINDOW + 2, vocabulary=259)
    model.config.sliding_window = 64
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 64
    check_packing(model, longest=WINDOW + 2, vocabulary=259)


def test_the_probe_leaves_mode_and_random_state_as_they_were() -> None:
    model = tiny_causal_lm("gpt2").train()
    model.transformer.h[0].eval()
    state = torch.get_rng_state()
    check_packing(model, longest=SHORT, vocabulary=259)
    assert model.training
    assert not model.transformer.h[0].training
    assert torch.equal(torch.get_rng_state(), state)
