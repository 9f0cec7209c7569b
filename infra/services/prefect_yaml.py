"""The rules of `prefect.yaml`: keys that Prefect silently drops (unknown or duplicate) are refused here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tzlocal
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from infra.errors import ServiceError
from infra.strict_yaml import load_yaml

FILE_NAME = "prefect.yaml"
ONE_AT_A_TIME = "one-at-a-time"
"""Tag of deployments that skip a run while another of their runs is not done (`tasks.one_process`)."""
NEEDS_DATA = "needs-data"
"""Tag of deployments that refuse a preset's own problems (`tasks.nights`)."""
_STARTS_WITHIN = re.compile(r"starts-within-(\d+)h")
NAMELESS = "#"
"""With a number, in place of the slug of a schedule that a person has made in the UI."""
_Name = r"^[a-z0-9][a-z0-9-]*$"


def hours_to_start(tags: Iterable[str]) -> int | None:
    """Return how late a scheduled run of a deployment may start, in hours, by its tag `starts-within-6h`; None: ever.

    Args:
        tags: of the deployment.
    """
    found = [int(each[1]) for each in map(_STARTS_WITHIN.fullmatch, tags) if each]
    return min(found, default=None)


def local_zone() -> str:
    """Return the name of this machine's time zone, such as `Europe/Berlin`; UTC where it says none."""
    try:
        return tzlocal.get_localzone_name() or "UTC"
    except (LookupError, ValueError):  # it says two, or one that is not known here
        return "UTC"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkPoolEntry(_Strict):
    """Where a deployment's runs wait."""

    name: str
    work_queue_name: str | None = None
    job_variables: dict[str, Any] = Field(default_factory=dict)


class ScheduleEntry(_Strict):
    """When a deployment runs by itself; it must say whether it is active."""

    slug: str = Field(pattern=_Name)
    cron: str
    timezone: str = Field(default_factory=local_zone)
    """By default this machine's, when the deployment is registered."""
    active: bool
    parameters: dict[str, Any] = Field(default_factory=dict)


