"""What each process of the four groups gets of the cluster, and the room that a group's processes get on its nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup

from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError
from rlhf_core.ray_tools.placement import in_bundle, release, reserve, resources

_WHOLE = 10_000
"""Ray shares a GPU out in so many parts."""


class Allotment(NamedTuple):
    """What one process gets."""

    threads: int
    gpus: float

    def bundle(self, processes: int) -> dict[str, float]:
        """Return what so many processes need on one node, in Ray's words."""
        bundle = {"CPU": float(self.threads * processes)}
        return bundle | ({"GPU": gpus_for(self.gpus, processes)} if self.gpus else {})

    def options(self) -> dict[str, Any]:
        """Return the options of an actor with this allotment."""
        options = resources(self.threads, self.gpus)
        if not self.gpus:
            options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] = ""
        return options


class Decision(NamedTuple):
    """How the roles share the cluster's GPUs."""

    allotment: Allotment
    line: str
    """What is said of it; empty if each process has a GPU of its own, as upstream demands."""


def decide(processes: Mapping[str, int], *, gpus: float, told: float | None, threads: int) -> Decision:
    """Return what each process gets.

    Args:
        processes: of each role.
        gpus: of the whole cluster.
        told: GPUs of each process as the user says; None gives each one if there are enough, else none to any.
        threads: of each process.

    Raises:
        ConfigError: if the cluster has fewer GPUs than the user hands out.
    """
    total = sum(processes.values())
    roles = ", ".join(f"{role} {count}" for role, count in processes.items())
    if told is not None:
        needed = gpus_for(told, total)
        if needed > gpus:
            raise ConfigError(
                f"--gpus_per_actor {told:g} for each of {counted(total, 'process', 'processes')} ({roles}), none on "
                f"parts of two GPUs, is {counted(needed, 'GPU')}, but the cluster has {gpus:g}; lower it, or set it to "
                "0 to place all of them on CPUs"
            )
        line = f"each of {total} processes ({roles}) gets {told:g} of a GPU" if told else f"{_all(total)} work on CPUs"
        return Decision(Allotment(threads, told), line)
    if gpus >= total:
        return Decision(Allotment(threads, 1.0), "")
    if not gpus:
        return Decision(Allotment(threads, 0.0), f"the cluster has no GPU: {_all(total)} work on CPUs")
    line = (
        f"the cluster has {counted(gpus, 'GPU')} for {counted(total, 'process', 'processes')} ({roles}): all of them "
        f"work on CPUs; --gpus_per_actor {math.floor(100 / math.ceil(total / gpus)) / 100:g} would share the GPUs"
    )
    return Decision(Allotment(threads, 0.0), line)


def gpus_for(share: float, processes: int) -> float:
    """Return the GPUs that so many processes need on one node, none of which gets parts of two GPUs."""
    parts = round(share * _WHOLE)
    if not 0 < parts < _WHOLE:
        return share * processes
    whole = (processes - 1) // (_WHOLE // parts)  # full of as many as one GPU holds; the last one holds the rest
    return whole + (processes - whole * (_WHOLE // parts)) * parts / _WHOLE


def _all(total: int) -> str:
    return f"all {total} processes of the four models"


class Room:
    """Room for one group's processes, on as many nodes as it wants; without several processes none is reserved.

    On one node each process has a bundle of its own, so that parts of several GPUs serve; on several nodes all
    processes of one share a bundle, as Ray spreads bundles alone.

    Args:
        name: of the group, for messages.
        num_nodes: nodes, all different.
        per_node: processes on each.
        allotment: of each process.
        timeout_s: longest wait for the room.

    Raises:
        TimeoutError: if there is none; it says what was wanted, and what the cluster has.
    """

    def __init__(self, name: str, num_nodes: int, per_node: int, allotment: Allotment, *, timeout_s: float) -> None:
        self.name, self.allotment, self.timeout_s = name, allotment, timeout_s
        self._in_bundle = 1 if num_nodes == 1 else per_node
        self._group: PlacementGroup | None = None
        self._wanted = wanted(name, num_nodes, allotment.bundle(per_node))
        if num_nodes * per_node == 1:
            return
        bundles = [allotment.bundle(self._in_bundle)] * (num_nodes * per_node // self._in_bundle)
        strategy = "STRICT_PACK" if num_nodes == 1 else "STRICT_SPREAD"
        self._group = reserve(bundles, strategy=strategy, timeout_s=timeout_s)
        if self._group is None:
            raise TimeoutError(f"waited {timeout_s:.0f} s for room, and there was none: {self.lacking()}")

    def options(self, rank: int) -> dict[str, Any]:
        """Return the options of the actor of a rank."""
        if self._group is None:
            return self.allotment.options()
        return self.allotment.options() | in_bundle(self._group, rank // self._in_bundle)

    def lacking(self) -> str:
        """Return what the group wants and what the cluster has, with what to do."""
        return f"{self._wanted}, and the cluster has {present(nodes())}; lower what it wants, or add nodes"

    def leave(self) -> None:
        """Give the room back."""
        if self._group is not None:
            release(self._group)
            self._group = None


def wanted(name: str, num_nodes: int, bundle: Mapping[str, float]) -> str:
    """Return what a group wants, in words."""
    each = " and ".join(f"{amount:g} {kind}{'s' if amount != 1 else ''}" for kind, amount in bundle.items())
    return f"the {name} group wants {num_nodes} node{'s' if num_nodes != 1 else ''} with {each} free on each"


def present(found: list[Mapping[str, float]]) -> str:
    """Return what the nodes of a cluster have, in words."""
    each = "; ".join(f"{counted(node.get('CPU', 0), 'CPU')} and {counted(node.get('GPU', 0), 'GPU')}" for node in found)
    return f"{len(found)} node{'s' if len(found) != 1 else ''} with {each or 'nothing'}, others' share included"


def nodes() -> list[Mapping[str, float]]:
    """Return the resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
