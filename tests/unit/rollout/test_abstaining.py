"""Advantages where judges fail are, for the samples that were judged, those of slow definitions over them alone."""

from __future__ import annotations

import random

import pytest
import torch

from rlhf_core.config import RolloutConfig
from rlhf_core.rollout.advantages import Estimates, Forwards, LegacyForm, estimate
from rlhf_core.types import EpisodeControls
from tests.reference import definitions

PROMPTS, GROUP, WIDTH, KL_COEF, GAMMA, LAM = 8, 4, 5, 0.1, 0.9, 0.8
ROWS = PROMPTS * GROUP
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(1, WIDTH + 1, (ROWS,), generator=GENERATOR).tolist()
LOGPROBS, REF, VALUES = (torch.randn(ROWS, WIDTH, generator=GENERATOR) for _ in range(3))
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
SCORES = torch.randint(0, 2, (ROWS,), generator=GENERATOR).float()
"""Right or wrong."""
RIGHT = SCORES.nonzero().flatten().tolist()


def killed(rows: list[int], share: float) -> list[int]:
    """Rows at which the judge fails; of the first prompt all but one, of the second all."""
    drawn = random.Random(0).sample(rows, round(share * len(rows)))
    return sorted({*drawn, 0, 1, 2, *range(GROUP, 2 * GROUP)})


KILLED = {"none": [], "at random": killed(list(range(ROWS)), 0.3), "right answers alone": killed(RIGHT, 0.3)}


def estimated(name: str, dead: list[int], *, form: LegacyForm = "trainer", **changes: object) -> Estimates:
    abstains = torch.zeros(ROWS, dtype=torch.bool)
    abstains[dead] = True
    options = {"gamma": GAMMA, "lam": LAM, "kl_coef": KL_COEF, **changes}
    return estimate(
        scores=torch.where(abstains, float("nan"), SCORES),
        abstains=abstains,
        forwards=Forwards(LOGPROBS, REF, VALUES, MASK),
        config=RolloutConfig(advantage_estimator=name, samples_per_prompt=GROUP, **options),
        controls=EpisodeControls(KL_COEF),
        legacy_form=form,
    )


def paid(row: int) -> list[float]:
    """Rewards of a response's tokens: the penalty of k1, and the score at the last."""
    kl = [(LOGPROBS - REF)[row, at].item() for at in range(LENGTHS[row])]
    return definitions.rewards(SCORES[row].item(), kl, KL_COEF)


def by_definition(name: str, row: int, judged: list[int]) -> list[float]:
    """What a judged response's tokens are worth beside the judged responses of its prompt."""
    if name == "gae":
        return definitions.gae(paid(row), VALUES[row, : LENGTHS[row]].tolist(), GAMMA, LAM)
    if name == "reinforce_pp":
        return definitions.reward_to_go(paid(row), GAMMA)
    group = [other for other in judged if other // GROUP == row // GROUP]
    place = group.index(row)
    scores = [SCORES[other].item() for other in group]
    totals = [sum(paid(other)) for other in group]
    if len(group) == 1:  # nothing to compare with
        worth = 0.0
    elif name == "grpo":
        penalties = [score - total for score, total in zip(scores, totals, strict=True)]
        compared = definitions.group_advantages(scores, scaled=True)[place] if len(set(scores)) > 1 else 0.0
        worth = compared - definitions.group_advantages(penalties)[place]
    else:
        worth = definitions.group_advantages(totals, leave_one_out=name == "rloo")[place]
    return [worth] * LENGTHS[row]


@pytest.mark.parametrize("dead", KILLED.values(), ids=KILLED)
@pytest.mark.parametrize("name", ["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_what_is_judged_is_worth_what_its_definition_says(name: str, dead: list[int]) -> None:
    found = estimated(name, dead)
    judged = [row for row in range(ROWS) if row not in dead]
    for row in judged:
        expected = by_definition(name, row, judged)
        assert found.advantages[row, : LENGTHS[row]].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5), row
        if found.returns is not None:
            values = VALUES[row, : LENGTHS[row]].tolist()
            returns = [a + v for a, v in zip(expected, values, strict=True)]
            assert found.returns[row, : LENGTHS[row]].tolist() == pytest.approx(returns, rel=1e-4, abs=1e-5)
    for table in (found.advantages, found.rewards):
        assert not table[dead].any()
        assert not table[~MASK].any()


@pytest.mark.parametrize("form", ["trainer", "detached"])
def test_upstreams_numbers_of_what_is_judged_are_those_without_a_failure(form: LegacyForm) -> None:
    dead = KILLED["at random"]
    judged = [row for row in range(ROWS) if row not in dead]
    found, whole = (estimated("gae", rows, form=form, legacy=True) for rows in (dead, []))
    assert torch.equal(found.advantages[judged], whole.advantages[judged])
    assert not found.advantages[dead].any()
