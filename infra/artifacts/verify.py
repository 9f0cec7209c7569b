"""Looking through a store, or one version, for anything that is not as it should be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from infra.artifacts.aliases import Alias, list_aliases
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import MANIFEST, Catalog
from infra.artifacts.layout import DELETING, KEYS, LEASES, VERSIONS, blob_key, version_key, versions_prefix
from infra.artifacts.leases import claims
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest
from infra.artifacts.parallel import in_parallel
from infra.artifacts.ref import KINDS, ArtifactRef, parse_reference
from infra.artifacts.survey import with_aliases
from infra.artifacts.trash import open_lists
from infra.errors import ReferenceNotFoundError, StoreError

Progress = Callable[[int, int], None]
"""Is told how many bytes have been read since it was told last, and how many there are in all; from any thread."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was looked at, and what is wrong with it."""

    versions: int
    blobs: int
    bytes: int
    """Of the blobs; each counts once."""
    removed_parents: int
    """Parents that are not in the store any longer, as retention has it: no mistake."""
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
    looked_up = {parent.uri: _parent(catalog, parent) for parent in manifest.parents}
    parents = {uri: found for uri, found in looked_up.items() if isinstance(found, Manifest)}
    removed, problems = _check_parents([manifest], parents)
    problems += [each for each in looked_up.values() if isinstance(each, str)]
    problems += _check_blobs(backend, [manifest], quick=quick, progress=progress)
    return _verification([manifest], removed, problems)


def verify_store(backend: Backend, catalog: Catalog, *, quick: bool, progress: Progress) -> Verification:
    """Check everything: manifests, parents, aliases, keys, notes of writers and deleters, and every blob.

    Args:
        backend: where.
        catalog: its manifests.
        quick: look at the sizes of the blobs only, not at their content.
        progress: is told how far it is.
    """
    manifests, problems = _read_manifests(backend, catalog)
    by_uri = {manifest.uri: manifest for manifest in manifests}
    removed, found = _check_parents(manifests, by_uri)
    problems += found
    problems += _check_aliases(backend, catalog, by_uri)
    problems += _check_keys(backend, by_uri)
    problems += _check_notes(backend)
    problems += _check_blobs(backend, manifests, quick=quick, progress=progress)
    return _verification(manifests, removed, problems)


def _verification(manifests: list[Manifest], removed: int, problems: Iterable[str]) -> Verification:
    blobs = {blob.sha256: blob.size for manifest in manifests for blob in manifest.blobs}
    return Verification(len(manifests), len(blobs), sum(blobs.values()), removed, tuple(problems))


def _read_manifests(backend: Backend, catalog: Catalog) -> tuple[list[Manifest], list[str]]:
    """Return all that can be read, and what is wrong with the others."""
    problems = [
        f"{VERSIONS}{kind}/ holds artifacts of a kind that this release does not know; upgrade rlhf-flows"
        for kind in sorted(set(backend.children(VERSIONS)) - set(KINDS))
    ]
    artifacts = [(kind, name) for kind in KINDS for name in backend.children(f"{VERSIONS}{kind}/")]
    listed: list[tuple[str, str, int]] = []
    for artifact, versions in zip(artifacts, in_parallel(partial(_versions, catalog), artifacts), strict=True):
        if isinstance(versions, str):
            problems.append(versions)
        else:
            listed += [(*artifact, version) for version in versions]
            problems += _strangers(backend, versions_prefix(*artifact))
    found = in_parallel(partial(_manifest, catalog), listed)
    problems += [each for each in found if isinstance(each, str)]
    return [each for each in found if isinstance(each, Manifest)], problems


def _versions(catalog: Catalog, artifact: tuple[str, str]) -> list[int] | str:
    try:
        return catalog.versions(*artifact)
    except StoreError as error:
        return f"{VERSIONS}{'/'.join(artifact)}: {error}"


def _strangers(backend: Backend, prefix: str) -> list[str]:
    strangers = [name for name in backend.children(prefix) if not MANIFEST.fullmatch(name)]
    return [f"{prefix}{name} is no manifest, and does not belong there" for name in strangers]


def _manifest(catalog: Catalog, version: tuple[str, str, int]) -> Manifest | str | None:
    try:
        return catalog.read(*version)  # anew: what is remembered says nothing about the store
    except StoreError as error:
        return str(error)


