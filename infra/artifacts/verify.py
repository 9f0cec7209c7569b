"""Checking a store or one version: all that is written about artifacts is read, and the body of each blob hashed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from infra.artifacts.aliases import Alias, list_aliases
from infra.artifacts.backend import Backend, in_parallel
from infra.artifacts.catalog import Catalog, hinted_number, is_of_content, parse_entry
from infra.artifacts.collect import open_lists
from infra.artifacts.deletion import with_aliases
from infra.artifacts.leases import claims
from infra.artifacts.locks import damaged_locks
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest
from infra.artifacts.plans import check_plans
from infra.artifacts.ref import (
    DELETING,
    HINTS,
    KEYS,
    KINDS,
    LEASES,
    MANIFEST,
    VERSIONS,
    ArtifactRef,
    blob_key,
    parse_reference,
    version_key,
    version_numbers,
    version_uri,
    versions_prefix,
)
from infra.errors import ReferenceNotFoundError, StoreError

Progress = Callable[[int, int], None]
"""Is told how many bytes have been read since it was told last, and how many there are in all; from any thread."""
_STALE = ""
"""Says of an entry that it leads to nothing: no problem, but counted."""
_ByUri = Mapping[str, Manifest | None]
"""What is in the store, by reference; None is what cannot be read, which is reported already."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at, and what is wrong with it."""

    versions: int
    blobs: int
    bytes: int
    """Of the blobs; each counts once."""
    removed_parents: int
    """Parents that are not in the store any longer, as retention has it: no mistake."""
    stale_keys: int
    """Entries of the key index that lead to nothing: no mistake either."""
    problems: tuple[str, ...]
    """A sentence each."""


def verify_version(
    backend: Backend, catalog: Catalog, manifest: Manifest, *, quick: bool, progress: Progress
) -> Verification:
    """Check one version: its blobs, and that its parents are what it says.

    Args:
        backend: where.
        catalog: its manifests.
        manifest: of the version.
        quick: look at the sizes of the blobs only, not at their content.
        progress: is told how far it is.
    """
    looked_up = {parent.uri: _parent(backend, catalog, parent) for parent in manifest.parents}
    parents, problems = _sorted_out(looked_up)
    removed, found = _check_parents([manifest], parents)
    problems += found
    problems += check_blobs(backend, [manifest], quick=quick, progress=progress)
    return _verification([manifest], removed, 0, problems)


def verify_store(backend: Backend, catalog: Catalog, *, quick: bool, progress: Progress) -> Verification:
    """Check everything: manifests, parents, aliases, keys, plans, notes of writers and deleters, and every blob.

    Args:
        backend: where.
        catalog: its manifests.
        quick: look at the sizes of the blobs only, not at their content.
        progress: is told how far it is.
    """
    by_uri, problems = _read_manifests(backend, catalog)
    manifests = [manifest for manifest in by_uri.values() if manifest is not None]
    removed, found = _check_parents(manifests, by_uri)
    problems += found
    problems += _check_aliases(backend, catalog, by_uri)
    stale, found = _check_keys(backend, catalog, by_uri)
    problems += found
    problems += _check_hints(backend)
    problems += check_plans(backend, partial(problem_of, backend))
    problems += _check_notes(backend)
    problems += check_blobs(backend, manifests, quick=quick, progress=progress)
    return _verification(manifests, removed, stale, problems)


def _verification(manifests: list[Manifest], removed: int, stale: int, problems: Iterable[str]) -> Verification:
    blobs = {blob.sha256: blob.size for manifest in manifests for blob in manifest.blobs}
    return Verification(len(manifests), len(blobs), sum(blobs.values()), removed, stale, tuple(problems))


