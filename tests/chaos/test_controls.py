"""What the comparison of bits would notice: another seed, weights that stay, a recovery that forgets something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tests.chaos.driver import Driver
from tests.chaos.plan import Aim
from tests.chaos.runs import Campaign, campaign, tiny_config
from tests.chaos.watcher import Forgotten

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(1800)]


def test_weights_differ_after_every_episode(lockstep: Campaign) -> None:
    assert len(set(lockstep.digests)) == lockstep.config.ppo.episodes


def test_another_seed_gives_other_weights(lockstep: Campaign, forked: dict[str, str], tmp_path: Path) -> None:
    lockstep.driver.end()
    with campaign(tiny_config(tmp_path, seed=1), tmp_path, environment=forked) as other:
        assert not {*other.digests, other.policy} & {*lockstep.digests, lockstep.policy}


@pytest.mark.parametrize("forgotten", [what for what in get_args(Forgotten) if what])
def test_a_recovery_that_forgets_something_is_noticed(lockstep: Campaign, forgotten: Forgotten) -> None:
    """One step of the recovery is skipped, and the bits are others two episodes later."""
    lockstep.driver.end()
    honest, lockstep.driver = lockstep.driver, Driver(replace(lockstep.stage, forgets=forgotten), lockstep.made.plan)
    try:
        lockstep.begin()
        assert lockstep.play(0).is_done
        lockstep.due = 1
        with pytest.raises(AssertionError, match=r"^after trainer at learn"):
            lockstep.strike(Aim("trainer", "learn"))
    finally:
        lockstep.driver.end()
        lockstep.driver, lockstep.has_diverged = honest, True
