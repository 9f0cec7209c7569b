"""Collection in two phases: what nothing needs is listed, and deleted after a grace time if still nothing needs it.

The lists stay in the store until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any
from uuid import uuid4

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, StringConstraints, ValidationError

from infra.artifacts.backend import Backend, clock
from infra.artifacts.catalog import Catalog
from infra.artifacts.deletion import LEFTOVER, Retention, Survey, delete_unreached, survey
from infra.artifacts.leases import LEASE_LIFE, live_leases
from infra.artifacts.locks import RUN_LOCK
from infra.artifacts.manifest import BlobEntry, Manifest, Sha256, first_complaint
from infra.artifacts.plans import forget
from infra.artifacts.ref import LOCKS, TRASH, parse_reference
from infra.errors import StoreError

_PURPOSE = "found unneeded; deleted after the grace time, if it is still unneeded then (rlhf artifacts collect)"
LEAST_GRACE = 2 * LEASE_LIFE
"""A writer that was stopped for as long as its lease lives goes on, and has as long again."""
BATCH_BLOBS, BATCH_VERSIONS = 1000, 100
"""Deleted under one intent: it has a limit in time, and writers of the same blobs wait for it."""


def collect(
    backend: Backend,
    catalog: Catalog,
    *,
    retention: Retention,
    grace: timedelta = LEAST_GRACE,
    delete: bool = False,
    least_grace: timedelta = LEAST_GRACE,
) -> Collection:
    """Look for what is not needed; list it, and delete what was listed long enough ago and still is not needed.

    Args:
        backend: where.
        catalog: its manifests.
        retention: how many versions are kept.
        grace: time between listing and deleting.
        delete: do it; otherwise only look.
        least_grace: the shortest grace time that is accepted; tests take less.

    Raises:
        StoreError: if the grace time is shorter than that, or something in the store cannot be read.
    """
    _check_grace(grace, least_grace)
    lists = open_lists(backend)
    found = survey(backend, catalog, retention)
    seen = Collection(retention, grace, found, unlisted(found, lists), lists, is_dry=not delete)
    if not delete:
        return seen
    known = list(lists)
    if not seen.fresh.is_empty:
        known.append(write_list(backend, seen.fresh))
    live_leases(backend)  # removes those of the dead
    for key in found.old_locks:
        forget(backend, key.removeprefix(f"{LOCKS}{RUN_LOCK}").removesuffix(".json"))
        backend.delete(key)
    versions, blobs = _delete_ripe(backend, catalog, found, [each for each in known if each.age >= grace])
    sizes = {blob.sha256: blob.size for each in found.retired for blob in each.blobs} | found.blob_bytes
    blobs &= sizes.keys()  # of a deletion that was broken off, some were gone before
    freed = sum(sizes[digest] for digest in blobs)
    return Collection(
        retention, grace, found, seen.fresh, lists, is_dry=False, versions=versions, blobs=len(blobs), blob_bytes=freed
    )


def _check_grace(grace: timedelta, least: timedelta) -> None:
    if grace < least:
        hour = timedelta(hours=1)
        raise StoreError(
            f"a grace time of {grace / hour:g} h is too short: a writer that was stopped holds its lease for "
            f"{LEASE_LIFE / hour:g} hours and needs as long to notice; give at least {least / hour:g}"
        )


def _delete_ripe(
    backend: Backend, catalog: Catalog, found: Survey, ripe: Sequence[OpenList]
) -> tuple[list[str], set[str]]:
    """Delete what the lists name and the survey found too; remove the lists of which nothing is left.

    Returns:
        References of the versions, and hashes of the blobs.
    """
    due = _due(found, [each.listing for each in ripe])
    versions: list[str] = []
    blobs: set[str] = set()

    for old, hashes, keys in _batches(due, found.stale_keys, finish=found.unfinished > 0):
        gone = delete_unreached(backend, catalog, old, hashes, keys, needed=found.needed)
        versions += [each.uri for each in gone.versions]
        blobs.update(gone.blobs)
        for manifest in gone.versions:
            del due.versions[manifest.uri, manifest.digest]
        due.blobs.difference_update(gone.blobs)
    for key in due.leftovers:
        backend.delete(key)
    due.leftovers.clear()
    for each in ripe:
        if not due.holds(each.listing):
            backend.delete(each.key)
    return versions, blobs


def _due(found: Survey, listings: Sequence[Listing]) -> _Due:
    named = {version for listing in listings for version in listing.versions}
    hashes = {blob.sha256 for listing in listings for blob in listing.blobs}
    leftovers = {key for listing in listings for key in listing.leftovers}
    return _Due(
        {(each.uri, each.digest): each for each in found.retired if as_listed(each) in named},
        hashes.intersection(blob.sha256 for blob in found.orphans),
        leftovers.intersection(found.leftovers),
    )


def _batches(
    due: _Due, keys: Sequence[str], *, finish: bool
) -> Iterator[tuple[list[Manifest], Sequence[str], Sequence[str]]]:
    """Yield what is deleted under one intent each: versions, blobs, entries of the key index.

    Args:
        due: what is to be deleted.
        keys: entries that lead to nothing.
        finish: whether there is something to finish: then there is a batch at least, if an empty one.
    """
    batch: list[Manifest] = []
    count = 0
    versions, blobs = list(due.versions.values()), sorted(due.blobs)
    for manifest in versions:
        if batch and (count + len(manifest.blobs) > BATCH_BLOBS or len(batch) == BATCH_VERSIONS):
            yield batch, (), ()
            batch, count = [], 0
        batch.append(manifest)
        count += len(manifest.blobs)
    if batch:
        yield batch, (), ()
    for start in range(0, len(blobs), BATCH_BLOBS):
        yield [], blobs[start : start + BATCH_BLOBS], ()
    for start in range(0, len(keys), BATCH_BLOBS):
        yield [], (), keys[start : start + BATCH_BLOBS]
    if finish and not (versions or blobs or keys):
        yield [], (), ()


@dataclass(slots=True)
class _Due:
    """What is to be deleted now: listed long enough ago, and found unneeded again."""

    versions: dict[tuple[str, str], Manifest]
    blobs: set[str]
    leftovers: set[str]

    def holds(self, listing: Listing) -> bool:
        """Return whether anything of a list is still to be deleted."""
        named = {(each.uri, each.digest) for each in listing.versions}
        hashes = {blob.sha256 for blob in listing.blobs}
        return not (
            named.isdisjoint(self.versions)
            and hashes.isdisjoint(self.blobs)
            and self.leftovers.isdisjoint(listing.leftovers)
        )


@dataclass(frozen=True)
class Collection:
    """What a collection found, and what it deleted."""

    retention: Retention
    grace: timedelta
    survey: Survey
    fresh: Listing
    """What no list named before; it is in the store now if this was no dry run."""
    lists: list[OpenList]
    """Those that were there."""
    is_dry: bool
    versions: list[str] = field(default_factory=list)
    """References of the versions that were deleted."""
    blobs: int = 0
    blob_bytes: int = 0

    @property
    def ripe(self) -> list[OpenList]:
        """The lists whose grace time is over."""
        return [each for each in self.lists if each.age >= self.grace]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values; sizes in bytes, times in hours."""
        found, sizes = self.survey, self.survey.blob_bytes
        hours = timedelta(hours=1)
        return {
            "dry_run": self.is_dry,
            "grace_hours": self.grace / hours,
            "retention": dict(self.retention.newest),
            "retired": [each.uri for each in found.retired],
            "kinds": {
                kind: {
                    "versions": sum(each.kind == kind for each in found.retired),
                    "blobs": len(blobs),
                    "bytes": sum(blob.size for blob in blobs),
                }
                for kind, blobs in found.freed.items()
            },
            "unreached": {"blobs": len(found.orphans), "bytes": sum(blob.size for blob in found.orphans)},
            "total_bytes": sum(sizes.values()),
            "leftovers": found.leftovers,
            "stale_keys": found.stale_keys,
            "old_locks": found.old_locks,
            "stale_leases": found.stale_leases,
            "unfinished_deletions": found.unfinished,
            "lists": [
                {
                    "key": each.key,
                    "created": each.listing.created.isoformat(),
                    "age_hours": each.age / hours,
                    "versions": [version.uri for version in each.listing.versions],
                    "blobs": len(each.listing.blobs),
                }
                for each in self.lists
            ],
            "newly_listed": {"versions": [each.uri for each in self.fresh.versions], "blobs": len(self.fresh.blobs)},
            "deleted": {"versions": self.versions, "blobs": self.blobs, "bytes": self.blob_bytes},
        }


