"""Which policy, reward model and base model a stage starts from."""

from __future__ import annotations

from pathlib import Path

from infra.artifacts import ArtifactRef, Manifest
from infra.artifacts.lineage import walk
from infra.artifacts.ref import EXTERNAL_PREFIX, parse_reference
from infra.errors import ReferenceNotFoundError
from rlhf_core.config import PipelineConfig
from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, ModelError
from tasks.context import Context, open_context
from tasks.models import read_base
from tasks.plan import settled_once
from tasks.progress import say
from tasks.projects import latest_reference, of_other_projects, versions
from tasks.results import Parent
from tasks.task_errors import stage_task

BASE_MODEL = "model/base"
"""Stands for the preset's base model where a policy is asked for."""


@stage_task(name="find-policy")
def find_policy(config: PipelineConfig, reference: str | None) -> Parent:
    """Return the policy that a reference names, or the project's latest SFT model, or the preset's base model."""
    return resolve_policy(open_context(), config, reference)


def base_model(context: Context, config: PipelineConfig) -> Parent:
    """Return the preset's base model, on this machine and identified by its content.

    Raises:
        ConfigError: it holds something else than when the run began.
    """
    from rlhf_core.models.loading import find_local, locate_model, model_digest
    from rlhf_core.models.locating import split_hub_name

    if find_local(config.model.path, models_dir=context.settings.models_dir) is None:
        say("model", f"getting {config.model.path}; once, then it is kept")
    directory = locate_model(config.model.path, models_dir=context.settings.models_dir)
    digest = model_digest(directory, models_dir=context.settings.models_dir)
    given = Path(config.model.path)
    hub, _ = split_hub_name(config.model.path)
    name = given.name if given.expanduser().is_dir() else Path(hub).name
    base = Parent(uri=f"{EXTERNAL_PREFIX}{name}", digest=digest)  # a record holds no path
    then: Parent = settled_once(context, f"model {config.model.path}", Parent, lambda: base, by_all=True)
    if then.digest != digest:
        raise ConfigError(
            f"{config.model.path} has other content than when this run began ({digest[:12]}, then {then.digest[:12]}); "
            "put back what was there, or start a new run, which takes the model as it is now"
        )
    return base.model_copy(update={"path": str(directory)})


def base_of(context: Context, config: PipelineConfig, model: Parent) -> Parent:
    """Return what a model's adapters are over; a whole model is its own base.

    Args:
        context: the open context.
        config: the preset, whose base model it may be.
        model: whole, or adapters.

    Raises:
        ModelError: if the adapters are over a model that is not in the store, and not the preset's.
    """
    if model.path:
        return model
    noted = read_base(context.store, context.store.resolve(ArtifactRef(model.uri, model.digest)))
    base = Parent(uri=noted.uri, digest=noted.digest) if noted else model
    if not base.uri.startswith(EXTERNAL_PREFIX):
        return base
    external = base_model(context, config)
    if base.digest != external.digest:
        raise ModelError(
            f"{model.uri} was trained over {base.uri} (digest {base.digest[:12]}), but model.path leads to "
            f"{external.path} (digest {external.digest[:12]}); give the model that it was trained over, with "
            "`-p model=PATH`"
        )
    return external


def settle_policy(context: Context, config: PipelineConfig, reference: str | None, *, trained: bool) -> str:
    """Return exactly which policy a call of a flow takes, as it was when the run began; the first time, say it.

    Args:
        context: the open context.
        config: the preset.
        reference: of `resolve_policy`; None: the project's latest.
        trained: whether the latest that PPO has made is meant, not what it starts from.

    Returns:
        `kind/name@version`, or BASE_MODEL.
    """
    if reference == BASE_MODEL or _is_exact(reference):
        resolve_policy(context, config, reference)
        return str(reference)
    wanted = latest_reference(context, config, "policy") if trained and reference is None else reference

    def find() -> Parent:
        found = resolve_policy(context, config, wanted)
        if wanted is None:
            say("actor", f"takes {_told_start(context, config, found)} (the parameter `actor` names another)")
        else:
            also = f", of {counted(len(context.store.list(*_artifact(found.uri))), 'version')}"
            named = "is the latest" if reference is None else f"{reference} is now"
            say("actor", f"takes {found.uri}, which {named}{also} (the parameter `actor` names another)")
        return found.model_copy(update={"path": None})

    return _as_named(context, settled_once(context, "actor", Parent, find), ("sft", "policy"))


