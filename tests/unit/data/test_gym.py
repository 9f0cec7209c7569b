"""reasoning-gym's tasks, by name with parameters: drawn by seed, right by their own scorers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from rlhf_core.config import TemplateConfig
from rlhf_core.data import Problem, PromptTemplate, problems_from_jsonl, problems_to_jsonl
from rlhf_core.data.gym import draw_problems
from rlhf_core.errors import DataError
from rlhf_core.rewards.gym import score
from rlhf_core.rewards.structure import answer_tags
from rlhf_core.rewards.verifying import Answered, Verdict, build_judge
from tests.tiny_llama import tiny_tokenizer

SORTING = {
    "min_numbers": 3, "max_numbers": 3, "min_decimals": 0, "max_decimals": 0, "min_value": 10, "max_value": 99,
}  # fmt: skip
TAGS = answer_tags("answer")
MIXTURE = {
    "datasets": [
        {"name": "countdown", "weight": 1, "config": {"min_numbers": 3, "max_numbers": 3}},
        {"name": "spell_backward", "weight": 3},
    ]
}


def keys(problems: list[Problem]) -> set[str]:
    return {problem.key for problem in problems}


def scored(problem: Problem, answer: str) -> float:
    assert problem.entry is not None
    return score("", f"<answer>{answer}</answer>", None, problem.entry, task="not looked at", tags=TAGS)


@pytest.mark.parametrize(
    "task",
    ["basic_arithmetic", "binary_matrix", "calendar_arithmetic", "chain_sum", "countdown", "knights_knaves",
     "letter_jumble", "maze", "mini_sudoku", "number_sorting", "palindrome_generation", "simple_equations",
     "tower_of_hanoi"],
)  # fmt: skip
def test_a_tasks_own_answer_is_right_by_its_own_scorer_and_another_is_not(task: str) -> None:
    problems = problems_from_jsonl(problems_to_jsonl(draw_problems(task, {}, seed=3, count=5)))
    assert len({problem.key for problem in problems}) == 5
    assert [scored(problem, str(problem.answer)) for problem in problems] == [1.0] * 5
    assert max(scored(problem, "no answer") for problem in problems) < 1


def test_a_palindrome_is_asked_and_answered_letter_by_letter() -> None:
    [problem] = draw_problems("palindrome_generation", {"min_length": 4, "max_length": 4}, seed=1, count=1)
    assert problem.prompt.startswith("Palindrome: ")
    letters = problem.prompt.removeprefix("Palindrome: ").split(" ")
    assert sorted(str(problem.answer).split(" ")) == sorted(letters)
    assert str(problem.answer) == str(problem.answer)[::-1]
    outer, inner = sorted(set(letters))  # four letters, two of each: both orders are palindromes
    for answer in (f"{outer} {inner} {inner} {outer}", f"{inner}{outer}{outer}{inner}"):
        assert scored(problem, answer) == 1.0
    assert scored(problem, f"{outer} {outer} {inner} {inner}") == 0.02  # the library's: no palindrome
    assert scored(problem, f"{outer} {outer}") == 0.05  # other letters


def test_countdown_takes_any_expression_of_these_numbers() -> None:
    parameters = {"min_numbers": 3, "max_numbers": 3, "operators": ["+"], "max_value": 9, "min_target": 1}
    [problem] = draw_problems("countdown", parameters, seed=1, count=1)
    target, numbers = problem.prompt.removeprefix("Make ").split(": ")
    a, b, c = numbers.split(" ")
    assert int(a) + int(b) + int(c) == int(target)
    assert " " not in str(problem.answer)
    assert [scored(problem, f"{c}+({b}+{a})"), scored(problem, f"{c} + {b} + {a}")] == [1.0, 1.0]
    assert scored(problem, f"{a}+{b}") == 0.05  # the library's: not all numbers


def test_a_scorer_knows_the_parameters_that_the_problem_was_drawn_with() -> None:
    # the library allows an error of one unit in the last decimal place that the task has: 0.01, or 0.00001
    coarse, fine = (
        draw_problems("decimal_arithmetic", {"min_num_decimal_places": n, "max_num_decimal_places": n}, seed=1, count=1)
        for n in (2, 5)
    )
    assert scored(coarse[0], str(Decimal(str(coarse[0].answer)) + Decimal("0.005"))) == 1.0
    assert scored(fine[0], str(Decimal(str(fine[0].answer)) + Decimal("0.005"))) == 0.0


@pytest.mark.parametrize(
    ("task", "wrong"),
    [("game_of_life_halting", "so what"), ("coin_flip", "0"), ("complex_arithmetic", "nan"), ("puzzle24", "6*4*1*1")],
)
def test_what_the_librarys_scorer_finds_right_without_reason_is_wrong(task: str, wrong: str) -> None:
    problems = draw_problems(task, {}, seed=1, count=5)
    assert [scored(problem, str(problem.answer)) for problem in problems] == [1.0] * 5
    assert [scored(problem, wrong) for problem in problems] == [0.0] * 5


def test_what_the_librarys_scorer_cannot_read_is_no_answer() -> None:
    [problem] = draw_problems("prime_factorization", {}, seed=1, count=1)
    assert scored(problem, "twelve times three") == 0.0


@pytest.mark.integration
def test_each_of_a_composites_problems_is_judged_by_its_own_task() -> None:
    template = PromptTemplate(tiny_tokenizer(), TemplateConfig())
    problems = draw_problems("composite", MIXTURE, seed=2, count=40)
    made = [problem.prompt.startswith("Make ") for problem in problems]
    assert 0 < sum(made) < 20  # a quarter of them, by the weights
    judge = build_judge(None, task="composite", template=template, allowed_modules=(), timeout_s=10.0)
    rows = [
        Answered(problem.prompt, template.answer_text(str(problem.answer)), None, problem.entry, problem.key, True)
        for problem in problems
    ]
    assert judge.judge(rows) == [Verdict(1.0, True)] * 40
    assert max(each.score for each in judge.judge([row._replace(response="<answer>x</answer>") for row in rows])) < 1
    judge.close()


def test_a_task_without_an_answer_leaves_every_answer_to_its_scorer() -> None:
    [problem] = draw_problems("graph_color", {"min_num_vertices": 3, "max_num_vertices": 3}, seed=1, count=1)
    assert problem.answer is None
    assert problem.entry is not None
    assert scored(problem, '{"0": 1, "1": 2, "2": 3}') == 1.0  # each vertex has a colour of its own
    assert scored(problem, '{"0": 1}') < 1


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


def test_an_unknown_task_offers_the_nearest_names() -> None:
    with pytest.raises(DataError, match=r"'number_sort' is not one of .* did you mean number_sorting"):
        draw_problems("number_sort", SORTING, seed=0, count=1)


def test_an_unknown_parameter_lists_those_of_the_task() -> None:
    with pytest.raises(DataError, match=r"no parameter 'min_number' .*it has min_numbers, max_numbers"):
        draw_problems("number_sorting", {"min_number": 3}, seed=0, count=1)


@pytest.mark.parametrize("name", ["seed", "size"])
def test_seed_and_size_are_not_parameters(name: str) -> None:
    with pytest.raises(DataError, match=f"must not set '{name}'"):
        draw_problems("number_sorting", {name: 3}, seed=0, count=1)


@pytest.mark.parametrize("value", [9, "three", None])
def test_a_refused_parameter_is_one_sentence(value: object) -> None:
    with pytest.raises(DataError, match=r"task 'number_sorting' refuses data\.task_parameters .*min_numbers") as caught:
        draw_problems("number_sorting", {**SORTING, "min_numbers": value}, seed=0, count=1)
    assert "\n" not in str(caught.value)


def mixtures() -> Iterator[tuple[Any, str]]:
    part = {"name": "gcd", "weight": 1, "config": {}}
    yield None, "needs data.task_parameters.datasets, a list of .* it is None"
    yield [], "needs data.task_parameters.datasets"
    yield [part, "gcd"], "entry 2, is 'gcd'; expected a list of"
    yield [{**part, "colour": 1}], "entry 1, is .*'colour'"
    yield [{**part, "weight": 0}], "entry 1, has the weight 0; give 'gcd' one above 0"
    yield [{**part, "weight": "much"}], "expected a list of"
    yield [part, part], "names 'gcd' more than once"
    yield [{"name": "composite"}], "names 'composite' again"
    yield [{"name": "gdc"}], "entry 1, 'gdc' is not one of the .* tasks of reasoning-gym; did you mean gcd"
    yield [{"name": "gcd", "config": {"seed": 1}}], "config must not set 'seed'"
    yield [{"name": "gcd", "config": {"terms": 1}}], "task 'gcd' has no parameter 'terms'"


@pytest.mark.parametrize(("datasets", "reason"), mixtures())
def test_a_composite_that_cannot_be_is_refused_in_a_sentence(datasets: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        draw_problems("composite", {} if datasets is None else {"datasets": datasets}, seed=0, count=1)
