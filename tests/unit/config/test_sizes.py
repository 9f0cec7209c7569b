from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.config.ppo import BATCHES
from rlhf_core.config.sizes import (
    KEYS,
    LEAST,
    Settled,
    Sizes,
    Supply,
    settle,
    shortage,
    split_key,
    told_changes,
)

USUAL = {
    **{
        split_key(split): size for split, size in {"sft": 384, "preferences": 96, "ppo": 256, "evaluation": 100}.items()
    },
    **dict(zip(BATCHES, (64, 32, 32, 32), strict=True)),
}
ALL = ("evaluation", "preferences", "sft", "ppo")


def sizes(*fixed: str, supplied: dict[str, int] | None = None, **relations: Any) -> Sizes:
    return Sizes({**USUAL, **(supplied or {})}, (frozenset(fixed),), **relations)


def settled(asked: Sizes, *supplies: Supply, **how: Any) -> Settled:
    found = settle(asked, supplies, **how)
    assert found is not None
    return found


def batches(found: Settled) -> tuple[int, ...]:
    return tuple(found.values[key] for key in BATCHES)


def splits(found: Settled) -> dict[str, int]:
    return {split: found.values[split_key(split)] for split in LEAST}


def test_sizes_that_hold_stay_as_they_are() -> None:
    assert settled(sizes()).values == USUAL
    assert settled(sizes(), Supply("rows", 836, ALL)).values == USUAL  # 384 + 96 + 256 + 100


def test_splits_share_fewer_rows_in_proportion() -> None:
    found = settled(sizes(), Supply("rows", 418, ALL))  # half of them
    # nobody gets less than a stage can use, and what is above that is shared: 413 of 831 rows, and the 5 least
    assert splits(found) == {"sft": 191, "preferences": 48, "ppo": 128, "evaluation": 51}
    assert sum(splits(found).values()) == 418


def test_the_reward_models_pairs_have_a_share_of_rows_that_are_too_few() -> None:
    served = ("evaluation", "sft", "ppo")
    whole = settled(sizes(pairs=260), Supply("pairs", 1000, served, feeds_pairs=True))  # 740 and 260
    assert splits(whole)["sft"] == 384
    half = splits(settled(sizes(pairs=260), Supply("pairs", 500, served, feeds_pairs=True)))
    # 494 of 994 beyond the least: 1 + 383 * 0.497, 1 + 255 * 0.497, 2 + 98 * 0.497; the pairs' 2 + 258 * 0.497 are left
    assert half == {"sft": 191, "preferences": 96, "ppo": 128, "evaluation": 51}
    assert 500 - 191 - 128 - 51 == 130


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"ppo.prompts_per_episode": 48}, (48, 24, 24, 24)),
        ({"ppo.prompts_per_episode": 7}, (7, 7, 7, 7)),
        ({"ppo.train_batch_size": 16}, (64, 32, 16, 16)),
        ({"ppo.micro_batch_size": 5}, (60, 30, 30, 5)),  # 60 prompts: 12 batches of 5, six or three or two at once
        ({"ppo.chunk_size": 7}, (56, 7, 28, 28)),
        ({"ppo.train_batch_size": 48}, (48, 24, 48, 24)),
        ({"ppo.train_batch_size": 128}, (128, 32, 128, 32)),  # an episode is at least one batch
    ],
)
def test_batches_follow_the_one_that_is_set(asked: dict[str, int], expected: tuple[int, ...]) -> None:
    assert batches(settled(sizes(*asked, supplied=asked))) == expected


def test_batches_follow_samples_trainers_and_the_buffer() -> None:
    assert batches(settled(sizes(samples_per_prompt=5, dp=1)))[1] % 5 == 0
    assert batches(settled(sizes(dp=3))) == (60, 30, 20, 20)
    asked = {"ppo.train_batch_size": 4}
    assert batches(settled(sizes(*asked, supplied=asked, buffer_limit=2))) == (64, 8, 4, 4)


def test_an_episode_has_no_more_prompts_than_the_split() -> None:
    assert (
        batches(settled(sizes(), Supply("rows", 100, ALL)))[0] <= splits(settled(sizes(), Supply("r", 100, ALL)))["ppo"]
    )
    asked = {"ppo.prompts_per_episode": 300}
    assert splits(settled(sizes(*asked, supplied=asked)))["ppo"] == 300  # a split that nobody set makes room
    small = settled(sizes(*asked, supplied=asked), Supply("rows", 320, ALL))
    assert splits(small)["ppo"] >= 300
    assert not small.complaints


def test_a_stage_that_does_not_run_gives_way_to_a_size_that_is_set() -> None:
    asked = {split_key("sft"): 300}
    rows = Supply("rows", 300, ALL)
    assert splits(settled(sizes(*asked, supplied=asked), rows, reads=("sft",))) == {
        "sft": 300, "preferences": 0, "ppo": 0, "evaluation": 0,
    }  # fmt: skip
    whole = settled(sizes(*asked, supplied=asked), rows)
    assert whole.given_up == {split_key("sft")}
    assert "rows has 300 different prompts that can be used, but data.splits need" in whole.complaints[0]
    again = {**asked, **whole.instead}
    assert not settled(sizes(*again, supplied=again), rows).complaints


