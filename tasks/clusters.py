"""Which Ray cluster a stage runs on, and its end: one that is started for it and ends with it, or the user's own."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from infra.errors import ClusterError
from infra.settings import settings
from tasks.actor_lines import follow_actors, leave_actors
from tasks.run_log import run_logger

if TYPE_CHECKING:
    from infra.clusters import ClusterRecord
    from rlhf_core.config import ClusterConfig
    from tasks.context import Context

CODE = ("infra", "rlhf_core", "tasks")
"""What the nodes of a user's own cluster must have as this process has it."""
IMPORTED = (
    "infra.artifacts.s3",
    "rlhf_core.ppo.learner",
    "rlhf_core.rollout.experience",
    "rlhf_core.rewards.sources",
    "tasks.ppo_keeper",
    "tasks.ppo_models",
    "transformers.models.auto.modeling_auto",
)
"""What actors import, but for Ray; on a cluster of the run's own their processes are forked from one that has
imported these."""
_MB = 1_000_000


def address_of(cluster: ClusterConfig) -> str | None:
    """Return the address of the user's own cluster, as configured or else as set for all runs; None: start one."""
    return cluster.address or settings().ray_address


def lease_for(
    name: str, cluster: ClusterConfig, context: Context, *, num_trainers: int, num_cpus: int, object_store_mb: int
) -> ClusterRecord:
    """Return a run's lease, held by this process: of a cluster of its own, or of its part of the user's.

    Args:
        name: of the run.
        cluster: says which, and how long is waited.
        context: of the stage.
        num_trainers: processes that talk to each other.
        num_cpus: what a cluster is started with; on the user's, room is asked for as actors are placed.
        object_store_mb: what a cluster is started with, and what the user's must have.

    Raises:
        ClusterError: if it does not start or answer, or is held by another process.
    """
    from infra.clusters import lease_cluster, lease_existing
    from tasks.gpu_allocation import available_gpus

    environment = context.settings.child_environment()
    address = address_of(cluster)
    if address is None:
        if num_trainers > 1:
            _warn_of_trainers()
        record = lease_cluster(
            name,
            directory=context.settings.clusters_dir,
            num_cpus=num_cpus,
            num_gpus=available_gpus(),
            object_store_mb=object_store_mb,
            start_timeout_s=cluster.start_timeout_s,
            environment=environment,
            imported=IMPORTED,
        )
    else:
        _check_object_store(address, object_store_mb)
        record = lease_existing(
            name, address=address, environment=environment, packages=CODE, start_timeout_s=cluster.start_timeout_s
        )
    follow_actors(record)
    return record


@cache
def _warn_of_trainers() -> None:
    """Say this once in a run, which is one process."""
    run_logger().warning("several trainers on one machine: any user of it can reach their ports (docs/security.md)")


def end_cluster(name: str) -> None:
    """End this process's cluster of a name and everything on it, and wait until it is gone; nothing if there is none.

    What is left of it does not end the run in another way than its work did: the watchdog goes on trying.
    """
    from infra.clusters import release_cluster

    leave_actors(name)
    try:
        release_cluster(name)  # which leaves the cluster too, and ends it even where Ray does not end
    except ClusterError as error:
        run_logger().warning("the cluster of %s has not ended yet: %s", name, error)


def _check_object_store(address: str, needed_mb: int) -> None:
    from infra.clusters import existing_resources

    there_mb = existing_resources(address).get("object_store_memory", 0.0) / _MB
    if there_mb < needed_mb:
        raise ClusterError(
            f"the nodes of the Ray cluster at {address} have object stores of {there_mb:.0f} MB together, but the run "
            f"needs {needed_mb}; start them with a larger --object-store-memory, or lower ppo.cluster.object_store_mb"
        )
