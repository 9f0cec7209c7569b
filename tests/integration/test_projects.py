"""The whole pipeline, with stages of a few bytes: a champion belongs to one task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.artifacts import ArtifactStore, open_store
from infra.settings import CHECKOUT
from tests.integration.nights_of_projects import SUMS_PROJECT

pytestmark = [pytest.mark.integration, pytest.mark.stack]


class Nights(NamedTuple):
    decided: dict[str, dict[str, Any]]
    log: str
    store: ArtifactStore


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Nights:
    directory = tmp_path_factory.mktemp("projects")
    (directory / "store").mkdir()
    url = (directory / "store").as_uri()
    told = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    told |= {"RLHF_HOME": str(directory / "home"), "RLHF_ENV_FILE": str(directory / ".env"), "RLHF_STORE_URL": url}
    told["PREFECT_HOME"] = str(directory / "prefect")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.nights_of_projects"],
        cwd=CHECKOUT,
        env=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    decided = json.loads(done.stdout.splitlines()[-1])
    return Nights(decided, done.stderr, open_store(url, cache_dir=Path(directory / "cache")))


def test_a_champion_that_was_made_for_another_task_is_not_replaced(nights: Nights) -> None:
    sorting = nights.decided["sorting"]
    assert (sorting["promote"], sorting["policy"]) == (False, "policy/quickstart@2")
    assert str(sorting["reason"]).startswith(
        "policy/quickstart@2 is not compared with policy/quickstart@1, which was made for another task: chain_sum, "
    )
    [moved] = nights.store.aliases("policy", "quickstart")["champion"].history
    assert moved.uri == "policy/quickstart@1"
    assert "▸ project      quickstart, of the task number_sorting (" in nights.log


def test_a_champion_of_an_earlier_release_must_be_beaten_by_its_own_task_and_keeps_its_alias(nights: Nights) -> None:
    sums, project = nights.decided["sums"], SUMS_PROJECT
    assert (sums["promote"], sums["policy"], sums["incumbent"]) == (True, f"policy/{project}@1", "policy/quickstart@1")
    assert nights.store.resolve(f"policy/{project}@champion").uri == f"policy/{project}@1"
    assert f"▸ project      {project}, of the task chain_sum, judged by reasoning_gym:chain_sum" in nights.log
    assert "policy/quickstart@1 was promoted by an earlier release, for the same task: it stands in" in nights.log


def test_everything_that_a_run_stores_is_its_projects(nights: Nights) -> None:
    for kind in ("dataset", "sft", "reward-model", "policy", "evaluation", "run"):
        assert nights.store.latest(kind, SUMS_PROJECT) is not None, kind
    assert nights.store.resolve(f"run/{SUMS_PROJECT}").config["preset"] == "quickstart"
