"""Flows of data that arrive, where nothing is new: each ends as completed, with the same sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.testing.utilities import prefect_test_harness

from flows.pipeline import pipeline
from flows.ppo import ppo
from flows.reward_model import reward_model
from flows.sft import sft
from infra.artifacts import open_default_store


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.mark.usefixtures("server")
def test_every_flow_without_news_ends_completed_and_only_a_night_stores_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("store", "arriving"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setenv("RLHF_STORE_URL", f"file://{tmp_path}/store")
    given = {"data": str(tmp_path / "arriving"), "name": "team", "overrides": {"data.arrivals": {}}}
    flows: list[Any] = [sft, reward_model, ppo, pipeline]
    states = [flow(**given, return_state=True) for flow in flows]
    assert [state.is_completed() for state in states] == [True] * len(flows)
    told = "nothing has arrived yet"
    assert [state.message for state in states] == [told] * 3 + [f"{told} (rlhf artifacts show run/team@1)"]
    assert len(open_default_store().list("run", "team")) == 1, "else a stage alone would count as a night"
