"""The experience makers that a trainer names, as actors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlhf_core.coati.detached.weight_sender import SentWeights
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.ray_tools.calls import await_actor, wait_for


class LostMakerError(RlhfError):
    """A maker that a trainer names is not there, has ended, or does not answer."""


def namespace() -> str | None:
    """Return Ray's namespace in which trainers and makers find each other; None for that of this process."""
    return os.environ.get("RAY_NAMESPACE") or None


def own_actor_name() -> str:
    """Return the name of the actor that this process is; empty where it has none, or is none."""
    return (ray.get_runtime_context().get_actor_name() or "") if ray.is_initialized() else ""


def find_actor(name: str, timeout_s: float, *, what: str) -> Any:
    """Return the handle of a trainer or maker, which may be about to be created, also in the place of one that died.

    Args:
        name: of the actor.
        timeout_s: longest wait for it.
        what: it is, in words.

    Raises:
        LostMakerError: if there is none in time.
    """
    found = await_actor(name, timeout_s, namespace())
    if found is None:
        raise LostMakerError(
            f"waited {timeout_s:g} s for {what} {name}, and no actor has that name in the namespace "
            f"{namespace() or ray.get_runtime_context().namespace}; create it with options(name={name!r})"
        )
    return found


class Holders:
    """Finds makers by name, whenever they are needed: one may have been created anew.

    Args:
        names: of the makers.
        timeout_s: longest wait for each of them: to be there, and to answer.
    """

    def __init__(self, names: Sequence[str], timeout_s: float) -> None:
        if isinstance(names, str):
            raise ConfigError(f"expected a list of makers' names, got {names!r} alone")
        self.names = tuple(names)
        self._timeout_s = timeout_s

    def handles(self) -> Mapping[str, Any]:
        """Return the makers' handles by name.

        Raises:
            LostMakerError: if one is not there.
        """
        return {name: find_actor(name, self._timeout_s, what="the experience maker") for name in self.names}

    def nodes(self) -> frozenset[str]:
        """Ask the makers for the ids of the nodes that they are on."""
        calls = {name: handle.node.remote() for name, handle in self.handles().items()}
        return frozenset(node for node, _ in self._answers(calls, "answer"))

    def send(self, sent: SentWeights) -> None:
        """Have every maker build its models and hold these weights; return when all do.

        Raises:
            LostMakerError: if one has ended, or does not do so in time; it is named.
        """
        handles = self.handles()
        self._answers({name: handle.build.remote() for name, handle in handles.items()}, "build its models")
        calls = {name: handle.load_weights.remote(sent, self._timeout_s) for name, handle in handles.items()}
        self._answers(calls, f"take weights of version {sent.version}")

    def _answers(self, calls: Mapping[str, Any], what: str) -> list[Any]:
        def late(names: Sequence[str]) -> Exception:
            return LostMakerError(f"waited {self._timeout_s:g} s for {', '.join(names)} to {what}")

        def failed(error: RayError, name: str) -> Exception | None:
            if isinstance(error, RayActorError):
                return LostMakerError(f"{name} was to {what}, but has ended: {str(error).splitlines()[0]}")
            return error.cause if isinstance(error, RayTaskError) else None  # its sentence, without Ray's frame

        return wait_for({call: name for name, call in calls.items()}, self._timeout_s, late=late, failed=failed)
