"""The artifact store: what every stage reads from and writes to (docs/adr/0002-manifest-last.md)."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.artifacts.aliases import UNSET, Alias, Unset, list_aliases, move_alias, read_alias
from infra.artifacts.backend import Backend
from infra.artifacts.cache import GB, LIMIT_GB, Cache
from infra.artifacts.catalog import Catalog
from infra.artifacts.commit import commit, describe_all, gather_sources, taken, write_next, write_numbered
from infra.artifacts.deletion import delete_unreached
from infra.artifacts.fetch import checked_pieces, fetch_directly, fetch_through
from infra.artifacts.layout import content_key, index_key
from infra.artifacts.lineage import Lineage, trace
from infra.artifacts.manifest import Manifest
from infra.artifacts.pieces import Source
from infra.artifacts.ref import ArtifactRef, check_key, check_kind, check_name, parse_reference
from infra.errors import ReferenceNotFoundError, StoreError


class ArtifactStore:
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
            VersionExistsError: if the explicit version is there with other files.
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
        highest = 0 if version is not None else max(self._catalog.versions(kind, name), default=0)
        there = self._there(draft, version)

        def write() -> Manifest:
            if there is not None:
                return there  # its blobs have been looked after all the same
            if version is not None:
                return write_numbered(self._backend, draft)
            return write_next(self._backend, draft, highest + 1)

        manifest = commit(self._backend, draft, sources, write)
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

    def lineage(self, reference: str | ArtifactRef) -> Lineage:
        """Return what an artifact came from, and what that came from, to the beginning."""
        return trace(self.resolve(reference), self._catalog.pinned)

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

    def set_alias(
        self,
        reference: str | ArtifactRef,
        alias: str,
        *,
        why: str,
        who: str,
        expected: str | Unset | None = UNSET,
    ) -> None:
        """Point an alias at a version; where it pointed, why it moved and by whom stays in its history.

        Args:
            reference: what it is to point at.
            alias: its name.
            why: the reason.
            who: the mover.
            expected: what `alias` returned when the move was decided; when it points elsewhere by now, it stays.

        Raises:
            StoreError: if it does not point at what was expected; the message names where it points.
        """
        move_alias(self._backend, self.resolve(reference), alias, why=why, who=who, expected=expected)

    def alias(self, kind: str, name: str, alias: str) -> str | None:
        """Return the reference of the version that an alias points at, or None if there is no such alias."""
        found = read_alias(self._backend, kind, name, alias)
        return None if found is None else found.uri

    def aliases(self, kind: str, name: str) -> dict[str, Alias]:
        """Return every alias of an artifact, with its history."""
        return list_aliases(self._backend, kind, name)

    def prune(self, kind: str, name: str, keep: int) -> builtins.list[int]:
        """Delete all but the newest versions, and the blobs that only they reached.

        Args:
            kind: of the artifact.
            name: of the artifact.
            keep: how many to keep; those that an alias points at are kept besides.

        Returns:
            The versions that were deleted.
        """
        if keep < 1:
            raise StoreError(f"cannot prune {kind}/{name} to {keep} versions; keep at least 1")
        aliased = {parse_reference(alias.uri).version for alias in self.aliases(kind, name).values()}
        versions = [version for version in self._catalog.versions(kind, name)[:-keep] if version not in aliased]
        old = [found for version in versions if (found := self._catalog.known(kind, name, version))]
        if not old:
            return []
        gone = delete_unreached(
            self._backend,
            old,
            (),
            needed=lambda: {alias.uri for alias in self.aliases(kind, name).values()},
            manifests=self._catalog.every,
        )
        return [manifest.version for manifest in gone.versions]

    def _there(self, draft: Manifest, version: int | None) -> Manifest | None:
        """Return the version that a commit would only repeat, or None if there is none.

        Raises:
            VersionExistsError: if the number that was asked for is taken by other content.
        """
        if version is not None:
            found = self._catalog.read(draft.kind, draft.name, version)
            if found is not None and found.digest != draft.digest:
                raise taken(found)
            return found
        indexed = self._catalog.by_key(content_key(draft.kind, draft.identity))
        if indexed is not None:
            return indexed
        last = self._catalog.latest(draft.kind, draft.name)  # its writer may have died before it was indexed
        return last if last is not None and last.identity == draft.identity else None

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
