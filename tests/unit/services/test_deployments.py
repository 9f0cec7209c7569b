"""What a person has set of a deployment stays when it is registered anew, and is told."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tzlocal.unix

from infra.errors import ServiceError
from infra.services import deployments, prefect_api
from infra.services.prefect_yaml import DeploymentEntry, hours_to_start
from infra.settings import CHECKOUT, inherited_environment

URL = "http://127.0.0.1:1/api"
CRON = {"cron": "0 2 * * *", "timezone": "Europe/Berlin", "day_or": True}
ENTRY = DeploymentEntry.model_validate(
    {
        "name": "nightly",
        "entrypoint": "flows/pipeline.py:pipeline",
        "description": "The night.",
        "tags": ["resumes", "nightly"],
        "parameters": {"preset": "llama7b"},
        "enforce_parameter_schema": True,
        "work_pool": {"name": "rlhf"},
        "schedules": [{"slug": "nightly", "cron": "0 2 * * *", "timezone": "Europe/Berlin", "active": False}],
    }
)


def on_server(**changes: Any) -> dict[str, Any]:
    """Return the deployment as the server has it after it was registered, with a person's changes."""
    scheduled = {"slug": "nightly", "schedule": CRON, "active": False, "parameters": {}}
    registered = {
        "description": "The night.",
        "paused": False,
        "global_concurrency_limit": None,
        "concurrency_options": None,
        "parameters": {"preset": "llama7b"},
        "tags": ["resumes", "nightly"],
        "schedules": [scheduled],
        "job_variables": {},
    }
    return deepcopy({**registered, **changes})


def body(values: Any, entry: DeploymentEntry = ENTRY) -> Any:
    return deployments._body(entry, values, "/checkout")


def kept(server: dict[str, Any], *, now: DeploymentEntry = ENTRY, before: DeploymentEntry | None = ENTRY) -> Any:
    """Return what is registered where the file said something before, and says something now."""
    theirs = deployments._values_of(server)
    base = deployments._assumed(now.values(), theirs) if before is None else before.values()
    return body(deployments._merged(base, theirs, now.values()), now)


