"""Waiting for the processes of the four groups, and what one of them failed with, in words of the script's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from rlhf_core.errors import LostRankError, RlhfError, TrainingError
from rlhf_core.ray_tools.calls import SilentError, troubles, wait_for

PING_S = 10.0
"""Longest wait for a sign of life of all actors together, once something is known to be wrong."""


def results(
    calls: Mapping[Any, str], *, members: Mapping[str, Any], timeout_s: float, what: str, advice: str = ""
) -> list[Any]:
    """Return what calls of actors return, in their order.

    Args:
        calls: reference of each, and whom it was made to.
        members: all actors of the run by name, each with a method `ping`.
        timeout_s: longest wait from one answer to the next.
        what: is waited for, completing "waited for ...".
        advice: what to do, for the error of a late answer.

    Raises:
        RlhfError: what an actor failed with, or that one has ended: it is named.
        TimeoutError: if no further one answers in time; those are named.
    """

    def late(names: Sequence[str]) -> Exception:
        asked = ", ".join(sorted(set(names)))
        silent = [name for name, error in troubles(members, PING_S).items() if isinstance(error, SilentError)]
        more = f"; {', '.join(silent)} gave no sign of life" if silent else ""
        return TimeoutError(
            f"waited {timeout_s:.0f} s for {asked} {what}, and no answer came{more}{advice and f'; {advice}'}"
        )

    return wait_for(calls, timeout_s, late=late, failed=lambda error, name: explained(error, name, members), each=True)


def explained(error: RayError, name: str, members: Mapping[str, Any]) -> Exception | None:
    """Return what an actor's failure means: its own sentence, or which actor has ended; None for a fault of ours.

    Args:
        error: what its call came back with.
        name: of the actor.
        members: all actors of the run by name.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RlhfError) and not isinstance(cause, LostRankError):
        return cause
    if isinstance(cause, OutOfMemoryError):
        return TrainingError(
            f"Ray ended {name} or another process of its machine, whose memory was nearly full; free some, or lower "
            "--train_batch_size or --experience_batch_size"
        )
    if type(cause).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        return TrainingError(
            f"the GPU's memory does not hold {name}; lower --train_batch_size or --experience_batch_size, take "
            "--mixed_precision bf16, or give each process more of a GPU (--gpus_per_actor)"
        )
    gone = [name for name, error in troubles(members, PING_S).items() if isinstance(error, RayActorError)]
    if gone:
        return LostRankError(
            f"{', '.join(gone)} of this run {'has' if len(gone) == 1 else 'have'} ended ({_reason(cause)}); look "
            "into its log in the cluster's log directory, and start the run again"
        )
    if isinstance(cause, LostRankError):
        return LostRankError(f"{name}: {cause}")
    return TimeoutError(f"{name}: {_reason(cause)}") if isinstance(cause, TimeoutError) else None


def _reason(error: BaseException) -> str:
    """Return the line of an error that says most: of an actor that could not be made, what its creation failed with."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return lines[-1 if "creation task" in lines[0] else 0].strip().rstrip(".")
