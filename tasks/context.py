"""What every stage needs: the store, the run's identity, keys, parents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from infra.artifacts import ArtifactRef, ArtifactStore, Manifest, open_default_store
from infra.errors import ReferenceNotFoundError
from infra.settings import Settings, settings
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from tasks.progress import say
from tasks.results import Parent, StageResult

BASE_MODEL = "model/base"
"""Stands for the preset's base model where a policy is asked for."""
CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Context:
    """The open store, the settings, and the Prefect run that is going on."""

    store: ArtifactStore
    settings: Settings
    flow_run: str | None


def open_context() -> Context:
    """Open the store of the settings; one per task, since its client belongs to one process."""
    return Context(open_default_store(), settings(), root_flow_run())


def root_flow_run() -> str | None:
    """Return the id of the outermost flow run, which artifacts are traced to; None outside a run."""
    return flow_run.get_root_flow_run_id() or flow_run.get_id() or None


@cache
def source_digest(*task_files: str) -> str:
    """Return the SHA-256 of the code that a stage's numbers depend on, committed or not.

    Args:
        task_files: names of the stage's modules in `tasks/`.
    """
    files = [*sorted((CHECKOUT / "rlhf_core").rglob("*.py")), CHECKOUT / "requirements.txt"]
    files += [CHECKOUT / "tasks" / f"{name}.py" for name in task_files]
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def stage_key(stage: str, *, config: Any, inputs: Iterable[str], seed: int, source: str) -> str:
    """Return the SHA-256 under which a stage's result is found again; names and paths are not part of it."""
    facts = {"stage": stage, "config": config, "inputs": list(inputs), "seed": seed, "source": source}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def reuse_or_make(context: Context, *, stage: str, kind: str, key: str, make: Callable[[], StageResult]) -> StageResult:
    """Return the stage's result from the store, or make it."""
    found = context.store.find(kind, key)
    return stage_result(stage, found, reused=True) if found else make()


def stage_result(stage: str, manifest: Manifest, *, reused: bool) -> StageResult:
    """Return what a manifest says of the stage that made it."""
    return StageResult(
        stage=stage,
        uri=manifest.ref.uri,
        digest=manifest.digest,
        reused=reused,
        seconds=float(str(manifest.metrics.get("seconds", 0.0))),
        metrics=dict(manifest.metrics),
    )


def commit_stage(
    context: Context,
    *,
    stage: str,
    kind: str,
    name: str,
    files: Mapping[str, Path | bytes] | Path,
    key: str,
    parents: Iterable[Parent],
    config: PipelineConfig,
    metrics: Mapping[str, Any],
    source: str,
) -> StageResult:
    """Store what a stage made, with everything that it is traced by."""
    reference = context.store.commit(
        kind,
        name,
        files,
        key=key,
        parents=[ArtifactRef(parent.uri, parent.digest) for parent in parents],
        config=config.model_dump(mode="json"),
        metrics=dict(metrics),
        source_digest=source,
        flow_run=context.flow_run,
    )
    return stage_result(stage, context.store.resolve(reference.uri), reused=False)


def base_model(context: Context, config: PipelineConfig) -> Parent:
    """Return the preset's base model, on this machine and identified by its content."""
    from rlhf_core.models.loading import find_local, locate_model, model_digest

    if find_local(config.model.path, models_dir=context.settings.models_dir) is None:
        say("model", f"getting {config.model.path}; once, then it is kept")
    directory = locate_model(config.model.path, models_dir=context.settings.models_dir)
    digest = model_digest(directory, models_dir=context.settings.models_dir)
    return Parent(uri=f"model/{Path(config.model.path).name}", digest=digest, path=str(directory))


def resolve_policy(context: Context, config: PipelineConfig, reference: str | None) -> Parent:
    """Return the policy that a stage starts from.

    Args:
        context: the open context.
        config: the preset; names the SFT model to look for, and says whether the base model may stand in.
        reference: `sft/...`, `policy/...`, BASE_MODEL for the preset's base model, or None: the latest SFT model.
    """
    if reference == BASE_MODEL:
        return base_model(context, config)
    if reference is not None:
        manifest = context.store.resolve(reference)
        _check_kind(manifest, ("sft", "policy"), reference)
        return Parent(uri=manifest.ref.uri, digest=manifest.digest)
    latest = context.store.latest("sft", config.name)
    if latest is not None:
        return Parent(uri=latest.ref.uri, digest=latest.digest)
    if config.bootstrap:
        return base_model(context, config)
    raise ConfigError(
        f"no SFT model sft/{config.name} exists yet: run the deployment sft/{config.name} first, name another "
        "with the parameter `actor`, or set `bootstrap: true` in the preset to start from the base model"
    )


def resolve_reward_model(context: Context, config: PipelineConfig, reference: str | None) -> Parent | None:
    """Return the reward model of a PPO run; None where the configuration gives it no weight."""
    if config.ppo.reward.reward_model == 0 and reference is None:
        return None
    if reference is None:
        latest = context.store.latest("reward-model", config.name)
        if latest is None:
            raise ConfigError(
                f"no reward model reward-model/{config.name} exists yet: run the deployment "
                f"reward-model/{config.name} first, or set the override ppo.reward.reward_model to 0"
            )
        return Parent(uri=latest.ref.uri, digest=latest.digest)
    manifest = context.store.resolve(reference)
    _check_kind(manifest, ("reward-model",), reference)
    return Parent(uri=manifest.ref.uri, digest=manifest.digest)


def materialise(context: Context, parent: Parent) -> Path:
    """Return a local directory with the parent's files, fetched and verified once."""
    return Path(parent.path) if parent.path else context.store.cached(parent.uri)


def _check_kind(manifest: Manifest, kinds: tuple[str, ...], reference: str) -> None:
    if manifest.kind not in kinds:
        raise ReferenceNotFoundError(
            f"{reference} is a {manifest.kind}, but a reference to {' or '.join(kinds)} is needed here"
        )
