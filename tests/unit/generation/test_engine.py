"""All engines give what transformers' own decoding gives, whatever the padding and the company in the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2LMHeadModel

from rlhf_core.generation import Generation, GenerationSettings, engine, make_engine, sample_uniforms
from rlhf_core.generation.decoder import Decoder
from rlhf_core.generation.engine import reserve_cache
from rlhf_core.models.trunk import forward_takes
from tests.unit.generation.wide import IN_VLLM, needs_vllm, wide_causal_lm
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm

PAD, STOPS = 0, (2,)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [200, 100, 50, 25, 12, 6, 3], [77]]
STEPS = 12
SETTINGS = GenerationSettings(max_new_tokens=STEPS, stop_ids=STOPS, pad_id=PAD)
ENGINES = ("native", "hf", pytest.param("vllm", marks=needs_vllm))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers(samples: int = 1) -> torch.Tensor:
    """Uniform numbers for each prompt, sampled so many times."""
    keys = [key for key in "abcde" for _ in range(samples)]
    return sample_uniforms(seed=0, episode=0, keys=keys, samples=list(range(samples)) * 5, max_new_tokens=STEPS)


def decode(model: Any, prompts=PROMPTS, *, engine: str = "native", uniforms=None, **changes: Any) -> Generation:
    return make_engine(engine, model).generate(prompts, replace(SETTINGS, **changes), uniforms=uniforms)


def responses(generation: Generation) -> list[list[int]]:
    width = generation.action_mask.shape[1]
    return [row[-width:][mask].tolist() for row, mask in zip(generation.sequences, generation.action_mask, strict=True)]


def frequent_tokens(model: Any, count: int, uniforms=None, **changes: Any) -> tuple[int, ...]:
    """Tokens that the responses hold in their middle, so that rows end at different steps."""
    rows = responses(decode(model, uniforms=uniforms, stop_ids=(), **changes))
    return tuple(row[2 + 2 * i] for i, row in enumerate(rows[:count]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers_generate(architecture: str) -> None:
    model = tiny_causal_lm(architecture)
    stops = frequent_tokens(model, 3)
    ours = responses(decode(model, stop_ids=stops))
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_are_those_of_a_full_forward_pass(architecture: str) -> None:
    model, temperature, uniforms = tiny_causal_lm(architecture), 1.3, numbers()
    generation = decode(model, stop_ids=frequent_tokens(model, 3), uniforms=uniforms, temperature=temperature)
    for row, (prompt, response) in enumerate(zip(PROMPTS, responses(generation), strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        table = torch.log_softmax(logits / temperature, -1)
        expected = [table[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]
        torch.testing.assert_close(
            generation.log_probs[row, : len(response)], torch.tensor(expected), rtol=1e-4, atol=1e-4
        )
        assert not generation.log_probs[row, len(response) :].any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampled_tokens_do_not_depend_on_the_company_in_the_batch(architecture: str) -> None:
    model, uniforms = tiny_causal_lm(architecture), numbers()
    stops = frequent_tokens(model, 3, uniforms)
    together = responses(decode(model, stop_ids=stops, uniforms=uniforms))
    alone = [
        responses(decode(model, [prompt], stop_ids=stops, uniforms=uniforms[row : row + 1]))[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert len({len(row) for row in together}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_batch_gives_the_same_bits(dtype: torch.dtype) -> None:
    model = tiny_causal_lm("llama").to(dtype)
    first, second = (decode(model, uniforms=numbers()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("engine", "architecture"),
    [
        *(("hf", each) for each in ARCHITECTURES),
        *(pytest.param("vllm", each, marks=needs_vllm) for each in IN_VLLM),
    ],
)
@pytest.mark.parametrize("sampled", [True, False])
def test_the_others_give_the_same_responses(engine: str, architecture: str, sampled: bool) -> None:
    make = wide_causal_lm if engine == "vllm" else tiny_causal_lm
    model, uniforms = make(architecture), numbers() if sampled else None
    how: dict[str, Any] = {"temperature": 0.9, "top_k": 100, "top_p": 0.97}
    stops = frequent_tokens(model, 3, uniforms, **how)
    first, second = (
        decode(model, engine=each, uniforms=uniforms, stop_ids=stops, **how) for each in ("native", engine)
    )
    assert_same(first, second)
    assert first.ended.any()


def assert_same(first: Generation, second: Generation) -> None:
    for name in ("sequences", "attention_mask", "action_mask", "ended"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name
    torch.testing.assert_close(first.log_probs, second.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "bloom", "mistral"])
def test_the_samples_of_a_prompt_share_one_pass_over_it(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, uniforms = tiny_causal_lm(architecture), numbers(samples=3)
    repeated = [prompt for prompt in PROMPTS for _ in range(3)]
    rows = rows_of_each_pass(monkeypatch)
    together = responses(decode(model, repeated, uniforms=uniforms))
    assert rows[:2] == [5, 15]
    alone = [
        responses(decode(model, [prompt], uniforms=uniforms[row : row + 1]))[0] for row, prompt in enumerate(repeated)
    ]
    assert together == alone
    assert len({tuple(row) for row in together}) > 10, "samples of a prompt differ"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cache_of_reserved_memory_gives_the_bits_of_a_growing_one(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, uniforms = tiny_causal_lm(architecture), numbers(samples=2)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    stops = frequent_tokens(model, 3, numbers())
    reserved = decode(model, prompts, uniforms=uniforms, stop_ids=stops)
    monkeypatch.setattr(engine, "reserve_cache", lambda config, _length: DynamicCache(config=config))
    growing = decode(model, prompts, uniforms=uniforms, stop_ids=stops)
    assert all(torch.equal(a, b) for a, b in zip(reserved, growing, strict=True))


def test_the_memory_of_the_cache_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches = tiny_causal_lm("qwen3"), []
    monkeypatch.setattr(
        engine, "reserve_cache", lambda config, length: caches.append(reserve_cache(config, length)) or caches[-1]
    )
    places: list[int] = []
    model.register_forward_hook(lambda *_: places.append(caches[-1].layers[1].keys.data_ptr()))
    decode(model, stop_ids=())
    assert len(places) == STEPS
    assert len(set(places)) == 1
    assert caches[-1].layers[1].keys.untyped_storage().nbytes() == 5 * 2 * (7 + STEPS) * 16 * 4


class WholeLogits(GPT2LMHeadModel):
    """An architecture that computes all logits, asked or not."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )


