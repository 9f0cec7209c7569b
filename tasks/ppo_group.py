"""The run's trainer and makers on its cluster: found warm, or built from the store's last state."""

from __future__ import annotations

import time
from typing import Any

from infra.clusters import ClusterManifest, connect
from infra.errors import ClusterError
from rlhf_core.config import ClusterConfig, PipelineConfig
from rlhf_core.data import problems_from_jsonl
from tasks.context import Context, materialise
from tasks.progress import say
from tasks.results import PPORun

TRAINER = "trainer"


def lease(run: PPORun, context: Context) -> ClusterManifest:
    """Return the run's cluster, held by this process: started on the first call, warm afterwards."""
    from infra.clusters import lease_cluster

    config = _cluster(run)
    return lease_cluster(
        run.name,
        directory=context.settings.clusters_dir,
        num_cpus=config.trainer_threads + config.num_makers * config.maker_threads,
        num_gpus=_gpus(),
        object_store_mb=config.object_store_mb,
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
    """End the run's actors, whatever they are doing; the cluster stays."""
    import ray

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
        position = ray.get(handles[TRAINER].position.remote(), timeout=30)
        ray.get([handles[name].ping.remote() for name in _maker_names(run)], timeout=30)
    except (ValueError, ray.exceptions.RayError):
        return None
    return handles[TRAINER] if position.next_episode == episode and not position.lost_makers else None


def _build(run: PPORun, context: Context) -> Any:
    import ray

    from rlhf_core.detached.maker import ExperienceMakerHolder
    from rlhf_core.detached.trainer import DetachedPPOTrainer
    from tasks.ppo_keeper import StoreKeeper
    from tasks.ppo_models import LearnerFactory, MakerFactory, PolicySaver

    started = time.monotonic()
    config, cluster = PipelineConfig.model_validate(run.config), _cluster(run)
    problems = problems_from_jsonl((materialise(context, run.dataset) / "ppo.jsonl").read_bytes())
    trainer_gpus, maker_gpus = _gpu_shares(cluster)
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
        _maker_names(run),
        LearnerFactory(run),
        problems,
        config.ppo,
        config.seed,
        StoreKeeper(run),
        PolicySaver(run),
    )
    waiting = [actor.ping.remote() for actor in (trainer, *makers)]
    ready, late = ray.wait(waiting, num_returns=len(waiting), timeout=cluster.start_timeout_s)
    if late:
        raise ClusterError(
            f"waited {cluster.start_timeout_s:.0f} s for trainer and makers of run {run.name}, and {len(late)} of "
            f"{len(waiting)} did not answer; raise ppo.cluster.start_timeout_s or look into the cluster's log"
        )
    ray.get(ready)  # an actor that failed to build says why here
    ray.get(trainer.synchronise.remote(), timeout=cluster.start_timeout_s)
    position = ray.get(trainer.position.remote(), timeout=30)
    found = f"restored after episode {position.next_episode}" if position.next_episode else "at the start"
    say("ppo", f"1 trainer and {len(makers)} makers ready in {time.monotonic() - started:.0f} s, {found}")
    return trainer


def _resources(threads: int, gpus: float) -> dict[str, Any]:
    # Ray would set one thread for an actor of a fraction of a CPU; torch reads this when it is imported.
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return {"num_cpus": threads, "num_gpus": gpus, "runtime_env": {"env_vars": environment}}


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _gpu_shares(cluster: ClusterConfig) -> tuple[float, float]:
    """Return the GPUs of the trainer and of each maker: as configured, else half for the trainer, the rest shared."""
    available = _gpus()
    trainer = cluster.trainer_gpus if cluster.trainer_gpus is not None else min(1.0, available / 2)
    if cluster.maker_gpus is not None:
        return trainer, cluster.maker_gpus
    share = max(0.0, available - trainer) / cluster.num_makers
    return trainer, float(int(share)) if share >= 1 else int(share * 100) / 100


def _maker_names(run: PPORun) -> tuple[str, ...]:
    return tuple(f"maker-{index}" for index in range(_cluster(run).num_makers))


def _cluster(run: PPORun) -> ClusterConfig:
    return PipelineConfig.model_validate(run.config).ppo.cluster


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
