"""Projects: everything that a run stores is named after one, and so is the champion that it must beat.

A project is a name: the user's, or the preset's where its own task is learnt, or one made from preset and task. In
earlier releases it was always the preset's name. What they stored is still found, where it is of the same task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.artifacts import Manifest
from infra.artifacts.ref import enumerate_names, parse_reference
from infra.errors import ReferenceNotFoundError
from rlhf_core.config import PipelineConfig
from rlhf_core.escaping import SHOWN_LENGTH, one_line
from rlhf_core.judged_task import JudgedTask, task_of, task_of_stored
from tasks.context import Context

CHAMPION = "champion"
_LONGEST_PRESET = 35
"""So much of a preset's name leaves room for the task in the 63 characters of a project's."""


def in_project(config: PipelineConfig, preset: Mapping[str, Any], *, named: bool) -> PipelineConfig:
    """Return a run's configuration with the name of its project.

    Args:
        config: with the run's parameters and data.
        preset: what the preset's file says.
        named: whether the user named the project; else the name follows from preset and task.
    """
    own, task = str(preset.get("name", config.name)), task_of(config.data, config.evaluation)
    name = config.name
    if not named:
        is_own = task == task_of_stored(preset)
        name = own if is_own else f"{own[:_LONGEST_PRESET].rstrip('-')}-{task.slug}-{task.digest}"
    return config.model_copy(update={"preset": own, "name": name})


def told_project(config: PipelineConfig) -> str:
    """Return the line on a run's project."""
    task = one_line(str(task_of(config.data, config.evaluation)), SHOWN_LENGTH)
    return f"{config.name}, of the task {task} (the parameter `name` names another)"


def versions(context: Context, config: PipelineConfig, kind: str) -> list[Manifest]:
    """Return what the store holds of a kind of artifact for the run's project, oldest first.

    What an earlier release stored under this name for another task is none of it. Where there is nothing else, what it
    stored under the preset's name for the same task is.
    """
    task = task_of(config.data, config.evaluation)
    own = [
        each
        for each in context.store.list(kind, config.name)
        if not _is_of_earlier_release(each) or _task(each) in {None, task}
    ]
    if own or config.preset in {None, config.name}:
        return own
    return [each for each in context.store.list(kind, config.preset) if _is_kept(each, task)]


def latest_reference(context: Context, config: PipelineConfig, kind: str) -> str:
    """Return a reference to the project's latest version of a kind, whether there is one or not."""
    found = versions(context, config, kind)
    return found[-1].uri if found else f"{kind}/{config.name}@latest"


def champion_of(context: Context, config: PipelineConfig, name: str) -> Manifest | None:
    """Return the champion among policies of a name; None if there is none.

    Until the run's project has one, that is the champion of an earlier release under the preset's name, if it is of the
    same task. It is read, not moved.
    """
    own = context.store.alias("policy", name, CHAMPION)
    if own is not None:
        return context.store.resolve(own)
    if name != config.name or config.preset in {None, name}:
        return None
    before = context.store.alias("policy", str(config.preset), CHAMPION)
    found = None if before is None else context.store.resolve(before)
    return found if found is not None and _is_kept(found, task_of(config.data, config.evaluation)) else None


def expected_champion(policy: str, champion: str | None) -> str | None:
    """Return where the alias of a policy's project must point while it is moved: that of another name stays."""
    same = champion is not None and parse_reference(champion).name == parse_reference(policy).name
    return champion if same else None


def why_not_comparable(context: Context, config: PipelineConfig, policy: str, incumbent: str) -> str | None:
    """Return the sentence on an incumbent that was made for another task than the run's; None if it was not.

    Its answers to tonight's problems say nothing about what it was made for. An incumbent that does not tell its
    task is compared.

    Args:
        context: the open context.
        config: of the run.
        policy: reference of the candidate.
        incumbent: reference of the champion, or of another policy that is to be replaced.
    """
    try:
        before = _task(context.store.resolve(incumbent))
    except ReferenceNotFoundError:  # deleted since it was evaluated
        return None
    task = task_of(config.data, config.evaluation)
    if before is None or before == task:
        return None
    made_for, now = (one_line(str(each), SHOWN_LENGTH) for each in (before, task))
    return (
        f"{policy} is not compared with {incumbent}, which was made for another task: {made_for}; this run's is {now}; "
        "give the run a project of its own (`-p name=...`), or promote by hand "
        f"(rlhf artifacts promote {policy} --why ...)"
    )


def of_other_projects(context: Context, kind: str) -> str:
    """Return in brackets which projects have something of a kind, for a person who finds none; nothing if none has."""
    names = sorted({f"{kind}/{each.name}" for each in context.store.list(kind)})
    return f" (the store has {enumerate_names(names)})" if names else ""


def _is_of_earlier_release(manifest: Manifest) -> bool:
    """Whether it was made when a run's name was its preset's: the configuration had no key for the preset."""
    return "preset" not in manifest.config


def _is_kept(manifest: Manifest, task: JudgedTask) -> bool:
    return _is_of_earlier_release(manifest) and _task(manifest) == task


def _task(manifest: Manifest) -> JudgedTask | None:
    return task_of_stored(manifest.config)