def test_an_architecture_that_computes_all_logits_gives_the_same_tokens() -> None:
    model = tiny_causal_lm("gpt2")
    expected = responses(decode(model, uniforms=numbers()))
    model.__class__ = WholeLogits
    assert not forward_takes(model, "logits_to_keep")
    assert responses(decode(model, uniforms=numbers())) == expected


def test_the_head_gets_the_last_positions_as_rows_side_by_side() -> None:
    model = tiny_causal_lm("llama")
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _head, given: seen.append(given[0]))
    decode(model, uniforms=numbers())
    assert {hidden.shape[1] for hidden in seen} == {1}
    assert all(hidden.is_contiguous() for hidden in seen)


def test_masks_padding_and_endings_fit_together() -> None:
    model = tiny_causal_lm("llama")
    stops = frequent_tokens(model, 3)
    generation = decode(model, stop_ids=stops)
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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_token_that_is_also_the_padding_belongs_to_the_response(engine: str) -> None:
    model = wide_causal_lm("llama")
    stop = frequent_tokens(model, 1)[0]
    apart, one = (decode(model, engine=engine, stop_ids=(stop,), pad_id=pad) for pad in (PAD, stop))
    assert torch.equal(one.action_mask, apart.action_mask)
    assert torch.equal(one.attention_mask, apart.attention_mask)
    assert responses(one) == responses(apart)
    assert responses(one)[0][-1] == stop


