"""Twenty kills of the flow's process and of the trainer, beside trackers: each step stands once, in one run of each."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from infra import trackers
from infra.clusters import ClusterRecord
from infra.errors import ClusterError
from tests.chaos.driver import Stage, start_flow
from tests.chaos.plan import RANK_PHASES, Aim
from tests.chaos.runs import Campaign, committed, policy_digest, state_digest, surroundings
from tests.integration.cluster_processes import wait_until_nothing_is_left
from tests.integration.ppo_runs import TINY_RUN
from tests.tracked import held

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(3600)]

KILLS = 20
TRAINERS_IN_A_LIFE = 2
"""Kills of the trainer in one process of the flow: a third would end its task's attempts."""
LIFE_TIMEOUT_S = 900.0
INSTALLED = [name for name, module in trackers.MODULES.items() if importlib.util.find_spec(module)]


@pytest.fixture
def api_url() -> Iterator[str]:
    with prefect_test_harness(server_startup_timeout=120):
        yield str(PREFECT_API_URL.value())


def test_after_twenty_kills_each_step_stands_once_in_one_run(lockstep: Campaign, api_url: str) -> None:
    lockstep.driver.end()
    lockstep.begin()
    told = {"PREFECT_API_URL": api_url, "RLHF_TRACKERS": " ".join(INSTALLED), "WANDB_MODE": "offline"}
    stage = replace(lockstep.stage, environment={**lockstep.stage.environment, **told})
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
    phases = sorted(RANK_PHASES)
    kills = 0
    while kills < KILLS:
        episodes = kills * (config.ppo.episodes - 1) // KILLS
        aims = [Aim("trainer", phases[(kills + each) % len(phases)]) for each in range(TRAINERS_IN_A_LIFE)]
        aims = [*aims, Aim("flow", phases[kills % len(phases)])][: KILLS - kills]
        kills += _live_and_die(lockstep, stage, parameters, aims, episodes)
    last = start_flow(stage, parameters)
    last.join(LIFE_TIMEOUT_S)
    assert last.exitcode == 0
    lockstep.has_diverged = True  # begun anew by whoever plays next
    digests = [state_digest(lockstep.made.store, lockstep.name, each + 1) for each in range(config.ppo.episodes)]
    assert digests == lockstep.digests, "the trackers changed the run"
    assert policy_digest(lockstep.made) == lockstep.policy
    state = lockstep.made.store.resolve(f"ppo-state/{lockstep.name}@{config.ppo.episodes}")
    scores = [
        (record["episode"] + 1, pytest.approx(record["metrics"]["score"]))
        for record in lockstep.made.store.read_json(state, "state.json")["history"]
    ]
    with surroundings(stage):
        for name in INSTALLED:
            (run,) = held(name, config.name).values()
            assert run["ppo/score"] == scores, name
            assert {len(steps) for steps in run.values()} == {len({step for step, _ in run["ppo/score"]})}, name


def _live_and_die(
    lockstep: Campaign, stage: Stage, parameters: dict[str, object], aims: list[Aim], episodes: int
) -> int:
    """Run the flow, and kill its trainers and at last itself, once so many episodes are committed; return the kills."""
    process = start_flow(stage, parameters)
    deadline = time.monotonic() + LIFE_TIMEOUT_S
    waiting, cluster = list(aims), None
    while process.is_alive():
        assert time.monotonic() < deadline, f"{waiting} did not come"
        if waiting and lockstep.folder.pending() is None and committed(lockstep.made) >= episodes:
            aim = waiting.pop(0)
            lockstep.folder.make(aim, targets=(process.pid,) if aim.victim == "flow" else ())
        with suppress(FileNotFoundError, ClusterError):
            cluster = lockstep.cluster
        time.sleep(0.05)
    if aims[-1].victim == "flow" and not waiting and not lockstep.folder.forget():
        assert process.exitcode == -signal.SIGKILL, f"the flow ended with {process.exitcode}"
    assert isinstance(cluster, ClusterRecord)
    wait_until_nothing_is_left(cluster)
    return len(aims) - len(waiting)
