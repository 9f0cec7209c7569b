"""Several installations on one stack: each with a schedule, a desk and a champion's line of its own."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from infra.services import prefect_api
from infra.services.prefect_yaml import NEEDS_DATA, read_prefect_yaml
from infra.settings import CHECKOUT
from tests.night.notes import Desk

FLOW = "pipeline"
NIGHTLY = "pipeline/nightly"
EPISODES = 2
SCHEDULING_S = 15.0
"""The server makes a new deployment's runs within five seconds."""
LEFT_OUT_BY = "NIGHT_WITHOUT"
"""Names to a run of a control which safeguard it does without."""


@dataclass
class Site:
    """One installation."""

    name: str
    desk: Desk
    period_s: float
    phase_s: float
    """Its nights are due at this second of each period."""
    first_s: float = math.inf
    last_s: float = math.inf
    """From when to when its schedule was active."""
    bad_days: int | None = None
    """Every so many days' data make the model worse, so that it is not promoted; None: never."""

    def due(self) -> list[float]:
        """Return the times at which its nights were due: arithmetic, not Prefect's."""
        times: list[float] = []
        moment = math.ceil((self.first_s - self.phase_s) / self.period_s) * self.period_s + self.phase_s
        while moment <= self.last_s:
            times.append(moment)
            moment += self.period_s
        return times

    def until_due(self, now: float) -> float:
        """Return the seconds until a night is due."""
        return (self.phase_s - now) % self.period_s

    def day(self, now: float) -> int:
        """Return the number of the day."""
        return int((now - self.phase_s) // self.period_s)

    def write_data(self, now: float, **further: Any) -> None:
        """Put the data of a day there."""
        day = self.day(now)
        is_bad = self.bad_days is not None and day % self.bad_days == 0
        self.desk.write_data(site=self.name, day=day, gain=-1 if is_bad else 1, **further)


@dataclass(frozen=True)
class Start:
    """How a site's flow is started."""

    cold: bool = False
    """Whether by a process of its own that imports all it needs, as the product's is; else it is forked."""
    entrypoint: str = "tests/night/stub.py:pipeline"
    environment: dict[str, str] = field(default_factory=dict)
    less_tags: tuple[str, ...] = ()
    """Of the nightly deployment's, those that it has not."""

    def job_variables(self, fork: str) -> dict[str, Any]:
        """Return what the worker is told.

        Args:
            fork: the command that has a flow forked.
        """
        command = {} if self.cold else {"command": fork}
        return command | ({"env": self.environment} if self.environment else {})


def make_sites(names: Sequence[str], period_s: float, home: Path, bad_days: int | None) -> list[Site]:
    """Return installations whose nights are spread evenly over the period."""
    return [
        Site(name, Desk(home / "night" / name).open(), period_s, each * period_s / len(names), bad_days=bad_days)
        for each, name in enumerate(names)
    ]


def deployments(sites: Sequence[Site], starts: Mapping[str, Start], fork: str) -> str:
    """Return a file of deployments like the product's nightly one in all but flow, times and parameters.

    Args:
        sites: one deployment each.
        starts: by site, how its flow is started.
        fork: the command that has a flow forked.
    """
    nightly = read_prefect_yaml(CHECKOUT)[NIGHTLY].model_dump(mode="json", exclude_none=True)
    kept = {name: nightly[name] for name in nightly if name not in {"description", "parameters", "schedules"}}
    kept["tags"].remove(NEEDS_DATA)  # a site's lie at its desk
    found = [
        {
            **kept,
            "name": site.name,
            "paused": True,  # until all are registered: a server with runs to begin may be too busy for the next one
            "entrypoint": starts[site.name].entrypoint,
            "tags": [tag for tag in kept["tags"] if tag not in starts[site.name].less_tags],
            "parameters": {"preset": "quickstart", "episodes": EPISODES, "overrides": {"name": site.name}},
            "work_pool": {**kept["work_pool"], "job_variables": starts[site.name].job_variables(fork)},
            "schedules": [
                {
                    "slug": "nightly",
                    "interval": site.period_s,
                    "anchor_date": datetime.fromtimestamp(site.phase_s, UTC).isoformat(),
                    "timezone": "UTC",
                    "active": True,
                }
            ],
        }
        for site in sites
    ]
    return yaml.safe_dump({"deployments": json.loads(json.dumps(found))})  # no anchors: it is read as plain text too


def switch_on(api_url: str, site: Site) -> None:
    """Let a site's schedule begin."""
    found = prefect_api.deployment(api_url, f"{FLOW}/{site.name}")
    assert found is not None, site.name
    prefect_api.call(api_url, "POST", f"/deployments/{found['id']}/resume_deployment")
    site.first_s = time.time() + SCHEDULING_S


def switch_off(api_url: str, site: Site) -> None:
    """End a site's schedule, at a moment that is far from its nights."""
    while min(site.until_due(now := time.time()), site.period_s - site.until_due(now)) < site.period_s / 12:
        time.sleep(0.2)
    found = prefect_api.deployment(api_url, f"{FLOW}/{site.name}")
    assert found is not None, site.name
    [schedule] = found["schedules"]
    prefect_api.call(api_url, "PATCH", f"/deployments/{found['id']}/schedules/{schedule['id']}", {"active": False})
    site.last_s = time.time()


def runs_of(api_url: str, *sites: Site, **which: Any) -> Iterator[dict[str, Any]]:
    """Yield the runs of sites that the server knows.

    Args:
        api_url: the server's.
        sites: one or more.
        which: the filter of runs, as the server takes it. Without one there are a hundred runs to come for each site.
    """
    page = 200
    for offset in range(0, 100 * page, page):
        body = {
            "deployments": {"name": {"any_": [site.name for site in sites]}},
            "flow_runs": which,
            "sort": "EXPECTED_START_TIME_ASC",
            "limit": page,
            "offset": offset,
        }
        found = prefect_api.call(api_url, "POST", "/flow_runs/filter", body)
        yield from found
        if len(found) < page:
            return
