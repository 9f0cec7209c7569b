"""The run's trainer and makers on its cluster: found warm, or built from the store's last state."""

from __future__ import annotations

import math
import time
from typing import Any

from infra.clusters import ClusterManifest, connect
from infra.errors import ClusterError
from rlhf_core.config import ClusterConfig, PipelineConfig
from rlhf_core.data import problems_from_jsonl
from tasks.context import Context, materialise
from tasks.progress import say
from tasks.ray_calls import ask, wait_for_all
from tasks.results import PPORun

TRAINER = "trainer"
ANSWER_S = 30.0
"""Longest wait for an actor that has nothing to do but answer."""
PUBLISHED = 2 * 2
"""Models in the object store at once: actor and critic, of the version that goes and of the one that comes."""


def lease(run: PPORun, context: Context) -> ClusterManifest:
    """Return the run's cluster, held by this process: started on the first call, warm afterwards."""
    from infra.clusters import lease_cluster

    config = _cluster(run)
    return lease_cluster(
        run.name,
        directory=context.settings.clusters_dir,
        num_cpus=config.trainer_threads + config.num_makers * config.maker_threads,
        num_gpus=_gpus(),
        object_store_mb=config.object_store_mb or _object_store_mb(run, context),
        start_timeout_s=config.start_timeout_s,
        environment=context.settings.child_environment(),
    )


def trainer_for(run: PPORun, episode: int, context: Context) -> Any:
    """Return a trainer at which `episode` is due or overdue, with living makers that hold its weights.

    A group that stands exactly there is used as it is. Any other is ended, and a new one restores the
    last committed state, which may be up to two episodes behind.
    """
    manifest = lease(run, context)
    connect(manifest)
    trainer = _warm(run, episode)
    if trainer is not None:
        return trainer
    end_group(run)
    return _build(run, context)


def end_group(run: PPORun) -> None:
    """End the run's actors; the cluster stays. A commit that a living trainer has under way is let finish first."""
    import ray

    _let_commit_finish(_cluster(run))
    for name in (TRAINER, *_maker_names(run)):
        try:
            ray.kill(ray.get_actor(name))
        except ValueError:
            continue  # not there
    _await_gone((TRAINER, *_maker_names(run)), _cluster(run).start_timeout_s)


def _warm(run: PPORun, episode: int) -> Any | None:
    import ray

    try:
        handles = {name: ray.get_actor(name) for name in (TRAINER, *_maker_names(run))}
        position = ask(handles[TRAINER].position, ANSWER_S)
        ray.get([handles[name].ping.remote() for name in _maker_names(run)], timeout=ANSWER_S)
    except (ValueError, TimeoutError, ray.exceptions.RayError):
        return None
    return handles[TRAINER] if position.next_episode == episode and position.has_all_makers else None


def _build(run: PPORun, context: Context) -> Any:
    from rlhf_core.detached.maker import ExperienceMakerHolder
    from rlhf_core.detached.trainer import DetachedPPOTrainer
    from tasks.ppo_keeper import StoreKeeper
    from tasks.ppo_models import LearnerFactory, MakerFactory, PolicySaver

    started = time.monotonic()
    config, cluster = PipelineConfig.model_validate(run.config), _cluster(run)
    problems = problems_from_jsonl((materialise(context, run.dataset) / "ppo.jsonl").read_bytes())
    trainer_gpus, maker_gpus = gpu_shares(cluster, _gpus())
    # Decorated with ray.remote, a class has .options and .remote, which its type does not show.
    maker_class: Any = ExperienceMakerHolder
    trainer_class: Any = DetachedPPOTrainer
    makers = [
        maker_class.options(name=name, lifetime="detached", **_resources(cluster.maker_threads, maker_gpus)).remote(
            name, MakerFactory(run)
        )
        for name in _maker_names(run)
    ]
    trainer = trainer_class.options(
        name=TRAINER, lifetime="detached", **_resources(cluster.trainer_threads, trainer_gpus)
    ).remote(
        _maker_names(run), LearnerFactory(run), problems, config.ppo, config.seed, StoreKeeper(run), PolicySaver(run)
    )
    actors = dict(zip((TRAINER, *_maker_names(run)), (trainer, *makers), strict=True))
    waiting = {actor.build.remote(): name for name, actor in actors.items()}
    wait_for_all(waiting, cluster.start_timeout_s, what=f"run {run.name} to build its models")
    ask(trainer.synchronise, cluster.start_timeout_s)
    position = ask(trainer.position, ANSWER_S)
    found = f"restored after episode {position.next_episode}" if position.next_episode else "at the start"
    say("ppo", f"1 trainer and {len(makers)} makers ready in {time.monotonic() - started:.0f} s, {found}")
    return trainer


def gpu_shares(cluster: ClusterConfig, available: int) -> tuple[float, float]:
    """Return the GPUs of the trainer and of each maker: as configured, else half for the trainer, the rest shared.

    Several makers on one GPU get equal shares that fit: 3 makers on 2 GPUs take half a GPU each.
    """
    trainer = cluster.trainer_gpus if cluster.trainer_gpus is not None else min(1.0, available / 2)
    if cluster.maker_gpus is not None:
        return trainer, cluster.maker_gpus
    left = available - trainer
    if left >= cluster.num_makers:
        return trainer, 1.0
    if left < 1:  # what the trainer leaves of the only GPU
        return trainer, math.floor(100 * left / cluster.num_makers) / 100
    return trainer, math.floor(100 / math.ceil(cluster.num_makers / math.floor(left))) / 100


def _resources(threads: int, gpus: float) -> dict[str, Any]:
    # Ray would set one thread for an actor of a fraction of a CPU; torch reads this when it is imported.
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return {"num_cpus": threads, "num_gpus": gpus, "runtime_env": {"env_vars": environment}}


def _object_store_mb(run: PPORun, context: Context) -> int:
    from rlhf_core.models.loading import count_parameters
    from rlhf_core.models.memory import BYTES

    dtype = PipelineConfig.model_validate(run.config).ppo.rollout_dtype
    published = PUBLISHED * BYTES[dtype] * count_parameters(materialise(context, run.actor))
    return 128 + math.ceil(1.1 * published / 1e6)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _maker_names(run: PPORun) -> tuple[str, ...]:
    return tuple(f"maker-{index}" for index in range(_cluster(run).num_makers))


def _cluster(run: PPORun) -> ClusterConfig:
    return PipelineConfig.model_validate(run.config).ppo.cluster


def _let_commit_finish(cluster: ClusterConfig) -> None:
    import ray

    try:
        trainer = ray.get_actor(TRAINER)
        ask(trainer.ping, ANSWER_S)
        ask(trainer.await_commit, cluster.commit_timeout_s)
    except Exception as error:
        if not isinstance(error, ValueError):  # no such actor
            say("ppo", f"the trainer's last commit did not finish: {str(error).splitlines()[0]}")


def _await_gone(names: tuple[str, ...], timeout_s: float) -> None:
    """Wait until the names are free: Ray frees a killed actor's name a moment later."""
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        left = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)} & set(names)
        if not left:
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"waited {timeout_s:.0f} s for the actors {', '.join(sorted(left))} to end, and they did not"
            )
        time.sleep(0.05)
