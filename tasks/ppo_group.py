"""The run's trainers and makers on its cluster: found warm, or built from the store's last state."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from infra.clusters import ClusterRecord, connect
from infra.errors import ClusterNotReadyError
from rlhf_core.config import ClusterConfig
from rlhf_core.counting import counted
from rlhf_core.data import problems_from_jsonl
from rlhf_core.errors import LostRankError
from tasks.clusters import address_of, lease_for
from tasks.context import Context, materialise, open_context
from tasks.failures import first_line
from tasks.gpu_allocation import ADVICE, available_gpus, gpu_shares
from tasks.progress import say
from tasks.results import Parent, PPORun

TRAINER = "trainer"
"""The first rank; the others are trainer-1, trainer-2, ..."""
ROOM = "ppo"
"""The placement group of all of them."""
ANSWER_S = 30.0
"""Longest wait for an actor that has nothing to do but answer."""
PUBLISHED = 2 * 2
"""Models in the object store at once: actor and critic, of the version that goes and of the one that comes."""


def lease(run: PPORun, context: Context) -> ClusterRecord:
    """Return the run's cluster, held by this process: started on the first call, warm afterwards."""
    config, trainers = run.config.ppo.cluster, run.config.ppo.num_trainers
    return lease_for(
        run.name,
        config,
        context,
        num_trainers=trainers,
        num_cpus=trainers * config.trainer_threads + config.num_makers * config.maker_threads,
        object_store_mb=config.object_store_mb or _object_store_mb(run),
    )


def trainer_for(run: PPORun, episode: int, context: Context) -> Any:
    """Return a trainer at which `episode` is due or overdue, with running peers, and makers that hold its weights.

    A group that stands exactly there is used as it is. Any other is ended, and a new one restores the
    last committed state, which may be up to two episodes behind.
    """
    record = lease(run, context)
    connect(record)
    trainer = _warm(run, episode)
    if trainer is not None:
        return trainer
    end_group(run)
    return _build(run, context)


def end_group(run: PPORun) -> None:
    """End the run's actors; the cluster stays. A commit that the trainer has begun is waited for first."""
    import ray

    from rlhf_core.ray_tools.calls import await_free, find_actor
    from rlhf_core.ray_tools.placement import vacate

    cluster = run.config.ppo.cluster
    _let_commit_finish(cluster)
    names = (TRAINER, *_peer_names(run), *_maker_names(run))
    for name in names:
        if (actor := find_actor(name)) is not None:
            ray.kill(actor)
    if left := await_free(names, cluster.start_timeout_s):
        raise ClusterNotReadyError(
            f"waited {cluster.start_timeout_s:.0f} s for the actors {', '.join(sorted(left))} to end, and they did not"
        )
    vacate(ROOM)


def peers_of(run: PPORun) -> dict[str, Any]:
    """Return the trainer's other ranks by name: whoever waits for the trainer checks that they still run.

    Raises:
        LostRankError: if one has ended.
    """
    from rlhf_core.ray_tools.calls import find_actor

    found = {name: find_actor(name) for name in _peer_names(run)}
    for name, actor in found.items():
        if actor is None:
            raise LostRankError(f"{name}, a process of the trainer group, has ended: no actor has its name")
    return found


def _warm(run: PPORun, episode: int) -> Any | None:
    import ray

    from rlhf_core.ray_tools.calls import ask, find_actor, trouble_among

    try:
        trainer, peers = find_actor(TRAINER), {name: find_actor(name) for name in _peer_names(run)}
        if trainer is None or None in peers.values():
            return None
        position = ask(trainer.position, ANSWER_S)
    except (TimeoutError, ray.exceptions.RayError):
        return None
    stands = position.next_episode == episode and position.has_all_makers and not trouble_among(peers, ANSWER_S)
    return trainer if stands else None


def _build(run: PPORun, context: Context) -> Any:
    from rlhf_core.ray_tools.calls import ask, wait_for_all
    from rlhf_core.ray_tools.group import form_group

    started = time.monotonic()
    cluster = run.config.ppo.cluster
    trainers, makers = _start(run, context)
    trainer = trainers[TRAINER]
    if len(trainers) > 1:
        waits = {"start_timeout_s": cluster.start_timeout_s, "collective_timeout_s": cluster.collective_timeout_s}
        form_group(trainers, **waits)
    waiting = {trainer.build.remote(): TRAINER}  # it has its peers build, and the scheduler the makers
    wait_for_all(
        waiting,
        cluster.start_timeout_s,
        what=f"run {run.name} to build its models",
        setting="ppo.cluster.start_timeout_s",
        members=peers_of(run),
    )
    # It names the maker that it waited for: to come up, then to take the weights.
    ask(trainer.synchronise, 2 * cluster.start_timeout_s + ANSWER_S)
    position = ask(trainer.position, ANSWER_S)
    found = f"restored after episode {position.next_episode}" if position.next_episode else "at the start"
    group = counted(len(trainers), "trainer") + (f" ({run.config.ppo.strategy})" if len(trainers) > 1 else "")
    say("ppo", f"{group} and {counted(len(makers), 'maker')} ready in {time.monotonic() - started:.0f} s, {found}")
    return trainer


