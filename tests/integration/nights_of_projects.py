"""Nights of several projects in one process, with the stages of `tests/night/stages.py`; prints what each decided."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from prefect.testing.utilities import prefect_test_harness

SUMS: dict[str, Any] = {"data.task": "chain_sum", "data.task_parameters": {}, "data.demonstrations": None}
SUMS_PROJECT = "quickstart-chain-sum-64c3eb"
NIGHTS: dict[str, dict[str, Any]] = {"sorting": {}, "sums": {"overrides": SUMS}}


def main() -> None:
    """Run the nights of NIGHTS in order."""
    from tasks import context
    from tests.night.notes import Desk
    from tests.night.stages import stand_in  # it changes this process

    pipeline, home = stand_in(), Path(os.environ["RLHF_HOME"])

    for name in ("quickstart", SUMS_PROJECT):
        Desk(home / "night" / name).open().write_data(site=name, day=0, gain=1)
    _promote_as_before()
    decided = {}
    with prefect_test_harness(server_startup_timeout=120):
        for night, parameters in NIGHTS.items():
            context.root_flow_run.cache_clear()  # type: ignore[attr-defined]  # the stub asks once for a process
            decided[night] = pipeline(**parameters).model_dump(mode="json")
    json.dump(decided, sys.stdout)


def _promote_as_before() -> None:
    """Leave a champion for sums under the preset's name, as releases did that knew no projects."""
    from flows.presets import resolve
    from infra.artifacts import open_default_store
    from tests.night.stages import BODY, SCORE

    store = open_default_store()
    config = resolve("quickstart", overrides=SUMS).model_dump(mode="json")
    del config["preset"]
    made = store.commit("policy", "quickstart", {BODY: b"before"}, config=config, metrics={SCORE: -1})
    store.set_alias(made.uri, "champion", why="better", who="an earlier release")


if __name__ == "__main__":
    main()
