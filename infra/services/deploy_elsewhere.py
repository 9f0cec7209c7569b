"""Deployments on a Prefect server that `rlhf up` did not start, and on a work pool of any type."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from infra.errors import ServiceError
from infra.services import automations, prefect_api
from infra.services.deployments import Values, deploy, differences
from infra.services.prefect_yaml import WorkPoolEntry, read_prefect_yaml
from infra.services.service import Report
from infra.services.state import StackState, locked, make_home
from infra.services.worker import WORK_POOL, make_work_pool
from infra.settings import CHECKOUT, Settings, inherited_environment

IN_THE_IMAGE = "/opt/rlhf"
"""Where the image of infra/deploy/Dockerfile has the checkout."""


def deploy_elsewhere(
    settings: Settings, pool: str, image: str | None, report: Report, *, checkout: Path = CHECKOUT
) -> None:
    """Register all deployments of a checkout on a work pool of the server of PREFECT_API_URL.

    Args:
        settings: as `infra.settings.settings` returns them.
        pool: name of the work pool; ours is made if it is not there.
        image: in which runs are, for a pool that runs containers.
        report: takes a line for each thing that is done.
        checkout: where `prefect.yaml` lies.

    Raises:
        ServiceError: if there is no such server or pool, the image is wanting or not wanted, or Prefect refused.
    """
    api_url = settings.prefect_api_url
    if api_url is None:
        raise ServiceError("no Prefect server is known here; set PREFECT_API_URL to the address of its API")
    entries = read_prefect_yaml(checkout)
    if pool == WORK_POOL:
        make_work_pool(api_url)
    known = prefect_api.call(api_url, "GET", f"/work_pools/{pool}")
    if known is None:
        raise ServiceError(
            f"the Prefect server at {api_url} has no work pool {pool!r}; make it with `prefect work-pool create`, as "
            "infra/deploy/README.md shows for each type"
        )
    kind = known["type"]
    runs_images = "image" in known["base_job_template"].get("variables", {}).get("properties", {})
    if runs_images and image is None:
        raise ServiceError(
            f"work pool {pool} is of type {kind}, whose runs are in containers; name the image that was built from "
            "infra/deploy/Dockerfile: --image REGISTRY/rlhf-flows:TAG"
        )
    if image is not None and not runs_images:
        raise ServiceError(f"work pool {pool} is of type {kind}, whose runs are in no container; leave out --image")
    report(f"registering {len(entries)} deployments on work pool {pool} ({kind}) of {api_url}")
    place = WorkPoolEntry(name=pool, job_variables={"image": image} if image else {})
    moved = {name: entry.model_copy(update={"work_pool": place}) for name, entry in entries.items()}
    log = settings.logs_dir / "deploy.log"
    directory = IN_THE_IMAGE if image else None
    make_home(settings.home)
    with locked(settings.home, report):
        state = StackState.load(settings.home)
        said = state.filed.get(api_url) or _images(api_url, moved)
        state.filed[api_url], refusals = deploy(
            checkout, api_url, inherited_environment(), log, moved, said, directory=directory
        )
        state.save(settings.home)
    for name, kept in differences(api_url, moved).items():
        report(f"{name} keeps what was set in Prefect: {'; '.join(kept)}")
    report(automations.install(api_url))
    if refusals:
        raise ServiceError("; ".join(refusals))


def _images(api_url: str, names: Iterable[str]) -> dict[str, Values]:
    """Return the images of the deployments there: no person's, also where another home has registered them."""
    there = {name: prefect_api.deployment(api_url, name) for name in names}
    images = {name: each["job_variables"].get("image") for name, each in there.items() if each is not None}
    return {name: {"job_variables": {"image": image}} for name, image in images.items() if image}