def told(server: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(prefect_api, "deployment", lambda _url, _name: server)
    return deployments.differences(URL, {"pipeline/nightly": ENTRY}).get("pipeline/nightly", [])


def test_a_deployment_that_nobody_touched_is_what_the_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(on_server()) == body(ENTRY.values())
    assert told(on_server(), monkeypatch) == []
    changed = ENTRY.model_copy(update={"parameters": {"preset": "hh-rlhf", "seed": 3}, "tags": ("resumes", "other")})
    result = kept(on_server(), now=changed)
    assert (result["parameters"], result["tags"]) == ({"preset": "hh-rlhf", "seed": 3}, ["resumes", "other"])


@pytest.mark.parametrize("before", [ENTRY, None])  # the second: registered by a release that did not write it down
@pytest.mark.parametrize(
    ("changes", "key", "becomes", "says"),
    [
        (
            {"parameters": {"preset": "llama7b", "data": "/d"}},
            "parameters",
            {"preset": "llama7b", "data": "/d"},
            "parameters.data: '/d'",
        ),
        (
            {"parameters": {"preset": "quickstart"}},
            "parameters",
            {"preset": "quickstart"},
            "parameters.preset: 'quickstart' (the file has 'llama7b')",
        ),
        ({"paused": True}, "paused", True, "paused: True (the file has False)"),
        (
            {"global_concurrency_limit": {"limit": 2}, "concurrency_options": {"collision_strategy": "ENQUEUE"}},
            "concurrency_options",
            {"collision_strategy": "ENQUEUE"},
            "concurrency_limit.collision_strategy: 'ENQUEUE'; concurrency_limit.limit: 2",
        ),
        ({"tags": ["resumes", "nightly", "mine"]}, "tags", ["resumes", "nightly", "mine"], "tag 'mine' added"),
        ({"job_variables": {"env": {"A": "1"}}}, "job_variables", {"env": {"A": "1"}}, "job_variables.env.A set"),
    ],
)
def test_what_a_person_has_set_stays_and_is_told(
    before: DeploymentEntry | None,
    changes: dict[str, Any],
    key: str,
    becomes: Any,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = ENTRY.model_copy(update={"parameters": {"preset": "llama7b", "seed": 3}})
    result = kept(on_server(**changes), now=now, before=before)
    assert result[key] == (becomes | {"seed": 3} if key == "parameters" else becomes)
    assert result["parameters"]["seed"] == 3, "what the file has new comes all the same"
    assert "; ".join(told(on_server(**changes), monkeypatch)) == says


def test_an_upgrade_takes_the_files_own_words_and_zone_but_no_other_zone() -> None:
    def zone(former: str) -> tuple[str, str]:
        scheduled = {"slug": "nightly", "schedule": CRON | {"timezone": former}, "active": True, "parameters": {}}
        result = kept(on_server(description="Former words.", schedules=[scheduled]), before=None)
        return result["description"], result["schedules"][0]["schedule"]["timezone"]

    assert zone("Etc/UTC") == ("The night.", "Europe/Berlin")
    assert zone("Asia/Tokyo") == ("The night.", "Asia/Tokyo")


def test_what_a_person_has_taken_away_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    server = on_server(tags=["nightly"], schedules=[], parameters={})
    result = kept(server)
    assert (result["tags"], result["schedules"], result["parameters"]) == (["nightly"], [], {})
    assert told(server, monkeypatch) == [
        "parameters.preset removed",
        "schedules.nightly removed",
        "tag 'resumes' removed",
    ]


def test_a_schedule_of_a_persons_own_stays_beside_ours_and_ours_takes_what_the_file_has_new() -> None:
    every_hour = {"interval": 3600.0, "anchor_date": "2026-01-01T00:00:00Z", "timezone": "UTC"}
    switched_on = {"slug": "nightly", "schedule": CRON, "active": True, "parameters": {}}
    own = {"slug": None, "schedule": every_hour, "active": True, "parameters": {"seed": 1}}
    now = ENTRY.model_copy(
        update={"schedules": (ENTRY.schedules[0].model_copy(update={"cron": "30 3 * * *", "active": False}),)}
    )
    assert kept(on_server(schedules=[switched_on, own]), now=now)["schedules"] == [
        {
            "slug": "nightly",
            "schedule": {"cron": "30 3 * * *", "timezone": "Europe/Berlin"},
            "active": True,
            "parameters": {},
        },
        {"schedule": every_hour, "active": True, "parameters": {"seed": 1}},
    ]


def test_a_schedule_is_in_the_machines_zone_unless_it_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tzlocal.unix, "_cache_tz_name", None)  # of the process: `rlhf up` is a new one
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    schedule = {"slug": "n", "cron": "0 2 * * *", "active": False}
    entry = DeploymentEntry.model_validate({**ENTRY.model_dump(exclude={"concurrency_limit"}), "schedules": [schedule]})
    assert entry.values()["schedules"]["n"]["timezone"] == "Asia/Tokyo"
    assert ENTRY.values()["schedules"]["nightly"]["timezone"] == "Europe/Berlin"


def test_the_time_to_start_stands_in_a_tag() -> None:
    assert hours_to_start(["nightly", "starts-within-6h"]) == 6
    assert hours_to_start(["nightly"]) is None
    with pytest.raises(ValueError, match=r"written in hours: starts-within-6h"):
        DeploymentEntry.model_validate({**ENTRY.model_dump(exclude={"concurrency_limit"}), "tags": ["starts-within-6"]})


def test_what_prefect_refuses_stays_as_it_was_and_the_others_are_registered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = on_server(parameters={"preset": "llama7b", "seed": -1})
    there = {"pipeline/nightly": mine, "pipeline/other": on_server(), "pipeline/third": None}
    entries = {name: ENTRY.model_copy(update={"name": name.partition("/")[2]}) for name in there}
    posted: list[str] = []

    def call(_url: str, _method: str, path: str, given: Any) -> Any:
        if path == "/flows/":
            return {"id": "1"}
        if given["parameters"].get("seed") == -1:
            raise prefect_api.RefusedError("-1 is less than the minimum of 0")
        posted.append(given["name"])
        return None if given["name"] == "third" else {}

    monkeypatch.setattr(prefect_api, "call", call)
    monkeypatch.setattr(prefect_api, "deployment", lambda _url, name: there[name])
    monkeypatch.setattr(deployments, "_read_flows", lambda *_: {ENTRY.entrypoint: {"name": "pipeline"}})
    before = {"pipeline/nightly": {"description": "of then"}}
    said, refusals = deployments.deploy(tmp_path, URL, {}, tmp_path / "log", entries, before)
    assert posted == ["other", "third"]
    assert said == {**before, "pipeline/other": ENTRY.values()}, "the next time knows what was registered, and when"
    assert refusals == [
        "deployment pipeline/nightly stays as it was, as Prefect refuses it: -1 is less than the minimum of 0; seed is "
        "as it was set in Prefect: correct it on the deployment's page, then `rlhf up` again",
        "deployment pipeline/third stays as it was: there is no work pool 'rlhf'",
    ]


def test_a_flow_that_does_not_import_is_told(tmp_path: Path) -> None:
    (tmp_path / "shift.py").write_text(
        "from prefect import flow\nfrom nowhere import night\n\n\n@flow\ndef shift() -> None:\n    night()\n"
    )
    environment = {**inherited_environment(), "PYTHONPATH": str(CHECKOUT)}
    with pytest.raises(ServiceError, match=r"cannot be imported: .*nowhere"):
        deployments._read_flows(tmp_path, environment, tmp_path / "logs" / "deploy.log", ["shift.py:shift"])