@pytest.mark.parametrize("engine", ENGINES)
def test_prompt_and_response_together_stay_within_max_length(engine: str) -> None:
    model = wide_causal_lm("gpt2")
    free = responses(decode(model, stop_ids=()))
    cut = decode(model, engine=engine, stop_ids=(), max_length=10)
    assert responses(cut) == [row[: 10 - len(prompt)] for row, prompt in zip(free, PROMPTS, strict=True)]
    assert not cut.ended.any()
    assert cut.sequences.shape[1] == 7 + 9  # the longest prompt, and the longest response


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_at_the_models_last_position_waits_for_longer_responses(engine: str) -> None:
    model = wide_causal_lm("gpt2")  # 128 positions
    prompts = [[7] * 120, [8] * 100, [9] * 100]  # one of three ends early, which is too few to leave
    generation = decode(model, prompts, engine=engine, stop_ids=(), max_new_tokens=100, max_length=128)
    assert generation.action_mask.sum(1).tolist() == [8, 28, 28]
    assert responses(generation)[1:] == responses(decode(model, prompts[1:], stop_ids=(), max_new_tokens=28))


def test_the_settings_that_come_with_a_model_are_not_looked_at() -> None:
    model = tiny_causal_lm("llama")
    expected = responses(decode(model))
    own = model.generation_config
    own.update(repetition_penalty=5.0, min_new_tokens=5, suppress_tokens=[row[0] for row in expected])
    assert responses(decode(model, engine="hf")) == expected
    assert model.generation_config is own


def test_the_batch_stops_when_its_last_row_has_ended() -> None:
    model = tiny_causal_lm("llama")
    stops = tuple(row[1] for row in responses(decode(model, stop_ids=())))
    generation = decode(model, max_new_tokens=100, stop_ids=stops)
    assert generation.action_mask.shape[1] <= 2
    assert generation.ended.all()


def rows_of_each_pass(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that is filled with the rows of each pass to come, the model's own or the decoder's."""
    rows: list[int] = []
    for place, name in ((engine, "_last_logits"), (Decoder, "next_logits")):
        run = getattr(place, name)

        def noted(owner: Any, tokens: torch.Tensor, *others: Any, run: Any = run) -> Any:
            rows.append(len(tokens))
            return run(owner, tokens, *others)

        monkeypatch.setattr(place, name, noted)
    return rows


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_finished_rows_leave_the_batch_once_they_are_half_of_it(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_causal_lm(architecture)
    stops = frequent_tokens(model, 3)
    rows = rows_of_each_pass(monkeypatch)
    lengths = decode(model, stop_ids=stops).action_mask.sum(-1).tolist()
    in_batch, expected = 5, []
    for step in range(max(lengths)):
        expected.append(in_batch)
        unfinished = sum(length > step + 1 for length in lengths)
        in_batch = unfinished if 2 * unfinished <= in_batch else in_batch
    assert rows == expected
    assert min(rows) < 5, "no row ended early: the test would prove little"


def test_the_head_sees_the_last_position_only() -> None:
    model = tiny_causal_lm("llama")
    seen: set[int] = set()
    model.lm_head.register_forward_hook(lambda _, inputs, __: seen.add(inputs[0].shape[1]))
    decode(model)
    assert seen == {1}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_returned_can_be_learnt_from(engine: str) -> None:
    model = wide_causal_lm("llama")
    generation = decode(model, engine=engine, max_new_tokens=3)
    logits = model(generation.sequences, attention_mask=generation.attention_mask.long()).logits
    (logits.sum() * generation.log_probs.sum()).backward()
    assert model.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_is_off_while_generating_and_each_part_is_put_back(engine: str) -> None:
    model = wide_causal_lm("gpt2").train()
    model.transformer.h[0].eval()
    assert responses(decode(model, engine=engine)) == responses(decode(wide_causal_lm("gpt2")))
    assert model.training
    assert model.transformer.h[1].training
    assert not model.transformer.h[0].training
