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


def rows(evaluation: int, preferences: int, sft: int, ppo: int, name: str = "rows", **more: int) -> Supply:
    parts = {"evaluation": evaluation, "preferences": preferences, "sft": sft, "ppo": ppo, **more}
    return Supply(name, sum(parts.values()), parts, 0.1)


def test_sizes_that_hold_stay_as_they_are() -> None:
    assert settled(sizes()).values == USUAL
    assert settled(sizes(), rows(100, 96, 384, 256)).values == USUAL
    assert settled(sizes(), rows(1000, 1000, 1000, 1000)).values == USUAL, "a size is the most that a split takes"


@pytest.mark.parametrize("fixed", [(), (split_key("sft"), split_key("evaluation"))])
def test_a_split_has_what_may_serve_it_however_much_is_asked_for(fixed: tuple[str, ...]) -> None:
    found = settled(sizes(*fixed), rows(29, 1000, 150, 1000))
    assert splits(found) == {"sft": 150, "preferences": 96, "ppo": 256, "evaluation": 29}
    assert not found.complaints


def test_a_reward_model_needs_prompts_of_its_share_of_given_pairs() -> None:
    def shared(pairs: int) -> Supply:
        return Supply("pairs", 800 + pairs, {"evaluation": 100, "sft": 400, "ppo": 300, "pairs": pairs})

    assert splits(settled(sizes(), shared(2)))["sft"] == 384
    assert settle(sizes(), [shared(1)]) is None
    assert "pairs may have 1 (needs 2); give more, or raise reward_model.pairs against" in shortage(
        sizes(), [shared(1)], ALL
    )
    assert splits(settled(sizes(), shared(1), reads=("sft", "ppo")))["sft"] == 384


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
    few = settled(sizes(), rows(12, 11, 46, 31))
    assert batches(few)[0] <= splits(few)["ppo"] == 31
    asked = {"ppo.prompts_per_episode": 300}
    assert splits(settled(sizes(*asked, supplied=asked)))["ppo"] == 300  # a split that nobody set makes room
    small = settled(sizes(*asked, supplied=asked), rows(2, 1, 1, 310))
    assert splits(small)["ppo"] == 300
    assert not small.complaints


def test_a_stage_that_does_not_run_gives_way_to_a_size_that_is_set() -> None:
    asked = {split_key("sft"): 300}
    every = rows(0, 0, 300, 0)
    assert splits(settled(sizes(*asked, supplied=asked), every, reads=("sft",))) == {
        "sft": 300, "preferences": 0, "ppo": 0, "evaluation": 0,
    }  # fmt: skip
    assert settle(sizes(*asked, supplied=asked), [every]) is None
    assert shortage(sizes(*asked, supplied=asked), [every], ALL) == (
        "rows has 300 different prompts that can be used, of which by their hashes evaluation may have 0 (needs 2), "
        "preferences may have 0 (needs 1), ppo may have 0 (needs 1); give more, or raise data.heldout_fraction (0.1), "
        "or raise data.splits.preferences and data.splits.ppo against the others, in proportion to which they share"
    )


def test_all_that_excludes_each_other_is_told_at_once_with_the_fewest_changes_that_work() -> None:
    asked = {split_key("evaluation"): 0, "ppo.train_batch_size": 48, "ppo.prompts_per_episode": 64}
    mine = rows(30, 30, 190, 50, name="data.problems (mine.jsonl)")
    found = settled(sizes(*asked, supplied=asked), mine)
    assert found.given_up == {split_key("evaluation"), "ppo.prompts_per_episode"}
    assert any("data.splits.evaluation is 0, but" in each for each in found.complaints)
    assert any("mine.jsonl" in each for each in found.complaints)
    assert any("ppo.train_batch_size is 48, but an episode has 64 samples" in each for each in found.complaints)
    again = {**asked, **found.instead}
    assert settled(sizes(*again, supplied=again), mine).complaints == ()


def test_the_next_set_of_fixed_sizes_is_tried_before_anything_is_given_up() -> None:
    asked = Sizes({**USUAL, "ppo.prompts_per_episode": 48}, (frozenset(BATCHES), frozenset(BATCHES[:1])))
    assert batches(settled(asked)) == (48, 24, 24, 24)
    assert not settled(asked).complaints


def test_too_few_rows_for_any_size_have_no_answer() -> None:
    assert settle(sizes(), [rows(1, 1, 1, 1)]) is None  # one each, and two held out
    assert shortage(sizes(), [rows(1, 1, 1, 1)], ALL).endswith("evaluation may have 1 (needs 2); give more")
    assert settle(sizes(), [rows(2, 1, 1, 1)]) is not None


def test_changes_are_told_by_key() -> None:
    found = settled(sizes(), rows(1000, 1000, 191, 1000))
    told = told_changes(USUAL, found.values, (split_key("sft"), BATCHES[0]))
    assert told is not None
    assert told.startswith("sizes follow the data and each other: data.splits.sft 191 (not 384); a prompt's hash says")
    assert told_changes({**USUAL, BATCHES[0]: 3}, USUAL, BATCHES[:1]) == (
        "sizes follow the data and each other: ppo.prompts_per_episode 64 (not 3)"
    )
    assert told_changes(USUAL, USUAL) is None


size = st.integers(1, 40)


@settings(max_examples=100, deadline=None)
@given(
    wanted=st.fixed_dictionaries(dict.fromkeys(KEYS, size)),
    fixed=st.sets(st.sampled_from(KEYS)),
    there=st.fixed_dictionaries(dict.fromkeys(ALL, st.integers(0, 60))),
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
    there: dict[str, int],
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
    supply = rows(**there, **({} if pairs is None else {"pairs": pairs}))
    found = settle(asked, [supply], reads=sorted(reads))
    if found is None:
        assert shortage(asked, [supply], sorted(reads))
        return
    unread = {split_key(split) for split in LEAST} - {split_key(split) for split in reads}
    limits = {split_key(split): count for split, count in there.items()}
    kept = {key: min(wanted[key], limits.get(key, wanted[key])) for key in found.fixed - unread}
    assert all(found.values[key] == value for key, value in kept.items())
    assert found.fixed >= frozenset(fixed) - found.given_up - (frozenset() if "ppo" in reads else set(BATCHES))
    assert bool(found.complaints) == bool(found.given_up)
    for told in found.complaints:  # what is said to be too little is
        for has, needs in re.findall(r"may have (\d+) \(needs (\d+)\)", told):
            assert int(has) < int(needs)
    parts = splits(found)
    assert all(parts[split] <= there[split] for split in parts)
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
    # pairs are given, so that none are sampled
    served = Supply("pairs", 900, {"evaluation": 200, "sft": 200, "ppo": 200, "pairs": 300})
    assert not settled(sizes(*asked, supplied=asked), served).complaints
