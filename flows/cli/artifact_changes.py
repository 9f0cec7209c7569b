"""The verbs of `rlhf artifacts` that change the store: promote and rollback move aliases, collect deletes."""

from __future__ import annotations

import getpass
import re
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.output import Flag, Json, console, print_rows, when, write_json
from rlhf_core.counting import counted
from tasks.report.cells import size

if TYPE_CHECKING:
    from infra.artifacts import Collection, Manifest

Why = Annotated[str, Parameter(name="--why", show_default=False)]
_MODELS = ("sft", "reward-model", "policy")
_CHAMPION = "champion"
LONGEST_GRACE_H = 24 * 365 * 100
_HOURS = {"": 1, "h": 1, "d": 24}


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
    if alias == _CHAMPION and before != target.uri:
        _tell_others(target, before, f"{target.uri} is the champion now, by {_who()}: {reason}")
    if as_json:
        return write_json({"uri": target.uri, "alias": alias, "before": before, "moved": before != target.uri})
    what = f"{alias} of {target.kind}/{target.name}"
    moved = f"{what} points at {target.uri} now; before, at {before or 'nothing'}"
    console().print(f"{what} points at {target.uri} already" if before == target.uri else moved)
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
    if alias == _CHAMPION:
        told = f"{target.uri} is the champion again, in place of {before}, by {_who()}: {reason}"
        _tell_others(target, before, told, is_rollback=True)
    if as_json:
        return write_json({"uri": target.uri, "alias": alias, "before": before})
    what = f"{alias} of {reference.kind}/{reference.name}"
    console().print(f"{what} points at {target.uri} again; before, at {before}")
    return None


def _tell_others(target: Manifest, before: str | None, told: str, *, is_rollback: bool = False) -> None:
    """Tell the Prefect server, and through it whoever gets notices; where there is none, the alias has moved anyway."""
    from infra.errors import InfraError
    from infra.services import notices, prefect_api, running_api_url
    from infra.settings import settings
    from tasks.events import event_of

    known = settings()
    name = notices.ROLLED_BACK if is_rollback else notices.PROMOTED
    facts = {"policy": target.uri, "before": before}
    try:
        if api_url := running_api_url(known) or known.prefect_api_url:
            event = event_of(name, target.name, told, artifacts=[target.uri, before], facts=facts)
            prefect_api.call(api_url, "POST", "/events", [event])
    except (InfraError, ValueError) as error:
        console(stderr=True).print(f"nobody was told of it: {error}", soft_wrap=True)


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
    """Return who moves the alias: user and machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may have a number only
        user = "somebody"
    return f"{user}@{socket.gethostname()}"


def collect(
    *,
    delete: Flag = False,
    grace: str | None = None,
    retention: str | None = None,
    as_json: Json = False,
) -> None:
    """Show what is not needed any longer: versions that the rules do not keep, and blobs that nothing reaches.

    What an alias or a running writer reaches always stays. Nothing is written without --delete. With it, what is new
    is listed in the store, and what was listed at least the grace time ago, and is still not needed, is deleted: so
    call it every day, say.

    Args:
        delete: list, and delete what was listed long enough ago.
        grace: time between the two, in hours (`36`, `36h`) or days (`2d`); 24 hours are the least, and the default.
        retention: how many of the newest versions of each name are kept, by kind (`ppo-state=3,policy=50`); else
            RLHF_RETENTION says so, else two training states are kept, and all of the others.
        as_json: print JSON.
    """
    from infra.artifacts import LEAST_GRACE, Retention, open_default_store
    from infra.settings import settings

    rules = Retention.parse(retention if retention is not None else settings().retention)
    time = LEAST_GRACE if grace is None else _duration(grace)
    store = open_default_store()
    with console(stderr=True).status(f"looking through {store.url}"):
        found = store.collect(rules, delete=delete, grace=time)
    if as_json:
        return write_json(found.as_dict())
    _show(found)
    return None


def _duration(text: str) -> timedelta:
    """Return a grace time as it is typed: `36`, `36h`, `2d`."""
    from infra.errors import StoreError

    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([hd]?)", text.strip())
    hours = float(found[1]) * _HOURS[found[2]] if found else None
    if hours is None or hours > LONGEST_GRACE_H:
        raise StoreError(
            f"{text!r} is no grace time; expected hours or days, such as 36, 36h or 2d, and at most {LONGEST_GRACE_H}h"
        )
    return timedelta(hours=hours)


def _show(found: Collection) -> None:
    screen = console()
    survey = found.survey
    screen.print(f"kept are the newest: {found.retention}; and all that an alias or a lease reaches")
    rows = []
    for kind, blobs in survey.freed.items():
        retired = [each for each in survey.retired if each.kind == kind]
        freed = f"{counted(len(blobs), 'blob')} that nothing else reaches, {size(sum(blob.size for blob in blobs))}"
        rows.append((kind, f"{counted(len(retired), 'version')} retired, {freed}"))
    if survey.orphans:
        orphans = f"{counted(len(survey.orphans), 'blob')} that nothing reaches"
        rows.append(("blobs", f"{orphans}, {size(sum(blob.size for blob in survey.orphans))}"))
    for name, count in (
        ("leases", survey.stale_leases),
        ("locks of runs that ended long ago", len(survey.old_locks)),
        ("deletions that were broken off", survey.unfinished),
        ("leftovers of opening the store", len(survey.leftovers)),
        ("keys that lead to nothing", len(survey.stale_keys)),
    ):
        if count:
            rows.append((name, str(count)))
    print_rows(screen, rows or [("nothing is unneeded",)])
    if survey.retired:
        print_rows(screen, [(each.uri, when(each.created)) for each in survey.retired])
    for each in found.lists:
        listed = f"{counted(len(each.listing.versions), 'version')}, {counted(len(each.listing.blobs), 'blob')}"
        due = when(each.listing.created + found.grace)
        screen.print(f"listed {when(each.listing.created)}: {listed}; due {due}")
    screen.print(_outcome(found))


def _outcome(found: Collection) -> str:
    hours = f"{found.grace / timedelta(hours=1):g} hours"
    if found.is_dry:
        return f"nothing was written; --delete lists what is new, and deletes what was listed {hours} ago or earlier"
    fresh = f"listed: {counted(len(found.fresh.versions), 'version')}, {counted(len(found.fresh.blobs), 'blob')}"
    versions, blobs = counted(len(found.versions), "version"), counted(found.blobs, "blob")
    return f"deleted: {versions}, {blobs}, {size(found.blob_bytes)}; newly {fresh}, to be deleted after {hours}"
