"""A stage that several processes do together: an actor for each rank, on a Ray cluster that ends with the stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tasks.clusters import address_of, lease_for
from tasks.failures import first_line
from tasks.progress import say
from tasks.ray_calls import POLL_S, ask, its_own_word, trouble_among, unwrapped, wait_for_all
from tasks.sentences import run_logger
from tasks.shares import available_gpus, resources, trainer_share

if TYPE_CHECKING:
    from rlhf_core.config import ClusterConfig, TrainersConfig
    from rlhf_core.ray_tools.rank_actor import Tell
    from tasks.context import Context

ANSWER_S = 30.0
"""Longest wait for an actor that has nothing to do but answer."""
OBJECT_STORE_MB = 80
"""As little as Ray takes: nothing goes through it."""


def run_on_ranks(
    work: Callable[[Tell], Any],
    *,
    stage: str,
    name: str,
    trainers: TrainersConfig,
    cluster: ClusterConfig,
    context: Context,
) -> Any:
    """Do a piece of work on every rank, each in an actor on a cluster of this run, and return the first rank's result.

    Args:
        work: is given what takes its lines for the run's log; crosses to the actors, and what it returns crosses back.
        stage: for the log.
        name: of the run's cluster.
        trainers: how many ranks, and by which strategy they train.
        cluster: what each gets of the machine, and how long is waited.
        context: of the stage.

    Raises:
        LostRankError: if a rank died.
        TimeoutError: if one does not answer, or nothing was told for `cluster.episode_timeout_s`.
    """
    from infra.clusters import connect, release_cluster

    started, number = time.monotonic(), trainers.num_trainers
    manifest = lease_for(
        name,
        cluster,
        context,
        num_trainers=number,
        num_cpus=number * cluster.trainer_threads,
        object_store_mb=cluster.object_store_mb or OBJECT_STORE_MB,
    )
    try:
        connect(manifest)
        share = trainer_share(cluster, available_gpus(address_of(cluster)), number)
        actors = _group(work, stage, number, cluster, resources(cluster.trainer_threads, share))
        ranks = f"{number} rank{'s' if number > 1 else ''} ({trainers.strategy})"
        say(stage, f"{ranks} ready in {time.monotonic() - started:.0f} s")
        return _first_result(actors, cluster)
    finally:
        release_cluster(name)


def _group(
    work: Callable[[Tell], Any], stage: str, number: int, cluster: ClusterConfig, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the actors by name, the first rank first, in one group if they are several."""
    from infra.clusters.placement import place
    from rlhf_core.ray_tools.member import form_group
    from rlhf_core.ray_tools.rank_actor import RankActor

    actor_class: Any = RankActor  # decorated with ray.remote, it has .options and .remote, which its type does not show
    names = [f"{stage}-{rank}" for rank in range(number)]
    placed = place(dict.fromkeys(names, options), group=stage, timeout_s=cluster.start_timeout_s)
    actors = {name: actor_class.options(name=name, **placed[name]).remote(work) for name in names}
    wait_for_all(
        {actor.ping.remote(): name for name, actor in actors.items()}, cluster.start_timeout_s, what="ranks to start"
    )
    if number > 1:
        unwrapped(
            partial(
                form_group,
                actors,
                start_timeout_s=cluster.start_timeout_s,
                collective_timeout_s=cluster.collective_timeout_s,
            )
        )
    return actors


def _first_result(actors: Mapping[str, Any], cluster: ClusterConfig) -> Any:
    """Have all ranks work, and return what the first one does; its lines go into the run's log as they come."""
    import ray

    calls = {actor.run.remote(): name for name, actor in actors.items()}
    first, leader = next(iter(calls)), next(iter(actors.values()))
    told = time.monotonic()
    while True:
        done, _ = ray.wait([first], timeout=POLL_S)
        if lines := _lines(leader):
            told = time.monotonic()
        for line in lines:
            run_logger().info("%s", line)
        if done:
            break
        if time.monotonic() - told > cluster.episode_timeout_s:
            raise TimeoutError(
                f"waited {cluster.episode_timeout_s:.0f} s for a word of {calls[first]}, and none came; raise "
                "ppo.cluster.episode_timeout_s, or look into the cluster's log"
            )
        trouble = trouble_among(actors, ANSWER_S)
        if trouble is not None:
            _say_what_others_met(calls, first)
            return its_own_word(first, trouble)
    _say_what_others_met(calls, first)
    result = unwrapped(partial(ray.get, first))
    wait_for_all(calls, cluster.collective_timeout_s, what="the other ranks to end", setting="collective_timeout_s")
    return result


def _lines(leader: Any) -> list[str]:
    """Return what the first rank has told since; nothing if it is gone, which its own call says better."""
    import ray

    try:
        lines: list[str] = ask(leader.lines, ANSWER_S)
    except ray.exceptions.RayActorError:
        return []
    return lines


def _say_what_others_met(calls: Mapping[Any, str], first: Any) -> None:
    """Write into the log why other ranks failed: the first may say only that one did."""
    import ray

    others = [reference for reference in calls if reference != first]
    ready, _ = ray.wait(others, num_returns=len(others), timeout=0) if others else ([], [])
    for reference in ready:
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            run_logger().warning("%s: %s", calls[reference], first_line(error))
