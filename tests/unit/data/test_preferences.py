"""Pairs from a model's own samples: right before wrong, well formed before ill formed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import RewardModelConfig, TemplateConfig
from rlhf_core.data import (
    PreferencePair,
    PromptTemplate,
    VerifiedSample,
    pairs_from_jsonl,
    pairs_from_samples,
    pairs_to_jsonl,
)
from rlhf_core.data.encoding import encode_pairs
from rlhf_core.data.preferences import refuse_shared_prompts, split_pairs
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer
from tests.unit.data.reading_files import rows, write

RIGHT, WRONG, ILL = (1.0, True), (0.0, True), (0.0, False)


def samples(prompt: str, *verdicts: tuple[float, bool]) -> list[VerifiedSample]:
    return [VerifiedSample(prompt, f"{prompt} response {i}", *verdict) for i, verdict in enumerate(verdicts)]


def test_the_better_sample_is_always_the_chosen_one() -> None:
    made = samples("a", RIGHT, WRONG, ILL, RIGHT)
    rank = {sample.response: sample.rank for sample in made}
    pairs = pairs_from_samples(made, most=100, seed=0)
    # right-wrong 2, right-ill 2, wrong-ill 1
    assert len(pairs) == len(set(pairs)) == 5
    assert all(rank[pair.chosen] > rank[pair.rejected] for pair in pairs)


def test_samples_of_different_prompts_are_never_paired() -> None:
    pairs = pairs_from_samples(samples("a", RIGHT) + samples("b", WRONG), most=100, seed=0)
    assert pairs == []


def test_equally_good_samples_make_no_pair() -> None:
    assert pairs_from_samples(samples("a", RIGHT, RIGHT) + samples("b", ILL, ILL), most=100, seed=0) == []


def test_a_limit_takes_one_pair_of_every_prompt_before_a_second_of_any() -> None:
    made = [sample for prompt in "abcd" for sample in samples(prompt, RIGHT, RIGHT, WRONG, WRONG)]
    pairs = pairs_from_samples(made, most=6, seed=0)
    counts = sorted(sum(pair.prompt == prompt for pair in pairs) for prompt in "abcd")
    assert counts == [1, 1, 2, 2]


def test_a_prompts_second_pair_uses_fresh_responses() -> None:
    first, second, *_ = pairs_from_samples(samples("a", RIGHT, RIGHT, WRONG, WRONG), most=4, seed=0)
    assert {first.chosen, first.rejected}.isdisjoint({second.chosen, second.rejected})


def test_the_pairs_depend_on_samples_and_seed_but_not_on_the_order_of_samples() -> None:
    made = [sample for prompt in "abc" for sample in samples(prompt, RIGHT, WRONG, ILL)]
    reference = pairs_from_samples(made, most=5, seed=0)
    assert pairs_from_samples(made[::-1], most=5, seed=0) == reference
    assert any(pairs_from_samples(made, most=5, seed=seed) != reference for seed in range(1, 5))


def test_the_same_text_is_never_preferred_to_itself() -> None:
    cut_off, ended = VerifiedSample("a", "61", 0.0, False), VerifiedSample("a", "61", 0.0, True)
    for order in itertools.permutations([cut_off, ended]):
        assert pairs_from_samples(order, most=5, seed=0) == []


def test_a_pair_of_samples_knows_whether_both_are_well_formed() -> None:
    pairs = pairs_from_samples(samples("a", RIGHT, WRONG) + samples("b", RIGHT, ILL), most=9, seed=0)
    assert {pair.prompt: pair.both_well_formed for pair in pairs} == {"a": True, "b": False}


def test_pairs_pass_through_json_lines() -> None:
    pairs = [PreferencePair("\n\nHuman: é\n\nAssistant:", "\u2028", '"'), PreferencePair("a", "b", "", 1.5, True)]
    assert pairs_from_jsonl(pairs_to_jsonl(pairs)) == pairs


def test_pairs_that_were_stored_without_margins_have_none() -> None:
    assert pairs_from_jsonl(b'{"prompt": "a", "chosen": "b", "rejected": "c"}') == [PreferencePair("a", "b", "c", 0.0)]


def test_a_preference_file_may_say_how_sure_the_judge_was(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant:"
    told: list[dict[str, Any]] = [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No", "margin": 2},
        {"chosen": start + " A", "rejected": start + " B", "margin": 0.5},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "So?", "margin": None},
    ]
    file = write(tmp_path / "pairs.jsonl", *told)
    assert [pair.margin for pair in rows(file, "preferences")] == [2.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("margin", "message"),
    [
        ("much", "must be a number, but is a string"),
        (-1, "finite in float64 and at least 0, but is -1"),
        (True, "a boolean"),
    ],
)
def test_a_margin_that_is_no_margin_is_named_with_its_row(tmp_path: Path, margin: object, message: str) -> None:
    file = write(tmp_path / "pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin})
    with pytest.raises(DataError, match=rf"row 1 of .*pairs.jsonl: field 'margin' .*{message}"):
        rows(file, "preferences")


def some_pairs(prompts: int) -> list[PreferencePair]:
    return [PreferencePair(f"p{row}", f"good {turn}", "bad") for row in range(prompts) for turn in range(2)]


def test_no_prompt_is_on_both_sides_of_the_split_and_the_order_of_pairs_does_not_matter() -> None:
    config = RewardModelConfig(pairs=60)
    split = split_pairs(some_pairs(40), config, seed=3)
    assert len(split.training) + len(split.heldout) == 60
    assert {pair.prompt for pair in split.training}.isdisjoint(pair.prompt for pair in split.heldout)
    assert split_pairs(some_pairs(40)[::-1], config, seed=3) == split
    refuse_shared_prompts(split.training, split.heldout)


def test_measuring_on_a_prompt_that_was_learnt_is_refused() -> None:
    ours = some_pairs(4)
    with pytest.raises(DataError, match=r"the training pairs and the held-out ones share 1 prompt, first 'p1'"):
        refuse_shared_prompts(ours[:3], ours[3:])


def test_too_few_prompts_for_a_split_are_refused() -> None:
    with pytest.raises(DataError, match="2 preference pairs of 1 prompt cannot be split"):
        split_pairs(some_pairs(1), RewardModelConfig(), seed=0)


def test_encoded_pairs_share_their_prompt_end_with_a_stop_token_and_keep_their_margin() -> None:
    tokenizer = tiny_tokenizer()
    template = PromptTemplate(tokenizer, TemplateConfig(prompt="Q {prompt} A"))
    [pair] = encode_pairs([PreferencePair("x", "yes", "no!!", 0.25)], template)
    assert tokenizer.decode(pair.chosen) == "Q x Ayes<|im_end|>"
    assert tokenizer.decode(pair.rejected) == "Q x Ano!!<|im_end|>"
    assert (pair.margin, pair.longest) == (0.25, 10)
