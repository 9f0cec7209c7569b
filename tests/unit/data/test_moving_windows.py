"""Nights over sets that grow, roll and shrink: what one night has learnt, no other holds out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config import PipelineConfig
from rlhf_core.data import PreferencePair, Problem
from rlhf_core.data.gym import draw_problems
from rlhf_core.data.preferences import split_pairs
from rlhf_core.data.preparing import Prepared, prepare
from rlhf_core.data.preparing.splits import in_hash_order
from rlhf_core.data.problems import problem_key
from tests.unit.data.read_sets import config, read

LEARNT = ("sft", "preferences", "ppo", "pairs")
SPLITS = {"sft": 30, "preferences": 20, "ppo": 40, "evaluation": 25}
Window = tuple[int, int]
Rows = dict[str, list[Any]]

# a first row and a number of rows, night by night, of a log that was written for years
rolling = st.tuples(st.integers(0, 400), st.integers(1, 60), st.integers(150, 300)).map(
    lambda of: [(of[0] + night * of[1], of[2]) for night in range(6)]
)
growing = st.tuples(st.integers(150, 300), st.integers(1, 80)).map(
    lambda of: [(0, of[0] + night * of[1]) for night in range(6)]
)
shrinking = growing.map(lambda nights: nights[::-1])
any_windows = st.lists(st.tuples(st.integers(0, 600), st.integers(150, 400)), min_size=2, max_size=6)
windows = st.one_of(rolling, growing, shrinking, any_windows)


def seen(rows: Sequence[Any], window: Window, night: int) -> list[Any]:
    """Return a night's rows: in another order each time."""
    first, count = window
    found = rows[first : first + count]
    return found[::-1] if night % 2 else list(found)


def asked(number: int, night: int) -> str:
    """Return a prompt in one of the ways in which a log may have it: all of them are the same prompt."""
    text = f"What is {number} and {number}?"
    return (text, text.upper(), text.replace(" ", "  "))[night % 3]


def problems_of(window: Window, night: int) -> Rows:
    numbers = seen(range(1000), window, night)
    return {"problems": [Problem(asked(number, night), str(2 * number)) for number in numbers]}


def demonstrations_of(window: Window, night: int) -> Rows:
    return {"demonstrations": [Problem(asked(n, night), demonstration="So.") for n in seen(range(1000), window, night)]}


def talk(number: int) -> str:
    """Return a prompt that is a conversation; the second of two continues the first."""
    opening = f"\n\nHuman: Ask {number // 2}\n\nAssistant:"
    return opening if number % 2 == 0 else f"{opening} What?\n\nHuman: Go on\n\nAssistant:"


def preferences_of(window: Window, night: int) -> Rows:
    numbers = seen(range(1000), window, night)
    return {"preferences": [PreferencePair(talk(n), f"Kind {n}.", f"Rude {r}.") for n in numbers for r in range(2)]}


def run(rows: Rows, night: int, **changes: Any) -> tuple[Prepared, PipelineConfig]:
    """Return what a night makes of its sets; each night has a seed of its own."""
    sets = {role: read(found) for role, found in rows.items()}
    named = {role: f"{role}.jsonl" for role in rows}
    given = config({**named, "splits": SPLITS, "heldout_fraction": 0.2, "lint": "off", **changes}, seed=night)
    return prepare(given, sets, meter=None), given


def keys(made: Prepared) -> dict[str, set[str]]:
    found = {split: {problem.key for problem in rows} for split, rows in made.splits.items()}
    return {**found, "pairs": {problem_key(pair.prompt) for pair in made.pairs or ()}}


@pytest.mark.parametrize("rows", [problems_of, demonstrations_of, preferences_of])
@settings(max_examples=40, deadline=None)
@given(nights=windows)
def test_over_all_nights_a_prompt_serves_one_split_alone(
    rows: Callable[[Window, int], Rows], nights: list[Window]
) -> None:
    served: defaultdict[str, set[str]] = defaultdict(set)
    for night, window in enumerate(nights):
        made, _ = run(rows(window, night), night)
        for split, prompts in keys(made).items():
            for key in prompts:
                served[key].add(split)
    assert {len(splits) for splits in served.values()} == {1}
    assert set().union(*served.values()) >= {"sft", "ppo", "evaluation"}