def _read_manifests(backend: Backend, catalog: Catalog) -> tuple[_ByUri, list[str]]:
    """Return all by reference, and what is wrong with those that cannot be read."""
    problems = [
        f"{VERSIONS}{kind}/ holds artifacts of a kind that this release does not know; upgrade rlhf-flows"
        for kind in sorted(set(backend.children(VERSIONS)) - set(KINDS))
    ]
    artifacts = [(kind, name) for kind in KINDS for name in backend.children(f"{VERSIONS}{kind}/")]
    listed: list[tuple[str, str, int]] = []
    for artifact, versions in zip(artifacts, in_parallel(partial(_versions, backend, catalog), artifacts), strict=True):
        if isinstance(versions, str):
            problems.append(versions)
        else:
            listed += [(*artifact, version) for version in versions]
            problems += _strangers(backend, versions_prefix(*artifact))
    found = in_parallel(partial(_manifest, backend, catalog), listed)
    by_uri, unread = _sorted_out({version_uri(*which): each for which, each in zip(listed, found, strict=True)})
    return by_uri, problems + unread


def _versions(backend: Backend, catalog: Catalog, artifact: tuple[str, str]) -> list[int] | str:
    try:
        return catalog.versions(*artifact)
    except StoreError as error:
        return f"{VERSIONS}{'/'.join(artifact)}: {problem_of(backend, error)}"


def _strangers(backend: Backend, prefix: str) -> list[str]:
    strangers = [name for name in backend.children(prefix) if not MANIFEST.fullmatch(name)]
    return [f"{prefix}{name} is no manifest, and does not belong there" for name in strangers]


def _manifest(backend: Backend, catalog: Catalog, version: tuple[str, str, int]) -> Manifest | str | None:
    try:
        return catalog.read(*version)  # read again: what is remembered says nothing about the store
    except StoreError as error:
        return problem_of(backend, error)


def _sorted_out(found: Mapping[str, Manifest | str | None]) -> tuple[_ByUri, list[str]]:
    """Return what is there, and why some of it cannot be read."""
    there = {uri: each if isinstance(each, Manifest) else None for uri, each in found.items() if each is not None}
    return there, [each for each in found.values() if isinstance(each, str)]


def _parent(backend: Backend, catalog: Catalog, parent: ArtifactRef) -> Manifest | str | None:
    """Return the manifest of a parent, why it cannot be read, or None if it is not in the store."""
    try:
        reference = None if parent.is_external else parse_reference(parent.uri)
    except ReferenceNotFoundError as error:
        return str(error)
    if reference is None or reference.version is None:
        return None
    return _manifest(backend, catalog, (reference.kind, reference.name, reference.version))


def _check_parents(manifests: list[Manifest], by_uri: _ByUri) -> tuple[int, list[str]]:
    """Return how many parents are gone, and which are not what they were."""
    gone: set[str] = set()
    problems = []
    for manifest in manifests:
        for parent in manifest.parents:
            found = by_uri.get(parent.uri)
            if parent.uri not in by_uri and not parent.is_external:
                gone.add(parent.uri)
                if parent == manifest.base:
                    problems.append(f"{manifest.uri} is adapters over what {parent.uri} held, which is gone")
            elif found is not None and parent.digest and found.digest != parent.digest:
                problems.append(
                    f"{manifest.uri} came from {parent.uri} with digest {parent.digest[:12]}, but that version has "
                    f"{found.digest[:12]}: another was stored under its number"
                )
    return len(gone), problems


def _check_aliases(backend: Backend, catalog: Catalog, by_uri: _ByUri) -> Iterator[str]:
    for kind, name in with_aliases(backend):
        try:
            aliases = list_aliases(backend, kind, name)
        except StoreError as error:
            yield problem_of(backend, error)
            continue
        for alias, content in aliases.items():
            target = by_uri.get(content.uri)
            if target is None and content.uri in by_uri:
                continue  # its manifest is told of
            target = target or _committed_since(backend, catalog, content)
            if complaint := _points_wrong(content, (kind, name), target):
                yield f"the alias {alias!r} of {kind}/{name} {complaint}; move it: rlhf artifacts promote"