def _check_version(uri: str) -> str:
    if parse_reference(uri).version is None:
        raise ValueError(f"{uri} is no version")
    return uri


class ListedVersion(BaseModel):
    """A version that the rules no longer keep."""

    model_config = ConfigDict(frozen=True)

    uri: Annotated[str, AfterValidator(_check_version)]
    digest: Sha256


class Listing(BaseModel):
    """What one collection found, and when; nothing of it is deleted before its grace time is over."""

    model_config = ConfigDict(frozen=True)

    purpose: str = _PURPOSE
    created: AwareDatetime
    blobs: tuple[BlobEntry, ...] = ()
    """Those that nothing reached; the blobs of the versions are not among them."""
    versions: tuple[ListedVersion, ...] = ()
    leftovers: tuple[Annotated[str, StringConstraints(pattern=LEFTOVER)], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it lists nothing."""
        return not (self.blobs or self.versions or self.leftovers)


@dataclass(frozen=True, slots=True)
class OpenList:
    """A list in the store."""

    key: str
    listing: Listing

    @property
    def age(self) -> timedelta:
        """Time since it was written."""
        return clock.now() - self.listing.created


def open_lists(backend: Backend) -> list[OpenList]:
    """Return the lists that wait for their grace time, oldest first.

    Raises:
        StoreError: if one cannot be read.
    """
    found = []
    for name in backend.children(TRASH):
        key = TRASH + name
        stored = backend.read(key) if name.endswith(".json") else None
        if stored is None:  # the folder of deletions under way, or gone since it was listed
            continue
        try:
            found.append(OpenList(key, Listing.model_validate_json(stored.data)))
        except (ValidationError, StoreError) as error:
            why = first_complaint(error) if isinstance(error, ValidationError) else error
            raise StoreError(
                f"{key} in the artifact store cannot be read ({why}); remove it: it is made anew"
            ) from None
    return sorted(found, key=lambda each: (each.listing.created, each.key))


def unlisted(found: Survey, lists: Iterable[OpenList]) -> Listing:
    """Return what no list names yet, as a list of now: what was listed before keeps its time."""
    known = [each.listing for each in lists]
    blobs = {blob.sha256 for listing in known for blob in listing.blobs}
    versions = {version for listing in known for version in listing.versions}
    leftovers = {key for listing in known for key in listing.leftovers}
    return Listing(
        created=clock.now(),
        blobs=tuple(blob for blob in found.orphans if blob.sha256 not in blobs),
        versions=tuple(listed for each in found.retired if (listed := as_listed(each)) not in versions),
        leftovers=tuple(key for key in found.leftovers if key not in leftovers),
    )


def as_listed(manifest: Manifest) -> ListedVersion:
    """Return what a list says of a version."""
    return ListedVersion(uri=manifest.uri, digest=manifest.digest)


def write_list(backend: Backend, listing: Listing) -> OpenList:
    """Put a list into the store."""
    key = f"{TRASH}{listing.created:%Y-%m-%d}-{uuid4().hex}.json"
    backend.create(key, listing.model_dump_json(indent=1).encode())
    return OpenList(key, listing)
