"""What each actor of a run gets of the machine's GPUs: whole ones, or shares of them."""

from __future__ import annotations

import math

from rlhf_core.config import ClusterConfig

ADVICE = (
    "end what holds the rest, add nodes, ask for less (ppo.cluster, num_trainers), or raise ppo.cluster.start_timeout_s"
)
"""What to do where the cluster has no room for a run's actors."""
_WHOLE = 100
"""A GPU is shared out in hundredths."""
_MOST_OF_ONE = 60
"""More than half a GPU: two who have so much are never put on the same one, where NCCL would refuse them."""


def available_gpus(address: str | None = None) -> int:
    """Return the number of this machine's GPUs, or of those of the user's own cluster at an address.

    Raises:
        ClusterError: if that cluster does not answer.
    """
    if address is not None:
        from infra.clusters import existing_resources

        return int(existing_resources(address).get("GPU", 0))
    import torch

    return torch.cuda.device_count()


def gpu_shares(cluster: ClusterConfig, available: int, num_trainers: int = 1) -> tuple[float, float]:
    """Return the GPUs of each trainer and of each maker, as configured, or else as the machine has them.

    Each trainer gets a GPU of its own if one is left for the makers; as many trainers as GPUs leave part of each to the
    makers; more than that share half of what there is. The makers get equal shares of the rest, as large as fit.
    """
    trainer = trainer_share(cluster, available, num_trainers, leaving=1)
    if cluster.maker_gpus is not None:
        return trainer, cluster.maker_gpus
    free = _free_beside(available, math.ceil(_WHOLE * trainer), num_trainers)
    fitting = (share for share in range(_WHOLE, 0, -1) if sum(left // share for left in free) >= cluster.num_makers)
    return trainer, next(fitting, 0) / _WHOLE


def trainer_share(cluster: ClusterConfig, available: int, num_trainers: int, *, leaving: int = 0) -> float:
    """Return the GPUs of each trainer.

    Args:
        cluster: says it, or leaves it to the machine.
        available: GPUs of the machine.
        num_trainers: who share them.
        leaving: GPUs that others need too; without any the trainers get whole ones where there are enough.
    """
    if cluster.trainer_gpus is not None:
        return cluster.trainer_gpus
    if available >= num_trainers + leaving:
        return 1.0
    if available == num_trainers > 1:
        return _MOST_OF_ONE / _WHOLE
    others = 2 if leaving else 1  # half for them
    return _WHOLE // (others * math.ceil(num_trainers / available)) / _WHOLE if available else 0.0


def _free_beside(available: int, share: int, number: int) -> list[int]:
    """Return what is left of each GPU, in hundredths, when actors of a share are put on the first that they fit on."""
    free = [_WHOLE] * available
    for _ in range(number):
        whole, part = divmod(share, _WHOLE)
        for needed in [_WHOLE] * whole + [part] * (part > 0):
            place = next((index for index, left in enumerate(free) if left >= needed), None)
            if place is not None:
                free[place] -= needed
    return free