def _committed_since(backend: Backend, catalog: Catalog, alias: Alias) -> Manifest | None:
    """Return what an alias points at, if it was stored after the manifests were read."""
    found = _parent(backend, catalog, ArtifactRef(alias.uri, ""))
    return found if isinstance(found, Manifest) else None


def _points_wrong(alias: Alias, artifact: tuple[str, str], found: Manifest | None) -> str | None:
    digest = alias.history[-1].digest
    if found is None:
        return f"points at {alias.uri}, which is not in the store"
    if (found.kind, found.name) != artifact:
        return f"points at {alias.uri}, which is another artifact"
    if found.digest != digest:
        return f"points at {alias.uri} with digest {digest[:12]}, which has {found.digest[:12]}"
    return None


def _check_keys(backend: Backend, catalog: Catalog, by_uri: _ByUri) -> tuple[int, list[str]]:
    """Return how many entries of the key index lead to nothing, and what is wrong with others."""
    keys = [f"{KEYS}{kind}/{name}" for kind in KINDS for name in backend.children(f"{KEYS}{kind}/")]
    found = in_parallel(partial(_check_key, backend, catalog, by_uri), keys)
    return found.count(_STALE), [problem for problem in found if problem]


def _check_key(backend: Backend, catalog: Catalog, by_uri: _ByUri, key: str) -> str | None:
    """Return what is wrong with an entry of the key index, or _STALE."""
    try:
        stored = backend.read(key)
    except StoreError as error:
        return problem_of(backend, error)
    if stored is None:
        return None
    ref = parse_entry(key, stored.data)
    if ref is None:
        return f"{key} in the artifact store cannot be read; remove it, and it is made anew"
    found = by_uri.get(ref.uri) or _parent(backend, catalog, ref)
    return _leads_wrong(key, ref, found) if isinstance(found, Manifest | None) else None  # its manifest is told of


def _leads_wrong(key: str, ref: ArtifactRef, found: Manifest | None) -> str | None:
    """Return what is wrong with where an entry leads to, or _STALE if it leads to nothing.

    A removed version or a killed writer left it then; the next commit of the same takes its place. An entry by content
    is written before its version, and may lead to a number that another writer took.
    """
    if found is None:
        return _STALE
    if found.digest == ref.digest:
        return None
    if is_of_content(key):
        return _STALE
    return f"{key} points at {ref.uri} with digest {ref.digest:.12}, which has {found.digest[:12]}; remove it"


def _check_hints(backend: Backend) -> list[str]:
    """Return which hints are wrong: they hide nothing, but save nothing either."""

    def check(artifact: str) -> str | None:
        try:
            stored = backend.read(f"{HINTS}{artifact}.json")
        except StoreError as error:
            return problem_of(backend, error)
        if stored is None:
            return None
        number = hinted_number(stored)
        if number is None:
            return f"{HINTS}{artifact}.json in the artifact store cannot be read; remove it, it only saves requests"
        if not version_numbers(backend.children(f"{VERSIONS}{artifact}/", after=f"{number:08d}")):
            return f"{HINTS}{artifact}.json says {number}, but there is no such version nor a later one; remove it"
        return None

    names = [f"{kind}/{file}" for kind in KINDS for file in backend.children(f"{HINTS}{kind}/")]
    found = in_parallel(check, [name.removesuffix(".json") for name in names])
    return [problem for problem in found if problem]


def _check_notes(backend: Backend) -> Iterator[str]:
    """Yield which leases, intents, lists and locks cannot be read."""
    for prefix in (LEASES, DELETING):
        try:
            list(claims(backend, prefix))
        except StoreError as error:
            yield problem_of(backend, error)
    try:
        open_lists(backend)
    except StoreError as error:
        yield problem_of(backend, error)
    yield from damaged_locks(backend)