def _parent(catalog: Catalog, parent: ArtifactRef) -> Manifest | str | None:
    """Return the manifest of a parent, why it cannot be read, or None if it is not in the store."""
    try:
        reference = None if parent.is_external else parse_reference(parent.uri)
    except ReferenceNotFoundError as error:
        return str(error)
    if reference is None or reference.version is None:
        return None
    return _manifest(catalog, (reference.kind, reference.name, reference.version))


def _check_parents(manifests: list[Manifest], by_uri: Mapping[str, Manifest]) -> tuple[int, list[str]]:
    """Return how many parents are gone, and which are not what they were."""
    gone: set[str] = set()
    problems = []
    for manifest in manifests:
        for parent in manifest.parents:
            found = by_uri.get(parent.uri)
            if found is None and not parent.is_external:
                gone.add(parent.uri)
            elif found is not None and parent.digest and found.digest != parent.digest:
                problems.append(
                    f"{manifest.uri} came from {parent.uri} with digest {parent.digest[:12]}, but that version has "
                    f"{found.digest[:12]}: another was stored under its number"
                )
    return len(gone), problems


def _check_aliases(backend: Backend, catalog: Catalog, by_uri: Mapping[str, Manifest]) -> Iterator[str]:
    for kind, name in with_aliases(backend):
        try:
            aliases = list_aliases(backend, kind, name)
        except StoreError as error:
            yield str(error)
            continue
        for alias, content in aliases.items():
            target = by_uri.get(content.uri) or _committed_since(catalog, content)
            if complaint := _points_wrong(content, (kind, name), target):
                yield f"the alias {alias!r} of {kind}/{name} {complaint}; move it: rlhf artifacts promote"


def _committed_since(catalog: Catalog, alias: Alias) -> Manifest | None:
    """Return what an alias points at, if it was stored after the manifests were read."""
    found = _parent(catalog, ArtifactRef(alias.uri, ""))
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


def _check_keys(backend: Backend, by_uri: Mapping[str, Manifest]) -> list[str]:
    """Return which entries of the key index cannot be read or point at other content.

    One that points at nothing is what a removed version left; the next commit takes its place.
    """
    keys = [f"{KEYS}{kind}/{name}" for kind in KINDS for name in backend.children(f"{KEYS}{kind}/")]

    def check(key: str) -> str | None:
        stored = backend.read(key)
        if stored is None:
            return None
        try:
            entry: dict[str, Any] = json.loads(stored.data)
            uri, digest = entry["uri"], entry["digest"]
        except (ValueError, KeyError, TypeError):
            return f"{key} in the artifact store cannot be read; remove it, and it is made anew"
        found = by_uri.get(uri)
        if found is not None and found.digest != digest:
            return f"{key} points at {uri} with digest {digest[:12]}, which has {found.digest[:12]}; remove it"
        return None

    return [problem for problem in in_parallel(check, keys) if problem]


def _check_notes(backend: Backend) -> Iterator[str]:
    """Yield which leases, intents and lists cannot be read."""
    for prefix in (LEASES, DELETING):
        try:
            list(claims(backend, prefix))
        except StoreError as error:
            yield str(error)
    try:
        open_lists(backend)
    except StoreError as error:
        yield str(error)


def _check_blobs(backend: Backend, manifests: list[Manifest], *, quick: bool, progress: Progress) -> list[str]:
    """Return what is wrong with the bodies of files; a file that several versions have is read once."""
    files = {(entry.sha256, entry.pieces): entry for manifest in manifests for entry in manifest.files}
    total = sum(entry.size for entry in files.values())
    progress(0, total)
    check = partial(_check_file, backend, quick=quick, read=lambda count: progress(count, total))
    complaints: dict[str, str] = {}
    for found in in_parallel(check, files.values()):
        complaints |= found
    users = _users(backend, manifests, complaints.keys()) if complaints else {}
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
    size = backend.size(key)
    if size is None:
        return f"{key} is missing"
    if size != blob.size:
        return f"{key} has {size} bytes instead of {blob.size}"
    if whole is None:
        return None
    digest = hashlib.sha256()
    try:
        for chunk in backend.download(key, size):
            digest.update(chunk)
            whole.update(chunk)
    except StoreError:
        if backend.size(key) is None:  # a deletion has just taken it
            return f"{key} is missing"
        raise
    return (
        None if digest.hexdigest() == blob.sha256 else f"{key} is damaged, its content hashes to {digest.hexdigest()}"
    )


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
