"""What a deployment's tags ask of a run before it begins: data of the user's own, and a start that is not too late.

`needs-data` refuses problems that a preset draws from a task: they are for trying the chain. `starts-within-6h` skips
a run of a schedule that no worker took within six hours of its time: a machine that was off at night does not train
all day. Of several such runs that are due at once, the last one runs.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext

from infra.services.automations import SKIPPED
from infra.services.prefect_yaml import NEEDS_DATA, hours_to_start
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from prefect.client.schemas.objects import FlowRun

    from rlhf_core.config import PipelineConfig

_FIRST = timedelta(seconds=1)
"""After a run's own time: another run of the same second is no later one."""


def tags_of_run() -> Collection[str]:
    """Return the tags of the run that goes on here; none outside a run."""
    context = FlowRunContext.get()
    return () if context is None or context.flow_run is None else context.flow_run.tags


def check_data_are_named(tags: Collection[str], config: PipelineConfig, data: str | None) -> None:
    """Refuse a run that should learn from the user's data, and would draw problems from a task.

    Args:
        tags: of the run or its deployment.
        config: the preset with the run's parameters.
        data: the parameter of this name.

    Raises:
        ConfigError: it would.
    """
    if NEEDS_DATA in tags and data is None and config.data.task is not None:
        raise ConfigError(
            f"this deployment learns from data of yours, and none are named: it would train on {config.data.task!r}, "
            "problems for trying the chain; set its parameter `data` to a path, pattern, s3:// address or hub name "
            f"(in Prefect's UI, or with `-p data=...`), or take the tag {NEEDS_DATA!r} from it",
            ends_as="Refused: no data named",
        )


def missed(run: FlowRun) -> str | None:
    """Return why a scheduled run that begins for the first time is not worth it any more; None if it is.

    A run that a person started is never skipped.

    Args:
        run: the outermost.

    Raises:
        httpx.HTTPError: the server does not say what else is due.
    """
    if not run.auto_scheduled or run.expected_start_time is None:
        return None
    due, now, limit = run.expected_start_time, datetime.now(UTC), hours_to_start(run.tags)
    if limit is None:
        return None
    told = f"skipped: it was due at {_clock(due)}"
    if now - due > timedelta(hours=limit):
        return f"{told}, and no worker took it within {limit} h (tag 'starts-within-{limit}h'); start one by hand"
    if (later := _last_due(run, due, now)) is not None:
        return f"{told}; the run {later.name!r}, which is due by now too, takes its place"
    return None


def _clock(time: datetime) -> str:
    return f"{time.astimezone():%Y-%m-%d %H:%M %Z}"


def _last_due(run: FlowRun, due: datetime, now: datetime) -> FlowRun | None:
    """Return the last scheduled run of the same deployment that is due after a time; None if there is none."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[run.deployment_id])),
            flow_run_filter=FlowRunFilter(
                expected_start_time=FlowRunFilterExpectedStartTime(after_=due + _FIRST, before_=now)
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        )
    nights = (each for each in found if each.auto_scheduled)
    return next((each for each in nights if not _was_cancelled(each)), None)


def _was_cancelled(run: FlowRun) -> bool:
    """Whether a person cancelled a run; one that was skipped as this one may be was not."""
    return run.state is not None and run.state.is_cancelled() and run.state.name != SKIPPED
