"""The artifact store: what every stage reads from and writes to (docs/adr/0002-manifest-last.md)."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.artifacts.backend import Backend
from infra.artifacts.cache import GB, LIMIT_GB, Cache
from infra.artifacts.catalog import Catalog
from infra.artifacts.commit import commit, describe_all, gather_sources, taken, write_next, write_numbered
from infra.artifacts.deletion import delete_unreached
from infra.artifacts.fetch import checked_pieces, fetch_directly, fetch_through
from infra.artifacts.keeping import Keeping
from infra.artifacts.layout import content_key, index_key
from infra.artifacts.leases import Claim, Lease
from infra.artifacts.manifest import Manifest
from infra.artifacts.pieces import Source
from infra.artifacts.ref import ArtifactRef, check_key, check_kind, check_name, parse_reference, version_uri
from infra.artifacts.survey import every_manifest, refuse_unknown_kinds
from infra.errors import ReferenceNotFoundError, StoreError, VersionExistsError


class ArtifactStore(Keeping):
    """Versions of artifacts, by reference, key and content; for several threads and processes at once."""

    def __init__(self, backend: Backend, cache_dir: Path, cache_limit_gb: float = LIMIT_GB) -> None:
        self._backend = backend
        self._catalog = Catalog(backend)
        self._cache = Cache(cache_dir / "artifacts", int(cache_limit_gb * GB))

    @property
    def url(self) -> str:
        """Where the store is."""
        return self._backend.url

    def commit(
        self,
        kind: str,
        name: str,
        files: Mapping[str, Source] | Path,
        *,
        key: str | None = None,
        parents: Sequence[ArtifactRef | str] = (),
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        source_digest: str = "",
        flow_run: str | None = None,
        version: int | None = None,
    ) -> ArtifactRef:
        """Store files as a new version; it becomes visible whole, or not at all.

        Args:
            kind: one of KINDS.
            name: of the artifact.
            files: the body, or a file on disk, of each path; or a directory, with all that is in it.
            key: what the artifact can be found by again: a hash of all that it was made from.
            parents: what it was made from; a string is resolved, unless it came from outside (`model/...`).
            config: the resolved configuration.
            metrics: figures worth keeping with it.
            source_digest: hash of the code that made it.
            flow_run: id of the run in Prefect.
            version: None takes the next free number.

        Returns:
            The reference of the version. An explicit version that is there with the same files is that one; without
            a version, so is one of the same name, files, configuration and parents.

        Raises:
            VersionExistsError: if the explicit version is there with other files, or has been there: a number is
                given once.
            StoreError: if an argument cannot be stored, or the store cannot be written.
        """
        check_kind(kind)
        check_name(name)
        sources = gather_sources(files)
        draft = Manifest.draft(
            describe_all(sources),
            kind=kind,
            name=name,
            version=version or 0,
            parents=tuple(self._pin(parent) for parent in parents),
            key=key if key is None else check_key(key),
            config=config or {},
            source_digest=source_digest,
            metrics=metrics or {},
            flow_run=flow_run,
        )
        if version is None:
            highest = max(self._catalog.versions(kind, name), default=0)
            number = Claim(onward=frozenset({version_uri(kind, name, highest + 1)}))
            manifest = commit(self._backend, draft, sources, number, lambda held: self._write_next(draft, held))
        else:
            self._numbered(draft)  # before anything is sent
            number = Claim(versions=frozenset({draft.uri}))
            manifest = commit(self._backend, draft, sources, number, lambda held: self._write_numbered(draft, held))
        self._catalog.remember(manifest)
        if version is None:
            self._index(manifest, content_key(kind, manifest.identity))
        if key is not None:
            self._index(manifest, index_key(kind, key))
        return manifest.ref

    def find(self, kind: str, key: str) -> Manifest | None:
        """Return what was made from the inputs that the key is a hash of, or None if nothing was."""
        return self._catalog.by_key(index_key(kind, key))

    def resolve(self, reference: str | ArtifactRef) -> Manifest:
        """Return what a reference names: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.

        Raises:
            ReferenceNotFoundError: if there is nothing; the message offers the nearest names.
            StoreError: if an ArtifactRef's digest is not that of the version.
        """
        if isinstance(reference, str):
            return self._catalog.resolve(reference)
        if reference.is_external:
            raise ReferenceNotFoundError(f"{reference.uri} came from outside the store; it cannot be read from it")
        return self._catalog.pinned(reference) or self._catalog.resolve(reference.uri)

    def latest(self, kind: str, name: str) -> Manifest | None:
        """Return the highest version, or None if there is none."""
        return self._catalog.latest(kind, name)

    def list(self, kind: str | None = None, name: str | None = None) -> builtins.list[Manifest]:
        """Return all manifests, or those of a kind or of one artifact, in order of kind, name and version."""
        return self._catalog.every(kind, name)

    def fetch(self, reference: str | ArtifactRef, directory: Path, *, keep: bool = True) -> Path:
        """Put an artifact's files into an empty directory, made if need be, and return it.

        Files larger than 1 MB are links to the local cache, where that is on the same file system: read-only, for
        whoever makes one writable and writes to it alters the cache's too. Smaller ones are copies, to be edited.

        Args:
            reference: which.
            directory: where to.
            keep: keep the files in the cache; without, they are downloaded past it, and are the caller's alone.

        Raises:
            ReferenceNotFoundError: if the reference names nothing.
            StoreError: if a blob is missing, truncated or altered, or the directory is not fit; no file that
                failed its check is left under its name.
        """
        manifest = self.resolve(reference)
        if keep:
            return fetch_through(self._backend, manifest, directory, self._cache)
        return fetch_directly(self._backend, manifest, directory)

    def cached(self, reference: str | ArtifactRef) -> Path:
        """Return a directory with an artifact's files, every byte checked, that stays while this process lives.

        It is shared and read-only: do not write to it.
        """
        return self._cache.directory(self._backend, self.resolve(reference))

    def read_bytes(self, manifest: Manifest, path: str) -> bytes:
        """Return the body of one file, checked."""
        return b"".join(checked_pieces(self._backend, manifest, manifest.entry(path)))

    def read_json(self, manifest: Manifest, path: str) -> Any:
        """Return the content of one JSON file, checked."""
        try:
            return json.loads(self.read_bytes(manifest, path))
        except ValueError:
            raise StoreError(f"{path!r} of {manifest.uri} is not JSON") from None

    def prune(self, kind: str, name: str, keep: int) -> builtins.list[int]:
        """Delete all but the newest versions, and the blobs that only they reached.

        Args:
            kind: of the artifact.
            name: of the artifact.
            keep: how many to keep; those that an alias points at are kept besides.

        Returns:
            The versions that were deleted.

        Raises:
            StoreError: if all would go, or a later release has stored what this one does not see.
        """
        if keep < 1:
            raise StoreError(f"cannot prune {kind}/{name} to {keep} versions; keep at least 1")
        aliased = {parse_reference(alias.uri).version for alias in self.aliases(kind, name).values()}
        versions = [version for version in self._catalog.versions(kind, name)[:-keep] if version not in aliased]
        old = [found for version in versions if (found := self._catalog.known(kind, name, version))]
        if not old:
            return []
        refuse_unknown_kinds(self._backend)
        gone = delete_unreached(
            self._backend,
            old,
            (),
            needed=lambda: {alias.uri for alias in self.aliases(kind, name).values()},
            manifests=lambda: every_manifest(self._backend, self._catalog),
        )
        return [manifest.version for manifest in gone.versions]

    def _numbered(self, draft: Manifest) -> Manifest | None:
        """Return the version of the number that was asked for, or None if it is free.

        Raises:
            VersionExistsError: if the number is, or was, taken by other content.
        """
        found = self._catalog.read(draft.kind, draft.name, draft.version)
        if found is not None and found.digest != draft.digest:
            raise taken(found)
        if found is None and (
            higher := [n for n in self._catalog.versions(draft.kind, draft.name) if n > draft.version]
        ):
            raise VersionExistsError(
                f"{draft.uri} cannot be written: {draft.kind}/{draft.name} has gone on to {higher[-1]}, and a number "
                "that was removed is not given again; commit under a higher one"
            )
        return found

    def _write_numbered(self, draft: Manifest, held: Lease) -> Manifest:
        """Write the manifest under the number that was asked for, or return the same that is there."""
        return self._numbered(draft) or write_numbered(self._backend, draft, held)

    def _write_next(self, draft: Manifest, held: Lease) -> Manifest:
        """Write the manifest under the next number, or return the version that a commit would only repeat.

        The lease is there before the numbers are listed: so none above the highest was ever given.
        """
        indexed = self._catalog.by_key(content_key(draft.kind, draft.identity))
        if indexed is not None:
            return indexed
        highest = max(self._catalog.versions(draft.kind, draft.name), default=0)
        last = self._catalog.known(draft.kind, draft.name, highest)
        if last is not None and last.identity == draft.identity:  # its writer may have died before it was indexed
            return last
        return write_next(self._backend, draft, highest + 1, held)

    def _pin(self, parent: ArtifactRef | str) -> ArtifactRef:
        """Return a parent as a manifest may name it: by version, or as something external."""
        ref = parent if isinstance(parent, ArtifactRef) else ArtifactRef(parent, "")
        if ref.is_external:
            return ref
        if isinstance(parent, str):
            return self.resolve(parent).ref
        if parse_reference(ref.uri).version is None:
            raise StoreError(f"the parent {ref.uri} must name a version, not an alias: aliases move")
        return ref

    def _index(self, manifest: Manifest, index: str) -> None:
        """Make the version findable by its key; a version that was first keeps the place while it exists."""
        data = json.dumps({"uri": manifest.uri, "digest": manifest.digest}).encode()
        if self._backend.create(index, data):
            return
        stored = self._backend.read(index)
        if stored is not None and self._catalog.by_key(index) is None:  # what it points at was pruned
            self._backend.replace(index, data, stored.tag)
