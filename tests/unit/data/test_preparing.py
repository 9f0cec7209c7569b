"""Every stage's rows are drawn by hash from the sets that serve it, and none sees a prompt of another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from infra.settings import settings
from rlhf_core.config import TemplateConfig
from rlhf_core.data import PreferencePair, Problem, PromptTemplate
from rlhf_core.data.preparing import Prepared, TokenMeter, prepare, refuse_unfit
from rlhf_core.data.problems import problem_key
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer
from tests.unit.data.read_sets import CHATML, SIZES, config, demonstrations, meter, pairs, problems, prompts, read

SORTING = {
    "min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 10, "max_value": 99,
}  # fmt: skip


def sizes(made: Prepared) -> dict[str, int]:
    return {name: len(rows) for name, rows in made.splits.items()}


def of_problems(rows: list[Problem], seed: int = 0, **splits: int) -> Prepared:
    data = {"problems": "p.jsonl", "splits": {**SIZES, **splits}}
    return prepare(config(data, seed=seed), {"problems": read(rows)}, meter=None)


def assert_apart(made: Prepared) -> None:
    keys = [{problem.key for problem in rows} for rows in made.splits.values()]
    keys.append({problem_key(pair.prompt) for pair in made.pairs or ()})
    for one, other in combinations(keys, 2):
        assert one.isdisjoint(other)


def test_problems_serve_every_split() -> None:
    made = of_problems(problems(40))
    assert sizes(made) == SIZES
    assert made.pairs is None
    assert_apart(made)


def test_the_order_of_rows_does_not_matter_and_the_seed_does() -> None:
    assert of_problems(problems(40)).splits == of_problems(problems(40)[::-1]).splits
    assert of_problems(problems(40)).splits["evaluation"] != of_problems(problems(40), seed=1).splits["evaluation"]


def test_a_row_more_moves_no_other() -> None:
    before = of_problems(problems(40)).splits
    after = of_problems([*problems(40), Problem("New?", "1")]).splits
    pushed = [row for split in SIZES for row in set(before[split]) - set(after[split])]
    assert len(pushed) <= 1, "only the new row may push one out"


@pytest.mark.parametrize("data", [{"problems": "p.jsonl"}, {"task": "number_sorting", "task_parameters": SORTING}])
def test_the_evaluation_split_stays_when_another_one_grows(data: dict[str, object]) -> None:
    sets = {"problems": read(problems(200))} if "problems" in data else {}
    before = prepare(config(data), sets, meter=None).splits
    grown = config({**data, "splits": {**SIZES, "ppo": 60, "sft": 40}})
    after = prepare(grown, sets, meter=None).splits
    assert before["evaluation"] == after["evaluation"]
    assert len(after["ppo"]) == 60


@pytest.mark.parametrize("data", [{"problems": "p.jsonl"}, {"task": "number_sorting", "task_parameters": SORTING}])
def test_a_development_split_takes_of_what_is_held_out_and_moves_nothing_that_is_learnt(
    data: dict[str, object],
) -> None:
    sets = {"problems": read(problems(400))} if "problems" in data else {}
    without = prepare(config({**data, "splits": {**SIZES, "evaluation": 400}}), sets, meter=None).splits
    splits = {**SIZES, "evaluation": 10, "development": 5}
    made = prepare(config({**data, "splits": splits}), sets, meter=None)
    assert_apart(made)
    assert 2 <= len(made.splits["development"]) <= 5
    assert len(made.splits["evaluation"]) == 10
    held_out = {problem.key for problem in without["evaluation"]}
    assert {problem.key for name in ("development", "evaluation") for problem in made.splits[name]} <= held_out
    for name in ("sft", "preferences", "ppo"):
        assert made.splits[name] == without[name]
    again = prepare(config({**data, "splits": splits}), sets, meter=None)
    assert again.splits == made.splits


def test_an_evaluation_set_of_its_own_gives_the_development_split_too() -> None:
    data = {"problems": "p.jsonl", "evaluation": "e.jsonl", "splits": {**SIZES, "development": 20, "evaluation": 20}}
    own = [Problem(f"Held out {n}?", "1") for n in range(60)]
    made = prepare(config(data), {"problems": read(problems(60)), "evaluation": read(own)}, meter=None)
    assert_apart(made)
    assert sizes(made)["development"] == sizes(made)["evaluation"] == 20
    assert set(made.splits["development"]) < set(own)


def test_demonstrations_are_what_sft_learns_where_there_are_some() -> None:
    sets = {"problems": read(problems(40)), "demonstrations": read(demonstrations(10))}
    made = prepare(config({"problems": "p", "demonstrations": "d"}), sets, meter=None)
    assert sizes(made) == SIZES
    assert set(made.splits["sft"]) <= set(demonstrations(10))
    assert set(made.splits["ppo"]) <= set(problems(40))
    assert_apart(made)


def test_with_preferences_alone_prompts_are_parted_and_the_reward_models_share_stays_as_pairs() -> None:
    made = prepare(config({"preferences": "h.jsonl"}), {"preferences": read(pairs(80))}, meter=None)
    assert sizes(made) == {**SIZES, "preferences": 0}
    assert made.pairs is not None
    assert abs(len(made.pairs) - 80 * 0.75 * 12 / 26) < 4 * 4.4, "12 pairs are wished beside 6 + 8 prompts"
    for problem in made.splits["sft"]:
        assert (
            problem.demonstration
            == problem.prompt.replace("\n\nHuman: Ask", "Kind").removesuffix("\n\nAssistant:") + "."
        )
    assert_apart(made)


def test_all_pairs_of_a_drawn_prompt_leave_the_reward_model() -> None:
    once = prepare(config({"preferences": "h"}), {"preferences": read(pairs(40))}, meter=None).pairs or ()
    twice = [PreferencePair(pair.prompt.replace("Ask", "ASK "), pair.chosen, "Ruder.") for pair in pairs(40)]
    made = prepare(config({"preferences": "h"}), {"preferences": read([*pairs(40), *twice])}, meter=None)
    assert made.pairs is not None
    assert len(made.pairs) == 2 * len(once) > 0
    assert_apart(made)


def test_what_follows_the_preferred_turn_is_not_learnt() -> None:
    early = [
        PreferencePair(pair.prompt, f"{pair.chosen}\n\nHuman: Go on\n\nAssistant: No.", "Rude.") for pair in pairs(40)
    ]
    made = prepare(config({"preferences": "h"}), {"preferences": read(early)}, meter=None)
    assert all(problem.demonstration.startswith("Kind") for problem in made.splits["sft"])
    assert not any("Human" in problem.demonstration for problem in made.splits["sft"])


def test_problems_with_preferences_leave_the_reward_model_all_pairs_that_could_never_be_held_out() -> None:
    sets = {"problems": read(problems(40)), "preferences": read(pairs(12))}
    made = prepare(config({"problems": "p", "preferences": "h"}), sets, meter=None)
    among = [*problems(40), *[Problem(pair.prompt, "1") for pair in pairs(12)]]
    held = {row.key for row in of_problems(among, evaluation=52).splits["evaluation"]}
    assert made.pairs == tuple(pair for pair in pairs(12) if problem_key(pair.prompt) not in held)
    assert 6 <= len(made.pairs) < 12
    assert made.report.splits["pairs"].drawn_from.endswith(f"less {12 - len(made.pairs)} on the side of the evaluation")
    assert sizes(made) == {**SIZES, "preferences": 0}
    own = {**sets, "evaluation": read(problems(9, first=100))}
    made = prepare(config({"problems": "p", "preferences": "h", "evaluation": "e"}), own, meter=None)
    assert made.pairs == tuple(pairs(12)), "the evaluation has a set of its own"


def test_prompts_alone_demonstrate_nothing() -> None:
    made = prepare(config({"prompts": "p"}), {"prompts": read(prompts(40))}, meter=None)
    assert sizes(made) == {**SIZES, "sft": 0, "preferences": 0}


def test_prompts_with_preferences_learn_the_preferred_responses() -> None:
    sets = {"prompts": read(prompts(40)), "preferences": read(pairs(60))}
    made = prepare(config({"prompts": "p", "preferences": "h"}), sets, meter=None)
    assert sizes(made) == {**SIZES, "preferences": 0}
    assert all(problem.demonstration for problem in made.splits["sft"])
    assert made.pairs is not None
    assert abs(len(made.pairs) - 60 * 0.75 * 12 / 18) < 4 * 3.9
    assert_apart(made)


def test_demonstrations_alone_serve_all_but_the_reward_model() -> None:
    made = prepare(config({"demonstrations": "d"}), {"demonstrations": read(demonstrations(40))}, meter=None)
    assert sizes(made) == {**SIZES, "preferences": 0}
    assert_apart(made)


def test_an_evaluation_set_of_its_own_is_what_is_held_out() -> None:
    sets = {"problems": read(problems(40)), "evaluation": read(problems(9, first=100))}
    made = prepare(config({"problems": "p", "evaluation": "e"}), sets, meter=None)
    assert set(made.splits["evaluation"]) <= set(problems(9, first=100))
    assert set(made.splits["ppo"]) <= set(problems(40))


@pytest.mark.parametrize(
    ("data", "sets", "told"),
    [
        (
            {"problems": "p", "evaluation": "e"},
            {"problems": read(problems(40), "train.jsonl"), "evaluation": read(problems(9, first=37), "test.jsonl")},
            r"data\.problems \(train\.jsonl\) for preferences and sft and ppo and data\.evaluation \(test\.jsonl\) for "
            r"evaluation share 3 prompts, such as 'What is 37 and 37\?'",
        ),
        (
            {"problems": "p", "preferences": "h"},
            {
                "problems": read([*problems(40), Problem("Ask 3", "4")], "p.jsonl"),
                "preferences": read(pairs(9), "h.jsonl"),
            },
            r"data\.preferences \(h\.jsonl\) for the reward model share 1 prompt, such as 'Ask 3'",
        ),
    ],
)
def test_sets_that_share_prompts_are_refused(data: dict[str, str], sets: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told) as error:
        prepare(config(data), sets, meter=None)
    assert "\n" not in str(error.value)


def test_too_few_rows_say_how_many_there_are_and_are_needed() -> None:
    told = r"p\.jsonl\) has 22 different prompts .* which by their hashes ppo may have \d \(needs 8\); give more, or "
    with pytest.raises(DataError, match=told + r"raise data\.splits\.ppo against the others"):
        prepare(config({"problems": "p"}), {"problems": read(problems(22), "p.jsonl")}, meter=None)
    told = r"evaluation may have 1 \(needs 2\); give more, or raise data\.heldout_fraction \(0\.01\)"
    with pytest.raises(DataError, match=told):
        prepare(config({"problems": "p", "heldout_fraction": 0.01}), {"problems": read(problems(200))}, meter=None)
    few = {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 1, "max_value": 2}
    with pytest.raises(DataError, match=r"data\.task \('number_sorting' with .* has \d+ different problems"):
        prepare(config({"task": "number_sorting", "task_parameters": few}), {}, meter=None)


def test_what_is_too_long_is_left_out_before_the_splits_are_filled() -> None:
    rows = [*problems(40), *[Problem(f"What is {'1' * 300} and {n}?", "1") for n in range(20)]]
    made = prepare(config({"problems": "p", "too_long": "drop"}), {"problems": read(rows)}, meter=meter())
    assert sizes(made) == SIZES
    assert {problem.prompt for split in made.splits.values() for problem in split} <= {p.prompt for p in problems(40)}
    [found] = made.report.too_long
    assert (found.split, found.key, found.longer, found.of, found.dropped) == ("sft", "sft.max_length", 20, 60, True)


def test_pairs_that_are_too_long_are_left_out_and_counted() -> None:
    long = [PreferencePair(f"Long {n}", "a" * 600, "b") for n in range(3)]
    sets = {"problems": read(problems(40)), "preferences": read([*pairs(12), *long])}
    given = {"problems": "p", "preferences": "h", "too_long": "drop", "heldout_fraction": 0.1}
    made = prepare(config(given), {**sets, "evaluation": read(problems(9, first=100))}, meter=meter())
    assert made.pairs == tuple(pairs(12))
    [found] = made.report.too_long
    assert (found.split, found.longer, found.of, found.limit) == ("pairs", 3, 15, 512)
    assert found.example == "Long 0"
    assert "the longest 626 (its prompt begins 'Long 0'); raise reward_model.max_length" in found.sentence
    assert found.longest == 3 + len("user\nLong 0\nassistant\n") + 600 + 1, "special tokens, bytes, and the stop token"


def test_a_task_gives_more_problems_where_some_are_too_long() -> None:
    data = {"task": "number_sorting", "task_parameters": {**SORTING, "max_numbers": 6}, "too_long": "drop"}
    made = prepare(config(data, evaluation={"max_new_tokens": 30}), {}, meter=meter())
    assert sizes(made) == SIZES
    assert all(len(problem.prompt.split(":")[1].split()) <= 3 for rows in made.splits.values() for problem in rows)


def drawn(given: list[Problem], **splits: int) -> Prepared:
    sets = {"demonstrations": read(given, "d.jsonl")}
    data = {"task": "number_sorting", "task_parameters": SORTING, "demonstrations": "d.jsonl"}
    return prepare(config({**data, "splits": {**SIZES, **splits}}), sets, meter=None)


def test_what_is_drawn_is_drawn_around_what_is_given() -> None:
    free = drawn(demonstrations(10)).splits
    known = [Problem(row.prompt.upper(), demonstration="7") for row in (free["evaluation"][1], *free["ppo"])]
    more = drawn(demonstrations(10), evaluation=6).splits["evaluation"]
    made = drawn([*demonstrations(10), *known])
    assert sizes(made) == SIZES
    assert_apart(made)
    assert made.splits["evaluation"] == [*more[:1], *more[2:]], "the next one of the side takes the place"
    assert ", less 9 that a given set has)" in made.report.splits["ppo"].drawn_from
    grown = drawn([*demonstrations(10), *known], ppo=60, sft=12)
    assert grown.splits["evaluation"] == made.splits["evaluation"]
    assert_apart(grown)


def test_a_task_that_a_given_set_exhausts_says_so() -> None:
    few = {"min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 1, "max_value": 2}
    data = {"task": "number_sorting", "task_parameters": few}
    with pytest.raises(DataError, match=r"has 16 different problems"):
        prepare(config(data), {}, meter=None)  # two orders of three numbers, each 1 or 2
    given = [Problem(f"Sort descending: {a} {b} {c}", "x") for a in "12" for b in "12" for c in "12"]
    sets = {"demonstrations": read(given)}
    with pytest.raises(DataError, match=r"less \d+ that a given set has\) has 8 different problems"):
        prepare(config({**data, "demonstrations": "d"}), sets, meter=None)


def test_each_text_is_measured_once() -> None:
    counted: list[str] = []

    class Counting(PromptTemplate):
        def count_tokens(self, texts: Sequence[str]) -> list[int]:
            counted.extend(texts)
            return super().count_tokens(texts)

    scale = TokenMeter(Counting(tiny_tokenizer(), TemplateConfig(prompt=CHATML)))
    sets = {"preferences": read([*pairs(30), *[PreferencePair("Long", "a" * 600, "b"), *pairs(2, first=50)]])}
    given = config({"preferences": "h", "too_long": "drop"})
    made = prepare(given, sets, meter=scale)
    rows = [*made.splits["sft"], *made.splits["ppo"]]
    assert scale.problems(rows)[0].prompt == len(scale.template.prompt_ids(rows[0].prompt))
    assert scale.problems(rows)[0].response == len(scale.template.response_ids(str(rows[0].demonstration)))
    refuse_unfit(made.splits, made.pairs, given, scale, reads=("sft",))
    kept = len(made.pairs or ()) + sum(each.longer for each in made.report.too_long if each.split == "pairs")
    assert len(counted) == len(set(counted)) == 33 * 2 + kept, "the other pairs are not learnt from"


def test_real_preferences_are_parted(tmp_path: Path) -> None:
    directory = settings().data_dir
    if directory is None:
        pytest.skip("RLHF_DATA_DIR names no directory with hh-rlhf/ in it")
    from rlhf_core.config import SourceConfig
    from rlhf_core.data.reading import Access, read_set

    source = SourceConfig(path=str(directory / "hh-rlhf" / "harmless-base-test.jsonl.gz"))
    found = read_set([source], "preferences", access=Access(tmp_path), bad_rows="drop")
    made = prepare(config({"preferences": source.path}), {"preferences": found}, meter=None)
    assert sizes(made) == {**SIZES, "preferences": 0}
    assert_apart(made)


def test_a_mixture_keeps_its_shares_in_every_split() -> None:
    mixed = [row for pair in zip(problems(2000), prompts(2000), strict=True) for row in pair]
    splits = {"sft": 6, "preferences": 4, "ppo": 400, "evaluation": 400}
    data = {"prompts": "m.jsonl", "demonstrations": "d.jsonl", "splits": splits}
    sets = {"prompts": read(mixed), "demonstrations": read(demonstrations(10))}
    made = prepare(config(data), sets, meter=None)
    for name in ("ppo", "evaluation"):
        share = sum(problem.answer is not None for problem in made.splits[name]) / 400
        assert abs(share - 0.5) < 0.1, "four standard deviations of a draw of 400"


class TestRotation:
    """Each night asks the next of the held-out problems, where they rotate."""

    def night(self, after: str | None, count: int = 200, **data: object) -> Prepared:
        given = {"problems": "p.jsonl", "heldout_fraction": 0.3, "splits": {**SIZES, "evaluation": 8}, **data}
        sets = {} if "task" in data else {"problems": read(problems(count))}
        return prepare(config(given, seed=0), sets, meter=None, after=after)

    def test_no_problem_comes_again_before_all_have_been_asked(self) -> None:
        after, asked = "", []
        first = self.night("")
        for _ in range(first.heldout // 8):
            made = self.night(after)
            asked += [problem.key for problem in made.splits["evaluation"]]
            after = str(made.until)
        assert len(set(asked)) == len(asked)
        last = [problem.key for problem in self.night(after).splits["evaluation"]]
        new = first.heldout % 8
        assert set(asked).isdisjoint(last[:new])
        assert last[new:] == asked[: 8 - new]  # from the beginning again
        assert_apart(first)

    def test_rows_that_come_move_no_other_in_the_order(self) -> None:
        before = self.night("")
        more = self.night("", count=210)
        came = {problem.key for problem in problems(210)} - {problem.key for problem in problems(200)}
        kept = [problem.key for problem in more.splits["evaluation"] if problem.key not in came]
        assert kept == [problem.key for problem in before.splits["evaluation"]][: len(kept)]

    def test_without_rotation_nothing_changes(self) -> None:
        same = self.night(None)
        assert same.until is None
        assert same.splits == self.night(None).splits
        assert same.splits["evaluation"] != self.night("").splits["evaluation"]

    def test_a_task_holds_out_the_problems_of_ten_nights(self) -> None:
        task = {"problems": [], "task": "number_sorting", "task_parameters": SORTING}
        rotating = self.night("", **task, rotate_evaluation=True)
        assert rotating.heldout >= 80
        assert rotating.splits["ppo"] == self.night(None, **task).splits["ppo"]