def settle_reward_model(context: Context, config: PipelineConfig, reference: str | None) -> str:
    """Return exactly which reward model a call of a flow takes, as it was when the run began; arguments as above."""
    if _is_exact(reference):
        resolve_reward_model(context, config, reference)
        return str(reference)

    def find() -> Parent:
        found = resolve_reward_model(context, config, reference)
        assert found is not None  # it was named, or is wanted
        count = counted(len(context.store.list(*_artifact(found.uri))), "version")
        why = f"{reference} is now" if reference else f"is the latest that was made from {config.model.path}"
        say("reward-model", f"takes {found.uri}, which {why}, of {count} (the parameter `reward_model` names another)")
        return found

    return _as_named(context, settled_once(context, "reward model", Parent, find), ("reward-model",))


def _is_exact(reference: str | None) -> bool:
    return reference is not None and parse_reference(reference).version is not None


def _artifact(uri: str) -> tuple[str, str]:
    reference = parse_reference(uri)
    return reference.kind, reference.name


def _told_start(context: Context, config: PipelineConfig, found: Parent) -> str:
    """Return what PPO starts from where nobody named anything, and what else there was."""
    count = len(versions(context, config, "sft"))
    others = f"of {counted(count, 'version')} of sft/{config.name}"
    if not found.uri.startswith(EXTERNAL_PREFIX):
        return f"{found.uri}, the latest SFT model that was made from {config.model.path}, {others}"
    none = f"there is no sft/{config.name} yet{of_other_projects(context, 'sft')}"
    why = f"none {others} was made from it" if count else none
    return f"the base model {config.model.path}: {why}"


def _as_named(context: Context, found: Parent, kinds: tuple[str, ...]) -> str:
    """Return what a flow is told of a policy or model that was recorded, and check that it is there.

    Raises:
        StoreError: it is gone, or another is under its number; or the record names something else.
    """
    if found.uri.startswith(EXTERNAL_PREFIX):
        return BASE_MODEL
    try:
        _check_kind(context.store.resolve(ArtifactRef(found.uri, found.digest)), kinds, found.uri)
    except ReferenceNotFoundError as error:
        raise ReferenceNotFoundError(f"this run began with {found.uri}, but {error}; start a new run") from None
    return found.uri


def resolve_policy(context: Context, config: PipelineConfig, reference: str | None) -> Parent:
    """Return the policy that a stage starts from.

    Args:
        context: the open context.
        config: names the project whose SFT models are looked at, and says whether the base model may stand in.
        reference: `sft/...`, `policy/...`, BASE_MODEL for the preset's base model, or None: the latest SFT model
            that was made from the preset's base model.
    """
    if reference is not None and reference != BASE_MODEL:
        manifest = context.store.resolve(reference)
        _check_kind(manifest, ("sft", "policy"), reference)
        return _as_parent(manifest)
    base = base_model(context, config)
    if reference == BASE_MODEL:
        return base
    latest = _latest_from(context, config, "sft", base)
    if latest is not None:
        return _as_parent(latest)
    if config.bootstrap:
        return base
    raise ConfigError(
        f"no SFT model sft/{config.name} made from {config.model.path} exists yet{of_other_projects(context, 'sft')}: "
        f"run `rlhf run sft/quickstart {_same_project(config)}` with the same data first, name another with the "
        "parameter `actor`, or set `bootstrap: true` in the preset to start from the base model"
    )


def resolve_reward_model(context: Context, config: PipelineConfig, reference: str | None) -> Parent | None:
    """Return the reward model of a run; None where the configuration has no use for one."""
    if reference is not None:
        manifest = context.store.resolve(reference)
        _check_kind(manifest, ("reward-model",), reference)
        return _as_parent(manifest)
    if not wants_reward_model(config):
        return None
    latest = _latest_from(context, config, "reward-model", base_model(context, config))
    if latest is None:
        raise ConfigError(
            f"no reward model reward-model/{config.name} made from {config.model.path} exists yet"
            f"{of_other_projects(context, 'reward-model')}: run `rlhf run reward-model/quickstart "
            f"{_same_project(config)}` with the same data first, name another with `reward_model`, or set "
            "the override ppo.reward.reward_model to 0 (and ppo.critic_init to policy, evaluation.judge to verifier)"
        )
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


def _same_project(config: PipelineConfig) -> str:
    """Return the parameters with which another stage is of the same project."""
    return f"-p preset={config.preset or config.name} -p name={config.name}"


def _latest_from(context: Context, config: PipelineConfig, kind: str, base: Parent) -> Manifest | None:
    """Return the project's newest version that came from this very base model: another one's weights would not fit."""
    for manifest in reversed(versions(context, config, kind)):
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
