"""The key index: what was made from these inputs, and which version holds this content.

The entry of a content is written before the manifest that it leads to, so that a writer who is killed after his
manifest finds it again; that of a key is written after it, for what it leads to is taken for finished. An entry that
leads to nothing, or to other content, says nothing: the next writer of the same takes its place, and a collection
removes it.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath

from infra.artifacts.backend import Backend
from infra.artifacts.catalog import Catalog
from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import ArtifactRef, content_key, index_key, parse_reference
from infra.errors import ReferenceNotFoundError, StoreError

ATTEMPTS = 5
"""How often an entry is read again that others change between two requests; to miss one costs a version more."""
_CONTENT = re.compile(r"content-[0-9a-f]{64}\.json")


class KeyIndex:
    """The entries of a store, by where they stand."""

    def __init__(self, backend: Backend, catalog: Catalog) -> None:
        self._backend = backend
        self._catalog = catalog

    def find(self, key: str) -> Manifest | None:
        """Return what an entry leads to, or None if it leads to nothing or is not there.

        Raises:
            StoreError: if it cannot be read.
        """
        stored = self._backend.read(key)
        return None if stored is None else self._follow(key, stored.data)

    def enter(self, manifest: Manifest, key: str) -> Manifest | None:
        """Let an entry lead to a version, written or about to be, unless it leads to another that is there.

        Returns:
            That other one, which keeps the place, or None.

        Raises:
            StoreError: if the entry cannot be read.
        """
        data = json.dumps({"uri": manifest.uri, "digest": manifest.digest}).encode()
        for _ in range(ATTEMPTS):
            if self._backend.create(key, data):
                return None
            stored = self._backend.read(key)
            if stored is None:  # removed since: there was nothing where it led
                continue
            if stored.data == data:
                return None
            found = self._follow(key, stored.data)
            if found is not None or self._backend.replace(key, data, stored.tag):
                return found
        return None

    def is_stale(self, key: str) -> bool:
        """Return whether an entry leads to nothing; not of one that cannot be read, which verification tells."""
        stored = self._backend.read(key)
        if stored is None or parse_entry(key, stored.data) is None:
            return False
        return self._follow(key, stored.data) is None

    def _follow(self, key: str, data: bytes) -> Manifest | None:
        ref = parse_entry(key, data)
        if ref is None:
            raise StoreError(f"{key} in the artifact store cannot be read; remove it, and it is made anew")
        found = self._catalog.held(ref)
        return found if found is not None and (not is_of_content(key) or key in keys_of(found)) else None


def keys_of(manifest: Manifest) -> list[str]:
    """Return the entries that may lead to a version because of what its manifest says."""
    of_content = content_key(manifest.kind, manifest.identity)
    return [of_content] if manifest.key is None else [of_content, index_key(manifest.kind, manifest.key)]


def is_of_content(key: str) -> bool:
    """Return whether an entry is found by a version's content: it may lead to a number that another took."""
    return _CONTENT.fullmatch(PurePosixPath(key).name) is not None


def parse_entry(key: str, data: bytes) -> ArtifactRef | None:
    """Return what an entry says that it leads to; None if it cannot be read or leads to another kind than its own."""
    try:
        entry = json.loads(data)
        ref = ArtifactRef(entry["uri"], entry["digest"])
        reference = parse_reference(ref.uri)
    except (ValueError, KeyError, TypeError, AttributeError, ReferenceNotFoundError):
        return None
    is_whole = reference.version is not None and isinstance(ref.digest, str) and ref.digest
    return ref if is_whole and reference.kind == PurePosixPath(key).parent.name else None
