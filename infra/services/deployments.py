"""Deployments: registered with the server when anything that they are made from has changed.

What a person has set in the UI stays: it is merged three ways, from what `prefect.yaml` said when it was registered
last, what it says now, and what the server has.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from infra.errors import ServiceError
from infra.services import prefect_api
from infra.services.prefect_yaml import FILE_NAME, NAMELESS, DeploymentEntry, local_zone
from infra.services.service import last_words

_TIMEOUT_S = 180
_ABSENT: Final = object()
_FORMER_ZONE = "Etc/UTC"
Values = dict[str, Any]
"""What a person can set of a deployment, by name; `parameters`, `tags`, `schedules`, `job_variables` by theirs."""
_SOURCES = (
    "flows/*.py",
    "flows/presets/*.py",
    "flows/presets/*.yaml",
    "rlhf_core/config/*.py",
    "infra/services/deployments.py",
    "infra/services/prefect_yaml.py",
)


def source_digest(checkout: Path) -> str:
    """Return a digest of all that deployments are made from: the file, presets, flows and the config's schema."""
    paths = [checkout / FILE_NAME, *(path for pattern in _SOURCES for path in sorted(checkout.glob(pattern)))]
    digest = hashlib.sha256(f"{checkout} {version('prefect')} {local_zone()}".encode())
    for path in paths:
        digest.update(f"\n{path.relative_to(checkout)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def all_present(api_url: str, names: Iterable[str]) -> bool:
    """Whether the server has all these deployments (`flow/deployment`)."""
    return all(prefect_api.deployment(api_url, name) is not None for name in names)


class Registered(NamedTuple):
    """What came of registering deployments."""

    said: dict[str, Values]
    """What the file says of each that is registered; of the others, what it said when they were."""
    refusals: list[str]
    """A sentence for each that is not."""


def deploy(
    checkout: Path,
    api_url: str,
    environment: Mapping[str, str],
    log: Path,
    entries: Mapping[str, DeploymentEntry],
    said_before: Mapping[str, Values],
    *,
    directory: str | None = None,
) -> Registered:
    """Register all deployments of a checkout; one that Prefect refuses stays as it was.

    Runs that wait to begin stay, also those of nights that were due while no worker ran.

    Args:
        checkout: where `prefect.yaml` lies.
        api_url: the Prefect server's.
        environment: of the process that imports the flows.
        log: where its output goes.
        entries: the file's deployments.
        said_before: of the last time, see `Registered`.
        directory: where runs have the checkout; None: here.

    Raises:
        ServiceError: if a flow cannot be imported, or the server does not answer.
    """
    flows = _read_flows(checkout, environment, log, {entry.entrypoint for entry in entries.values()})
    for flow in flows.values():
        flow["flow_id"] = prefect_api.call(api_url, "POST", "/flows/", {"name": flow.pop("name")})["id"]
    place = str(directory or checkout.resolve())
    said, refusals = dict(said_before), []
    for name, entry in entries.items():
        says = values = entry.values()
        if (there := prefect_api.deployment(api_url, name)) is not None:
            theirs = _values_of(there)
            values = _merged(_assumed(values, theirs) | said_before.get(name, {}), theirs, values)
        body = flows[entry.entrypoint] | _body(entry, values, place)
        try:
            answer = prefect_api.call(api_url, "POST", "/deployments/", body)
        except prefect_api.RefusedError as error:
            refusals.append(f"deployment {name} stays as it was, as Prefect refuses it: {error}{_as_set(values, says)}")
            continue
        if answer is None:
            refusals.append(f"deployment {name} stays as it was: there is no work pool {entry.work_pool.name!r}")
            continue
        said[name] = says
    return Registered(said, refusals)


def _as_set(values: Values, says: Values) -> str:
    """Return a hint where the parameters are not the file's alone."""
    if values["parameters"] == says["parameters"]:
        return ""
    theirs = sorted(key for key, value in values["parameters"].items() if says["parameters"].get(key) != value)
    return (
        f"; {', '.join(theirs)} is as it was set in Prefect: correct it on the deployment's page, then `rlhf up` again"
    )


def _body(entry: DeploymentEntry, values: Values, directory: str) -> dict[str, Any]:
    """Return a deployment as the server takes it, which fills no braces in its values."""
    schedules = []
    for slug, each in values["schedules"].items():
        when = {key: value for key, value in each.items() if key not in {"active", "parameters"}}
        schedule = {"schedule": when, "active": each["active"], "parameters": each["parameters"]}
        schedules.append(schedule if slug.startswith(NAMELESS) else {"slug": slug, **schedule})
    limit, options = values["concurrency_limit"], None
    if isinstance(limit, dict):
        options = {key: value for key, value in limit.items() if key != "limit"}
        limit = limit["limit"]
    return {
        **{key: values[key] for key in ("description", "paused", "parameters", "job_variables")},
        "name": entry.name,
        "entrypoint": entry.entrypoint,
        "enforce_parameter_schema": entry.enforce_parameter_schema,
        "tags": list(values["tags"]),
        "schedules": schedules,
        "concurrency_limit": limit,
        "concurrency_options": options,
        "work_pool_name": entry.work_pool.name,
        "work_queue_name": entry.work_pool.work_queue_name,
        "pull_steps": [{"prefect.deployments.steps.set_working_directory": {"directory": directory}}],
    }


def differences(api_url: str, entries: Mapping[str, DeploymentEntry]) -> dict[str, list[str]]:
    """Return what a person has set otherwise than the file has it, a phrase for each, by deployment.

    Raises:
        ServiceError: if the server does not answer.
    """
    found = {}
    for name, entry in entries.items():
        there = prefect_api.deployment(api_url, name)
        told = [] if there is None else list(_told(entry.values(), _values_of(there)))
        if told:
            found[name] = told
    return found


def _told(file: Values, theirs: Values, place: str = "") -> Iterator[str]:
    for key in sorted({*file, *theirs}):
        ours, its = file.get(key, _ABSENT), theirs.get(key, _ABSENT)
        where = f"{place}.{key}" if place else key
        if ours == its:
            continue
        if isinstance(its, dict):
            yield from _told(ours if isinstance(ours, dict) else {}, its, where)
        elif place == "tags":
            yield f"tag {key!r} {'removed' if its is _ABSENT else 'added'}"
        elif its is _ABSENT:
            yield f"{where} removed"
        elif where.startswith("job_variables"):  # there may be secrets in them
            yield f"{where} set"
        else:
            yield f"{where}: {its!r:.60}" + ("" if ours is _ABSENT else f" (the file has {ours!r:.60})")


def _values_of(deployment: Mapping[str, Any]) -> Values:
    """Return what a person can set of a deployment, as the server has it, in the form of `DeploymentEntry.values`."""
    schedules = {}
    for number, each in enumerate(deployment["schedules"], start=1):
        when = {key: value for key, value in each["schedule"].items() if value is not None and key != "day_or"}
        when |= {"day_or": False} if each["schedule"].get("day_or") is False else {}
        schedules[each.get("slug") or f"{NAMELESS}{number}"] = {
            **when,
            "active": each["active"],
            "parameters": each["parameters"],
        }
    limit: Any = (deployment["global_concurrency_limit"] or {}).get("limit")
    if limit is not None and (options := deployment["concurrency_options"]):
        limit = {"limit": limit, **{key: value for key, value in options.items() if value is not None}}
    return {
        "description": deployment["description"],
        "paused": deployment["paused"],
        "concurrency_limit": limit,
        "parameters": deployment["parameters"],
        "tags": dict.fromkeys(deployment["tags"], True),
        "schedules": schedules,
        "job_variables": deployment["job_variables"],
    }


def _merged(before: Values, theirs: Values, now: Values) -> Values:
    """Return what the file says now, but for all that differs on the server from what the file said before."""
    result: Values = {}
    for key in {**now, **theirs}:  # in the file's order
        base, its, ours = (each.get(key, _ABSENT) for each in (before, theirs, now))
        if all(isinstance(each, dict) for each in (base, its, ours)):
            result[key] = _merged(base, its, ours)
        elif (chosen := its if its != base else ours) is not _ABSENT:
            result[key] = chosen
    return result


def _assumed(file: Values, theirs: Values) -> Values:
    """Return what the file may have said where nothing was written down: all that differs counts as the person's.

    Our own words do not, nor does the zone of the nightly schedule as the releases before had it.
    """
    assumed = _of_both(file, theirs) | {"description": theirs["description"]}
    for slug, schedule in assumed["schedules"].items():
        if theirs["schedules"][slug].get("timezone") == _FORMER_ZONE:
            schedule["timezone"] = _FORMER_ZONE
    return assumed


def _of_both(file: Values, theirs: Values) -> Values:
    """Return what the file says of all that the server has, too."""
    return {
        key: _of_both(value, theirs[key]) if isinstance(value, dict) and isinstance(theirs[key], dict) else value
        for key, value in file.items()
        if key in theirs
    }


def _read_flows(
    checkout: Path, environment: Mapping[str, str], log: Path, entrypoints: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Return what `describe_flows` finds, from a process of its own: Prefect's import alone takes seconds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(suffix=".json", dir=log.parent) as found, log.open("wb") as output:
        code = "import sys; from infra.services.deployments import describe_flows; describe_flows(*sys.argv[1:])"
        try:
            status = subprocess.run(
                [sys.executable, "-c", code, found.name, *sorted(entrypoints)],
                cwd=checkout,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ServiceError(f"the flows were not imported within {_TIMEOUT_S} s: {last_words(log)}") from None
        if status != 0:
            raise ServiceError(f"the flows cannot be imported: {last_words(log)}")
        return dict(json.load(found))


def describe_flows(path: str, *entrypoints: str) -> None:
    """Write flows' names, versions and parameters' schemas, as a server keeps them, as JSON by entrypoint."""
    from prefect.flows import load_flow_from_entrypoint  # noqa: PLC0415 - Prefect, which takes seconds
    from prefect.utilities.callables import parameter_schema  # noqa: PLC0415

    flows: dict[str, Any] = {
        entrypoint: load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False) for entrypoint in entrypoints
    }
    told = {
        entrypoint: {
            "name": flow.name,
            "version": flow.version,
            # else the server makes a run of a misspelt parameter
            "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi()
            | {"additionalProperties": False},
        }
        for entrypoint, flow in flows.items()
    }
    Path(path).write_text(json.dumps(told), encoding="utf-8")
