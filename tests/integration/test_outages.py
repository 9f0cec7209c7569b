"""A whole night while its store, its server, or what takes its pages is away, again and again: it is delayed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra.services import prefect_api
from tasks.report.write import PAGE
from tests.integration.behind_proxies import behind, start_with
from tests.integration.flaky_proxy import FlakyProxy
from tests.integration.local_stack import LocalStack, wait_for
from tests.integration.test_chain import small
from tests.integration.waiting_run import ONE_START
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.integration, pytest.mark.outages, pytest.mark.timeout(0)]

STORE_AWAY_S = float(os.environ.get("STORE_AWAY_S", "20"))
"""At each border; with 300 it takes three quarters of an hour."""
SERVER_AWAY_S = float(os.environ.get("SERVER_AWAY_S", "14"))
"""In each stage; 60 and 480 are worth a try, too."""
RUN_S = 1200.0
"""Longest a night may take beside its outages, on two busy cores."""
BORDERS = (
    rb"PUT \S*/versions/dataset/quickstart/",
    rb"PUT \S*/versions/sft/",
    rb"PUT \S*/versions/dataset/quickstart-preferences/",
    rb"PUT \S*/versions/reward-model/",
    rb"PUT \S*/versions/ppo-state/",
    rb"PUT \S*/versions/policy/",
    rb"PUT \S*/versions/evaluation/",
    rb"PUT \S*/aliases/policy/\S*champion",
    rb"PUT \S*/versions/run/",
)
"""What each stage writes last; what comes next is the following stage."""
BEGUN = rb"PUT \S*/plans/"
"""What a run writes first, before its data are read."""


def night(
    stack: LocalStack, directory: Path, *, seed: int, store: FlakyProxy, server: FlakyProxy, outages_s: float
) -> str:
    """Let a night run to its end and return its id."""
    model = write_tiny_llama(directory / f"tiny-{seed}", seed=seed)
    given = {"model": str(model), "episodes": 2, "seed": seed, "overrides": small()}
    run = start_with(stack, "pipeline/quickstart", behind(stack, store=store, server=server), **given)
    wait_for(lambda: stack.is_over(run), "the night to end", timeout_s=RUN_S + outages_s)
    return run


def promoted_at_the_first_start(stack: LocalStack, run: str) -> bool:
    """Return whether a run is Completed and its policy champion, and nothing had to start it again."""
    assert stack.history(run) == ["Scheduled", *ONE_START, "Completed"], (
        stack.history(run),
        stack.message(run),
        stack.log(run),
    )
    assert prefect_api.call(stack.api_url, "GET", f"/flow_runs/{run}")["run_count"] == 1
    return stack.message(run).startswith("promoted: policy/quickstart@")


def not_shown(stack: LocalStack, run: str) -> list[str]:
    """Return what a run's log says was not shown."""
    return [line.partition(":")[0] for line in stack.log(run) if "not shown, and the run goes on without" in line]


def test_a_store_that_is_away_at_every_border_and_pages_that_nobody_takes_delay_a_night(
    stack: LocalStack, store_proxy: FlakyProxy, server_proxy: FlakyProxy, tmp_path: Path
) -> None:
    server_proxy.answer_unavailable(rb"POST /api/artifacts/", times=10_000)
    for border in BORDERS:
        store_proxy.leave_after(border, STORE_AWAY_S)
    store_proxy.leave(STORE_AWAY_S)  # before the first stage, too
    outages_s = (len(BORDERS) + 1) * STORE_AWAY_S
    run = night(stack, tmp_path, seed=11, store=store_proxy, server=server_proxy, outages_s=outages_s)
    assert promoted_at_the_first_start(stack, run)
    assert len(store_proxy.refused) == len(BORDERS) + 1
    assert all(store_proxy.refused), store_proxy.refused
    assert server_proxy.count > 0
    untold = ["the page of the data in Prefect", PAGE]  # the run's own; each stage has told so in its own log
    wait_for(lambda: not_shown(stack, run) == untold, "the report's page, last of the run's lines", timeout_s=60)


def test_a_server_that_is_away_in_every_stage_delays_a_night(
    stack: LocalStack, store_proxy: FlakyProxy, server_proxy: FlakyProxy, tmp_path: Path
) -> None:
    for border in (BEGUN, *BORDERS):
        store_proxy.leave_after(border, SERVER_AWAY_S, leaver=server_proxy)
    outages_s = (len(BORDERS) + 1) * SERVER_AWAY_S
    run = night(stack, tmp_path, seed=12, store=store_proxy, server=server_proxy, outages_s=outages_s)
    assert promoted_at_the_first_start(stack, run)
    assert len(server_proxy.refused) == len(BORDERS) + 1
    assert all(server_proxy.refused), server_proxy.refused
