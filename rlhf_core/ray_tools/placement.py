"""Room for the actors of a run: all of them get theirs, or none does, within a deadline.

Actors that are asked for one by one can each take a part of what two runs need, and then both wait for ever. A
placement group is granted whole; whatever does not fit is told in one sentence instead of left pending.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.errors import NoRoomError

_RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU"}


def resources(threads: int, gpus: float) -> dict[str, Any]:
    """Return the options of an actor with so many threads and GPUs."""
    # Ray would set one thread for an actor of a fraction of a CPU; torch reads this when it is imported.
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return {"num_cpus": threads, "num_gpus": gpus, "runtime_env": {"env_vars": environment}}


def reserve(
    bundles: Sequence[Mapping[str, float]], *, strategy: str, timeout_s: float, name: str = ""
) -> PlacementGroup | None:
    """Return a placement group, granted whole; None if there is no room in time, and nothing stays reserved.

    Args:
        bundles: what is wanted, in Ray's words; each lies on one node.
        strategy: `PACK` on few nodes, `SPREAD` over many, or the strict form of either.
        timeout_s: longest wait.
        name: of the group within the run's namespace; one of that name must not be there.
    """
    reserved = placement_group([dict(bundle) for bundle in bundles], strategy=strategy, name=name)
    is_granted, until = False, time.monotonic() + timeout_s
    try:
        while not is_granted and time.monotonic() < until:
            is_granted = reserved.wait(1)  # Ray takes whole seconds, and lets a signal wait for their end
    finally:
        if not is_granted:  # also when the wait is interrupted: the next attempt wants the name
            release(reserved)
    return reserved if is_granted else None


def in_bundle(reserved: PlacementGroup, index: int) -> dict[str, Any]:
    """Return the option that puts an actor where a bundle of a placement group is."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=index)}


def release(reserved: PlacementGroup) -> None:
    """Give a placement group back."""
    remove_placement_group(reserved)


def place(
    actors: Mapping[str, Mapping[str, Any]],
    *,
    group: str,
    timeout_s: float,
    strategy: str = "PACK",
    advice: str = "end what holds the rest, add nodes, or ask for less",
) -> dict[str, dict[str, Any]]:
    """Reserve what actors ask for, and return the options with which each is put where its share is kept.

    The reservation belongs to this process's connection: it ends with `vacate`, with the run, and with this process.
    An actor that has ended leaves its share to the next that is started with its options.

    Args:
        actors: the options of each by name, of which `num_cpus` and `num_gpus` count. Those that come first get the
            first choice of place.
        group: names the reservation, as for `reserve`.
        timeout_s: longest wait.
        strategy: as for `reserve`.
        advice: what to do where there is no room.

    Raises:
        NoRoomError: if the cluster has no room for them in time; nothing stays reserved.
    """
    bundles = [_bundle(options) for options in actors.values()]
    reserved = reserve(bundles, strategy=strategy, timeout_s=timeout_s, name=group)
    if reserved is None:
        raise NoRoomError(
            f"waited {timeout_s:g} s for room for {_described(bundles)} on the Ray cluster, which has {_free()} free; "
            f"{advice}"
        )
    logging.getLogger("ray.actor").addFilter(_is_news)
    return {name: {**options, **in_bundle(reserved, index)} for index, (name, options) in enumerate(actors.items())}


def _is_news(record: logging.LogRecord) -> bool:
    """Ray warns at each maker that it goes with its placement group: it should, and users need not read of it."""
    return "restartable detached actor with a placement group" not in record.getMessage()


def vacate(group: str, timeout_s: float = 30.0) -> None:
    """Give a reservation back, and end what still runs on it; none of that name is fine.

    Raises:
        NoRoomError: if it is not gone in time.
    """
    try:
        reserved = get_placement_group(group)
    except ValueError:
        return
    release(reserved)
    deadline = time.monotonic() + timeout_s
    while placement_group_table(reserved).get("state", "REMOVED") != "REMOVED":
        if time.monotonic() > deadline:
            raise NoRoomError(f"waited {timeout_s:g} s for the placement group {group!r} to end, and it did not")
        time.sleep(0.05)


def _bundle(options: Mapping[str, Any]) -> dict[str, float]:
    return {resource: options[option] for option, resource in _RESOURCES.items() if options.get(option)}


def _described(bundles: list[dict[str, float]]) -> str:
    """Return what is asked for, such as `2 x (2 CPU, 1 GPU) and 1 x (1 CPU)`."""
    counted = Counter(", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items()) for bundle in bundles)
    return " and ".join(f"{number} x ({needs})" for needs, number in counted.items())


def _free() -> str:
    free, there = ray.available_resources(), ray.cluster_resources()
    return " and ".join(
        f"{free.get(resource, 0):g} of {there.get(resource, 0):g} {resource}" for resource in _RESOURCES.values()
    )
