"""The flow's own process killed at every phase of a run, one after another; the next one goes on each time."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from infra.clusters import ClusterRecord
from infra.errors import ClusterError
from tests.chaos.driver import Stage, start_flow
from tests.chaos.plan import PHASES, Aim
from tests.chaos.runs import Campaign, committed, policy_digest, state_digest
from tests.chaos.table import ROWS, Row
from tests.integration.cluster_processes import wait_until_nothing_is_left
from tests.integration.ppo_runs import TINY_RUN

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(1800)]

SEED = 11
LIFE_TIMEOUT_S = 600.0
END_TIMEOUT_S = 900.0


@pytest.fixture
def api_url() -> Iterator[str]:
    with prefect_test_harness(server_startup_timeout=120):
        yield str(PREFECT_API_URL.value())


def test_a_run_goes_on_from_flow_process_to_flow_process(lockstep: Campaign, api_url: str) -> None:
    lockstep.driver.end()
    lockstep.begin()
    aims = [Aim("flow", phase) for phase in PHASES]
    random.Random(SEED).shuffle(aims)
    stage = replace(lockstep.stage, environment={**lockstep.stage.environment, "PREFECT_API_URL": api_url})
    config, plan = lockstep.config, lockstep.made.plan
    assert plan.reward_model is not None
    parameters = {
        "preset": config.name,
        "model": config.model.path,
        "actor": "model/base",
        "reward_model": plan.reward_model.uri,
        "episodes": config.ppo.episodes,
        # set, so that a processor which is slow with bfloat16 computes as the undisturbed run did
        "overrides": TINY_RUN
        | {"ppo.cluster.num_makers": 1, "ppo.dtype": config.ppo.dtype, "ppo.rollout_dtype": config.ppo.rollout_dtype},
    }
    lives: list[tuple[Aim, int, float]] = []
    for place, aim in enumerate(aims):
        lives.append(
            (aim, *_live_and_die(lockstep, stage, parameters, aim, place * (config.ppo.episodes - 1) // len(aims)))
        )
    last = start_flow(stage, parameters)
    last.join(END_TIMEOUT_S)
    assert last.exitcode == 0
    digests = [state_digest(lockstep.made.store, lockstep.name, each + 1) for each in range(config.ppo.episodes)]
    ends = [started for _, _, started in lives[1:]] + [time.time()]
    for (aim, episode, started), end in zip(lives, [*ends[1:], time.time()], strict=True):
        events = [event for event in lockstep.folder.events() if event["time"] < end]
        ROWS.append(Row.of(aim, episode=episode, digest=digests[episode - 1], events=events, since=started))
    assert digests == lockstep.digests
    assert policy_digest(lockstep.made) == lockstep.policy
    lockstep.has_diverged = True  # begun anew by whoever plays next


def _live_and_die(
    lockstep: Campaign, stage: Stage, parameters: dict[str, object], aim: Aim, episodes: int
) -> tuple[int, float]:
    """Run the flow until it is killed, once so many episodes are committed.

    Returns:
        The episode that it died in, and when it began.
    """
    started = time.time()
    process = start_flow(stage, parameters)
    deadline = time.monotonic() + LIFE_TIMEOUT_S
    is_planned, cluster = False, None
    while process.is_alive():
        assert time.monotonic() < deadline, f"{aim} did not come"
        if not is_planned and committed(lockstep.made) >= episodes:
            lockstep.folder.make(aim, targets=(process.pid,))
            is_planned = True
        with suppress(FileNotFoundError, ClusterError):
            cluster = lockstep.cluster
        time.sleep(0.05)
    assert process.exitcode == -signal.SIGKILL, f"the flow ended with {process.exitcode} before {aim}"
    assert isinstance(cluster, ClusterRecord)
    wait_until_nothing_is_left(cluster)
    return committed(lockstep.made) + 1, started
