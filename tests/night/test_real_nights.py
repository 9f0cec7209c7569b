"""Three real nights, with a tiny model: the server is killed in SFT, the flow in PPO, the worker in evaluation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.services.prefect_yaml import NEEDS_DATA, read_prefect_yaml
from infra.settings import CHECKOUT
from tests.integration.local_stack import wait_for
from tests.integration.stages import EPISODES, at_stage, flow_process
from tests.integration.test_chain import small
from tests.night.books import read_champion
from tests.night.sites import NIGHTLY
from tests.night.table import markdown, show
from tests.night.year import NightStack, night_stack, send_signal
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.night, pytest.mark.timeout(1500)]

NAME = "small"
NIGHT_TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NightStack]:
    os.nice(10)  # the year that is played beside these nights has a clock to keep
    with night_stack(tmp_path_factory.mktemp("real")) as running:
        deploy(running, write_tiny_llama(model_of(running)))
        yield running


def deploy(stack: NightStack, model: Path, *, episodes: int = EPISODES) -> None:
    """Register the product's nightly deployment, small, or register it anew."""
    nightly = read_prefect_yaml(CHECKOUT)[NIGHTLY].model_dump(mode="json", exclude_none=True)
    given = {"preset": "quickstart", "model": str(model), "episodes": episodes, "overrides": small(name=NAME)}
    tags = [tag for tag in nightly["tags"] if tag != NEEDS_DATA]
    nightly |= {"name": NAME, "parameters": given, "tags": tags, "schedules": []}
    file = stack.home / "small.yaml"
    file.write_text(yaml.safe_dump({"deployments": [nightly]}))
    stack.deploy_tiny_flows(CHECKOUT, str(file))


def kill_service(stack: NightStack, name: str) -> None:
    """Kill a service, and have it started again."""
    process = stack.service(name)
    assert process is not None
    process.kill()
    stack.up()


def kill_flow(stack: NightStack, run: str) -> None:
    """Kill the night's process with its Ray cluster, and register the deployment anew, with more to do."""
    send_signal(flow_process(stack, run).pid, signal.SIGKILL)
    deploy(stack, model_of(stack), episodes=EPISODES + 1)


def model_of(stack: NightStack) -> Path:
    return stack.home.parent / "model"


NIGHTS: tuple[tuple[str, str, Callable[[NightStack, str], Any], int], ...] = (
    ("server", "sft", lambda stack, _: kill_service(stack, "server"), 1),
    ("flow", "ppo", kill_flow, 2),
    ("worker", "evaluate", lambda stack, _: kill_service(stack, "worker"), 1),
)


def test_three_nights_with_a_kill_each_are_completed_and_the_champions_line_is_whole(
    stack: NightStack, tmp_path: Path
) -> None:
    rows = [("real night", "killed", "in", "starts", "state", "says")]
    try:
        for number, (victim, stage, strike, starts) in enumerate(NIGHTS, 1):
            run = stack.start_run(f"pipeline/{NAME}", seed=number)
            at_stage(stack, run, stage)
            strike(stack, run)
            wait_for(partial(stack.is_over, run), f"the night {run} to end", timeout_s=NIGHT_TIMEOUT_S)
            found = stack.run(run)
            row = (str(number), victim, stage, str(found["run_count"]), found["state"]["name"], stack.message(run))
            rows.append(row)
            assert (found["state"]["type"], found["run_count"]) == ("COMPLETED", starts), row
    finally:
        show(markdown(rows))
    store = stack.store(tmp_path / "cache")
    policies = [store.resolve(f"policy/{NAME}@{number}") for number in (1, 2, 3)]
    episodes = [policy.config["ppo"]["episodes"] for policy in policies]
    assert episodes == [EPISODES, EPISODES, EPISODES + 1], "a run that is started again is what it was when it began"
    champion = read_champion(store, NAME)
    assert champion is not None
    assert [move.uri for move in champion.history] == [f"policy/{NAME}@{number}" for number in (1, 2, 3)]
    states = [store.list("ppo-state", f"{NAME}-{str(policy.key)[:12]}") for policy in policies]
    assert [[each.has_ended for each in of_one] for of_one in states] == [[True]] * 3
    assert [len(store.list(kind, NAME)) for kind in ("dataset", "sft", "policy", "run")] == [3, 3, 3, 3]
