"""One model over four trainers on a real Ray cluster, two of which are killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import ray

from rlhf_core.config import PPOConfig
from rlhf_core.errors import LostRankError
from tasks.failures import passes
from tasks.ppo import ppo_episode
from tests.integration.ppo_runs import Run, act_when, on_a_cluster
from tests.integration.test_trainer_ranks import PEER, small

pytestmark = [pytest.mark.integration, pytest.mark.clusters]


def test_two_of_four_ranks_that_hold_one_model_are_killed_and_the_run_ends_with_the_same_bits(
    forked: dict[str, str], tmp_path: Path
) -> None:
    config = small(tmp_path)
    sizes = {"strategy": "3d", "num_trainers": 4, "tp": 2, "pp": 2, "train_batch_size": 8, "ptx_batch_size": 4}
    ppo = PPOConfig.model_validate(config.ppo.model_dump(mode="json") | sizes)
    with patch.dict(os.environ, forked), on_a_cluster(config.model_copy(update={"ppo": ppo}), tmp_path) as run:
        run.begin()
        run.finish()
        weights, numbers = run.weights(), run.numbers()
        run.begin()
        ppo_episode.fn(run.plan, 0)
        kill_two(run)
        run.finish()
        assert run.numbers() == numbers
        assert run.weights() == weights


def kill_two(run: Run) -> None:
    """Kill two trainers, one of each stage, in the second episode."""
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(ppo_episode.fn, run.plan, 1)
        other = ray.get(ray.get_actor("trainer-3").ping.remote(), timeout=120)  # of each stage one

        def kill_both(own: int) -> None:
            for each in (own, other):
                os.kill(each, signal.SIGKILL)

        act_when(attempt, "episode 2: learning", kill_both, PEER)
        with pytest.raises(LostRankError, match=r"rank [13] of 4 has ended|trainer-[13] has ended") as caught:
            attempt.result(timeout=120)
    assert passes(caught.value)
