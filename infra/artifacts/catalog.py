"""Finding manifests: by version, by reference or all of them, and by the key or the content that they were made from.

The versions of a name are listed, and the highest is the newest. A *hint* holds a number that they have reached: the
list of a long history begins there. A commit leaves a hint when the list has become long. The list decides,
never the hint: one that is missing, behind or altered by hand costs requests, and hides nothing.

The *key index* has an entry for what was made from some inputs, and one for each content. The entry of a content is
written before the manifest that it leads to, so that a writer who is killed after the manifest finds it again. The
entry of a key is written after the manifest, because what it leads to counts as finished. An entry that leads to
nothing, or to other content, says nothing: the next writer of the same replaces it, and a collection removes it.

A deletion needs all manifests, and every night adds some. A bucket's list names the MD5 of each object: what this
machine has read once stays on its disk under that, and is not requested again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath
from uuid import uuid4

from infra.artifacts.aliases import list_aliases, read_alias
from infra.artifacts.backend import Backend, Stored, in_parallel
from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import (
    KINDS,
    LATEST,
    MANIFEST,
    VERSIONS,
    ArtifactRef,
    Reference,
    check_kind,
    content_key,
    did_you_mean,
    enumerate_names,
    hint_key,
    index_key,
    is_name,
    parse_reference,
    version_key,
    version_numbers,
    version_uri,
    versions_prefix,
)
from infra.errors import ReferenceNotFoundError, StoreError

LOOKS = 5
"""How often we look for something in its new place, when it was removed between two requests."""
FEW = 50
"""So many names are listed without a hint; a new hint is left when the newest one is this far behind."""
ATTEMPTS = 5
"""How often an entry is read again that others change between two requests; to miss one costs one more version."""
_HIGHEST = 99_999_999
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_CONTENT = re.compile(r"content-[0-9a-f]{64}\.json")


class Catalog:
    """The manifests of a store. What exists is listed each time; what a manifest says never changes.

    Args:
        backend: where they are.
        directory: where those that were read are kept for later processes; None keeps none.
    """

    def __init__(self, backend: Backend, directory: Path | None = None) -> None:
        self._backend = backend
        self._kept = KeptManifests(directory)
        self._known: dict[tuple[str, str], dict[int, Manifest]] = {}

    def versions(self, kind: str, name: str) -> list[int]:
        """Return the numbers of an artifact's versions, lowest first, without reading any."""
        return list(self._tagged(kind, name))

    def read(self, kind: str, name: str, version: int) -> Manifest | None:
        """Return the manifest of a version, or None if there is none."""
        stored = self._backend.read(version_key(kind, name, version))
        return None if stored is None else self._parsed(stored.data, version_uri(kind, name, version))

    def remember(self, manifest: Manifest) -> None:
        """Keep a manifest that was read or written, so that it need not be read again while it is listed."""
        self._known.setdefault((manifest.kind, manifest.name), {})[manifest.version] = manifest

    def latest(self, kind: str, name: str) -> Manifest | None:
        """Return the highest version, or None if there is none."""
        for _ in range(LOOKS):
            version = highest_version(self._backend, kind, name)
            manifest = self.read(kind, name, version)
            if manifest is not None or not version:  # else it was removed since it was listed: there are newer ones
                return manifest
        return None

    def every(self, kind: str | None = None, name: str | None = None) -> list[Manifest]:
        """Return the manifests of a kind and name, or of all kinds or names, in order."""
        kinds = KINDS if kind is None else (check_kind(kind),)
        artifacts = [(each, found) for each in kinds for found in ([name] if name else self._folders(each))]
        listed = in_parallel(lambda artifact: self._tagged(*artifact), artifacts)
        versions = [
            (*artifact, number, tag)
            for artifact, tags in zip(artifacts, listed, strict=True)
            for number, tag in tags.items()
        ]
        found = in_parallel(lambda version: self._of_tag(*version), versions)
        if kind is None and name is None:
            self._kept.keep_only([tag for *_, tag in versions])
        return [manifest for manifest in found if manifest is not None]

    def resolve(self, text: str) -> Manifest:
        """Return what a reference names.

        Raises:
            ReferenceNotFoundError: if there is nothing; the message offers the nearest names.
        """
        reference = parse_reference(text)
        found = self._look_up(reference)
        if found is None:
            raise ReferenceNotFoundError(f"the store has no {text}{self._what_there_is(reference)}")
        return found

    def pinned(self, ref: ArtifactRef) -> Manifest | None:
        """Return the manifest that a parent or task names, or None if it is gone.

        Raises:
            StoreError: if the version holds other files than the reference says.
        """
        reference = parse_reference(ref.uri)
        found = self._look_up(reference)
        if found is not None and ref.digest and found.digest != ref.digest:
            raise StoreError(
                f"{ref.uri} holds other files than it is referred to with (digest {found.digest[:12]}, "
                f"expected {ref.digest[:12]}); it may come from another store"
            )
        return found

    def held(self, ref: ArtifactRef) -> Manifest | None:
        """Return the manifest of the very version that is meant; None if it is gone, or another has its number."""
        reference = parse_reference(ref.uri)
        found = self._look_up(reference)
        return found if found is not None and ref.digest in {"", found.digest} else None

    def _folders(self, kind: str) -> list[str]:
        """Return the names of a kind; in a directory, one that has lost its last version stays.

        Raises:
            StoreError: if there is something else: a deletion must not ignore what it cannot read.
        """
        folder = f"{VERSIONS}{check_kind(kind)}/"
        names = self._backend.children(folder)
        if strangers := [name for name in names if not is_name(name)]:
            raise StoreError(
                f"{folder}{strangers[0]} in the artifact store is no artifact's: remove it, or upgrade rlhf-flows if a "
                "later release put it there"
            )
        return names

    def _tagged(self, kind: str, name: str) -> dict[int, str]:
        """Return the tags of an artifact's versions by number, lowest first.

        What is gone is forgotten: its number may be taken again, by other content.
        """
        tags = self._backend.tags(versions_prefix(kind, name))
        versions = dict(sorted((int(match[1]), tags[match[0]]) for match in map(MANIFEST.fullmatch, tags) if match))
        known = self._known.get((kind, name), {})
        for gone in set(known).difference(versions):  # of a copy: other threads remember meanwhile
            known.pop(gone, None)
        return versions

    def _of_tag(self, kind: str, name: str, version: int, tag: str) -> Manifest | None:
        """Return the manifest of a version that was just listed, read once for all."""
        if known := self._known.get((kind, name), {}).get(version):
            return known
        data = self._kept.find(tag)
        if data is None:
            stored = self._backend.read(version_key(kind, name, version))
            if stored is None:  # it was removed since it was listed
                return None
            data = stored.data
            self._kept.add(tag, data)
        return self._parsed(data, version_uri(kind, name, version))

    def _parsed(self, data: bytes, uri: str) -> Manifest:
        manifest = Manifest.from_json(data, uri)
        if manifest.uri != uri:
            raise StoreError(f"the manifest {uri} says that it is {manifest.uri}: the store has been altered by hand")
        self.remember(manifest)
        return manifest

    def _look_up(self, reference: Reference) -> Manifest | None:
        kind, name = reference.kind, reference.name
        if reference.selector == LATEST:
            return self.latest(kind, name)
        if reference.version is not None:
            return self.read(kind, name, reference.version)
        return self._aliased(reference)

    def _aliased(self, reference: Reference) -> Manifest | None:
        """Return what an alias points at, or None if there is no such alias."""
        kind, name = reference.kind, reference.name
        before = ""
        for _ in range(LOOKS):
            alias = read_alias(self._backend, kind, name, reference.selector)
            if alias is None:
                return None
            target = parse_reference(alias.uri)
            if (target.kind, target.name) != (kind, name) or target.version is None:
                raise StoreError(
                    f"the alias {reference} points at {alias.uri}, which is no version of {kind}/{name}: "
                    "the store has been altered by hand"
                )
            found = self._look_up(target)
            if found is not None and found.digest != alias.ref.digest:
                raise StoreError(
                    f"the alias {reference} points at {alias.uri} with digest {alias.ref.digest[:12]}, which has "
                    f"{found.digest[:12]}: another was stored under its number; move it: rlhf artifacts promote"
                )
            if found is not None:
                return found
            if alias.uri == before:  # it has not moved since it was read before
                break
            before = alias.uri
        return self.resolve(before)

    def _what_there_is(self, reference: Reference) -> str:
        kind, name = reference.kind, reference.name
        versions = self.versions(kind, name)
        if not versions:
            folders = [(each, found) for each in KINDS for found in self._folders(each)]
            everything = ["/".join(folder) for folder in folders if folder != (kind, name)]  # an empty one may be left
            hint = did_you_mean(f"{kind}/{name}", everything)
            there = [item for item in everything if item.startswith(f"{kind}/")] or everything
            return f"{hint}; it holds {enumerate_names(there)}" if there else ": it is empty so far"
        numbers = enumerate_names(str(version) for version in reversed(versions))
        if reference.version is not None:
            return f"; the versions of {kind}/{name} are {numbers}"
        aliases = [LATEST, *list_aliases(self._backend, kind, name)]
        hint = did_you_mean(reference.selector, aliases)
        return f"{hint}; the aliases of {kind}/{name} are {enumerate_names(aliases)}, and its versions {numbers}"


