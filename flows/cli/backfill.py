"""`rlhf backfill`: make nights that were missed, each with the data that had arrived by the end of its day."""

from __future__ import annotations

from datetime import date, timedelta
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.output import Flag, console
from flows.cli.run import Given, run_deployment
from rlhf_core.counting import counted

if TYPE_CHECKING:
    from rich.console import Console

    from infra.artifacts import ArtifactStore

_SHOWN_DAYS = 10


def backfill(
    first: str,
    last: str,
    /,
    *,
    deployment: str = "nightly",
    param: Given = (),
    no_wait: Flag = False,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Make the nights of a deployment that are missing from FIRST to LAST, in order, one after the other.

    A day has its night once a run for it has stored its report; called again, only what is still missing is made. The
    deployment's data must arrive (`data.arrivals`). Ctrl-C ends the waiting; a run that has begun goes on.

    Args:
        first: day, such as 2026-11-20.
        last: day, at most today.
        deployment: of the flow `pipeline`; FLOW/NAME takes any other that has the parameter `as_of`.
        param: a parameter of the flow as NAME=VALUE; may be repeated.
        no_wait: start the first of the missing nights alone, and do not wait for it.
        dry_run: only say which nights are missing.

    Returns:
        0 if all that was made has completed, else 1; after a night that failed, no further one is begun.

    Raises:
        ConfigError: a day is none, is to come, or the last lies before the first; or the data do not arrive.
        ServiceError: there is no server.
    """
    from infra.artifacts import open_default_store

    days, screen = days_between(first, last, date.today()), console()
    store = open_default_store()
    name = _name(deployment, param)
    missing = missing_days(store, name, days)
    _say(screen, name, days, missing)
    if dry_run or not missing:
        return 0
    for day in missing[:1] if no_wait else missing:
        screen.print(f"\nnight of {day}", style="bold")
        status = run_deployment(deployment, (*param, f'as_of="{day}"'), wait=not no_wait)
        if status:
            left = missing[missing.index(day) + 1 :]
            if left:
                screen.print(f"{counted(len(left), 'night')} from {left[0]} on not begun; call this again to go on")
            return status
    if no_wait and len(missing) > 1:
        screen.print(f"then call this again: {counted(len(missing) - 1, 'night')} more, each after the one before")
    return 0


def days_between(first: str, last: str, today: date) -> list[date]:
    """Return the days from one to another, both among them.

    Raises:
        ConfigError: one is none or is to come, or the last lies before the first.
    """
    from rlhf_core.errors import ConfigError

    days = []
    for given in (first, last):
        try:
            days.append(date.fromisoformat(given))
        except ValueError:
            raise ConfigError(f"a day is written as 2026-11-27, but it is {given!r}") from None
    start, end = days
    if end < start:
        raise ConfigError(f"{last} lies before {first}; give the earlier day first")
    if end > today:
        raise ConfigError(f"{last} is still to come; give a day up to {today}")
    return [start + timedelta(days=count) for count in range((end - start).days + 1)]


def missing_days(store: ArtifactStore, name: str, days: list[date]) -> list[date]:
    """Return the days for which no run has stored a report.

    Args:
        store: where reports are.
        name: of the artifacts, as in `policy/NAME`.
        days: to look at.
    """
    made = {
        str(report.metrics.get("night") or f"{report.created.astimezone():%Y-%m-%d}")
        for report in store.list("run", name)
    }
    return [day for day in days if day.isoformat() not in made]


def _name(deployment: str, param: Given) -> str:
    """Return the name of what a deployment's runs make, which must be data that arrive."""
    from flows.begin import with_data_and_project
    from flows.cli.parameters import read_parameters
    from flows.cli.run import find_deployment
    from flows.presets import draft_of, preset_values
    from rlhf_core.errors import ConfigError

    found = find_deployment(deployment)
    given: dict[str, Any] = {**found.parameters, **read_parameters(param)}
    if "as_of" not in (found.parameter_openapi_schema or {}).get("properties", {}):
        raise ConfigError(f"{deployment} has no parameter as_of; name a deployment of the flow `pipeline`")
    if "as_of" in given:
        raise ConfigError("backfill sets the parameter as_of itself; leave it out")
    names = ("data", "model", "episodes", "seed", "overrides", "name")
    preset = given.get("preset", "quickstart")
    draft = draft_of(preset, **{name: given[name] for name in names if name in given})
    if draft.config.data.arrivals is None:
        raise ConfigError(
            f"the data of {deployment} do not arrive, so that no day has data of its own; set data.arrivals in its "
            "preset or overrides"
        )
    return with_data_and_project(draft.config, given.get("data"), preset_values(preset), given).name


def _say(screen: Console, name: str, days: list[date], missing: list[date]) -> None:
    shown = ", ".join(map(str, missing[:_SHOWN_DAYS])) + (", ..." if len(missing) > _SHOWN_DAYS else "")
    if missing:
        screen.print(f"{name}: of {counted(len(days), 'day')}, {len(missing)} without a night: {shown}")
    else:
        screen.print(f"{name}: each of {counted(len(days), 'day')} from {days[0]} to {days[-1]} has its night")
