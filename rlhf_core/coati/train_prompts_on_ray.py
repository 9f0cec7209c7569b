"""`python -m rlhf_core.detached.train_prompts_on_ray`: PPO with four models on four groups of Ray actors.

The names of coati's script are here; they are loaded when they are first used, as torch and Ray take seconds.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhf_core.coati.roles.flags import build_parser, check_arguments
from rlhf_core.coati.script.flags import end_with
from rlhf_core.errors import ConfigError, RlhfError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from rlhf_core.coati.roles.base import BasePPORole, DistributedTorchRayActor, TrainablePPORole
    from rlhf_core.coati.roles.composition import ExperienceCompositionRefs, ExperienceMaker
    from rlhf_core.coati.roles.groups import (
        PPOActorRayActorGroup,
        PPOCriticRayActorGroup,
        PPOInitialRayActorGroup,
        PPORayActorGroup,
        PPORewardRayActorGroup,
        TrainableModelRayActorGroup,
    )
    from rlhf_core.coati.roles.loop import Outcome

    OnCluster = Callable[[Namespace], AbstractContextManager[Any]]
    from rlhf_core.coati.roles.roles import RayPPOActor, RayPPOCritic, RayPPOInitialModel, RayPPORewardModel

__all__ = [
    "BasePPORole",
    "DistributedTorchRayActor",
    "ExperienceCompositionRefs",
    "ExperienceMaker",
    "PPOActorRayActorGroup",
    "PPOCriticRayActorGroup",
    "PPOInitialRayActorGroup",
    "PPORayActorGroup",
    "PPORewardRayActorGroup",
    "RayPPOActor",
    "RayPPOCritic",
    "RayPPOInitialModel",
    "RayPPORewardModel",
    "TrainableModelRayActorGroup",
    "TrainablePPORole",
    "main",
]
_HOMES = {
    "BasePPORole": "base",
    "DistributedTorchRayActor": "base",
    "ExperienceCompositionRefs": "composition",
    "ExperienceMaker": "composition",
    "PPOActorRayActorGroup": "groups",
    "PPOCriticRayActorGroup": "groups",
    "PPOInitialRayActorGroup": "groups",
    "PPORayActorGroup": "groups",
    "PPORewardRayActorGroup": "groups",
    "RayPPOActor": "roles",
    "RayPPOCritic": "roles",
    "RayPPOInitialModel": "roles",
    "RayPPORewardModel": "roles",
    "TrainableModelRayActorGroup": "groups",
    "TrainablePPORole": "base",
}
_USAGE = 2  # as argparse reports a command line that cannot be run
_INTERRUPTED = 130


def main(args: Namespace) -> Outcome:
    """Train as the flags say, on the cluster that this process is connected to, or as `--address` says.

    Args:
        args: what `build_parser` parses.

    Returns:
        The numbers of each round, and when each process was busy.

    Raises:
        RlhfError: a flag, file or model is not what it should be, an actor has ended, or training cannot go on.
        TimeoutError: an actor, or room for it, did not come in time; it is named.
    """
    return _run(args, nullcontext)


def cli(
    arguments: Sequence[str] | None = None,
    *,
    on_cluster: OnCluster = nullcontext,
    address: str | None = None,
) -> int:
    """Run one command line and return its exit status: 2 for flags that cannot be run, 1 for a run that failed.

    Args:
        arguments: the command line's words; None takes this process's.
        on_cluster: is given the flags; the actors live in its context, which may connect to a cluster.
        address: of a cluster that runs, for flags that name none.
    """
    parser = build_parser()
    parser.set_defaults(address=address)
    try:
        args = parser.parse_args(arguments)
        check_arguments(args)
    except ConfigError as error:
        return _fail(f"error: {error}; --help lists the flags", status=_USAGE)
    try:
        _run(args, on_cluster)
    except (RlhfError, TimeoutError) as error:
        return _fail(str(error), status=1)
    except KeyboardInterrupt:
        return _fail("interrupted", status=_INTERRUPTED)
    return 0


def _run(args: Namespace, on_cluster: OnCluster) -> Outcome:
    check_arguments(args)
    from rlhf_core.coati.roles.loop import run  # noqa: PLC0415 - torch and Ray, once the flags are known to be good

    return run(args, _tell, on_cluster)


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _fail(sentence: str, *, status: int) -> int:
    return end_with(sentence, program="train_prompts_on_ray", status=status)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rlhf_core.coati.roles.{_HOMES[name]}"), name)


if __name__ == "__main__":
    sys.exit(cli())
