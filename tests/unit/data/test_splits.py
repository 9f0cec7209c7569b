"""Problems are drawn by seed, and no split sees a prompt of another."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from rlhf_core.config import DataConfig, SplitsConfig
from rlhf_core.data import Problem, assert_disjoint, load_problems, problems_from_jsonl, problems_to_jsonl
from rlhf_core.data.problems import problem_key
from rlhf_core.data.tasks import draw_problems
from rlhf_core.errors import DataError

SORTING = {
    "min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 10, "max_value": 99,
}  # fmt: skip
SIZES = SplitsConfig(sft=30, preferences=10, ppo=20, evaluation=15)


def sorting(**changes) -> DataConfig:
    return DataConfig(task_parameters=SORTING, splits=SIZES).model_copy(update=changes)


def problem_file(path: Path, count: int) -> Path:
    rows = [json.dumps({"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"}) for i in range(count)]
    path.write_text("\n".join(rows))
    return path


def keys(problems: list[Problem]) -> set[str]:
    return {problem.key for problem in problems}


def test_number_sorting_has_the_short_form_and_right_answers() -> None:
    for problem in draw_problems("number_sorting", SORTING, seed=0, count=50):
        match = re.fullmatch(r"Sort (ascending|descending): (\d\d) (\d\d) (\d\d)", problem.prompt)
        assert match
        numbers = sorted((int(number) for number in match.groups()[1:]), reverse=match[1] == "descending")
        assert problem.answer == " ".join(map(str, numbers))


def test_numbers_with_decimals_keep_them() -> None:
    parameters = {"min_numbers": 2, "max_numbers": 2, "min_decimals": 2, "max_decimals": 2}
    problems = draw_problems("number_sorting", parameters, seed=0, count=20)
    for problem in problems:
        assert sorted(problem.prompt.split(": ")[1].split()) == sorted(problem.answer.split())
    assert any(re.search(r"\.\d\d", problem.answer) for problem in problems)


def test_other_tasks_are_taken_as_they_are() -> None:
    [problem] = draw_problems("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=0, count=1)
    expression = re.search(r"problem: (.*) =", problem.prompt)
    assert expression
    left, sign, right = expression[1].split()
    assert int(problem.answer) == int(left) + (1 if sign == "+" else -1) * int(right)


def test_the_same_seed_draws_the_same_problems_and_neighbouring_seeds_share_few() -> None:
    first, again, other = (draw_problems("number_sorting", SORTING, seed=seed, count=200) for seed in (0, 0, 1))
    assert first == again
    assert len(keys(first) & keys(other)) < 5
    assert draw_problems("number_sorting", SORTING, seed=0, count=50) == first[:50]


def test_splits_have_their_sizes_and_share_no_problem() -> None:
    splits = load_problems(sorting(), seed=0)
    assert {name: len(problems) for name, problems in splits.items()} == SIZES.model_dump()
    for one, other in combinations(splits.values(), 2):
        assert keys(one).isdisjoint(keys(other))


def test_the_evaluation_split_stays_when_another_one_grows(tmp_path: Path) -> None:
    grown = SIZES.model_copy(update={"ppo": 60, "sft": 40})
    path = str(problem_file(tmp_path / "p.jsonl", 300))
    for config in (sorting(), DataConfig(task=None, problems=path, splits=SIZES)):
        before = load_problems(config, seed=0)
        after = load_problems(config.model_copy(update={"splits": grown}), seed=0)
        assert before["evaluation"] == after["evaluation"]


def test_a_problem_file_is_split_by_hash(tmp_path: Path) -> None:
    path = problem_file(tmp_path / "p.jsonl", 300)
    config = DataConfig(task=None, problems=str(path), splits=SIZES)
    splits = load_problems(config, seed=0)
    assert {name: len(problems) for name, problems in splits.items()} == SIZES.model_dump()
    path.write_text("\n".join(reversed(path.read_text().splitlines())))
    assert load_problems(config, seed=0) == splits, "the order of the rows must not matter"
    assert load_problems(config, seed=1)["evaluation"] != splits["evaluation"]


def test_a_problem_file_that_is_too_small_says_how_many_it_has_and_needs(tmp_path: Path) -> None:
    path = problem_file(tmp_path / "p.jsonl", 74)
    with pytest.raises(DataError, match=r"p\.jsonl has 74 different problems, but data\.splits need 75 \(sft 30, "):
        load_problems(DataConfig(task=None, problems=str(path), splits=SIZES), seed=0)


def test_a_task_with_too_few_different_problems_says_how_many_it_has() -> None:
    few = {**SORTING, "min_numbers": 1, "max_numbers": 1, "max_value": 12}
    with pytest.raises(DataError, match=r"task 'number_sorting' .* has 6 different problems, .* need 75"):
        load_problems(sorting(task_parameters=few), seed=0)


def test_an_unknown_task_offers_the_nearest_names() -> None:
    with pytest.raises(DataError, match=r"'number_sort' is not one of .* did you mean number_sorting"):
        load_problems(sorting(task="number_sort"), seed=0)


def test_an_unknown_parameter_lists_those_of_the_task() -> None:
    with pytest.raises(DataError, match=r"no parameter 'min_number' .*it has min_numbers, max_numbers"):
        load_problems(sorting(task_parameters={"min_number": 3}), seed=0)


@pytest.mark.parametrize("name", ["seed", "size"])
def test_seed_and_size_are_not_parameters(name: str) -> None:
    with pytest.raises(DataError, match=f"must not set '{name}'"):
        load_problems(sorting(task_parameters={name: 3}), seed=0)


@pytest.mark.parametrize("value", [9, "three", None])
def test_a_refused_parameter_is_one_sentence(value: object) -> None:
    with pytest.raises(DataError, match=r"task 'number_sorting' refuses data\.task_parameters .*min_numbers") as caught:
        load_problems(sorting(task_parameters={**SORTING, "min_numbers": value}), seed=0)
    assert "\n" not in str(caught.value)


def test_shared_problems_are_named() -> None:
    one, other = Problem("Sort: 1 2", "1 2"), Problem("sort:  1 2 ", "1 2")
    with pytest.raises(DataError, match=r"splits 'sft' and 'ppo' share 1 problems"):
        assert_disjoint({"sft": [one], "ppo": [other]})
    with pytest.raises(DataError, match=r"split 'sft' holds 1 problems twice"):
        assert_disjoint({"sft": [one, other]})


def test_a_key_ignores_case_and_white_space_alone() -> None:
    assert problem_key("  Sort\tTHIS:\n1 ") == problem_key("sort this: 1")
    assert problem_key("sort this: 1") != problem_key("sort this: 2")
    assert re.fullmatch(r"[0-9a-f]{16}", problem_key("x"))


def test_problems_pass_through_json_lines() -> None:
    problems = [Problem("Wie viel?\n", "größer \u2028 42"), Problem('"{prompt}"', "\\")]
    assert problems_from_jsonl(problems_to_jsonl(problems)) == problems
