"""Lists of what a collection found, kept in the store until the grace time is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated
from uuid import uuid4

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, StringConstraints, ValidationError

from infra.artifacts import clock
from infra.artifacts.backend import Backend
from infra.artifacts.layout import TRASH
from infra.artifacts.manifest import BlobEntry, Manifest, Sha256, first_complaint
from infra.artifacts.ref import parse_reference
from infra.artifacts.survey import LEFTOVER, Survey
from infra.errors import StoreError

_PURPOSE = "found unneeded; deleted after the grace time, if it is still unneeded then (rlhf artifacts collect)"


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