def test_all_that_excludes_each_other_is_told_at_once_with_the_fewest_changes_that_work() -> None:
    asked = {split_key("sft"): 400, "ppo.train_batch_size": 48, "ppo.prompts_per_episode": 64}
    rows = Supply("data.problems (mine.jsonl)", 300, ALL)
    found = settled(sizes(*asked, supplied=asked), rows)
    assert len(found.given_up) == 2
    assert any("mine.jsonl" in each for each in found.complaints)
    assert any("ppo.train_batch_size is 48, but an episode has 64 samples" in each for each in found.complaints)
    again = {**asked, **found.instead}
    assert settled(sizes(*again, supplied=again), rows).complaints == ()


def test_the_next_set_of_fixed_sizes_is_tried_before_anything_is_given_up() -> None:
    asked = Sizes({**USUAL, "ppo.prompts_per_episode": 48}, (frozenset(BATCHES), frozenset(BATCHES[:1])))
    assert batches(settled(asked)) == (48, 24, 24, 24)
    assert not settled(asked).complaints


def test_too_few_rows_for_any_size_have_no_answer() -> None:
    assert settle(sizes(), [Supply("rows", 4, ALL)]) is None  # one each, and two held out
    assert settle(sizes(), [Supply("rows", 5, ALL)]) is not None


def test_changes_are_told_by_key() -> None:
    found = settled(sizes(), Supply("rows", 418, ALL))
    told = told_changes(USUAL, found.values, (split_key("sft"), BATCHES[0]))
    assert told == "sizes that nobody set follow the data and each other: data.splits.sft 191 (not 384)"
    assert told_changes(USUAL, USUAL) is None


size = st.integers(1, 40)


@settings(max_examples=100, deadline=None)
@given(
    wanted=st.fixed_dictionaries(dict.fromkeys(KEYS, size)),
    fixed=st.sets(st.sampled_from(KEYS)),
    rows=st.integers(0, 120),
    each=st.integers(1, 4),
    trainers=st.integers(1, 3),
    room=st.sampled_from([0, 0, 1, 3]),
    reads=st.sets(st.sampled_from(sorted(LEAST)), min_size=1),
    then=st.sets(st.sampled_from(KEYS)),
    pairs=st.sampled_from([None, 0, 30]),
)
def test_whatever_is_asked_what_comes_of_it_holds_and_what_is_offered_works(
    wanted: dict[str, int],
    fixed: set[str],
    rows: int,
    each: int,
    trainers: int,
    room: int,
    reads: set[str],
    then: set[str],
    pairs: int | None,
) -> None:
    wanted[split_key("evaluation")] += 1  # one alone is refused as a value
    levels = (frozenset(fixed | then), frozenset(fixed))
    asked = Sizes(wanted, levels, each, trainers, room, pairs or None)
    supply = Supply("rows", rows, ALL, feeds_pairs=pairs is not None)
    found = settle(asked, [supply], reads=sorted(reads))
    if found is None:
        assert shortage(asked, [supply], sorted(reads))
        return
    unread = {split_key(split) for split in LEAST} - {split_key(split) for split in reads}
    assert all(found.values[key] == wanted[key] for key in found.fixed - unread)
    assert found.fixed >= frozenset(fixed) - found.given_up - (frozenset() if "ppo" in reads else set(BATCHES))
    assert bool(found.complaints) == bool(found.given_up)
    for told in found.complaints:  # what is said to be too little is
        if numbers := re.match(r"rows has (\d+) .* need (\d+) ", told):
            assert int(numbers[1]) < int(numbers[2])
    parts = splits(found)
    assert sum(parts.values()) <= rows
    assert all(parts[split] >= LEAST[split] for split in reads)
    holds(found, each, trainers, room)
    again = Sizes({**wanted, **found.instead}, asked.fixed, each, trainers, room, pairs or None)
    better = settle(again, [supply], reads=sorted(reads))
    assert better is not None
    assert not better.complaints


def holds(found: Settled, each: int, trainers: int, room: int) -> None:
    """See that the configuration itself takes the sizes."""
    ppo = {key.removeprefix("ppo."): found.values[key] for key in BATCHES}
    PipelineConfig.model_validate(
        {
            "name": "x",
            "data": {"task": "chain_sum", "splits": splits(found)},
            "ppo": {**ppo, "samples_per_prompt": each, "num_trainers": trainers, "buffer_limit": room},
        }
    )


def test_a_split_without_rows_of_its_own_may_be_nothing() -> None:
    asked = {split_key("preferences"): 0}
    served = ("evaluation", "sft", "ppo")  # pairs are given, so that none are sampled
    assert not settled(sizes(*asked, supplied=asked), Supply("pairs", 900, served, feeds_pairs=True)).complaints
