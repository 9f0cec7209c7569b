"""Moving an alias back to where it pointed before."""

from __future__ import annotations

from collections.abc import Sequence

from infra.artifacts.aliases import AliasMove, apply_move, move_to, read_alias
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import Catalog
from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import ArtifactRef
from infra.errors import ReferenceNotFoundError, StoreError

CHAMPION = "champion"


def roll_back(
    backend: Backend, catalog: Catalog, artifact: tuple[str, str], alias: str, *, why: str, who: str
) -> Manifest:
    """Point an alias at where it pointed before, as far as that is still in the store; the history stays.

    A second rollback goes one further back; it does not undo the first.

    Args:
        backend: where.
        catalog: its manifests.
        artifact: kind and name.
        alias: its name.
        why: the reason, for its history.
        who: the mover, for its history.

    Returns:
        The version that it points at now.

    Raises:
        ReferenceNotFoundError: if there is no such alias.
        StoreError: if there is nothing to go back to, or the alias was moved meanwhile.
    """
    what = f"{alias!r} of {'/'.join(artifact)}"
    found = read_alias(backend, *artifact, alias)
    if found is None:
        raise ReferenceNotFoundError(f"there is no alias {what} to roll back; promote a version first")
    standing = stand(found.history)
    undone = standing[-1]
    for past in reversed(standing):
        target = None if past.uri == found.uri else catalog.held(ArtifactRef(past.uri, past.digest))
        if target is not None:
            apply_move(backend, target, alias, move_to(target, why=why, who=who, undoes=undone.id), found.uri)
            return target
        undone = past
    gone = [move.uri for move in standing if move.uri != found.uri]
    why_not = f"of {', '.join(gone)} none is in the store any longer" if gone else "it pointed at nothing before that"
    raise StoreError(
        f"the alias {what} points at {found.uri} and cannot be rolled back: {why_not}; "
        "promote the version that you want"
    )


def stand(history: Sequence[AliasMove]) -> list[AliasMove]:
    """Return the moves that have not been taken back, oldest first; there is at least one."""
    standing: list[AliasMove] = []
    for move in history:
        if move.undoes is None:
            standing.append(move)
            continue
        ids = [each.id for each in standing]
        del standing[ids.index(move.undoes) if move.undoes in ids else len(ids) :]
        if not standing or standing[-1].uri != move.uri:  # where it led to was not just before what it took back
            standing.append(move)
    return standing