class KeptManifests:
    """Manifests on this machine's disk, by the MD5 of their bytes, which is hashed again whenever they are read.

    Other tags find nothing: those of a place that encrypts, or has none. A disk that refuses costs requests.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def find(self, tag: str) -> bytes | None:
        """Return the manifest whose object has this tag in the list, or None if it is not kept."""
        if self._directory is not None and (md5 := _named_md5(tag)):
            with suppress(OSError):
                data = (self._directory / md5).read_bytes()
                return data if _md5(data) == md5 else None
        return None

    def add(self, tag: str, data: bytes) -> None:
        """Keep a manifest that was read, if the tag that the list gave is its MD5."""
        if self._directory is not None and (md5 := _named_md5(tag)) and _md5(data) == md5:
            temporary = self._directory / uuid4().hex
            with suppress(OSError):
                self._directory.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(data)
                temporary.replace(self._directory / md5)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def keep_only(self, tags: Collection[str]) -> None:
        """Remove all that have none of these tags, and what killed writers left."""
        if self._directory is not None:
            listed = set(map(_named_md5, tags))
            for path in self._directory.glob("*"):
                if path.name not in listed:
                    with suppress(OSError):
                        path.unlink()


def _named_md5(tag: str) -> str | None:
    """Return the MD5 that an ETag is, or None if it is something else."""
    return match[1] if (match := _MD5.fullmatch(tag)) else None


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def highest_version(backend: Backend, kind: str, name: str, *, leave_hint: bool = False) -> int:
    """Return the highest number of an artifact's versions, or 0 if there is none.

    Args:
        backend: where.
        kind: of the artifact.
        name: of the artifact.
        leave_hint: leave a hint for others if the list was long; for callers that write anyway.
    """
    prefix = versions_prefix(kind, name)
    first = backend.children(prefix, most=FEW)
    found = version_numbers(first)
    if len(first) == FEW:  # else these are all: fewer, or more from a place that lists all at once
        hint = _read(backend, hint_key(kind, name))
        reached = None if hint is None else hinted_number(hint)
        later = [] if reached is None else version_numbers(backend.children(prefix, after=f"{reached:08d}"))
        later = later or version_numbers(backend.children(prefix, after=first[-1]))
        if leave_hint and len(later) > FEW:
            _leave(backend, hint_key(kind, name), max(later), hint)
        found += later
    return max(found, default=0)


def hinted_number(hint: Stored) -> int | None:
    """Return what a hint says, or None if it was altered."""
    try:
        number = json.loads(hint.data)["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and 0 <= number <= _HIGHEST else None


def _read(backend: Backend, key: str) -> Stored | None:
    """Return a hint, or None if there is none, or it cannot be read: then all is listed."""
    with suppress(StoreError):
        return backend.read(key)
    return None


def _leave(backend: Backend, key: str, number: int, old: Stored | None) -> None:
    """Write a hint, if it can be written; another writer's hint is as good."""
    data = json.dumps({"version": number}).encode()
    with suppress(StoreError):
        if old is None:
            backend.create(key, data)
        else:
            backend.replace(key, data, old.tag)


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
