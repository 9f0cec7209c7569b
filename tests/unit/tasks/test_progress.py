"""Lines for people: where they go, and what episodes are called in them."""

from __future__ import annotations

import logging
import sys
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.logging.handlers import APILogHandler

from flows.pipeline import pipeline
from rlhf_core.config import DataConfig, PipelineConfig
from rlhf_core.ppo.state import EpisodeRecord
from tasks import ppo, progress
from tasks.progress import say, telling, with_lines_of_stages
from tasks.results import Parent, PPORun

Line = tuple[UUID | None, str]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """Lines that went to a flow run's log on the server alone, with the run's id."""
    found: list[Line] = []

    def emit(_: Any, record: Any) -> None:
        found.append((record.flow_run_id, record.getMessage()))

    monkeypatch.setattr(APILogHandler, "emit", emit)
    return found


def within(run: UUID | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what follows run as the flow run `run`."""
    monkeypatch.setattr(progress, "own_flow_run", lambda: run)


def test_a_stages_lines_stand_in_the_callers_log_once_and_its_own_are_not_doubled(
    sent: list[Line], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parent, child = uuid4(), uuid4()

    @with_lines_of_stages
    def flow() -> str:
        say("data", "its own")
        within(child, monkeypatch)
        say("ppo", "episode 1/3, 50 % right")
        within(parent, monkeypatch)
        return "done"

    within(parent, monkeypatch)
    with caplog.at_level(logging.INFO):
        assert flow() == "done"
        within(child, monkeypatch)
        say("ppo", "alone")
    assert sent == [(parent, "▸ ppo          episode 1/3, 50 % right")]
    assert [line for line in caplog.messages if "▸" in line] == [
        "▸ data         its own", "▸ ppo          episode 1/3, 50 % right", "▸ ppo          alone",
    ]  # fmt: skip


def test_outside_a_run_and_in_an_actor_nothing_is_sent(sent: list[Line], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    within(None, monkeypatch)
    with_lines_of_stages(lambda: say("sft", "without a run"))()
    within(uuid4(), monkeypatch)
    with telling(told.append):
        with_lines_of_stages(lambda: say("sft", "from an actor"))()
    assert (sent, told) == ([], ["▸ sft          from an actor"])


def test_the_pipelines_log_has_its_stages_lines(sent: list[Line], monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = uuid4(), uuid4()

    def begin(*_: Any, **__: Any) -> None:
        within(child, monkeypatch)
        say("sft", "step 1/2")
        raise KeyboardInterrupt

    within(parent, monkeypatch)
    monkeypatch.setattr(sys.modules["flows.pipeline"], "begin", begin)  # `flows.pipeline.pipeline` hides the module
    with pytest.raises(KeyboardInterrupt):
        pipeline.fn()
    assert sent == [(parent, "▸ sft          step 1/2")]


def test_an_episode_has_one_name_as_a_task_and_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    within(None, monkeypatch)
    config = PipelineConfig(name="test", data=DataConfig(task="chain_sum"))
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"episodes": 3})})
    run = PPORun(
        name="test-1", key="1", preset="test", config=config,
        actor=Parent(uri="sft/test@1", digest="1"), reward_model=None, dataset=Parent(uri="dataset/test@1", digest="1"),
        source_digest="1", flow_run=None,
    )  # fmt: skip
    record = EpisodeRecord(0, 1, "a", {"score": 0.5, "kl": 0.0, "length": 3.0}, {"learn": 1.0}, {})
    with caplog.at_level(logging.INFO):
        ppo._say_episode(record, 3)
    assert caplog.messages[-1].startswith("▸ ppo          episode 1/3  score 0.500")
    assert ppo._task_name({"run": run, "episode": 0}) == "episode 1/3"
    assert ppo._task_name({"run": run, "episode": 2}) == "episode 3/3"
