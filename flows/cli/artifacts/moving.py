"""Moving aliases: promote, rollback."""

from __future__ import annotations

import getpass
import socket
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.artifacts.output import Json, console, write_json

if TYPE_CHECKING:
    from infra.artifacts import Manifest

Why = Annotated[str, Parameter(name="--why", show_default=False)]
_MODELS = ("sft", "reward-model", "policy")
_CHAMPION = "champion"


def promote(reference: str, /, alias: str = _CHAMPION, *, why: Why = "", as_json: Json = False) -> None:
    """Point an alias at a version. Where it pointed, who moved it, when and why is kept.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        alias: what is moved; `champion` is for models.
        why: the reason, for the history; it must be given.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    reason = _reason(why)
    store = open_default_store()
    target = store.resolve(reference)
    _refuse_other_champions(target, alias)
    before = store.promote(target.ref, alias, why=reason, who=_who())
    if as_json:
        return write_json({"uri": target.uri, "alias": alias, "before": before, "moved": before != target.uri})
    what = f"{alias} of {target.kind}/{target.name}"
    moved = f"{what} points at {target.uri} now; before, at {before or 'nothing'}"
    console().print(f"{what} points at {target.uri} already" if before == target.uri else moved, markup=False)
    return None


def rollback(artifact: str, /, alias: str = _CHAMPION, *, why: Why = "", as_json: Json = False) -> None:
    """Point an alias at the version before, as far as that is still in the store; its history is kept.

    A second rollback goes one further back.

    Args:
        artifact: `kind/name`.
        alias: what is moved.
        why: the reason, for the history; it must be given.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store
    from infra.artifacts.ref import LATEST, parse_reference
    from infra.errors import StoreError

    reference = parse_reference(artifact)
    if reference.selector != LATEST:
        raise StoreError(
            f"{artifact!r} is a version, but an alias is rolled back: "
            f"write rlhf artifacts rollback {reference.kind}/{reference.name} ALIAS"
        )
    reason = _reason(why)
    store = open_default_store()
    before = store.alias(reference.kind, reference.name, alias)
    if before is None:
        store.resolve(artifact)  # of an unknown one it says what there is instead
    target = store.rollback(reference.kind, reference.name, alias, why=reason, who=_who())
    if as_json:
        return write_json({"uri": target.uri, "alias": alias, "before": before})
    what = f"{alias} of {reference.kind}/{reference.name}"
    console().print(f"{what} points at {target.uri} again; before, at {before}", markup=False)
    return None


def _refuse_other_champions(target: Manifest, alias: str) -> None:
    """Refuse to make the champion of what is no model: runs look for theirs among models, and would not see it."""
    from infra.errors import StoreError

    if alias != _CHAMPION or target.kind in _MODELS:
        return
    models = [parent.uri for parent in target.parents if parent.uri.partition("/")[0] == "policy"]
    raise StoreError(
        f"{target.uri} is a {target.kind}, but the champion is a model; "
        f"promote {' or '.join(models) or 'a policy'}, or name another alias: rlhf artifacts promote {target.uri} ALIAS"
    )


def _reason(why: str) -> str:
    from infra.errors import StoreError

    if not why.strip():
        raise StoreError('a move of an alias needs a reason, for whoever reads its history; give one: --why "..."')
    return why.strip()


def _who() -> str:
    """Return who moves it, as others know him."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may have a number only
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