class DeploymentEntry(_Strict):
    """One deployment."""

    name: str = Field(pattern=_Name)
    entrypoint: str = Field(pattern=r"^[\w/.-]+\.py:\w+$")
    description: str
    tags: tuple[str, ...] = ()
    parameters: dict[str, Any]
    enforce_parameter_schema: Literal[True]
    work_pool: WorkPoolEntry
    schedules: tuple[ScheduleEntry, ...] = ()
    concurrency_limit: None = None
    """Only here so that its error says what to use instead."""

    @field_validator("concurrency_limit", mode="before")
    @classmethod
    def _no_limit_of_the_server(cls, given: Any) -> None:
        if given is not None:
            raise PydanticCustomError(
                "no_limit",
                "Prefect keeps this limit in its server's memory, and a run that cannot renew it while the server is "
                "away is crashed; give the deployment the tag `{tag}` instead, whose lock is in the artifact store",
                {"tag": ONE_AT_A_TIME},
            )

    @field_validator("tags")
    @classmethod
    def _time_to_start(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        for tag in tags:
            if tag.startswith("starts-within") and not _STARTS_WITHIN.fullmatch(tag):
                raise PydanticCustomError("starts_within", "a time to start is written in hours: starts-within-6h")
        return tags

    def values(self) -> dict[str, Any]:
        """Return what a person can set of the deployment in Prefect's UI, each by name."""
        schedules = {each.slug: each.model_dump(exclude={"slug"}) for each in self.schedules}
        return {
            "description": self.description,
            "paused": False,
            "concurrency_limit": None,
            "parameters": self.parameters,
            "tags": dict.fromkeys(self.tags, True),
            "schedules": schedules,
            "job_variables": self.work_pool.job_variables,
        }


class _Definitions(BaseModel):
    """What blocks are made from; anchors of any name may stand beside these."""

    model_config = ConfigDict(extra="allow", frozen=True)

    local: dict[str, Any] = Field(default_factory=dict)
    """What a deployment that is made from `stages` has besides its own."""
    stages: dict[str, str] = Field(default_factory=dict)
    """By entrypoint, the first words of a description: a flow that is deployed with every preset."""


class _File(_Strict):
    definitions: _Definitions = _Definitions()
    deployments: tuple[DeploymentEntry, ...] = Field(min_length=1)


def read_prefect_yaml(checkout: Path) -> dict[str, DeploymentEntry]:
    """Return the deployments of a checkout by their full names, `flow/deployment`: the file's, and those of its stages.

    Raises:
        ServiceError: if anything in the file is not as it must be: one sentence with the place.
    """
    path = checkout / FILE_NAME
    try:
        file = _File.model_validate(load_yaml(path))
    except OSError as error:
        raise ServiceError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ServiceError(f"{path}: {where}: {first['msg']}, but it is {first['input']!r:.200}") from None
    except ValueError as error:  # the text itself
        raise ServiceError(str(error)) from None
    found: dict[str, DeploymentEntry] = {}
    for entry in file.deployments:
        name = f"{_check_entrypoint(path, checkout, entry)}/{entry.name}"
        if name in found:
            raise ServiceError(f"{path}: there are two deployments {name}")
        for schedule in entry.schedules:
            _check_schedule(path, name, schedule)
        found[name] = entry
    return found | _stages(path, checkout, file.definitions, found)


def _stages(
    path: Path, checkout: Path, definitions: _Definitions, found: Mapping[str, DeploymentEntry]
) -> dict[str, DeploymentEntry]:
    """Return a deployment of each stage with each preset, but those that the file has itself.

    A preset's block of the whole chain gives its stages their tags, and the actor that it names: there is no SFT then,
    and the evaluation is still of what PPO made.
    """
    made: dict[str, DeploymentEntry] = {}
    for entrypoint, description in definitions.stages.items():
        flow = _flow_of(f"{path}: definitions.stages", checkout, entrypoint)
        for preset in _presets(checkout):
            name, whole = f"{flow.name}/{preset}", found.get(f"pipeline/{preset}")
            given = {"preset": preset} if whole is None else whole.parameters
            if name in found or (flow.name == "sft" and "actor" in given):
                continue
            taken = [key for key in given if key in flow.parameters and (key, flow.name) != ("actor", "evaluate")]
            block = {
                "name": preset,
                "entrypoint": entrypoint,
                "description": f"{description} with the preset {preset} (docs/presets.md).",
                "tags": ("resumes", preset) if whole is None else whole.tags,
                "parameters": {key: given[key] for key in taken},
            }
            try:
                made[name] = DeploymentEntry.model_validate({**definitions.local, **block})
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise ServiceError(
                    f"{path}: {name} is made from definitions.local, whose {where} is not as it must be: {first['msg']}"
                ) from None
    return made


class _Flow(NamedTuple):
    name: str
    parameters: tuple[str, ...]


def _check_entrypoint(path: Path, checkout: Path, entry: DeploymentEntry) -> str:
    """Return the name of a deployment's flow."""
    place = f"{path}: deployment {entry.name} ({entry.entrypoint})"
    flow = _flow_of(place, checkout, entry.entrypoint)
    for name in entry.parameters:
        if name not in flow.parameters:
            raise ServiceError(f"{place}: parameter {name!r} is none of {', '.join(flow.parameters)}")
    _check_preset(place, checkout, entry)
    return flow.name


def _flow_of(place: str, checkout: Path, entrypoint: str) -> _Flow:
    """Return a flow as its source says: importing five flows to look at a file takes seconds."""
    file, _, function = entrypoint.partition(":")
    try:
        module = ast.parse((checkout / file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ServiceError(f"{place}: {file} cannot be read: {error.strerror}") from None
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if function not in functions:
        raise ServiceError(f"{place}: {file} has no function {function!r}; it has {', '.join(functions) or 'none'}")
    node = functions[function]
    flow_name = _flow_name(node)
    if flow_name is None:
        raise ServiceError(f"{place}: {function} is no flow; decorate it with @flow")
    return _Flow(flow_name, tuple(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)))


def _flow_name(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        target = call.func if call else decorator
        if isinstance(target, ast.Name) and target.id == "flow":
            given = [word.value for word in call.keywords if word.arg == "name"] if call else []
            if given and isinstance(given[0], ast.Constant):
                return str(given[0].value)
            return node.name.replace("_", "-")
    return None


def _presets(checkout: Path) -> list[str]:
    """Return the names of all presets.

    Raises:
        ServiceError: if one cannot be a deployment's name.
    """
    files = sorted((checkout / "flows" / "presets").glob("*.yaml"))
    for file in files:
        if re.fullmatch(_Name, file.stem) is None:
            raise ServiceError(
                f"{file}: a preset is named by lower-case letters, digits and dashes, as its deployments are, but this "
                f"one is named {file.stem!r}; rename the file"
            )
    return [file.stem for file in files]


def _check_preset(place: str, checkout: Path, entry: DeploymentEntry) -> None:
    preset = entry.parameters.get("preset")
    presets = _presets(checkout)
    if preset is not None and preset not in presets:
        near = get_close_matches(str(preset), presets) or presets
        raise ServiceError(f"{place}: there is no preset {preset!r}; did you mean {' or '.join(near) or 'none'}?")


def _check_schedule(path: Path, name: str, schedule: ScheduleEntry) -> None:
    # Prefect takes seconds to import, and only a file with schedules needs it.
    from prefect.client.schemas.schedules import CronSchedule  # noqa: PLC0415

    try:
        CronSchedule(cron=schedule.cron, timezone=schedule.timezone)
    except (ValidationError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ServiceError(f"{path}: schedule {schedule.slug} of {name}: {reason}") from None
