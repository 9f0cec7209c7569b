"""Every process of a lockstep run is killed at every phase: each time the bits are those of the undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.chaos.plan import PHASES, Aim, Victim
from tests.chaos.runs import Campaign, campaign, tiny_config

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(1800)]

SEED = 7
OCCURRENCES = {
    "lease": 4,
    "buffer": 4,
    "generate": 2,
    "score": 2,
    "send": 2,
    "learn": 4,
    "between_steps": 4,
    "upload": 2,
}
"""How often each phase comes in an episode at least, in whoever comes there most often; all others come once."""


def seeded(victims: tuple[Victim, ...]) -> list[Aim]:
    """Each pair of a process and a phase, in a random order, at a random occurrence."""
    draw = random.Random(SEED)
    aims = [Aim(victim, phase, draw.randint(1, OCCURRENCES.get(phase, 1))) for victim in victims for phase in PHASES]
    draw.shuffle(aims)
    return aims


TWO_MAKERS = seeded(("maker", "all makers", "trainer"))
ONE_MAKER = seeded(("raylet", "head", "driver"))
TWO_TRAINERS = seeded(("second rank",))


@pytest.fixture(scope="module")
def one_maker(
    lockstep: Campaign, forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Campaign]:
    """The same run with one process less: the numbers depend on no maker."""
    lockstep.driver.end()
    directory = tmp_path_factory.mktemp("solo")
    with campaign(tiny_config(directory, cluster__num_makers=1), directory, known=lockstep, environment=forked) as made:
        yield made


@pytest.fixture(scope="module")
def two_trainers(forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    directory = tmp_path_factory.mktemp("two")
    config = tiny_config(directory, strategy="ddp", num_trainers=2, train_batch_size=4, cluster__num_makers=1)
    with campaign(config, directory, environment=forked) as made:
        yield made


@pytest.mark.parametrize("aim", TWO_MAKERS, ids=str)
def test_a_run_whose_process_was_killed_goes_on_to_the_same_bits(lockstep: Campaign, aim: Aim) -> None:
    lockstep.strike(aim)


@pytest.mark.parametrize("aim", ONE_MAKER, ids=str)
def test_a_run_whose_cluster_went_goes_on_to_the_same_bits(one_maker: Campaign, aim: Aim) -> None:
    one_maker.strike(aim)


@pytest.mark.parametrize("aim", TWO_TRAINERS, ids=str)
def test_a_run_of_two_ranks_goes_on_to_the_same_bits(one_maker: Campaign, two_trainers: Campaign, aim: Aim) -> None:
    one_maker.driver.end()
    two_trainers.strike(aim)


def test_the_last_runs_end_with_the_same_policy(
    lockstep: Campaign, one_maker: Campaign, two_trainers: Campaign
) -> None:
    for each in (lockstep, one_maker, two_trainers):
        each.finish()
        each.driver.end()
        each.has_diverged = True  # over: whoever plays it next begins


def test_every_pair_was_hit() -> None:
    """All that exist: every process at every phase, whoever comes there."""
    aims = [*TWO_MAKERS, *ONE_MAKER, *TWO_TRAINERS]
    assert len({(aim.victim, aim.phase) for aim in aims}) == len(aims) == 7 * len(PHASES)
