"""Pointers that move: each with the history of where it pointed, why it moved, and who moved it."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from enum import Enum
from typing import Final
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.artifacts.backend import Backend
from infra.artifacts.layout import alias_key, aliases_prefix, version_key
from infra.artifacts.leases import Claim, lease
from infra.artifacts.manifest import Manifest, first_complaint
from infra.artifacts.ref import check_alias
from infra.errors import ReferenceNotFoundError, StoreError

MOVE_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0


class Unset(Enum):
    """Says that an argument was not given, where None means something."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET


class AliasMove(BaseModel):
    """One move of an alias."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    digest: str
    why: str
    who: str
    when: datetime
    id: str
    """A random id: tells a mover whose answer was lost that the move it finds is its own."""


class Alias(BaseModel):
    """An alias as it is stored; the last move says where it points."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    history: tuple[AliasMove, ...] = Field(min_length=1)

    @property
    def uri(self) -> str:
        """The version it points at."""
        return self.history[-1].uri


def read_alias(backend: Backend, kind: str, name: str, alias: str) -> Alias | None:
    """Return an alias, or None if there is none of that name."""
    return _read(backend, alias_key(kind, name, check_alias(alias)))[0]


def list_aliases(backend: Backend, kind: str, name: str) -> dict[str, Alias]:
    """Return every alias of an artifact by its name."""
    names = [file.removesuffix(".json") for file in backend.children(aliases_prefix(kind, name))]
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
) -> None:
    """Point an alias at a version by compare-and-swap, so that no other's move is lost from the history.

    Args:
        backend: where.
        target: what it is to point at.
        alias: its name.
        why: the reason, for its history.
        who: the mover, for its history.
        expected: the reference of the version that it must point at until then; None: it must not exist.

    Raises:
        ReferenceNotFoundError: if the version has been removed meanwhile.
        StoreError: if the alias cannot have that name, points at something else than expected, or others kept
            moving it all the time.
    """
    key = alias_key(target.kind, target.name, check_alias(alias))
    move = AliasMove(uri=target.uri, digest=target.digest, why=why, who=who, when=datetime.now(UTC), id=uuid4().hex)
    with lease(backend, move.id, Claim(versions=frozenset({target.uri}))):
        if backend.read(version_key(target.kind, target.name, target.version)) is None:
            raise ReferenceNotFoundError(f"{target.uri} has been removed from the store; no alias can point at it")
        _swap(backend, key, move, expected, f"{alias!r} of {target.kind}/{target.name}")


def _swap(backend: Backend, key: str, move: AliasMove, expected: str | Unset | None, what: str) -> None:
    """Add a move to the alias, however many others do the same."""
    deadline = time.monotonic() + MOVE_TIMEOUT_S
    pause_s = FIRST_PAUSE_S
    while time.monotonic() < deadline:
        current, tag = _read(backend, key)
        history = current.history if current else ()
        if any(past.id == move.id for past in history):  # the answer to our write was lost
            return
        _check_expected(current, expected, move, what)
        data = Alias(history=(*history, move)).model_dump_json(indent=1).encode()
        if backend.create(key, data) if current is None else backend.replace(key, data, tag):
            return
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # or many movers would meet again and again
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise StoreError(
        f"the alias {what} could not be moved within "
        f"{MOVE_TIMEOUT_S:.0f} s: others kept moving it, or the server does not honour If-Match; try again"
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
