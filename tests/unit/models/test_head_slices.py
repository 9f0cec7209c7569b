"""The head in slices: the numbers and gradients of all logits at once, and no more logits at once than a slice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

from rlhf_core.config import LoRAConfig
from rlhf_core.functional.logprobs import LogprobsAndEntropy
from rlhf_core.models import head_slices, shape
from rlhf_core.models.actor import response_logprobs, response_statistics
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.shape import head_is_last
from rlhf_core.models.trunk import autocast
from rlhf_core.supervised.batches import MaskedTokens, token_batch
from rlhf_core.supervised.step import TokenObjective
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm

torch.set_num_threads(1)

WORDS, ROWS, WIDTH = 259, 3, 10
IDS = torch.randint(3, WORDS, (ROWS, 16), generator=torch.Generator().manual_seed(0))
BATCH: dict[str, Any] = {
    "sequences": IDS, "attention_mask": torch.ones_like(IDS, dtype=torch.bool), "num_actions": WIDTH,
}  # fmt: skip
TWO_TOKENS = 4 * (4 * ROWS * WORDS) * 2
"""Bytes of all logits with which a slice is two tokens of each row."""


def measured(model: PreTrainedModel, *, entropy_needs_grad: bool = True) -> tuple[LogprobsAndEntropy, list[Tensor]]:
    """Both statistics, and the gradients of a sum in which every token has another weight."""
    model.zero_grad()
    found = response_statistics(model, **BATCH, temperature=0.7, entropy_needs_grad=entropy_needs_grad)
    weights = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    (weights * found.logprobs + (weights.flip(0) * found.entropy if entropy_needs_grad else 0.0)).sum().backward()
    return found, [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.fixture
def two_tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return partial(monkeypatch.setattr, head_slices, "LOGITS_BYTES", TWO_TOKENS)


@pytest.mark.parametrize("entropy_needs_grad", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slices_give_the_numbers_and_gradients_of_the_whole(
    architecture: str, entropy_needs_grad: bool, two_tokens: Callable[[], None]
) -> None:
    model = tiny_causal_lm(architecture)
    whole, gradients = measured(model, entropy_needs_grad=entropy_needs_grad)
    two_tokens()
    found, others = measured(model, entropy_needs_grad=entropy_needs_grad)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(others, gradients, rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.get_output_embeddings())


def adapted(dropout: float) -> PreTrainedModel:
    model = tiny_causal_lm("llama")
    attach_lora(model, LoRAConfig(r=2, target_modules=("lm_head", "q_proj"), dropout=dropout), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def test_adapters_on_the_head_are_learnt_in_slices(two_tokens: Callable[[], None]) -> None:
    model = adapted(dropout=0.0)
    whole, gradients = measured(model)
    two_tokens()
    found, others = measured(model)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(others, gradients, strict=True):
        # sums of terms as large as the largest entry, in another order: the small entries have their rounding
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, theirs.abs().max().item()))


def test_dropout_of_the_head_is_drawn_once(two_tokens: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(dropout=0.5).train()
    two_tokens()
    torch.manual_seed(0)
    _, gradients = measured(model)
    monkeypatch.setattr(head_slices, "checkpoint", lambda part, *given, **_: part(*given))
    torch.manual_seed(0)
    _, kept = measured(model)
    torch.testing.assert_close(gradients, kept, rtol=1e-6, atol=1e-6)


def test_slices_in_half_precision_have_its_numbers(two_tokens: Callable[[], None]) -> None:
    model = tiny_causal_lm("llama")
    with autocast(torch.device("cpu"), torch.bfloat16):
        whole, gradients = measured(model)
        two_tokens()
        found, others = measured(model)
    assert found.logprobs.dtype == torch.float32
    torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(others, gradients, strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_no_more_logits_exist_than_a_slice_and_none_is_kept(two_tokens: Callable[[], None]) -> None:
    model = tiny_causal_lm("llama")
    two_tokens()
    measured(model)  # by now it is known that this head can be cut
    computed, kept = [], []
    whole = type(model.lm_head).forward

    def forward(head: Any, hidden: Tensor) -> Tensor:
        computed.append(hidden.shape[1])
        return whole(head, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.lm_head), "forward", forward)
        computed.clear()
        with saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
            found = response_statistics(model, **BATCH, temperature=1.0, entropy_needs_grad=False)
            at_head = [width for width in computed if width <= WIDTH]
            found.logprobs.sum().backward()
    assert at_head == [2] * 5
    assert not [shape for shape in kept if len(shape) == 3 and shape[-1] == WORDS and shape[1] > 2]


def test_the_ratio_of_the_first_pass_is_one_to_the_bit(two_tokens: Callable[[], None]) -> None:
    model = adapted(dropout=0.0)
    two_tokens()
    with torch.no_grad():
        old = response_logprobs(model, **BATCH, temperature=0.7)
    assert torch.equal(measured(model)[0].logprobs, old)


def gemma(cap: float | None) -> PreTrainedModel:
    config = Gemma2Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, final_logit_softcapping=cap,
    )  # fmt: skip
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


@pytest.mark.parametrize("cap", [None, 2.0])
def test_an_architecture_that_changes_its_logits_has_all_at_once(
    cap: float | None, two_tokens: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gemma(cap)
    whole, gradients = measured(model)
    two_tokens()
    found, others = measured(model)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(others, gradients, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.logprobs, whole.logprobs) or cap is None
    assert head_is_last(model.config) is (cap is None)
    monkeypatch.setattr(shape, "_try_head", None)  # once for each configuration
    assert head_is_last(copy.deepcopy(model.config)) is (cap is None)


def test_a_model_that_is_learnt_in_slices_stays_as_it_was(two_tokens: Callable[[], None]) -> None:
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    before = model.config.to_dict() | {"attention": model.config._attn_implementation}
    seen: list[Tensor] = []
    two_tokens()
    model.lm_head.register_forward_pre_hook(lambda _head, given: seen.append(given[0]))
    whole = type(model.lm_head).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.lm_head), "forward", lambda head, hidden: seen.append(hidden) or whole(head, hidden))
        response_logprobs(model, **BATCH, temperature=1.0)
    assert model.config.to_dict() | {"attention": model.config._attn_implementation} == before
    slices = [hidden for hidden in seen if hidden.shape[:2] == (ROWS, 2)]
    assert len(slices) == WIDTH // 2
    assert all(hidden.is_contiguous() for hidden in slices)


def test_demonstrations_are_learnt_in_slices(two_tokens: Callable[[], None]) -> None:
    model = tiny_causal_lm("llama")
    batch = token_batch([MaskedTokens(tuple(row.tolist()), (False,) * 6 + (True,) * 10) for row in IDS])
    objective = TokenObjective(torch.device("cpu"), torch.float32)
    (whole,) = objective.loss(model, batch, denominator=30)
    two_tokens()
    (found,) = objective.loss(model, batch, denominator=30)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
