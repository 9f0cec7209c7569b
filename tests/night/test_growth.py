"""How RLHF_HOME grows: nights in a row, with the days put forward between them, until it grows no more.

After each round all that is stored becomes as old as the round has nights: runs and events in the server's database,
files, and what the store has listed as unneeded. The rest is the product's: the server's own deletions, `rlhf tidy`.
"""

from __future__ import annotations

import json
import os
import sqlite3
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.artifacts.ref import LOCKS, TRASH
from infra.forked_processes import forking_python
from infra.services import seaweed
from infra.settings import CHECKOUT
from tests.integration.local_stack import running, wait_for
from tests.night.sites import Start, deployments, make_sites
from tests.night.year import NightStack, Year

pytestmark = [pytest.mark.night, pytest.mark.timeout(7200)]

NIGHTS = int(os.environ.get("GROWTH_NIGHTS", "300"))
SITES = 12
KEPT_DAYS = 60
PARTS = ("prefect", "store", "cache", "clusters", "logs", "failed-batches", "scratch")
SETTINGS = {
    "RLHF_RUNS_KEPT_DAYS": str(KEPT_DAYS),
    "RLHF_BATCHES_KEPT_DAYS": str(KEPT_DAYS),
    "RLHF_RETENTION": "dataset=5,sft=5,reward-model=5,policy=5,evaluation=5",
    "RLHF_LOG_LIMIT_MB": "0.2",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "5",
}
BATCH_BYTES = 100_000
FLAT = 1.15
"""The last third of the nights may hold so much more than the third before it."""


def test_what_a_year_of_nights_leaves_behind_becomes_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    rows: list[dict[str, int]] = []
    with running(GrowingStack(tmp_path / "home", tmp_path / ".env")) as stack:
        made = Year(stack, make_sites([f"site-{each}" for each in range(SITES)], 1e9, stack.home, None), tmp_path / "w")
        try:
            made.warm_up()
            register(made)
            while len(rows) * SITES < NIGHTS:
                play(made, day=len(rows))
                put_forward(stack, days=SITES)
                stack.rlhf("tidy")
                rows.append(sizes(stack.home))
                keep(rows)
        finally:
            made.cool_down()
    third = len(rows) // 3
    before, last = (max(sum(row.values()) for row in rows[start : start + third]) for start in (third, 2 * third))
    assert last <= FLAT * before, f"it held {before:,} bytes at most in the second third, and {last:,} in the last"


class GrowingStack(NightStack):
    """A stack whose commands and services have this test's settings."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, **SETTINGS}


def register(made: Year) -> None:
    """Register the sites' deployments, without schedules: their runs are started one round after the other."""
    file = made.stack.home / "night.yaml"
    starts = {site.name: Start() for site in made.sites}
    told = deployments(made.sites, starts, f"{forking_python(made.warm)} -mprefect.engine")
    file.write_text(told.replace("active: true", "active: false").replace("paused: true", "paused: false"))
    made.stack.deploy_tiny_flows(CHECKOUT, str(file))


def play(made: Year, *, day: int) -> None:
    """Play a night at each site, and leave a batch that could not be learnt from."""
    for site in made.sites:
        site.desk.write_data(site=site.name, day=day, gain=1)
    runs = {site.name: made.stack.start_run(f"pipeline/{site.name}", seed=day) for site in made.sites}
    for site in made.sites:
        run = runs[site.name]
        wait_for(partial(made.stack.is_over, run), f"night {day} of {site.name} to end", timeout_s=600)
        assert made.stack.run_state(run) == "COMPLETED", made.stack.message(run)
        batch = made.stack.home / "failed-batches" / f"{site.name}-{day}"
        batch.mkdir(parents=True)
        (batch / "batch.bin").write_bytes(os.urandom(BATCH_BYTES))


def put_forward(stack: NightStack, *, days: int) -> None:
    """Have some days pass for all that lies there."""
    with sqlite3.connect(stack.home / "prefect" / "prefect.db", timeout=60) as database:
        for table, column in (("flow_run", "end_time"), ("events", "occurred"), ("event_resources", "occurred")):
            database.execute(
                f"UPDATE {table} SET {column} = strftime('%Y-%m-%d %H:%M:%f000', {column}, ?)",
                (f"-{days} days",),
            )
    database.close()
    for file in (stack.home / "failed-batches").iterdir():
        then = file.stat().st_mtime - days * 24 * 3600
        os.utime(file, (then, then))
    seaweed.purge_log(stack.home, stack.state.ports, kept_days=0)  # more than a week has passed
    backend: Any = stack.store(stack.home.parent / "books")._backend
    for prefix, of in ((TRASH, lambda note: note), (LOCKS, lambda note: note["ended"])):
        field = "created" if prefix == TRASH else "when"
        for name in backend.children(prefix):
            stored = backend.read(prefix + name)
            note = stored and json.loads(stored.data)
            if dated := note and of(note):
                dated[field] = (datetime.fromisoformat(dated[field]) - timedelta(days=days)).isoformat()
                backend.delete(prefix + name)
                backend.create(prefix + name, json.dumps(note).encode())


def sizes(home: Path) -> dict[str, int]:
    """Return the bytes on disk by part."""
    return {part: sum(each.stat().st_blocks * 512 for each in (home / part).rglob("*")) for part in PARTS}


def keep(rows: list[dict[str, int]]) -> None:
    """Draw the picture, and keep what it shows, where GROWTH_PICTURE says so."""
    if not (target := os.environ.get("GROWTH_PICTURE")):
        return
    from matplotlib.figure import Figure

    Path(target).with_suffix(".json").write_text(json.dumps(rows))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    nights = [SITES * (each + 1) for each in range(len(rows))]
    shown = [part for part in PARTS if any(row[part] > 0 for row in rows)]
    axes.stackplot(nights, [[row[part] / 1e6 for row in rows] for part in shown], labels=shown)
    axes.set(xlabel="nights", ylabel="MB", title="What small nights leave in RLHF_HOME", xlim=(0, nights[-1]))
    axes.legend(loc="lower right")
    figure.savefig(target, dpi=80)
