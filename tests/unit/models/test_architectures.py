"""What a row gets depends on the row alone, in each architecture; training mode without dropout is evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import check_same_tokenizer, load_causal_lm
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import (
    autocast,
    checkpoint_gradients,
    disable_dropout,
    forward_takes,
    max_positions,
    model_inputs,
    unwrapped,
)
from tests.tiny_llama import tiny_tokenizer
from tests.unit.models.architectures import ARCHITECTURES, WINDOW, tiny_causal_lm

torch.set_num_threads(1)

TOKENS = [5, 17, 40, 99, 12, 7, 30, 44, 200, 3]
assert len(TOKENS) > WINDOW
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


class Wrapper(torch.nn.Module):
    """What a booster puts around a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@every_architecture
@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 2), (2, 4)])
def test_the_logits_of_a_row_depend_on_neither_padding_nor_neighbours(architecture: str, left: int, right: int) -> None:
    model = tiny_causal_lm(architecture)
    with torch.no_grad():
        alone = model(torch.tensor([TOKENS])).logits[0]
    width, generator = left + len(TOKENS) + right, torch.Generator().manual_seed(left)
    mask = torch.zeros(4, width, dtype=torch.bool)
    mask[0, left : left + len(TOKENS)] = True
    mask[1], mask[2, -1], mask[3, :2] = True, True, True
    found = []
    for filler in (0, 250):
        ids = torch.randint(3, 259, mask.shape, generator=generator).masked_fill(~mask, filler)
        ids[0, left : left + len(TOKENS)] = torch.tensor(TOKENS)
        with torch.no_grad():
            logits = model(**model_inputs(model, ids, mask)).logits
        assert logits.isfinite().all()
        found.append(logits[0, left : left + len(TOKENS)])
        torch.testing.assert_close(found[-1], alone, rtol=1e-4, atol=1e-4)
    assert torch.equal(*found), "what fills the padding, and who stands beside, does not show in one bit"


