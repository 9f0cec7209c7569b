"""The local stack that `rlhf up` starts: object store, Prefect server, worker, deployments."""

from infra.services.bring_up import up
from infra.services.doctor import Finding, diagnose
from infra.services.status import ServiceStatus, status
from infra.services.take_down import down

__all__ = ["Finding", "ServiceStatus", "diagnose", "down", "status", "up"]