def _start(run: PPORun, context: Context) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Start the processes of trainers and makers, and return both by name."""
    from rlhf_core.detached.run import RunMaker, RunTrainer, TrainerRank
    from tasks.ppo_keeper import StoreKeeper
    from tasks.ppo_models import Development, LearnerFactory, MakerFactory, PolicySaver

    config, learner_fn = run.config, LearnerFactory(run)
    problems = problems_from_jsonl((materialise(context, run.dataset) / "ppo.jsonl").read_bytes())
    placed = _placed(run)
    # Decorated with ray.remote, a class has .options and .remote, which its type does not show.
    first: Any = RunTrainer
    further: Any = TrainerRank
    maker: Any = RunMaker
    trainers = {
        TRAINER: first.options(name=TRAINER, lifetime="detached", **placed[TRAINER]).remote(
            _maker_names(run), learner_fn, problems, config.ppo, config.seed, StoreKeeper(run), PolicySaver(run),
            peers=_peer_names(run), weights_dtype="float32" if run.shares_base else None,
            measure=Development(run) if config.ppo.evaluate_every else None,
        )
    }  # fmt: skip
    trainers |= {
        name: further.options(name=name, lifetime="detached", **placed[name]).remote(
            learner_fn, config.ppo, config.seed
        )
        for name in _peer_names(run)
    }
    makers = {
        name: maker.options(name=name, lifetime="detached", max_restarts=-1, **placed[name]).remote(
            name, MakerFactory(run)
        )
        for name in _maker_names(run)
    }
    return trainers, makers


def _placed(run: PPORun) -> dict[str, dict[str, Any]]:
    """Return the options of each actor by name, with room reserved for all of them: trainers first."""
    from rlhf_core.ray_tools.placement import place, resources

    cluster = run.config.ppo.cluster
    trainer_gpus, maker_gpus = gpu_shares(cluster, available_gpus(address_of(cluster)), run.config.ppo.num_trainers)
    asked = dict.fromkeys((TRAINER, *_peer_names(run)), resources(cluster.trainer_threads, trainer_gpus))
    asked |= dict.fromkeys(_maker_names(run), resources(cluster.maker_threads, maker_gpus))
    return place(asked, group=ROOM, timeout_s=cluster.start_timeout_s, advice=ADVICE)


def _object_store_mb(run: PPORun) -> int:
    from rlhf_core.models.memory import BYTES, adapter_parameters

    ppo = run.config.ppo
    models = PUBLISHED * (1.5 if ppo.cluster.sparse_weights else 1.0)  # a difference, of half at most, beside the whole
    size = BYTES[ppo.rollout_dtype] * _parameters(run.base or run.actor)
    if run.shares_base and ppo.lora is not None:
        scorer = run.config.reward_model.lora if ppo.critic_init == "reward_model" else None
        rank = max(ppo.lora.r, scorer.r if scorer else 0)  # of a critic that has the reward model's adapters
        size = BYTES["float32"] * adapter_parameters(_parameters(run.base or run.actor), rank)
    return 128 + math.ceil(1.1 * models * size / 1e6)


@cache
def _parameters(model: Parent) -> int:
    """Return how many parameters a whole model has. Once for a run: each look hashes all of its files."""
    from rlhf_core.models.loading import count_parameters

    return count_parameters(materialise(open_context(), model))


def _peer_names(run: PPORun) -> tuple[str, ...]:
    return tuple(f"{TRAINER}-{rank}" for rank in range(1, run.config.ppo.num_trainers))


def _maker_names(run: PPORun) -> tuple[str, ...]:
    return tuple(f"maker-{index}" for index in range(run.config.ppo.cluster.num_makers))


def _let_commit_finish(cluster: ClusterConfig) -> None:
    from rlhf_core.ray_tools.calls import ask, find_actor

    try:
        if (trainer := find_actor(TRAINER)) is not None:
            ask(trainer.ping, ANSWER_S)
            ask(trainer.await_commit, cluster.commit_timeout_s)
    except Exception as error:
        say("ppo", f"the trainer's last commit did not finish: {first_line(error)}")