@every_architecture
def test_attention_over_short_rows_is_as_near_to_exact_and_depends_on_neither_padding_nor_neighbours(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.ones(2, len(TOKENS), dtype=torch.bool)
    mask[0, :3] = False

    def logits(arithmetic: torch.dtype, other: int = 0) -> torch.Tensor:
        ids = torch.tensor([TOKENS, TOKENS]).masked_fill(~mask, other)
        ids[1, 1:] += other
        model = tiny_causal_lm(architecture)
        with torch.no_grad(), autocast(torch.device("cpu"), arithmetic):
            found: torch.Tensor = model(**model_inputs(model, ids, mask)).logits
        return found.float()[0, 3:]

    exact, ours = logits(torch.float32), logits(torch.bfloat16)
    assert torch.equal(ours, logits(torch.bfloat16, other=50))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    assert (ours - exact).norm() < 1.5 * (logits(torch.bfloat16) - exact).norm()


@every_architecture
def test_a_stored_model_answers_to_the_bit_as_before_and_uses_the_fast_attention(
    architecture: str, tmp_path: Path
) -> None:
    model = tiny_causal_lm(architecture)
    model.save_pretrained(tmp_path)
    again = load_causal_lm(tmp_path, "float32")
    with torch.no_grad():
        assert torch.equal(again(torch.tensor([TOKENS])).logits, model(torch.tensor([TOKENS])).logits)
    assert again.config._attn_implementation == ("eager" if architecture == "bloom" else "sdpa")


@every_architecture
def test_without_dropout_training_mode_computes_what_evaluation_does(architecture: str) -> None:
    model = tiny_causal_lm(architecture)
    attach_lora(model, LoRAConfig(r=2, dropout=0.5), seed=0)
    for name, parameter in trainable_parameters(model).items():
        torch.nn.init.constant_(parameter, 0.1 if "lora_B" in name else 0.05)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        expected = model(ids).logits
        assert not torch.equal(model.train()(ids).logits, expected), "dropout did nothing: the test would prove little"
        disable_dropout(model)
        assert all(torch.equal(model(ids).logits, expected) for _ in range(5))
    assert model.training


@every_architecture
@pytest.mark.parametrize("with_adapters", [True, False])
def test_activations_computed_again_give_the_same_gradients(architecture: str, with_adapters: bool) -> None:
    def gradients(checkpointing: bool) -> tuple[dict[str, torch.Tensor], int]:
        model = tiny_causal_lm(architecture)
        if with_adapters:
            attach_lora(model, LoRAConfig(r=2), seed=0)
            for parameter in trainable_parameters(model).values():
                torch.nn.init.constant_(parameter, 0.05)
        disable_dropout(model)
        passes: list[int] = []
        norms = [
            part for name, part in model.named_modules() if name.endswith(("0.input_layernorm", "0.ln_1", "0.fc1"))
        ]
        norms[0].register_forward_hook(lambda *_: passes.append(1))
        if checkpointing:
            checkpoint_gradients(Wrapper(model))
        model.train()
        rows = {
            "sequences": torch.tensor([TOKENS, TOKENS[::-1]]),
            "attention_mask": torch.tensor([[True] * 10, [False] * 3 + [True] * 7]),
        }
        response_logprobs(model, **rows, num_actions=6, temperature=1.0).sum().backward()
        return {name: part.grad for name, part in trainable_parameters(model).items() if part.grad is not None}, len(
            passes
        )

    kept, once = gradients(checkpointing=False)
    again, twice = gradients(checkpointing=True)
    assert (once, twice) == (1, 2)
    assert kept.keys() == again.keys()
    for name, gradient in kept.items():
        assert torch.equal(gradient, again[name]), name
    assert any(gradient.abs().max() > 0 for gradient in kept.values())


@every_architecture
def test_a_score_is_read_at_the_last_token_even_if_that_is_also_the_padding(architecture: str) -> None:
    model = RewardModel.from_causal_lm(tiny_causal_lm(architecture)).eval()
    eos = 2
    alone = model(torch.tensor([[*TOKENS, eos]]), torch.ones(1, 11, dtype=torch.bool))
    ids = torch.tensor([[eos, eos, *TOKENS, eos, eos]])
    mask = torch.tensor([[False, False, *[True] * 11, False]])
    torch.testing.assert_close(model(ids, mask), alone, rtol=1e-4, atol=1e-5)
    cut = model(ids, torch.tensor([[False, False, *[True] * 10, False, False]]))
    assert not torch.allclose(cut, alone, rtol=1e-4, atol=1e-5)


def test_what_is_put_around_a_model_is_seen_through() -> None:
    model = tiny_causal_lm("bloom")
    wrapped = Wrapper(Wrapper(model))
    assert unwrapped(wrapped) is model
    assert not forward_takes(wrapped, "position_ids")
    assert max_positions(wrapped) is None
    rows = {
        "sequences": torch.tensor([TOKENS]),
        "attention_mask": torch.ones(1, 10, dtype=torch.bool),
        "num_actions": 4,
        "temperature": 1.0,
    }
    assert torch.equal(response_logprobs(wrapped, **rows), response_logprobs(model, **rows))


def with_vocabulary(size: int) -> PreTrainedModel:
    model = tiny_causal_lm("llama")
    model.resize_token_embeddings(size)
    return model


def test_models_of_one_vocabulary_and_their_tokenizer_fit_together() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_tokenizer()
    check_same_tokenizer(model, RewardModel.from_causal_lm(model), what="actor and reward model")
    check_same_tokenizer(Wrapper(Critic.from_causal_lm(model)), model, what="critic and actor")
    check_same_tokenizer(
        with_vocabulary(320), tokenizer, what="the actor and its tokenizer"
    )  # padded to a round number
    check_same_tokenizer(tokenizer, tiny_tokenizer(), what="the two tokenizers")


def test_another_vocabulary_is_refused_in_one_sentence() -> None:
    model, tokenizer = tiny_causal_lm("llama"), tiny_tokenizer()
    with pytest.raises(ModelError, match="reward model and the actor have different vocabularies: 320 and 259 tokens"):
        check_same_tokenizer(
            RewardModel.from_causal_lm(with_vocabulary(320)), model, what="the reward model and the actor"
        )
    with pytest.raises(ModelError, match=r"ids up to 258, but the model has embeddings for 200 tokens"):
        check_same_tokenizer(with_vocabulary(200), tokenizer, what="the actor and its tokenizer")
    other = tiny_tokenizer()
    other.add_tokens(["<more>"])
    with pytest.raises(ModelError, match=r"they differ in 1 token, such as '<more>' \(absent and 259\)"):
        check_same_tokenizer(tokenizer, other, what="the actor's and the reward model's")
