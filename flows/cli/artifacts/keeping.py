"""Keeping the store in order: verify, collect."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.artifacts.output import Json, console, print_rows, size, when, write_json, write_lines
from rlhf_core.counting import counted

if TYPE_CHECKING:
    from infra.artifacts import ArtifactRef, ArtifactStore, Collection, Verification

Flag = Annotated[bool, Parameter(negative="")]
LONGEST_GRACE_H = 24 * 365 * 100
_HOURS = {"": 1, "h": 1, "d": 24}


def verify(reference: str | None = None, /, *, quick: Flag = False, as_json: Json = False) -> int:
    """Look for anything that is not as it should be: manifests, parents, aliases, keys, and every byte of the blobs.

    Each problem is a line. The exit status is 1 if there is one.

    Args:
        reference: check this version only; the whole store when left out.
        quick: look at the sizes of blobs only, not at their content.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    which = None if reference is None else store.resolve(reference).ref  # before a bar is there
    found = _verified(store, which, quick=quick)
    if as_json:
        facts = {"versions": found.versions, "blobs": found.blobs, "bytes": found.bytes, "quick": quick}
        facts |= {"removed_parents": found.removed_parents, "stale_keys": found.stale_keys}
        write_json(facts | {"problems": found.problems})
        return int(bool(found.problems))
    write_lines(found.problems)
    held = f"{counted(found.versions, 'version')}, {counted(found.blobs, 'blob')}, {size(found.bytes)}"
    depth = "of which only the sizes were looked at" if quick else "read and hashed"
    console().print(
        f"{which or store.url}: {held}, {depth}: "
        f"{counted(len(found.problems), 'problem') if found.problems else 'all is well'}",
        markup=False,
    )
    if found.stale_keys:
        entries = counted(found.stale_keys, "entry", "entries")
        console().print(f"{entries} of the key index of versions that are gone: no problem", markup=False)
    return int(bool(found.problems))


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


def _verified(store: ArtifactStore, which: ArtifactRef | None, *, quick: bool) -> Verification:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=None)
        return store.verify(
            which, quick=quick, progress=lambda read, total: bar.update(task, advance=read, total=total)
        )


def _show(found: Collection) -> None:
    screen = console()
    survey = found.survey
    screen.print(f"kept are the newest: {found.retention}; and all that an alias or a lease reaches", markup=False)
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
        screen.print(f"listed {when(each.listing.created)}: {listed}; due {due}", markup=False)
    screen.print(_outcome(found), markup=False)


def _outcome(found: Collection) -> str:
    hours = f"{found.grace / timedelta(hours=1):g} hours"
    if found.is_dry:
        return f"nothing was written; --delete lists what is new, and deletes what was listed {hours} ago or earlier"
    fresh = f"listed: {counted(len(found.fresh.versions), 'version')}, {counted(len(found.fresh.blobs), 'blob')}"
    versions, blobs = counted(len(found.versions), "version"), counted(found.blobs, "blob")
    return f"deleted: {versions}, {blobs}, {size(found.blob_bytes)}; newly {fresh}, to be deleted after {hours}"
