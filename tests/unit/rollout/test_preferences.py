"""Pairs of a policy's own samples are ordered by the data's verifier."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rlhf_core.config import RewardModelConfig
from rlhf_core.data import Problem
from rlhf_core.errors import DataError
from rlhf_core.rewards.verifying import Answered, Verdict
from rlhf_core.rollout.preferences import sample_pairs
from tests.unit.rollout.makers import TEMPLATE, actor

torch.set_num_threads(1)

CONFIG = RewardModelConfig(samples_per_prompt=4, pairs=50, max_new_tokens=4)
PROBLEMS = [Problem("open"), Problem("1+1", "2", entry="{}")]


class LongestFirst:
    """Full marks to what has at least four characters, a tenth to the rest."""

    def __init__(self) -> None:
        self.asked: list[Answered] = []

    def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
        self.asked += rows
        return [Verdict(1.0 if len(row.response) >= 4 else 0.1, row.ended) for row in rows]

    def close(self) -> None: ...


def test_the_judge_sees_every_sample_with_its_problem_and_orders_the_pairs() -> None:
    judge, seen = LongestFirst(), []
    made = sample_pairs(actor(), TEMPLATE, PROBLEMS, CONFIG, seed=1, on_progress=seen.append, judge=judge)
    assert [(row.answer, row.entry, row.key) for row in judge.asked] == [
        (problem.answer, problem.entry, problem.key) for problem in PROBLEMS for _ in range(4)
    ]
    right = sum(len(row.response) >= 4 for row in judge.asked)
    assert 0 < right < 8
    assert made.figures["accuracy"] == right / 8  # a tenth is not right
    assert made.figures["well_formed"] == sum(row.ended for row in judge.asked) / 8
    assert made.pairs
    ranks = {
        (row.prompt, row.response): (len(row.response) >= 4) + 0.1 * (len(row.response) < 4) + 0.5 * row.ended
        for row in judge.asked
    }
    assert all(ranks[pair.prompt, pair.chosen] > ranks[pair.prompt, pair.rejected] for pair in made.pairs)
    assert seen == [2]


class Failing(LongestFirst):
    """Fails at every other sample."""

    def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
        verdicts = super().judge(rows)
        return [
            verdict._replace(failure="raised: it raised OSError: no") if place % 2 else verdict
            for place, verdict in enumerate(verdicts)
        ]


def test_a_verdict_that_fails_makes_no_pair_and_above_the_share_none_is_made() -> None:
    judge = Failing()
    made = sample_pairs(
        actor(), TEMPLATE, PROBLEMS, CONFIG, seed=1, on_progress=lambda _: None, judge=judge, max_abstained=0.5
    )
    known = {(row.prompt, row.response) for row in judge.asked[::2]}
    assert made.pairs
    assert all({(pair.prompt, pair.chosen), (pair.prompt, pair.rejected)} <= known for pair in made.pairs)
    assert (made.figures["samples"], made.figures["unjudged"]) == (4, 4)
    with pytest.raises(DataError, match=r"^4 of 8 samples for preference pairs could not be judged.*verifier failed 4"):
        sample_pairs(
            actor(), TEMPLATE, PROBLEMS, CONFIG, seed=1, on_progress=lambda _: None, judge=judge, max_abstained=0.4
        )


def test_a_prompt_without_an_answer_cannot_be_ranked_by_comparing() -> None:
    with pytest.raises(DataError, match="verifier exact compares with a right answer"):
        sample_pairs(actor(), TEMPLATE, PROBLEMS, CONFIG, seed=1, on_progress=lambda _: None)
