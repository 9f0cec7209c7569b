"""What may be deleted, and deleting it: versions that the rules no longer keep, and blobs that nothing reaches.

The protocol of leases.py protects what somebody is about to rely on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from typing import NamedTuple
from uuid import uuid4

from infra.artifacts.aliases import list_aliases
from infra.artifacts.backend import Backend, clock, in_parallel
from infra.artifacts.catalog import Catalog, KeyIndex, keys_of
from infra.artifacts.leases import INTENT_LIFE, LEASE_LIFE, Claim, claims, live_leases
from infra.artifacts.locks import old_run_locks
from infra.artifacts.manifest import BlobEntry, Manifest
from infra.artifacts.ref import (
    ALIASES,
    BLOBS,
    DELETING,
    KEYS,
    KINDS,
    LEASES,
    PROBES,
    VERSIONS,
    blob_key,
    did_you_mean,
    enumerate_names,
    version_key,
)
from infra.errors import StoreError

NEVER = "run"
"""Reports are small, and teams look back at them: they are never retired."""
ALL = "all"
_DEFAULT = {"ppo-state": 2}
_EXAMPLE = "ppo-state=3,policy=50"
LEFTOVER = rf"^{PROBES}[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What the key of a leftover looks like: anything else is not ours to delete."""
_FOLDER, _REST = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{62}")
DELETE_LIMIT_S = 60.0
"""Nothing is deleted later than this after the intent; what is left then is the next deletion's to finish."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How many of the newest versions of each name are kept, by kind; of a kind that is not named, all."""

    newest: Mapping[str, int] = field(default_factory=lambda: dict(_DEFAULT))
    named: Collection[str] = ()
    """Kinds that the rule names, those of which all are kept among them; of the others the default holds."""

    @classmethod
    def parse(cls, text: str | None) -> Retention:
        """Read a rule as people write it.

        Args:
            text: `kind=count` with commas between them; `kind=all` keeps all of a kind. What is not named stays
                as it is by default: two training states, and all of the others.

        Raises:
            StoreError: if it cannot be read, or would retire what is never retired.

        Example:
            >>> Retention.parse("policy=50").newest
            {'ppo-state': 2, 'policy': 50}
        """
        newest, named = dict(_DEFAULT), []
        for part in (text or "").split(","):
            kind, _, count = (word.strip() for word in part.partition("="))
            if not part.strip():
                continue
            if kind not in KINDS:
                raise StoreError(
                    f"the retention {text!r} names the kind {kind!r}, which there is not{did_you_mean(kind, KINDS)}; "
                    f"write kind=count, such as {_EXAMPLE}; the kinds are {', '.join(KINDS)}"
                )
            named.append(kind)
            if count == ALL:
                newest.pop(kind, None)
                continue
            if kind == NEVER:
                raise StoreError(f"the retention {text!r} would retire reports; those of kind {NEVER!r} are all kept")
            if not (count.isdecimal() and int(count) > 0):
                raise StoreError(
                    f"the retention {text!r} keeps {count!r} of {kind}; expected a number from 1 on, or {ALL!r}, "
                    f"such as {_EXAMPLE}"
                )
            newest[kind] = int(count)
        return cls(newest, named)

    def retired(self, manifests: Iterable[Manifest], kept: Collection[str]) -> list[Manifest]:
        """Return the versions that are no longer wanted.

        Args:
            manifests: of all versions.
            kept: references of those that stay however old they are.
        """
        ordered = sorted(manifests, key=lambda each: (each.kind, each.name, each.version))
        found: list[Manifest] = []
        for (kind, _), versions in groupby(ordered, key=lambda each: (each.kind, each.name)):
            if kind in self.newest:
                those = list(versions)
                newest = 1 if those[-1].has_ended and kind not in self.named else self.newest[kind]
                found += [each for each in those[:-newest] if each.uri not in kept]
        return found

    def __str__(self) -> str:
        return ", ".join(f"{kind}={count}" for kind, count in self.newest.items()) or "nothing is retired"


def survey(backend: Backend, catalog: Catalog, retention: Retention) -> Survey:
    """Return what the rules, aliases and leases no longer keep.

    Blobs are listed first and manifests read last: whatever a writer sends meanwhile is leased or named by then.

    Raises:
        StoreError: if something in the store cannot be read, so that what it reaches is not known.
    """
    stored = _stored_blobs(backend)
    leases = list(claims(backend, LEASES))
    leased = reduce(Claim.join, (claim for _, claim, age in leases if age <= LEASE_LIFE), Claim())
    manifests = every_manifest(backend, catalog)
    retired = retention.retired(manifests, staying(backend, leased, manifests))
    gone = {manifest.uri for manifest in retired}
    needed = {blob.sha256 for each in manifests if each.uri not in gone for blob in each.blobs} | leased.blobs
    freed = _freed(retired, needed)
    named = needed.union(blob.sha256 for blobs in freed.values() for blob in blobs)
    return Survey(
        retired=retired,
        freed=freed,
        orphans=_sized(backend, sorted(stored - named)),
        leftovers=[key for name in backend.children(PROBES) if re.match(LEFTOVER, key := PROBES + name)],
        stale_keys=_stale_keys(backend, catalog, manifests),
        old_locks=old_run_locks(backend),
        needed=needed,
        stale_leases=sum(age > LEASE_LIFE for _, _, age in leases),
        unfinished=sum(age > INTENT_LIFE for _, _, age in claims(backend, DELETING)),
    )


