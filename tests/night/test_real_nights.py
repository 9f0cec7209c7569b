"""Three real nights, with a tiny model: the server is killed in SFT, the flow in PPO, the worker in evaluation."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from infra.process_record import is_live
from infra.services.prefect_yaml import read_prefect_yaml
from infra.settings import CHECKOUT
from tests.integration.local_stack import turn, wait_for
from tests.integration.test_chain import small
from tests.night.books import read_champion
from tests.night.sites import NIGHTLY
from tests.night.table import LINES, markdown
from tests.night.year import NightStack, end_process, ended_well
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.night, pytest.mark.timeout(1500)]

NAME = "small"
EPISODES = 2
STAGES = ("sft", "reward-model", "ppo", "evaluate")
"""The flows that a night calls, in order."""
STAGE_TIMEOUT_S, NIGHT_TIMEOUT_S = 300.0, 600.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NightStack]:
    directory = tmp_path_factory.mktemp("real")
    running = NightStack(directory / "home", directory / ".env")
    with ended_well(running):
        with turn():
            running.up()
        deploy(running, write_tiny_llama(directory / "model"))
        yield running


def deploy(stack: NightStack, model: Path) -> None:
    """Register the product's nightly deployment anew, small."""
    nightly = read_prefect_yaml(CHECKOUT)[NIGHTLY].model_dump(mode="json", exclude_none=True)
    given = {"preset": "quickstart", "model": str(model), "episodes": EPISODES, "overrides": small(name=NAME)}
    nightly |= {"name": NAME, "parameters": given, "schedules": []}
    file = stack.home / "small.yaml"
    file.write_text(yaml.safe_dump({"deployments": [nightly]}))
    stack.deploy_tiny_flows(CHECKOUT, str(file))


def at_stage(stack: NightStack, run: str, stage: str) -> None:
    """Wait until a night is at a stage, and in PPO until an episode is behind it."""

    def has_come() -> bool:
        if len(stack.children(run)) <= STAGES.index(stage):
            return False
        return stage != "ppo" or any(f"episode 1/{EPISODES}" in line for line in stack.log(run))

    wait_for(has_come, f"the night {run} to come to {stage}", timeout_s=STAGE_TIMEOUT_S)


def flow_process(stack: NightStack, run: str) -> psutil.Process:
    """Return the process in which Prefect runs a night."""

    def look() -> psutil.Process | None:
        found = [each for each in stack.processes_of(run) if is_live(each) and "prefect.engine" in each.cmdline()]
        return found[0] if found else None

    return wait_for(look, f"a process of {run}", timeout_s=60)


def kill_service(stack: NightStack, name: str) -> None:
    """Kill a service, and have it started again."""
    process = stack.service(name)
    assert process is not None
    process.kill()
    stack.up()


def kill_flow(stack: NightStack, run: str) -> None:
    """Kill the night's process; whatever it holds of a Ray cluster goes with it."""
    end_process(flow_process(stack, run).pid, signal.SIGKILL)


def is_over(stack: NightStack, run: str) -> bool:
    """Whether a night has ended; one that crashed is started again."""
    return stack.run_state(run) in {"COMPLETED", "FAILED", "CANCELLED"}


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
            wait_for(partial(is_over, stack, run), f"the night {run} to end", timeout_s=NIGHT_TIMEOUT_S)
            found = stack.run(run)
            row = (str(number), victim, stage, str(found["run_count"]), found["state"]["name"], stack.message(run))
            rows.append(row)
            assert (found["state"]["type"], found["run_count"]) == ("COMPLETED", starts), row
    finally:
        LINES.extend(markdown(rows))
    store = stack.store(tmp_path / "cache")
    champion = read_champion(store, NAME)
    assert champion is not None
    assert [move.uri for move in champion.history] == [f"policy/{NAME}@{number}" for number in (1, 2, 3)]
    assert [len(store.list(kind, NAME)) for kind in ("dataset", "sft", "policy", "run")] == [3, 3, 3, 3]
