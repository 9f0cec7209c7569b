"""What every stage needs: the store, its inputs as files, and the run's identity. Actors import it, too: no Prefect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from infra.artifacts import ArtifactRef, ArtifactStore, open_default_store
from infra.settings import Settings, settings
from tasks.failures import is_unattended
from tasks.results import Parent

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from rlhf_core.data.reading import Access


@dataclass(frozen=True)
class Context:
    """The open store, the settings, and the Prefect run that is going on."""

    store: ArtifactStore
    settings: Settings
    flow_run: str | None


def open_context() -> Context:
    """Open the store of the settings; one per task, since its client belongs to one process.

    In a run of a deployment it is waited for from the start; a person who called is told at once that it is away.
    """
    return Context(open_default_store(patient=is_unattended(), in_run=True), settings(), root_flow_run())


def actors_context(flow_run_id: str | None) -> Context:
    """Open the store inside an actor, in mid-run: it waits longer for a store that is away.

    Args:
        flow_run_id: of the flow run that the actor works for.
    """
    return Context(open_default_store(patient=True, in_run=True), settings(), flow_run_id)


def is_inner(run: FlowRun) -> bool:
    """Return whether a flow run is a part of the one that called it, in whose process it goes on.

    One that another flow let a worker start (`run_deployment`) has a caller, too, but also a deployment and a process.
    """
    return run.parent_task_run_id is not None and run.deployment_id is None


def is_alone() -> bool:
    """Return whether the flow run that goes on here was called by no other."""
    from tasks.run_log import own_flow_run

    return root_flow_run() in {None, str(own_flow_run())}


_ROOTS: dict[str, str] = {}
"""The outermost run of each, by its id."""


def root_flow_run() -> str | None:
    """Return the id of the outermost flow run, which artifacts are traced to; None outside a run."""
    from prefect.runtime import flow_run  # a second, which actors need not spend

    own = flow_run.get_id()
    if own is None:
        return None
    if own not in _ROOTS:  # the server is asked for the runs around this one: once, for it may be away later
        _ROOTS[own] = flow_run.get_root_flow_run_id() or own
    return _ROOTS[own]


def page_of(known: Settings, flow_run: str | None) -> str | None:
    """Return the address of a run's page in Prefect, without a password; None where there is none.

    Others reach it where PREFECT_UI_URL says so, as the API may be known here by an address of this machine alone.
    """
    from prefect.settings import get_current_settings

    if flow_run is None or known.prefect_api_url is None:
        return None
    server = urlsplit(get_current_settings().ui_url or known.prefect_api_url)
    place = server._replace(netloc=server.netloc.rpartition("@")[2]).geturl()
    return f"{place.removesuffix('/').removesuffix('/api')}/runs/flow-run/{flow_run}"


def materialise(context: Context, parent: Parent) -> Path:
    """Return a local directory with the parent's files, verified.

    Raises:
        StoreError: if the version that the store has under this reference holds other files than were meant.
    """
    return Path(parent.path) if parent.path else context.store.cached(ArtifactRef(parent.uri, parent.digest))


def data_access(known: Settings) -> Access:
    """Return where fetched data are kept, and how the S3 server of the settings is reached: as the store's is.

    Credentials are read only where an `s3://` address is, so a run without one needs none.
    """
    from infra.artifacts.credentials import options_of
    from rlhf_core.data.reading import Access

    return Access(known.home / "data", lambda: options_of(known).arguments())
