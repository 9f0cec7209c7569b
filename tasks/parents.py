"""Which policy, reward model and base model a stage starts from."""

from __future__ import annotations

from pathlib import Path

from infra.artifacts import Manifest
from infra.artifacts.lineage import walk
from infra.errors import ReferenceNotFoundError
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from tasks.context import Context, open_context
from tasks.plan import settled_once
from tasks.progress import say
from tasks.results import Parent
from tasks.sentences import stage_task

BASE_MODEL = "model/base"
"""Stands for the preset's base model where a policy is asked for."""


@stage_task(name="find-policy")
def find_policy(config: PipelineConfig, reference: str | None) -> Parent:
    """Return the policy that a reference names, or the preset's latest SFT model, or its base model."""
    return resolve_policy(open_context(), config, reference)


def base_model(context: Context, config: PipelineConfig) -> Parent:
    """Return the preset's base model, on this machine and identified by its content."""
    from rlhf_core.models.loading import find_local, locate_model, model_digest

    if find_local(config.model.path, models_dir=context.settings.models_dir) is None:
        say("model", f"getting {config.model.path}; once, then it is kept")
    directory = locate_model(config.model.path, models_dir=context.settings.models_dir)
    digest = model_digest(directory, models_dir=context.settings.models_dir)
    base = Parent(uri=f"model/{Path(config.model.path).name}", digest=digest, path=str(directory))
    then: Parent = settled_once(context, f"base {config.model.path}", Parent, lambda: base, by_all=True)
    if then.digest != digest:
        raise ConfigError(
            f"{config.model.path} has other content than when this run began ({digest[:12]}, then {then.digest[:12]}); "
            "put back what was there, or start a new run, which takes the model as it is now"
        )
    return base


def resolve_policy(context: Context, config: PipelineConfig, reference: str | None) -> Parent:
    """Return the policy that a stage starts from.

    Args:
        context: the open context.
        config: the preset; names the SFT model to look for, and says whether the base model may stand in.
        reference: `sft/...`, `policy/...`, BASE_MODEL for the preset's base model, or None: the latest SFT model
            that was made from the preset's base model.
    """
    if reference == BASE_MODEL:
        return base_model(context, config)
    found: Parent = settled_once(
        context, f"actor {reference or 'latest'}", Parent, lambda: _find_policy(context, config, reference)
    )
    return found if found.path is None else base_model(context, config)  # which sees that it is the same


def _find_policy(context: Context, config: PipelineConfig, reference: str | None) -> Parent:
    if reference is not None:
        manifest = context.store.resolve(reference)
        _check_kind(manifest, ("sft", "policy"), reference)
        return _as_parent(manifest)
    base = base_model(context, config)
    latest = _latest_from(context, "sft", config.name, base)
    if latest is not None:
        say("actor", f"takes {latest.ref.uri}, the latest SFT model that was made from {config.model.path}")
        return _as_parent(latest)
    if config.bootstrap:
        say("actor", f"takes the base model {config.model.path}: no SFT model sft/{config.name} was made from it yet")
        return base
    raise ConfigError(
        f"no SFT model sft/{config.name} made from {config.model.path} exists yet: run "
        f"`rlhf run sft/quickstart -p preset={config.name}` first, name another with the parameter `actor`, or set "
        "`bootstrap: true` in the preset to start from the base model"
    )


def resolve_reward_model(context: Context, config: PipelineConfig, reference: str | None) -> Parent | None:
    """Return the reward model of a run; None where the configuration has no use for one."""
    if reference is None and not wants_reward_model(config):
        return None
    found: Parent = settled_once(
        context,
        f"reward model {reference or 'latest'}",
        Parent,
        lambda: _find_reward_model(context, config, reference),
    )
    return found


def _find_reward_model(context: Context, config: PipelineConfig, reference: str | None) -> Parent:
    if reference is not None:
        manifest = context.store.resolve(reference)
        _check_kind(manifest, ("reward-model",), reference)
        return _as_parent(manifest)
    latest = _latest_from(context, "reward-model", config.name, base_model(context, config))
    if latest is None:
        raise ConfigError(
            f"no reward model reward-model/{config.name} made from {config.model.path} exists yet: run "
            f"`rlhf run reward-model/quickstart -p preset={config.name}` first, or set the override "
            "ppo.reward.reward_model to 0 (and ppo.critic_init to policy, evaluation.judge to verifier)"
        )
    say("reward-model", f"takes {latest.ref.uri}, the latest that was made from {config.model.path}")
    return _as_parent(latest)


def wants_reward_model(config: PipelineConfig) -> bool:
    """Return whether a trained reward model is needed: for PPO, or to judge held-out answers."""
    return ppo_wants_reward_model(config) or config.evaluation.judge == "reward_model"


def ppo_wants_reward_model(config: PipelineConfig) -> bool:
    """Return whether PPO needs a trained reward model: for its scores, or as what its critic starts from."""
    return config.ppo.reward.reward_model > 0 or config.ppo.critic_init == "reward_model"


def ancestors(context: Context, uri: str) -> set[str]:
    """Return the digests of all that an artifact came from."""
    _, *found = walk(context.store.lineage(uri))
    return {node.ref.digest for node in found}


def _latest_from(context: Context, kind: str, name: str, base: Parent) -> Manifest | None:
    """Return the newest version that came from this very base model: another one's weights would not fit."""
    for manifest in reversed(context.store.list(kind, name)):
        if base.digest in ancestors(context, manifest.ref.uri):
            return manifest
    return None


def _as_parent(manifest: Manifest) -> Parent:
    return Parent(uri=manifest.ref.uri, digest=manifest.digest)


def _check_kind(manifest: Manifest, kinds: tuple[str, ...], reference: str) -> None:
    if manifest.kind not in kinds:
        raise ReferenceNotFoundError(
            f"{reference} is a {manifest.kind}, but a reference to {' or '.join(kinds)} is needed here"
        )