@dataclass(frozen=True, slots=True)
class Survey:
    """What could go."""

    retired: list[Manifest]
    """Versions that the rules no longer keep."""
    freed: dict[str, list[BlobEntry]]
    """The blobs that only they reach, by the kind of the first that does."""
    orphans: list[BlobEntry]
    """The blobs that no version and no lease reaches: of writers that were killed, mostly."""
    leftovers: list[str]
    """Keys of what openings of the store left when they were killed."""
    stale_keys: list[str]
    """Entries of the key index that lead to nothing. They need no grace time, because nothing is lost with them."""
    old_locks: list[str]
    """Keys of the locks of runs that ended long ago: nobody starts them again. What they began with goes, too."""
    needed: set[str]
    """The blobs, by hash, that versions or leases which stay reach."""
    stale_leases: int
    unfinished: int
    """Deletions whose process was killed."""

    @property
    def blob_bytes(self) -> dict[str, int]:
        """Size of every blob that could go, by its hash."""
        return {blob.sha256: blob.size for blobs in (self.orphans, *self.freed.values()) for blob in blobs}


def every_manifest(backend: Backend, catalog: Catalog) -> list[Manifest]:
    """Return all manifests: a deletion must know what each of them reaches.

    Raises:
        StoreError: if there may be some that this release cannot read.
    """
    refuse_unknown_kinds(backend)
    return catalog.every()


def refuse_unknown_kinds(backend: Backend) -> None:
    """Raise StoreError if there are versions that this release does not see: what they reach must not be deleted."""
    if unknown := sorted(set(backend.children(VERSIONS)) - set(KINDS)):
        raise StoreError(
            f"the store holds versions of a kind that this release does not know ({enumerate_names(unknown)}), and "
            "what they reach must not be deleted; upgrade rlhf-flows to collect"
        )


def staying(backend: Backend, leased: Claim, manifests: Iterable[Manifest]) -> set[str]:
    """Return the references of all versions that an alias or a lease reaches through parents, and of adapters' bases.

    Args:
        backend: where the aliases are; they are read after the leases, because a mover's lease ends after its move.
        leased: what somebody relies on by lease.
        manifests: of all versions.
    """
    known = list(manifests)
    pointed = in_parallel(lambda artifact: list_aliases(backend, *artifact), with_aliases(backend))
    roots = {alias.uri for aliases in pointed for alias in aliases.values()}
    roots |= {each.base.uri for each in known if each.base and not each.base.is_external}
    return reached(roots.union(each.uri for each in known if leased.covers(each.uri)), known)


def reached(roots: Iterable[str], manifests: Iterable[Manifest]) -> set[str]:
    """Return the references of some versions and of all that they came from.

    Args:
        roots: references of versions, there or not.
        manifests: of all versions.
    """
    parents = {manifest.uri: [parent.uri for parent in manifest.parents] for manifest in manifests}
    found: set[str] = set()
    pending = list(roots)
    while pending:
        uri = pending.pop()
        if uri not in found:
            found.add(uri)
            pending += parents.get(uri, ())
    return found


def with_aliases(backend: Backend) -> list[tuple[str, str]]:
    """Return kind and name of all artifacts that have, or had, an alias."""
    return [(kind, name) for kind in KINDS for name in backend.children(f"{ALIASES}{kind}/")]


def _stale_keys(backend: Backend, catalog: Catalog, manifests: Iterable[Manifest]) -> list[str]:
    """Return the entries of the key index that lead to nothing; those that a version has by right are not read."""
    there = [f"{KEYS}{kind}/{name}" for kind in KINDS for name in backend.children(f"{KEYS}{kind}/")]
    others = sorted(set(there).difference(*map(keys_of, manifests)))
    stale = in_parallel(KeyIndex(backend, catalog).is_stale, others)
    return [key for key, is_stale in zip(others, stale, strict=True) if is_stale]


