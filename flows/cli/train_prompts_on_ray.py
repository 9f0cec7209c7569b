"""`rlhf train-prompts-on-ray`: PPO on four groups of Ray actors without the stack, with coati's flags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from argparse import Namespace


def train_prompts_on_ray(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Run PPO with four models on four groups of Ray actors; `rlhf train-prompts-on-ray --help` lists coati's flags.

    Args:
        arguments: passed on as they are.
    """
    from infra.settings import settings
    from rlhf_core.coati.train_prompts_on_ray import cli

    return cli(arguments, on_cluster=_leased, address=settings().ray_address)


@contextmanager
def _leased(args: Namespace) -> Iterator[None]:
    """Run the block on a cluster that this process leases, unless the user names one that runs."""
    from infra.clusters import connect, lease_cluster
    from infra.settings import settings
    from rlhf_core.coati.roles.cluster import OBJECT_STORE_BYTES, address_of, check_alone
    from rlhf_core.coati.roles.flags import processes_of
    from tasks.clusters import IMPORTED, end_cluster
    from tasks.gpu_allocation import available_gpus

    if address_of(args):
        yield
        return
    check_alone(args)
    name = f"prompts-on-ray-{os.getpid()}"
    try:
        connect(
            lease_cluster(
                name,
                directory=settings().clusters_dir,
                num_cpus=sum(processes_of(args).values()) * args.threads,
                num_gpus=available_gpus(),
                object_store_mb=OBJECT_STORE_BYTES >> 20,
                start_timeout_s=args.start_timeout_s,
                environment=settings().child_environment(),
                imported=IMPORTED,
            )
        )
        yield
    finally:
        end_cluster(name)
