"""What keeps a store in order: lineage, comparison, verification, collection, and aliases, forward and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from infra.artifacts.aliases import (
    UNSET,
    Alias,
    AliasMove,
    Unset,
    apply_move,
    list_aliases,
    move_alias,
    move_to,
    read_alias,
)
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import Catalog
from infra.artifacts.collect import LEAST_GRACE, Collection, collect
from infra.artifacts.deletion import Retention
from infra.artifacts.diff import Difference, compare
from infra.artifacts.lineage import Descent, Lineage, descend, trace
from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import ArtifactRef, check_kind, check_name
from infra.artifacts.verify import Progress, Verification, verify_store, verify_version
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


class Keeping(ABC):
    """The part of a store that looks after what is there."""

    _backend: Backend
    _catalog: Catalog

    @abstractmethod
    def resolve(self, reference: str | ArtifactRef) -> Manifest:
        """Return what a reference names."""

    def lineage(self, reference: str | ArtifactRef) -> Lineage:
        """Return what an artifact came from, and what that came from, to the beginning."""
        return trace(self.resolve(reference), self._catalog.held)

    def descendants(self, reference: str | ArtifactRef) -> Descent:
        """Return what was made from an artifact, and what was made from that; all manifests are read for it."""
        root = self.resolve(reference)
        return descend(root, self._catalog.every())

    def diff(self, before: str | ArtifactRef, after: str | ArtifactRef) -> Difference:
        """Return what is different between two versions, of whatever kinds and names."""
        return compare(self.resolve(before), self.resolve(after))

    def verify(
        self,
        reference: str | ArtifactRef | None = None,
        *,
        quick: bool = False,
        progress: Progress | None = None,
    ) -> Verification:
        """Look for anything that is not as it should be.

        Args:
            reference: the version to be checked; None checks the whole store.
            quick: look at the sizes of blobs only, not at their content.
            progress: is told how many bytes were read since it was told last, and how many there are; from any
                thread.

        Returns:
            What was looked at; what is wrong stands in it, and is not raised.

        Raises:
            ReferenceNotFoundError: if the reference names nothing.
            StoreError: if the store cannot be reached.
        """
        told = progress or (lambda *_: None)
        if reference is None:
            return verify_store(self._backend, self._catalog, quick=quick, progress=told)
        return verify_version(self._backend, self._catalog, self.resolve(reference), quick=quick, progress=told)

    def collect(
        self,
        retention: Retention | None = None,
        *,
        delete: bool = False,
        grace: timedelta = LEAST_GRACE,
        least_grace: timedelta = LEAST_GRACE,
    ) -> Collection:
        """Look for what is not needed, and delete it in two phases.

        What nothing needs is listed in the store's trash; a later call deletes what was listed at least the grace
        time ago and is still not needed. What an alias or a lease reaches through parents always stays.

        Args:
            retention: how many versions are kept; None takes two training states of each name, and all others.
            delete: list and delete; otherwise nothing is written.
            grace: time between the two phases.
            least_grace: the shortest grace time that is accepted; only tests may do with less.

        Raises:
            StoreError: if the grace time is too short, or something in the store cannot be read, so that what it
                reaches is not known.
        """
        rules = retention or Retention()
        return collect(
            self._backend, self._catalog, retention=rules, grace=grace, delete=delete, least_grace=least_grace
        )

    def set_alias(
        self,
        reference: str | ArtifactRef,
        alias: str,
        *,
        why: str,
        who: str,
        expected: str | Unset | None = UNSET,
    ) -> None:
        """Point an alias at a version; where it pointed, why it moved and by whom stays in its history.

        Args:
            reference: what it is to point at.
            alias: its name.
            why: the reason.
            who: the mover.
            expected: what `alias` returned when the move was decided; when it points elsewhere by now, it stays.

        Raises:
            StoreError: if it does not point at what was expected; the message names where it points.
        """
        move_alias(self._backend, self.resolve(reference), alias, why=why, who=who, expected=expected)

    def promote(self, reference: str | ArtifactRef, alias: str = CHAMPION, *, why: str, who: str) -> str | None:
        """Point an alias at a version unless it points there, and return where it pointed; arguments as above.

        Raises:
            StoreError: if it was moved by another meanwhile; it stays where that one put it.
        """
        target = self.resolve(reference)
        found = read_alias(self._backend, target.kind, target.name, alias)
        before = None if found is None else found.uri
        if found is None or found.ref != target.ref:
            move_alias(self._backend, target, alias, why=why, who=who, expected=before)
        return before

    def rollback(self, kind: str, name: str, alias: str = CHAMPION, *, why: str, who: str) -> Manifest:
        """Point an alias at the version before, as far as it is still there, and return it; the history stays.

        Raises:
            ReferenceNotFoundError: if there is no such alias.
            StoreError: if there is nothing to go back to, or another moved it meanwhile.
        """
        return roll_back(self._backend, self._catalog, (check_kind(kind), check_name(name)), alias, why=why, who=who)

    def alias(self, kind: str, name: str, alias: str) -> str | None:
        """Return the reference of the version that an alias points at, or None if there is no such alias."""
        found = read_alias(self._backend, kind, name, alias)
        return None if found is None else found.uri

    def aliases(self, kind: str, name: str) -> dict[str, Alias]:
        """Return every alias of an artifact, with its history."""
        return list_aliases(self._backend, kind, name)
