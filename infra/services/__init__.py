"""The local stack that `rlhf up` starts: object store, Prefect server, worker, deployments."""

from infra.services.bring_up import bring_back, up
from infra.services.doctor import Finding, diagnose
from infra.services.status import ServiceStatus, how_to_open_the_ui, running_api_url, set_in_prefect, status
from infra.services.supervise import supervise
from infra.services.systemd import UNIT, write_unit
from infra.services.take_down import down

__all__ = [
    "UNIT",
    "Finding",
    "ServiceStatus",
    "bring_back",
    "diagnose",
    "down",
    "how_to_open_the_ui",
    "running_api_url",
    "set_in_prefect",
    "status",
    "supervise",
    "up",
    "write_unit",
]