def _freed(retired: Iterable[Manifest], needed: set[str]) -> dict[str, list[BlobEntry]]:
    seen = set(needed)
    freed: dict[str, list[BlobEntry]] = {}
    for manifest in retired:
        blobs = freed.setdefault(manifest.kind, [])
        for blob in manifest.blobs:
            if blob.sha256 not in seen:
                seen.add(blob.sha256)
                blobs.append(blob)
    return freed


def _stored_blobs(backend: Backend) -> set[str]:
    """Return the hashes of all blobs; what has no such name was put there by somebody else, and stays."""
    folders = [folder for folder in backend.children(BLOBS) if _FOLDER.fullmatch(folder)]
    found = in_parallel(lambda folder: backend.children(f"{BLOBS}{folder}/"), folders)
    names = zip(folders, found, strict=True)
    return {folder + rest for folder, rests in names for rest in rests if _REST.fullmatch(rest)}


def _sized(backend: Backend, hashes: Iterable[str]) -> list[BlobEntry]:
    """Return the blobs with their sizes, less those that are gone by now."""
    listed = list(hashes)
    sizes = in_parallel(lambda digest: backend.size(blob_key(digest)), listed)
    return [BlobEntry(size=n, sha256=digest) for digest, n in zip(listed, sizes, strict=True) if n is not None]


def delete_unreached(
    backend: Backend,
    catalog: Catalog,
    versions: Collection[Manifest] = (),
    blobs: Iterable[str] = (),
    keys: Collection[str] = (),
    needed: Collection[str] = (),
) -> Deleted:
    """Delete versions that no alias or lease reaches, then what nothing that is left leads to.

    Every manifest is looked at, and every alias if there are versions.

    Args:
        backend: where.
        catalog: its manifests.
        versions: to be deleted; their blobs and entries of the key index are candidates too. Never the newest of a
            name: its number would be given again.
        blobs: other candidates, by hash.
        keys: other candidates among the entries of the key index.
        needed: blobs, by hash, that other versions reached a moment ago. They stay, and the intent does not name them:
            their writers would wait for it if this process is killed.

    Returns:
        What was deleted; less than asked for when others rely on it or time ran out.
    """
    orphaned = [(key, claim) for key, claim, age in claims(backend, DELETING) if age > INTENT_LIFE]
    doomed = set(blobs).union(
        (blob.sha256 for each in versions for blob in each.blobs), *(claim.blobs for _, claim in orphaned)
    )
    doomed.difference_update(needed)
    claim = Claim(frozenset(doomed), frozenset(each.uri for each in versions), keys=_entries(keys, versions))
    intent = _Intent(backend, claim)
    leased = live_leases(backend)  # before the manifests: a lease ends only when its manifest is there
    manifests = every_manifest(backend, catalog) if doomed or versions else []
    kept = staying(backend, leased, manifests) if versions else set()
    gone = [each for each in versions if each.uri not in kept and intent.delete(_place(each))]
    uris = {each.uri for each in gone}
    doomed -= leased.blobs.union(blob.sha256 for each in manifests if each.uri not in uris for blob in each.blobs)
    deleted = in_parallel(lambda digest: intent.delete(blob_key(digest)), ordered := sorted(doomed))
    _delete_entries(backend, catalog, intent, _entries(keys, gone) - leased.keys)
    if all(deleted):
        for key in [*(key for key, _ in orphaned), intent.key]:
            backend.delete(key)
    return Deleted(gone, [digest for digest, is_gone in zip(ordered, deleted, strict=True) if is_gone])


class Deleted(NamedTuple):
    """What was deleted."""

    versions: list[Manifest]
    blobs: list[str]


class _Intent:
    """Tells others what is about to be deleted, and deletes it while the intent counts.

    Args:
        backend: where.
        claim: all that may be deleted.
    """

    def __init__(self, backend: Backend, claim: Claim) -> None:
        self.key = f"{DELETING}{uuid4().hex}.json"
        self._backend = backend
        self._started = clock.boottime()
        backend.create(self.key, claim.to_json())

    def delete(self, key: str) -> bool:
        """Delete something, unless it is too late for that; return whether it was done."""
        if clock.boottime() - self._started >= DELETE_LIMIT_S:
            return False
        self._backend.delete(key)
        return True


def _place(manifest: Manifest) -> str:
    return version_key(manifest.kind, manifest.name, manifest.version)


def _entries(keys: Iterable[str], versions: Iterable[Manifest]) -> frozenset[str]:
    """Return some entries of the key index, and those that may lead to these versions."""
    return frozenset(keys).union(*map(keys_of, versions))


def _delete_entries(backend: Backend, catalog: Catalog, intent: _Intent, entries: Iterable[str]) -> None:
    """Delete the entries of the key index that lead to nothing; what time is too short for, the next deletion takes."""
    index = KeyIndex(backend, catalog)
    in_parallel(lambda key: index.is_stale(key) and intent.delete(key), sorted(entries))
