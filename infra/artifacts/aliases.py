"""Aliases of versions: reading, promoting and rolling them back, each with a history of where, why and by whom."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import Enum
from pathlib import PurePosixPath
from typing import Final
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from infra.artifacts.backend import Backend, clock
from infra.artifacts.leases import Claim, Lease, lease
from infra.artifacts.lineage import trace, walk
from infra.artifacts.manifest import SCHEMA_VERSION, Manifest, SchemaVersion, first_complaint
from infra.artifacts.ref import ArtifactRef, alias_key, aliases_prefix, check_alias, parse_reference, version_key
from infra.errors import ReferenceNotFoundError, StoreError, StoreNotReadyError

MOVE_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0


class Unset(Enum):
    """Says that an argument was not given, where None means something."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class AliasMove(BaseModel):
    """One move of an alias."""

    model_config = ConfigDict(frozen=True, extra="allow")

    uri: str
    digest: str
    why: str
    who: str
    when: datetime
    id: str
    """A random id: tells a mover whose answer was lost that the move it finds is its own."""
    undoes: str | None = None
    """Of a rollback: the id of the first move that it takes back, with all that came after it."""
    facts: dict[str, JsonValue] | None = None
    """What the mover has to know of it later."""


class Alias(BaseModel):
    """An alias as it is stored; the last move says where it points.

    What a later minor version has added stays when this release moves the alias, and so does its schema version.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    schema_version: SchemaVersion = SCHEMA_VERSION
    """As of manifests; the first aliases had none."""
    history: tuple[AliasMove, ...] = Field(min_length=1)

    @property
    def uri(self) -> str:
        """The version it points at."""
        return self.history[-1].uri

    @property
    def ref(self) -> ArtifactRef:
        """The version it points at, with the digest that it had then."""
        return ArtifactRef(self.uri, self.history[-1].digest)

    def moved(self, move: AliasMove) -> Alias:
        """Return the alias after one more move."""
        return self.model_copy(update={"history": (*self.history, move)})


def read_alias(backend: Backend, kind: str, name: str, alias: str) -> Alias | None:
    """Return an alias, or None if there is none of that name."""
    return _read(backend, alias_key(kind, name, check_alias(alias)))[0]


def list_aliases(backend: Backend, kind: str, name: str) -> dict[str, Alias]:
    """Return every alias of an artifact by its name.

    Raises:
        StoreError: if one cannot be read, or has a name that no alias can have.
    """
    prefix = aliases_prefix(kind, name)
    names = [file.removesuffix(".json") for file in backend.children(prefix) if file.endswith(".json")]
    for alias in names:
        try:
            check_alias(alias)
        except StoreError:
            raise StoreError(f"{prefix}{alias}.json in the artifact store is no alias: remove it") from None
    found = {alias: read_alias(backend, kind, name, alias) for alias in names}
    return {alias: content for alias, content in found.items() if content is not None}


def move_alias(
    backend: Backend,
    target: Manifest,
    alias: str,
    *,
    why: str,
    who: str,
    expected: str | Unset | None = UNSET,
    facts: dict[str, JsonValue] | None = None,
) -> None:
    """Point an alias at a version by compare-and-swap, so that no other's move is lost from the history.

    Args:
        backend: where.
        target: what it is to point at.
        alias: its name.
        why: the reason, for its history.
        who: the mover, for its history.
        expected: the reference of the version that it must point at until then; None: it must not exist.
        facts: plain data that the history keeps with the move.

    Raises:
        ReferenceNotFoundError: if the version has been removed meanwhile.
        StoreError: if the alias cannot have that name, points at something else than expected, or others kept
            moving it all the time.
    """
    move = move_to(target, why=why, who=who).model_copy(update={"facts": facts})
    apply_move(backend, target, alias, move, expected)


def move_to(target: Manifest, *, why: str, who: str, undoes: str | None = None) -> AliasMove:
    """Return a move that is yet to be made."""
    now, ours = clock.now(), uuid4().hex
    return AliasMove(uri=target.uri, digest=target.digest, why=why, who=who, when=now, id=ours, undoes=undoes)


def apply_move(
    backend: Backend, target: Manifest, alias: str, move: AliasMove, expected: str | Unset | None = UNSET
) -> None:
    """Make a move; arguments and errors as of `move_alias`."""
    key = alias_key(target.kind, target.name, check_alias(alias))
    with lease(backend, move.id, _reached(backend, target)) as held:
        if backend.read(version_key(target.kind, target.name, target.version)) is None:
            raise ReferenceNotFoundError(f"{target.uri} has been removed from the store; no alias can point at it")
        _swap(backend, key, move, expected, held)


def _reached(backend: Backend, target: Manifest) -> Claim:
    """Return a version and all that it came from: what must stay when an alias points there."""

    def read(ref: ArtifactRef) -> Manifest | None:
        parent = parse_reference(ref.uri)
        stored = None if parent.version is None else backend.read(version_key(parent.kind, parent.name, parent.version))
        return None if stored is None else Manifest.from_json(stored.data, ref.uri)

    return Claim(versions=frozenset(each.ref.uri for each in walk(trace(target, read)) if each.manifest))


def _swap(backend: Backend, key: str, move: AliasMove, expected: str | Unset | None, held: Lease) -> None:
    """Add a move to the alias, however many others do the same."""
    what = f"{PurePosixPath(key).stem!r} of {move.uri.partition('@')[0]}"
    deadline = clock.boottime() + MOVE_TIMEOUT_S
    pause_s = FIRST_PAUSE_S
    while True:
        current, tag = _read(backend, key)
        if current and any(past.id == move.id for past in current.history):  # the answer to our write was lost
            return
        _check_expected(current, expected, move, what)
        alias = current.moved(move) if current else Alias(history=(move,))
        data = alias.model_dump_json(indent=1, exclude_none=True).encode()
        held.check()
        if backend.create(key, data) if current is None else backend.replace(key, data, tag):
            return
        clock.pause(pause_s * random.uniform(0.5, 1.0))  # or many movers would meet again and again
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        if clock.boottime() > deadline:
            raise StoreNotReadyError(
                f"the alias {what} could not be moved within {MOVE_TIMEOUT_S:.0f} s: others kept moving it, or the "
                "server does not honour If-Match; try again"
            )


def _check_expected(current: Alias | None, expected: str | Unset | None, move: AliasMove, what: str) -> None:
    present = None if current is None else current.uri
    if expected is UNSET or present == expected:
        return
    raise StoreError(
        f"the alias {what} points at {present or 'nothing'}, but its move to "
        f"{move.uri} was decided when it pointed at {expected or 'nothing'}; it stays: decide anew"
    )


def _read(backend: Backend, key: str) -> tuple[Alias | None, str]:
    stored = backend.read(key)
    if stored is None:
        return None, ""
    try:
        return Alias.model_validate_json(stored.data), stored.tag
    except ValidationError as error:
        raise StoreError(f"the alias {key} cannot be read: {first_complaint(error)}") from None


def roll_back(
    backend: Backend,
    held: Callable[[ArtifactRef], Manifest | None],
    artifact: tuple[str, str],
    alias: str,
    *,
    why: str,
    who: str,
) -> Manifest:
    """Point an alias at where it pointed before, as far as that is still in the store; the history stays.

    A second rollback goes one further back; it does not undo the first.

    Args:
        backend: where.
        held: returns the manifest of a version that is still there.
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
        target = None if past.uri == found.uri else held(ArtifactRef(past.uri, past.digest))
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
