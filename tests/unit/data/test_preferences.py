"""Pairs from a model's own samples: right before wrong, well formed before ill formed."""

from __future__ import annotations

import itertools

from rlhf_core.data import PreferencePair, VerifiedSample, pairs_from_jsonl, pairs_from_samples, pairs_to_jsonl

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


def test_pairs_pass_through_json_lines() -> None:
    pairs = [PreferencePair("\n\nHuman: é\n\nAssistant:", "\u2028", '"'), PreferencePair("a", "b", "")]
    assert pairs_from_jsonl(pairs_to_jsonl(pairs)) == pairs
