"""The local stack that `rlhf up` starts: object store, Prefect server, worker, deployments."""

from infra.services.bring_up import up
from infra.services.doctor import Finding, diagnose
from infra.services.status import ServiceStatus, how_to_open_the_ui, running_api_url, set_in_prefect, status
from infra.services.take_down import down

__all__ = [
    "Finding",
    "ServiceStatus",
    "diagnose",
    "down",
    "how_to_open_the_ui",
    "running_api_url",
    "set_in_prefect",
    "status",
    "up",
]
