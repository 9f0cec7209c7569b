"""Every estimator of advantages, and upstream's numbers, worked by hand from what the models said."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import RolloutConfig
from rlhf_core.rollout.advantages import Estimates, Forwards, compares_groups, estimate
from rlhf_core.types import EpisodeControls

SCORES = torch.tensor([1.0, 3.0, 10.0, 6.0])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
LOGPROBS = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [-2.0, -2.0, 0.0]])
REF = torch.tensor([[-2.0, -2.0, 0.0], [-1.0, 0.0, 0.0], [-1.5, -1.5, -2.0], [-1.0, -2.0, 0.0]])
VALUES = torch.tensor([[0.5, 1.5, 0.0], [1.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.0, 2.0, 0.0]])
KL_COEF = 0.5
KLS = [1.0, 0.0, 2.0, -1.0]
"""Summed k1 of each row: 1 + 0; 0; 0.5 + 0.5 + 1; -1 + 0."""


def estimated(*, controls: EpisodeControls | None = None, form: str = "trainer", **options: object) -> Estimates:
    config = RolloutConfig(samples_per_prompt=2, kl_coef=KL_COEF, **options)
    forwards = Forwards(LOGPROBS, REF, VALUES, MASK)
    return estimate(
        scores=SCORES,
        abstains=torch.zeros(4, dtype=torch.bool),
        forwards=forwards,
        config=config,
        controls=controls or EpisodeControls(KL_COEF),
        legacy_form=form,
    )


def per_row(table: torch.Tensor) -> list[list[float]]:
    assert torch.equal(table[~MASK], torch.zeros(int((~MASK).sum())))
    return [row[counts].tolist() for row, counts in zip(table, MASK, strict=True)]


COMPARED = [score - KL_COEF * kl for score, kl in zip(SCORES.tolist(), KLS, strict=True)]
"""0.5, 3, 9, 6.5"""


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("dr_grpo", [-1.25, 1.25, 1.25, -1.25]),
        ("rloo", [-2.5, 2.5, 2.5, -2.5]),
        # scores 1 and 3, 10 and 6: -+ 1/sqrt 2; penalties 0.5 and 0, 1 and -0.5: +-0.25, +-0.75 from their means
        ("grpo", [-(0.5**0.5) - 0.25, 0.5**0.5 + 0.25, 0.5**0.5 - 0.75, -(0.5**0.5) + 0.75]),
    ],
)
def test_a_response_pays_for_all_its_tokens_in_what_groups_compare_or_beside_it(
    name: str, by_hand: list[float]
) -> None:
    found = estimated(advantage_estimator=name)
    assert found.returns is None
    for row, expected in zip(per_row(found.advantages), by_hand, strict=True):
        assert row == pytest.approx([expected] * len(row), abs=1e-5)


def test_reinforce_pp_is_the_reward_still_to_come() -> None:
    found = estimated(advantage_estimator="reinforce_pp")
    assert found.returns is None
    by_hand = [[0.5, 1.0], [3.0], [9.0, 9.25, 9.5], [6.5, 6.0]]
    assert per_row(found.advantages) == [pytest.approx(row) for row in by_hand]


def test_scores_are_normalised_and_then_clipped_before_they_are_paid() -> None:
    found = estimated(controls=EpisodeControls(0.0, score_mean=1.0, score_std=2.0), reward_clip=2.0)
    assert [row[-1] for row in per_row(found.rewards)] == [0.0, 1.0, 2.0, 2.0]


def test_the_controls_coefficient_is_what_counts() -> None:
    found = estimated(controls=EpisodeControls(2.0))
    assert per_row(found.rewards)[0] == [-2.0, 1.0]
    assert per_row(found.kl)[0] == [1.0, 0.0]


def test_upstreams_trainer_pays_five_at_most_and_on_every_token() -> None:
    found = estimated(legacy=True, gamma=1.0, lam=1.0)
    by_hand = [[0.5, 1.0], [3.0], [4.75, 4.75, 4.5], [5.5, 5.0]]
    assert per_row(found.rewards) == [pytest.approx(row) for row in by_hand]
    assert found.returns is not None
    assert per_row(found.returns)[2] == pytest.approx([14.0, 9.25, 4.5])


def test_upstreams_detached_trainer_has_one_number_for_each_response() -> None:
    found = estimated(legacy=True, form="detached")
    e = torch.e
    paid = [1 - 0.5 * (e - 1 - 1) / 2, 3.0, 10 - 0.5 * (2 * (e**0.5 - 1.5) + e - 2) / 3, 6 - 0.5 * (1 / e) / 2]
    means = [1.0, 1.0, 2.0, 1.0]
    assert found.returns is not None
    for row, (advantages, returns) in enumerate(zip(per_row(found.advantages), per_row(found.returns), strict=True)):
        assert returns == pytest.approx([paid[row]] * len(returns))
        assert advantages == pytest.approx([paid[row] - means[row]] * len(advantages))


def test_which_estimators_compare_groups() -> None:
    found = {name for name in ("gae", "grpo", "dr_grpo", "rloo", "reinforce_pp")
             if compares_groups(RolloutConfig(advantage_estimator=name, samples_per_prompt=2))}  # fmt: skip
    assert found == {"grpo", "dr_grpo", "rloo"}
