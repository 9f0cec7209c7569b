"""Ray clusters and their leases: a cluster lives exactly as long as the process that leased it.

On a cluster that is there already, `lease_existing` holds what a run has there, and ends it in the same way.

    record = lease_cluster("ppo-llama7b", directory=..., num_cpus=4, ...)
    connect(record)          # this process is now a Ray driver
    ...
    release_cluster("ppo-llama7b")

The names are loaded when they are first used: the watchdog imports this package and must not import Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infra.clusters.driver import connect, disconnect
    from infra.clusters.existing import existing_resources, lease_existing
    from infra.clusters.lease import is_lost, lease_cluster, reap_orphans, release_cluster
    from infra.clusters.output import output_of
    from infra.clusters.reaper import leftover_processes
    from infra.clusters.record import ClusterRecord

_HOME = {
    "ClusterRecord": "record",
    "connect": "driver",
    "disconnect": "driver",
    "existing_resources": "existing",
    "is_lost": "lease",
    "lease_cluster": "lease",
    "lease_existing": "existing",
    "leftover_processes": "reaper",
    "output_of": "output",
    "reap_orphans": "lease",
    "release_cluster": "lease",
}

__all__ = [
    "ClusterRecord",
    "connect",
    "disconnect",
    "existing_resources",
    "is_lost",
    "lease_cluster",
    "lease_existing",
    "leftover_processes",
    "output_of",
    "reap_orphans",
    "release_cluster",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
