"""Our decoding loop gives what transformers' own gives, whatever the padding and the company in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_core.errors import ConfigError
from rlhf_core.generation import Generation, GenerationSettings, make_engine, sample_uniforms
from tests.tiny_llama import tiny_llama

PAD, STOPS = 0, (2,)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [200, 100, 50, 25, 12, 6, 3], [77]]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=259, n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


def models() -> list[Any]:
    return [
        pytest.param(lambda: tiny_llama(initializer_range=0.3), id="llama"),
        pytest.param(tiny_gpt2, id="gpt2"),
    ]


def decode(model: Any, prompts=PROMPTS, *, length: int = 12, stops=STOPS, uniforms=None, temperature=1.0):
    settings = GenerationSettings(max_new_tokens=length, stop_ids=stops, pad_id=PAD, temperature=temperature)
    return make_engine("native", model).generate(prompts, settings, uniforms=uniforms)


def responses(generation: Generation) -> list[list[int]]:
    width = generation.action_mask.shape[1]
    return [row[-width:][mask].tolist() for row, mask in zip(generation.sequences, generation.action_mask, strict=True)]


def frequent_tokens(model: Any, count: int, uniforms=None) -> tuple[int, ...]:
    """Tokens that the responses hold in their middle, so that rows end at different steps."""
    rows = responses(decode(model, stops=(), uniforms=uniforms))
    return tuple(row[2 + 2 * i] for i, row in enumerate(rows[:count]))


@pytest.mark.parametrize("make", models())
def test_greedy_tokens_are_those_of_transformers_generate(make) -> None:
    model = make()
    stops = frequent_tokens(model, 3)
    ours = responses(decode(model, stops=stops))
    for prompt, response in zip(PROMPTS, ours, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=list(stops),
            pad_token_id=PAD,
        )[0, len(prompt) :].tolist()
        assert response == theirs
    assert len({len(row) for row in ours}) > 1, "no row ended early: the test would prove little"


@pytest.mark.parametrize("make", models())
def test_log_probs_are_those_of_a_full_forward_pass(make) -> None:
    model, temperature = make(), 1.3
    uniforms = sample_uniforms(seed=0, episode=0, keys=list("abcde"), samples=[0] * 5, max_new_tokens=12)
    generation = decode(model, stops=frequent_tokens(model, 3), uniforms=uniforms, temperature=temperature)
    for row, (prompt, response) in enumerate(zip(PROMPTS, responses(generation), strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        table = torch.log_softmax(logits / temperature, -1)
        expected = [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]
        torch.testing.assert_close(
            generation.log_probs[row, : len(response)], torch.tensor(expected), rtol=1e-4, atol=1e-4
        )
        assert not generation.log_probs[row, len(response) :].any()


@pytest.mark.parametrize("make", models())
def test_sampled_tokens_do_not_depend_on_the_company_in_the_batch(make) -> None:
    model = make()
    uniforms = sample_uniforms(seed=0, episode=0, keys=list("abcde"), samples=[0] * 5, max_new_tokens=12)
    stops = frequent_tokens(model, 3, uniforms)
    together = responses(decode(model, stops=stops, uniforms=uniforms))
    alone = [
        responses(decode(model, [prompt], stops=stops, uniforms=uniforms[row : row + 1]))[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert len({len(row) for row in together}) > 1


def test_the_same_batch_gives_the_same_bits() -> None:
    model = tiny_llama(initializer_range=0.3)
    uniforms = sample_uniforms(seed=0, episode=0, keys=list("abcde"), samples=[0] * 5, max_new_tokens=12)
    first, second = (decode(model, uniforms=uniforms) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_masks_padding_and_endings_fit_together() -> None:
    model = tiny_llama(initializer_range=0.3)
    stops = frequent_tokens(model, 3)
    generation = decode(model, stops=stops)
    width = max(map(len, PROMPTS))
    length = generation.action_mask.shape[1]
    assert generation.sequences.shape == (5, width + length)
    assert torch.equal(generation.attention_mask[:, width:], generation.action_mask)
    assert (generation.sequences[~generation.attention_mask] == PAD).all()
    for row, (prompt, response) in enumerate(zip(PROMPTS, responses(generation), strict=True)):
        assert generation.sequences[row, width - len(prompt) : width].tolist() == prompt
        assert generation.action_mask[row].tolist() == [True] * len(response) + [False] * (length - len(response))
        assert generation.ended[row] == (response[-1] in stops)
        assert not set(response[:-1]) & set(stops)


def test_the_batch_stops_when_its_last_row_has_ended() -> None:
    model = tiny_llama(initializer_range=0.3)
    stops = tuple(row[1] for row in responses(decode(model, stops=())))
    generation = decode(model, length=100, stops=stops)
    assert generation.action_mask.shape[1] <= 2
    assert generation.ended.all()


def test_finished_rows_leave_the_batch_once_they_are_half_of_it() -> None:
    model = tiny_llama(initializer_range=0.3)
    stops = frequent_tokens(model, 3)
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda _module, _args, inputs: rows.append(len(inputs["input_ids"])), with_kwargs=True
    )
    lengths = decode(model, stops=stops).action_mask.sum(-1).tolist()
    in_batch, expected = 5, []
    for step in range(max(lengths)):
        expected.append(in_batch)
        unfinished = sum(length > step + 1 for length in lengths)
        in_batch = unfinished if 2 * unfinished <= in_batch else in_batch
    assert rows == expected
    assert min(rows) < 5, "no row ended early: the test would prove little"


def test_what_is_returned_can_be_learnt_from() -> None:
    model = tiny_llama()
    generation = decode(model, length=3)
    logits = model(generation.sequences, attention_mask=generation.attention_mask.long()).logits
    (logits.sum() * generation.log_probs.sum()).backward()
    assert model.get_input_embeddings().weight.grad is not None


def test_dropout_is_off_while_generating_and_the_mode_is_given_back() -> None:
    model = tiny_gpt2().train()
    assert responses(decode(model)) == responses(decode(tiny_gpt2()))
    assert model.training


def test_more_tokens_than_the_model_has_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"up to 132 tokens.*128 positions"):
        decode(tiny_gpt2(), length=125)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        decode(tiny_llama(), [[5], []])