def check_blobs(backend: Backend, manifests: list[Manifest], *, quick: bool, progress: Progress) -> list[str]:
    """Return what is wrong with the bodies of files; a file that several versions have is read once."""
    files = {(entry.sha256, entry.pieces): entry for manifest in manifests for entry in manifest.files}
    total = sum(entry.size for entry in files.values())
    progress(0, total)
    check = partial(_check_file, backend, quick=quick, read=lambda count: progress(count, total))
    complaints: dict[str, str] = {}
    for found in in_parallel(check, files.values()):
        complaints |= found
    if not complaints:
        return []
    _ensure_there(backend)
    users = _users(backend, manifests, complaints.keys())
    return [
        f"{complaint}: {users[digest][0]}{f' and {more} more' if (more := len(users[digest]) - 1) else ''} "
        "cannot be fetched; restore it, or remove the blob, if it is there, and commit the same again"
        for digest, complaint in complaints.items()
        if digest in users
    ]


def _check_file(backend: Backend, entry: FileEntry, *, quick: bool, read: Callable[[int], None]) -> dict[str, str]:
    """Return what is wrong with the blobs of a file, or with the file as a whole, by hash."""
    whole = hashlib.sha256()
    complaints = {}
    for blob in entry.pieces:
        if complaint := _check_blob(backend, blob, None if quick else whole):
            complaints[blob.sha256] = complaint
        read(blob.size)
    if not (quick or complaints) and whole.hexdigest() != entry.sha256:
        complaints[entry.sha256] = f"the blobs of {entry.path!r} do not make up what hashes to {entry.sha256}"
    return complaints


def _check_blob(backend: Backend, blob: BlobEntry, whole: Any) -> str | None:
    """Return what is wrong with a blob; its content is hashed where the hash of the whole file is given."""
    key = blob_key(blob.sha256)
    try:
        size = backend.size(key)
        if size is None:
            return f"{key} is missing"
        if size != blob.size:
            return f"{key} has {size} B instead of {blob.size}"
        return None if whole is None else _check_content(backend, blob, whole)
    except StoreError as error:
        problem = problem_of(backend, error)
        if _is_missing(backend, key):
            return f"{key} is missing"
        cause = error.__cause__
        return f"{key} cannot be read ({(isinstance(cause, OSError) and cause.strerror) or problem})"


def _check_content(backend: Backend, blob: BlobEntry, whole: Any) -> str | None:
    key, digest = blob_key(blob.sha256), hashlib.sha256()
    for chunk in backend.download(key, blob.size):
        digest.update(chunk)
        whole.update(chunk)
    found = digest.hexdigest()
    return None if found == blob.sha256 else f"{key} is damaged, its content hashes to {found}"


def _is_missing(backend: Backend, key: str) -> bool:
    """Return whether a blob that could not be read has just been taken by a deletion."""
    try:
        return backend.size(key) is None
    except StoreError:
        return False


def _users(backend: Backend, manifests: list[Manifest], damaged: Collection[str]) -> dict[str, list[str]]:
    """Return which files need each hash, of the versions that have not been removed since they were read."""
    found: dict[str, list[str]] = {}
    for manifest in manifests:
        needs = [
            (digest, f"{entry.path!r} of {manifest.uri}")
            for entry in manifest.files
            for digest in {entry.sha256, *(blob.sha256 for blob in entry.pieces)}.intersection(damaged)
        ]
        key = version_key(manifest.kind, manifest.name, manifest.version)
        if needs and backend.read(key) is not None:
            for digest, what in needs:
                found.setdefault(digest, []).append(what)
    return found


def problem_of(backend: Backend, error: StoreError) -> str:
    """Return an error as a problem of the one thing that was read.

    Raises:
        StoreError: if the store as a whole has gone away.
    """
    _ensure_there(backend)
    return str(error)


def _ensure_there(backend: Backend) -> None:
    """Raise StoreError if the store has gone away, as a disk does: it would look as if all were missing."""
    if not backend.children(VERSIONS):
        raise StoreError(f"the artifact store {backend.url} has gone away while it was looked through; try again")
