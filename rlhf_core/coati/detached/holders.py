"""The experience makers that a trainer names, as actors."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from rlhf_core.coati.detached.weight_sender import SentWeights
from rlhf_core.errors import ConfigError, RlhfError

_LOOK_S = 0.2


class LostMakerError(RlhfError):
    """A maker that a trainer names is not there, has ended, or does not answer."""


def namespace() -> str | None:
    """Return Ray's namespace in which trainers and makers find each other; None for that of this process."""
    return os.environ.get("RAY_NAMESPACE") or None


def own_actor_name() -> str:
    """Return the name of the actor that this process is; empty where it has none, or is none."""
    return (ray.get_runtime_context().get_actor_name() or "") if ray.is_initialized() else ""


def find_actor(name: str, timeout_s: float, *, what: str) -> Any:
    """Return the handle of an actor, which may be about to be created, also in the place of one that died.

    Args:
        name: of the actor.
        timeout_s: longest wait for it.
        what: it is, in words.

    Raises:
        LostMakerError: if there is none in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = ray.get_actor(name, namespace=namespace())
        except ValueError:
            found = None
        if found is not None and not _is_dead(found):
            return found
        if time.monotonic() >= deadline:
            raise LostMakerError(
                f"waited {timeout_s:g} s for {what} {name}, and no actor has that name in the namespace "
                f"{namespace() or ray.get_runtime_context().namespace}; create it with options(name={name!r})"
            )
        if found is not None:
            ray.kill(found)  # or Ray would give this process the dead actor by that name for ever
        time.sleep(_LOOK_S)


def _is_dead(actor: Any) -> bool:
    """Whether Ray knows that an actor has died for good; it says so at once."""
    try:
        ray.get(ray.wait([actor.__ray_ready__.remote()], timeout=_LOOK_S)[0])
    except ActorDiedError:
        return True
    except RayActorError:
        return False  # it comes up again
    return False


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
        deadline = time.monotonic() + self._timeout_s
        late = dict(calls)
        while late:
            ready, _ = ray.wait(list(late.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LostMakerError(f"waited {self._timeout_s:g} s for {', '.join(late)} to {what}, in vain")
            name = next(name for name, call in late.items() if call == ready[0])
            try:
                ray.get(late.pop(name))
            except RayActorError as error:
                raise LostMakerError(f"{name} was to {what}, but has ended: {str(error).splitlines()[0]}") from error
            except RayTaskError as error:
                raise error.cause from None  # its sentence, without Ray's frame around it
        found: list[Any] = ray.get(list(calls.values()))
        return found
