"""What is written to trackers comes from the store, and one that does not take it costs a run nothing but a line."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.presets import resolve
from infra import trackers as known_trackers
from infra.artifacts import ArtifactStore
from infra.errors import SettingsError
from tasks import trackers
from tasks.results import Parent, PPORun, StageResult
from tasks.tracker_process import TrackedRun
from tasks.trackers import track, track_ppo, track_report, with_trackers
from tests.tracked import held
from tests.unit.tasks.episodes import episode

KILLS = 4


@pytest.fixture(autouse=True)
def _no_writers() -> Iterator[None]:
    yield
    trackers._end_writers(0.0)


@pytest.fixture
def run() -> PPORun:
    config = resolve("quickstart", overrides={"name": "mine"})
    parent = Parent(uri="model/base", digest="0" * 64)
    return PPORun(
        name="mine-0123456789ab", key="0" * 64, preset="mine", config=config, actor=parent, reward_model=None,
        dataset=parent, source_digest="", flow_run=None,
    )  # fmt: skip


def commit(store: ArtifactStore, run: PPORun, episodes: int) -> None:
    """Commit a training state as far as trackers read it."""
    rows = [episode(at) for at in range(episodes)]
    history = [
        {
            "episode": at,
            "policy_version": at + 1,
            "metrics": {name: value for name, value in row.items() if name not in {"episode"}},
            "seconds": {"learn": 2.0, "generate": 1.0},
        }
        for at, row in enumerate(rows)
    ]
    store.commit(
        "ppo-state", run.name, {"state.json": json.dumps({"history": history}).encode()}, version=episodes,
        config=run.config.model_dump(mode="json") | {"data": {"problems": "s3://user:hunter22@host/rows.jsonl"}},
    )  # fmt: skip


def gathered(track: Any, *args: Any) -> list[TrackedRun]:
    found: list[TrackedRun] = list(track.__wrapped__(*args))
    return found


def test_the_committed_episodes_of_a_ppo_run_are_one_run_with_configuration_and_no_secret(
    store: ArtifactStore, run: PPORun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-key-of-somebody")
    assert gathered(track_ppo, run) == []
    commit(store, run, 2)
    (found,) = gathered(track_ppo, run)
    assert (found.project, found.name, found.is_over) == ("mine", "ppo-mine-0123456789ab", False)
    assert [(row.step, row.seconds) for row in found.rows] == [(1, 3.0), (2, 6.0)]
    assert [row.figures["ppo/kl"] for row in found.rows] == [0.0, 0.125]
    assert not {"ppo/episode", "ppo/policy_version"} & found.rows[0].figures.keys()
    assert found.parameters["ppo.lr"] == str(run.config.ppo.lr)
    assert found.parameters["data.problems"] == "s3://***@host/rows.jsonl"
    assert "hunter22" not in str(found)
    assert found.tags["artifact"] == "ppo-state/mine-0123456789ab@2"
    other_code = run.model_copy(update={"name": "mine-other", "continues": run.name})
    assert gathered(track_ppo, other_code)[0].name == found.name


def test_a_stage_is_a_run_of_its_steps_and_a_secret_is_hidden_wherever_it_stands(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cr3t-token")
    rows = b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n'
    made = store.commit(
        "sft", "mine", {"metrics.jsonl": rows}, config={"name": "mine", "model": {"path": "/s3cr3t-token/m"}},
        metrics={"first_loss": 2.0, "judge": "verifier", "ok": True},
    )  # fmt: skip
    result = StageResult(stage="sft", uri=made.uri, digest=made.digest, reused=False, seconds=1.0, metrics={})
    (found,) = gathered(track, result)
    assert found.name == f"sft-mine-1-{made.digest[:8]}"
    assert [(row.step, row.figures) for row in found.rows] == [
        (1, {"sft/loss": 2.0}),
        (2, {"sft/first_loss": 2.0, "sft/ok": 1.0}),
    ]
    assert found.parameters["model.path"] == "/***/m"
    assert found.tags["judge"] == "verifier"
    assert found.is_over


def test_a_night_is_a_run_with_the_verdict_and_all_policies(store: ArtifactStore) -> None:
    decision = {"difference": 0.25, "reason": "better", "wins": 3}
    facts = json.dumps({"decision": decision, "evaluations": {"sft": {"metrics": {"accuracy": 0.5}}}}).encode()
    made = store.commit("run", "mine", {"report.json": facts}, metrics={"promoted": True, "seconds": {"ppo": 2.0}})
    (found,) = gathered(track_report, made.uri)
    assert found.rows[0].figures == {
        "night/promoted": 1.0,
        "night/seconds.ppo": 2.0,
        "night/gate/difference": 0.25,
        "night/gate/wins": 3.0,
        "night/evaluation/sft/accuracy": 0.5,
    }
    assert found.tags["gate/reason"] == "better"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("mlfow", r"names 'mlfow', and known are mlflow, tensorboard, trackio, wandb; did you mean mlflow\?"),
        ("tensorboard, wandb", r"names wandb, and its package is not installed; install it \(.*\[wandb\]'\)"),
    ],
)
def test_a_tracker_that_cannot_be_had_is_refused_before_the_run(
    named: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(known_trackers.MODULES, "wandb", "no_such_package")
    monkeypatch.setenv("RLHF_TRACKERS", named)
    begun = []
    with pytest.raises(SettingsError, match=message):
        with_trackers(lambda: begun.append(1))()
    assert begun == []


SCRIPTS = {
    "away": "import sys; input(); print('ConnectionError: refused', flush=True)",
    "hangs": "import time; time.sleep(600)",
    "dies": "import os; os._exit(3)",
    "takes": "import sys\nfor line in sys.stdin:\n open(sys.argv[1], 'a').write(line); print('written', flush=True)",
}


@pytest.fixture
def becomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let the process that is started next for a tracker be one of SCRIPTS."""

    def become(what: str) -> None:
        monkeypatch.setattr(
            trackers._Writer,
            "_start",
            lambda _: subprocess.Popen(
                [sys.executable, "-S", "-c", SCRIPTS[what], str(tmp_path / "taken")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            ),
        )  # fmt: skip

    return become


@pytest.mark.parametrize(
    ("state", "sentence"),
    [("away", "ConnectionError: refused"), ("hangs", "it took more than 2 s"), ("dies", "")],
)
def test_a_tracker_that_does_not_take_it_is_told_once_and_catches_up_with_the_next_commit(
    state: str,
    sentence: str,
    becomes: Callable[[str], None],
    store: ArtifactStore,
    run: PPORun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RLHF_TRACKERS", "tensorboard")
    monkeypatch.setattr(trackers, "WRITE_S", 2.0 if state == "hangs" else 120.0)
    becomes(state)
    exchanged: list[str | None] = []
    exchange = trackers._Writer._exchange
    monkeypatch.setattr(trackers._Writer, "_exchange", lambda *args: exchanged.append(exchange(*args)) or exchanged[-1])

    @with_trackers
    def flow() -> str:
        for episodes in (1, 2):
            commit(store, run, episodes)
            started = time.monotonic()
            track_ppo(run)
            assert time.monotonic() - started < 30  # of a busy machine; a hanging tracker takes ten minutes
            deadline = time.monotonic() + 100
            while len(exchanged) < episodes:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        becomes("takes")
        monkeypatch.setattr(trackers, "WRITE_S", 120.0)
        commit(store, run, 3)
        track_ppo(run)
        return "went on"

    assert flow() == "went on"
    assert [fault is None for fault in exchanged] == [False, False, True, True]
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING and "tracker" in each.msg]
    assert len(told) == 1
    assert "the tracker tensorboard: not written, and the run goes on without" in told[0]
    assert sentence in told[0]
    taken = (tmp_path / "taken").read_text().splitlines()
    assert [line.count('"ppo/score"') for line in taken] == [3, 0]  # all steps, then `close`
    assert taken[-1] == "close"
    assert threading.active_count() < 20


@pytest.mark.integration
def test_after_kills_each_committed_step_stands_once(
    store: ArtifactStore, run: PPORun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that commits is killed at a random moment, its trackers' with it, and another one goes on."""
    monkeypatch.setenv("RLHF_TRACKERS", "tensorboard")
    draw, kills = random.Random(5), 0
    while kills < KILLS:
        child = os.fork()
        if child == 0:
            try:
                _commit_and_track(run)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.05, 6.0))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    committed = store.resolve(f"ppo-state/{run.name}").version
    with_trackers(lambda: track_ppo(run))()
    (found,) = held("tensorboard", "mine").values()
    assert committed > KILLS // 4
    assert found["ppo/kl"] == [(at + 1, 0.125 * at) for at in range(committed)]
    assert {len(steps) for steps in found.values()} == {committed}


def _commit_and_track(run: PPORun) -> None:
    """Commit an episode after the other, as a flow does, until killed."""
    from infra.artifacts import open_default_store

    trackers._WRITERS.clear()
    store = open_default_store()
    latest = store.latest("ppo-state", run.name)
    done = 0 if latest is None else latest.version
    while True:
        track_ppo(run)
        time.sleep(0.2)
        done += 1
        commit(store, run, done)
