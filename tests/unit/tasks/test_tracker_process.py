"""Each real tracker holds each step once, whatever is written again, by whichever process."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra import trackers
from infra.settings import settings
from tasks.tracker_process import CLOSE, WRITTEN, Row, TrackedRun, as_line
from tests.tracked import held

NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(module) is None, reason=f"needs the extra {name}: pip install -e '.[{name}]'"
        ),
    )
    for name, module in trackers.MODULES.items()
]
TIMEOUT_S = 240.0


class Process:
    """The process as a flow starts it, spoken to line by line."""

    def __init__(self, name: str) -> None:
        directory = trackers.directory_of(settings())
        directory.mkdir(parents=True, exist_ok=True)
        ours = {"RLHF_TENSORBOARD": str(directory / "tensorboard"), "WANDB_MODE": "offline"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.tracker_process", name, str(directory / "lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=trackers.environment(settings()) | ours,
            start_new_session=True,
        )

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(TIMEOUT_S, self.kill)
        timer.start()
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        timer.cancel()
        return answer

    def write(self, *runs: TrackedRun) -> None:
        answer = self.ask(as_line(list(runs)))
        assert answer == WRITTEN, answer

    def close(self) -> None:
        assert self.ask(f"{CLOSE}\n") == WRITTEN
        assert self._process.wait(TIMEOUT_S) == 0

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def lose_input(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(TIMEOUT_S)


def run(steps: int, *, name: str = "ppo-mine-0123456789ab", is_over: bool = False, **figures: float) -> TrackedRun:
    rows = tuple(
        Row(step, 2.5 * step, {"ppo/score": step / 4, "ppo/raw/my.rewards:short": -float(step), **figures})
        for step in range(1, steps + 1)
    )
    return TrackedRun("mine", name, rows, {"ppo.lr": "0.001", "seed": "0"}, {"artifact": "policy/mine@1"}, is_over)


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def begin(name: str) -> Process:
        started.append(Process(name))
        return started[-1]

    yield begin
    for each in started:
        if each._process.poll() is None:
            each.kill()


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_written_again_and_goes_on_after_a_kill_holds_each_step_once(
    name: str, start: Callable[[str], Process]
) -> None:
    first = start(name)
    first.write(run(2))
    first.write(run(2), run(3))  # what it holds, and one step more
    first.kill()  # with all that its package holds back
    second = start(name)
    second.write(run(5))
    other = run(1, name="sft-mine-1-01234567", is_over=True)
    second.write(other)
    second.write(run(5, is_over=True), other)
    second.close()
    expected = [(step, step / 4) for step in range(1, 6)]
    assert held(name, "mine") == {
        "ppo-mine-0123456789ab": {
            "ppo/score": expected,
            "ppo/raw/my.rewards:short": [(step, -float(step)) for step in range(1, 6)],
        },
        "sft-mine-1-01234567": {"ppo/score": expected[:1], "ppo/raw/my.rewards:short": [(1, -1.0)]},
    }


@pytest.mark.parametrize("name", [each for each in NAMES if each.values[0] == "mlflow"])
def test_mlflow_has_parameters_tags_and_the_state_and_takes_a_step_that_was_cut_off(
    name: str, start: Callable[[str], Process]
) -> None:
    from mlflow.tracking import MlflowClient

    process = start(name)
    process.write(run(2))
    process.write(run(2, more=1.0))  # a figure that the steps before were cut off from
    process.close()
    client = MlflowClient(trackers.environment(settings())["MLFLOW_TRACKING_URI"])
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert found.data.params == {"ppo.lr": "0.001", "seed": "0"}
    assert found.data.tags["artifact"] == "policy/mine@1"
    assert found.info.status == "RUNNING"
    history = client.get_metric_history(found.info.run_id, "ppo/score")
    assert [each.timestamp - found.info.start_time for each in history] == [2500, 5000]
    assert held(name, "mine")["ppo-mine-0123456789ab"]["more"] == [(1, 1.0), (2, 1.0)]


def test_a_process_whose_flow_is_gone_ends(start: Callable[[str], Process]) -> None:
    process = start("tensorboard")
    process.write(run(1))
    assert process.lose_input() == -signal.SIGKILL


def test_what_goes_wrong_is_one_line(start: Callable[[str], Process]) -> None:
    place = trackers.directory_of(settings()) / "tensorboard"
    place.parent.mkdir(parents=True)
    place.write_text("")  # a file where the directory should be
    answer = start("tensorboard").ask(as_line([run(1)]))
    assert answer.startswith("NotADirectoryError: ")


def test_a_line_is_what_was_meant() -> None:
    told: list[dict[str, Any]] = json.loads(as_line([run(1)]))
    assert told[0]["rows"] == [[1, 2.5, {"ppo/score": 0.25, "ppo/raw/my.rewards:short": -1.0}]]
