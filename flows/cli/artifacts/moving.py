"""Moving aliases: promote, rollback."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated

from cyclopts import Parameter

from flows.cli.artifacts.output import Json, console, write_json

Why = Annotated[str, Parameter(name="--why")]


def promote(reference: str, alias: str = "champion", *, why: Why, as_json: Json = False) -> None:
    """Point an alias at a version. Where it pointed, who moved it, when and why is kept.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        alias: what is moved.
        why: the reason, for the history.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    target = store.resolve(reference)
    before = store.promote(target.ref, alias, why=_reason(why), who=_who())
    if as_json:
        return write_json({"uri": target.uri, "alias": alias, "before": before, "moved": before != target.uri})
    what = f"{alias} of {target.kind}/{target.name}"
    moved = f"{what} points at {target.uri} now; before, at {before or 'nothing'}"
    console().print(f"{what} points at {target.uri} already" if before == target.uri else moved, markup=False)
    return None


def rollback(artifact: str, alias: str = "champion", *, why: Why, as_json: Json = False) -> None:
    """Point an alias at the version before, as far as that is still in the store; its history is kept.

    A second rollback goes one further back.

    Args:
        artifact: `kind/name`.
        alias: what is moved.
        why: the reason, for the history.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store
    from infra.artifacts.ref import LATEST, parse_reference
    from infra.errors import StoreError

    reference = parse_reference(artifact)
    if reference.selector != LATEST:
        raise StoreError(
            f"{artifact!r} is a version, but an alias is rolled back: write {reference.kind}/{reference.name} ALIAS"
        )
    store = open_default_store()
    before = store.alias(reference.kind, reference.name, alias)
    target = store.rollback(reference.kind, reference.name, alias, why=_reason(why), who=_who())
    if as_json:
        return write_json({"uri": target.uri, "alias": alias, "before": before})
    what = f"{alias} of {reference.kind}/{reference.name}"
    console().print(f"{what} points at {target.uri} again; before, at {before}", markup=False)
    return None


def _reason(why: str) -> str:
    from infra.errors import StoreError

    if not why.strip():
        raise StoreError("a move of an alias needs a reason, for whoever reads its history: give one with --why")
    return why.strip()


def _who() -> str:
    """Return who moves it, as others know him."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may have a number only
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
