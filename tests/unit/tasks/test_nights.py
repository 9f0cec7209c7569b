"""What tags ask of a run before it begins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun

from flows.presets import draft_of
from infra.services.prefect_yaml import NEEDS_DATA
from rlhf_core.errors import ConfigError
from tasks import nights
from tasks.nights import check_data_are_named, missed

WITHIN = "starts-within-6h"


def test_a_run_that_needs_the_users_data_refuses_a_presets_own_problems() -> None:
    toy, real = draft_of("llama7b").config, draft_of("hh-rlhf").config
    with pytest.raises(ConfigError, match=r"none are named: it would train on 'chain_sum'.*set its parameter `data`"):
        check_data_are_named([NEEDS_DATA], toy, None)
    check_data_are_named([NEEDS_DATA], toy, "mine.jsonl")
    check_data_are_named([NEEDS_DATA], real, None)
    check_data_are_named([], toy, None)


def run_due(hours_ago: float, *, tags: tuple[str, ...] = (WITHIN,), **changes: Any) -> FlowRun:
    due = datetime.now(UTC) - timedelta(hours=hours_ago)
    given = {"auto_scheduled": True, "expected_start_time": due, **changes}
    return FlowRun(flow_id="00000000-0000-0000-0000-000000000001", tags=list(tags), **given)


@pytest.mark.parametrize(
    ("run", "is_skipped"),
    [
        (run_due(7), True),
        (run_due(5), False),
        (run_due(7, tags=("nightly",)), False),
        (run_due(7, auto_scheduled=False), False),  # a person started it
    ],
)
def test_a_night_that_no_worker_took_in_time_is_skipped(
    run: FlowRun, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nights, "_last_due", lambda *_: None)
    reason = missed(run)
    assert (reason is not None) == is_skipped
    if reason is not None:
        assert "no worker took it within 6 h (tag 'starts-within-6h')" in reason


def test_of_nights_that_are_due_at_once_the_last_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nights, "_last_due", lambda *_: run_due(0.1, name="brave-owl"))
    assert str(missed(run_due(2))).endswith("; the run 'brave-owl', which is due by now too, takes its place")
