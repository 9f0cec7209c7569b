"""Deployments: registered with the server when anything that they are made from has changed.

What a person has set in the UI stays: it is merged three ways, from what `prefect.yaml` said when it was registered
last, what it says now, and what the server has.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import yaml

from infra.errors import ServiceError
from infra.services import prefect_api
from infra.services.prefect_yaml import FILE_NAME, NAMELESS, DeploymentEntry, local_zone
from infra.services.service import last_words

_TIMEOUT_S = 180
_ABSENT: Final = object()
_BRACES_APART = "{\u200b{"
_FORMER_ZONE = "Etc/UTC"
Values = dict[str, Any]
"""What a person can set of a deployment, by name; `parameters`, `tags`, `schedules`, `job_variables` by theirs."""
_SOURCES = ("flows/*.py", "flows/presets/*.yaml", "rlhf_core/config/*.py")


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


def deploy(
    checkout: Path,
    api_url: str,
    environment: Mapping[str, str],
    log: Path,
    entries: Mapping[str, DeploymentEntry],
    said_before: Mapping[str, Values],
    *,
    directory: str | None = None,
) -> dict[str, Values]:
    """Register all deployments of a checkout, and return what the file says of each.

    Runs that wait to begin stay, also those of nights that were due while no worker ran.

    Args:
        checkout: where `prefect.yaml` lies.
        api_url: the Prefect server's.
        environment: of Prefect's command.
        log: where its output goes.
        entries: the file's deployments.
        said_before: what this function returned the last time.
        directory: where runs have the checkout; None: here.

    Raises:
        ServiceError: if Prefect refused one.
    """
    says = {name: entry.values() for name, entry in entries.items()}
    wanted = dict(says)
    for name in entries:
        if (there := prefect_api.deployment(api_url, name)) is not None:
            theirs = _values_of(there)
            before = _assumed(says[name], theirs) | said_before.get(name, {})
            wanted[name] = _merged(before, theirs, says[name])
    told: Values = {"deployments": [_apart(entries[name].with_values(wanted[name])) for name in entries]}
    if directory is not None:
        told["pull"] = [{"prefect.deployments.steps.set_working_directory": {"directory": directory}}]
    _run_prefect_deploy(checkout, environment, log, told)
    for name in entries:
        there = prefect_api.deployment(api_url, name)
        if there is None:
            raise ServiceError(f"`prefect deploy --all` succeeded, but there is no deployment {name}")
        _put_braces_back(api_url, there)
    return says


def _apart(value: Any) -> Any:
    """Return a value with its double braces apart: `prefect deploy` would fill them, with secrets of blocks, too."""
    return _mapped(value, lambda text: text.replace("{{", _BRACES_APART))


def _put_braces_back(api_url: str, deployment: Mapping[str, Any]) -> None:
    def whole(value: Any) -> Any:
        return _mapped(value, lambda text: text.replace(_BRACES_APART, "{{"))

    path = f"/deployments/{deployment['id']}"
    values = {key: deployment[key] for key in ("description", "parameters", "tags", "job_variables")}
    if braced := {key: whole(value) for key, value in values.items() if whole(value) != value}:
        prefect_api.call(api_url, "PATCH", path, braced)
    for each in deployment["schedules"]:
        if (parameters := whole(each["parameters"])) != each["parameters"]:
            prefect_api.call(api_url, "PATCH", f"{path}/schedules/{each['id']}", {"parameters": parameters})


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


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


def _run_prefect_deploy(checkout: Path, environment: Mapping[str, str], log: Path, told: Values) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=log.parent) as file, log.open("wb") as output:
        yaml.safe_dump(told, file)
        file.flush()
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file.name]
        try:
            status = subprocess.run(
                command,
                cwd=checkout,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ServiceError(f"`prefect deploy --all` did not end within {_TIMEOUT_S} s: {last_words(log)}") from None
    if status != 0:
        raise ServiceError(f"`prefect deploy --all` refused: {last_words(log)}")
