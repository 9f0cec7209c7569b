"""The sets that a configuration names, read: one a role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_core.config import DataConfig
from rlhf_core.data.reading import detect_role, possible_roles, read_set

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import SourceConfig
    from rlhf_core.data.reading import Access, ReadSet, Role
    from rlhf_core.data.template import PromptTemplate

ROLES: tuple[Role, ...] = ("problems", "prompts", "demonstrations", "preferences")
SOURCES = (*ROLES, "evaluation")
"""The keys of the configuration that name sets."""
_OF_A_TASK = "reasoning_gym:"


def read_sets(config: DataConfig, access: Access, template: PromptTemplate | None) -> dict[str, ReadSet[Any]]:
    """Return the sets by the configuration's key; those that it does not name are not among them.

    Args:
        config: names them.
        access: how they are reached.
        template: of the model that learns from them, as `read_set` takes it.

    Raises:
        DataError: as `read_set`.
    """
    sets: dict[str, ReadSet[Any]] = {}
    for role in ROLES:
        sources = getattr(config, role)
        if sources:
            sets[role] = read_set(sources, role, access=access, bad_rows=config.bad_rows, template=template)
    if config.evaluation:
        role = detect_role(config.evaluation[0], access)
        sets["evaluation"] = read_set(
            config.evaluation, role, access=access, bad_rows=config.bad_rows, template=template
        )
    return sets


def set_digests(sets: Mapping[str, ReadSet[Any]]) -> dict[str, str]:
    """Return what names the content of each set."""
    return {role: read.digest for role, read in sets.items()}


def role_of(source: SourceConfig, config: DataConfig, access: Access) -> Role:
    """Return what a source is for that takes the place of a configuration's own.

    Where the configuration has sets of one role alone and the rows have that role's form, it is that role:
    GSM8K's rows are demonstrations to who learns from demonstrations. Else it is the role that says most.

    Raises:
        DataError: if it cannot be read, or its rows are of no form of any role.
    """
    roles = possible_roles(source, access)
    used = [role for role in ROLES if getattr(config, role)]
    alone = used[0] if len(used) == 1 and config.task is None else None
    return alone if alone in roles else roles[0]


def with_source(config: DataConfig, source: SourceConfig, role: Role) -> DataConfig:
    """Return the configuration with one source in place of the task and of all sources."""
    fields = config.model_dump() | dict.fromkeys(SOURCES, ()) | {"task": None, "task_parameters": {}, role: (source,)}
    if (config.verifier or "").startswith(_OF_A_TASK):
        fields["verifier"] = None  # it scores by the records of a task that is no longer there
    return DataConfig.model_validate(fields)