@settings(max_examples=40, deadline=None)
@given(nights=windows)
def test_in_each_night_a_conversation_is_learnt_by_the_reward_model_or_measures_it(nights: list[Window]) -> None:
    for night, window in enumerate(nights):
        sides: defaultdict[str, set[str]] = defaultdict(set)
        made, given = run(preferences_of(window, night), night)
        reward_model = given.reward_model.model_copy(update={"pairs": (None, 40)[night % 2]})
        for side, pairs in split_pairs(made.pairs or (), reward_model, seed=night)._asdict().items():
            for pair in pairs:
                sides[pair.prompt.split("\n\n")[1]].add(side)
        begun = {pair.prompt.split("\n\n")[1] for pair in made.pairs or () if pair.prompt.count("\n\n") == 2}
        assert {len(each) for opening, each in sides.items() if opening in begun} <= {1}


@settings(max_examples=20, deadline=None)
@given(nights=windows, others=windows)
def test_what_moves_from_one_set_to_another_is_never_held_out_after_it_was_learnt(
    nights: list[Window], others: list[Window]
) -> None:
    learnt: set[str] = set()
    held: set[str] = set()
    for night, (window, other) in enumerate(zip(nights, others, strict=False)):
        rows = problems_of(window, night) | demonstrations_of(other, night)
        given = {problem.key for problem in rows["problems"]}
        rows["demonstrations"] = [row for row in rows["demonstrations"] if row.key not in given]
        if len(rows["demonstrations"]) < 20:
            continue
        found = keys(run(rows, night)[0])
        learnt |= set().union(*(found[split] for split in LEARNT))
        held |= found["evaluation"]
    assert learnt.isdisjoint(held)


SMALL_TASK = {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 1, "max_value": 9}


def test_a_tasks_problems_keep_their_sides_for_other_seeds_sizes_and_given_rows() -> None:
    served: defaultdict[str, set[str]] = defaultdict(set)
    known = draw_problems("number_sorting", SMALL_TASK, seed=99, count=800)
    drawn = {"task": "number_sorting", "task_parameters": SMALL_TASK}
    for night in range(8):
        rows = [Problem(row.prompt, demonstration="So.") for row in known[night * 60 : night * 60 + 200]]
        sizes = {"sft": 60, "preferences": 20, "ppo": 40, "evaluation": 25 + 10 * (night % 3)}
        made, _ = run({"demonstrations": rows}, night, **drawn, splits=sizes)
        assert {split: len(found) for split, found in made.splits.items()} == sizes
        for split, prompts in keys(made).items():
            for key in prompts:
                served[key].add("held out" if split == "evaluation" else "learnt")
    assert {len(each) for each in served.values()} == {1}
    assert len(served) > 600, "the nights' problems differ"


@settings(max_examples=40, deadline=None)
@given(window=st.tuples(st.integers(0, 500), st.integers(300, 500)), heldout=st.sampled_from([0.05, 0.1, 0.3]))
def test_the_sides_are_as_large_as_their_shares(window: Window, heldout: float) -> None:
    large = {split: 100 * size for split, size in SPLITS.items()}
    made, _ = run(problems_of(window, 0), 0, splits=large, heldout_fraction=heldout)
    learning = {split: size for split, size in SPLITS.items() if split != "evaluation"}
    shares = {split: (1 - heldout) * size / sum(learning.values()) for split, size in learning.items()}
    count = sum(len(rows) for rows in made.splits.values())
    assert count == window[1], "no row is lost"
    for split, share in {**shares, "evaluation": heldout}.items():
        deviation = math.sqrt(count * share * (1 - share))
        assert abs(len(made.splits[split]) - count * share) < 5 * deviation


def test_the_rows_of_a_side_that_are_used_change_little_when_the_window_moves() -> None:
    before, _ = run(problems_of((0, 600), 0), 0)
    after, _ = run(problems_of((60, 600), 2), 0)
    for split, size in SPLITS.items():
        kept = keys(before)[split] & keys(after)[split]
        assert len(before.splits[split]) == len(after.splits[split]) == size
        assert len(kept) > 0.6 * size, "a tenth of the rows went, and a tenth came"


def test_splits_by_rank_would_hold_out_what_was_learnt() -> None:
    """As splits were made before: the first rows of the hash's order are held out, and the next are learnt."""

    def by_rank(rows: Iterable[Problem]) -> tuple[set[str], set[str]]:
        order = [row.key for row in in_hash_order(rows, 0)]
        return set(order[:25]), set(order[25:115])

    nights = [by_rank(problems_of((60 * night, 200), night)["problems"]) for night in range(6)]
    held = set().union(*(night[0] for night in nights))
    learnt = set().union(*(night[1] for night in nights))
    assert held & learnt
