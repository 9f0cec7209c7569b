"""The artifact store: how it is opened by its address, and what every stage reads from it and writes to it.

A version appears whole or not at all, because its manifest is written last (docs/adr/0002-manifest-last.md).
"""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import JsonValue

from infra.artifacts import plans
from infra.artifacts.aliases import UNSET, Alias, Unset, list_aliases, move_alias, read_alias, roll_back
from infra.artifacts.backend import Backend
from infra.artifacts.cache import GB, LIMIT_GB, Cache
from infra.artifacts.catalog import Catalog, KeyIndex, highest_version, keys_of
from infra.artifacts.collect import LEAST_GRACE, Collection, collect
from infra.artifacts.commit import Source, commit, describe_all, gather_sources, numbered, write_next, write_numbered
from infra.artifacts.credentials import S3Options, options_of
from infra.artifacts.deletion import Retention, delete_unreached, every_manifest, staying
from infra.artifacts.diff import Difference, compare
from infra.artifacts.download import checked_pieces, fetch_directly
from infra.artifacts.leases import Claim, Lease
from infra.artifacts.lineage import Descent, Lineage, descend, trace
from infra.artifacts.local import LocalBackend
from infra.artifacts.locks import Lock
from infra.artifacts.manifest import Manifest
from infra.artifacts.plans import Answer
from infra.artifacts.ref import ArtifactRef, check_key, check_kind, check_name, index_key, parse_reference, version_uri
from infra.artifacts.verify import Progress, Verification, verify_store, verify_version
from infra.errors import ReferenceNotFoundError, SettingsError, StoreError

CHAMPION = "champion"


def open_store(
    url: str,
    *,
    cache_dir: Path,
    cache_limit_gb: float = LIMIT_GB,
    s3: S3Options | None = None,
    patient: bool = False,
    deadline_s: float | None = None,
) -> ArtifactStore:
    """Open a store, and check that it answers and does what every place must do (backend.py).

    A user who may only read can open it too; the first write says what is missing.

    Args:
        url: `s3://bucket`, `s3://bucket/prefix` or `file:///directory` (made if need be).
        cache_dir: where `fetch` and `cached` keep what they fetched, and a bucket's manifests lie.
        cache_limit_gb: how much those two keep, in GB of 1e9 bytes; manifests are small, and not counted.
        s3: server and credentials; None takes those of the environment.
        patient: wait for an absent server as long as any request does. Otherwise its absence is an error within
            seconds, unless it has answered this process before.
        deadline_s: how long we wait for an absent server; None: as long as a person would wait.

    Raises:
        StoreError: if the address is wrong, the server is away, the secret is wrong, the bucket is missing, the
            server's clock is not ours, or it does not enforce conditional writes; or if the directory is not there.
    """
    parts = _parts(url)
    scheme = "" if parts.query or parts.fragment else parts.scheme  # else what follows a # would be ignored
    if scheme == "s3" and parts.netloc:
        backend = _open_bucket(url, s3 or S3Options(), patient=patient, deadline_s=deadline_s)
    elif scheme == "file" and parts.netloc in {"", "localhost"} and parts.path.startswith("/"):
        backend = LocalBackend(url, Path(unquote(parts.path)))
    else:
        raise StoreError(
            f"{url!r} is no address of an artifact store; set RLHF_STORE_URL to s3://bucket/prefix or file:///directory"
        )
    backend.probe()
    return ArtifactStore(backend, cache_dir, cache_limit_gb)


def open_default_store(*, patient: bool = False, in_run: bool = False) -> ArtifactStore:
    """Open the store that the settings name.

    Args:
        patient: as for `open_store`: for what runs unattended.
        in_run: wait for an absent server as long as a run waits (RLHF_STORE_PATIENCE_S).

    Raises:
        StoreError: as `open_store`.
        SettingsError: if no store is named, or several sources of credentials, or half a pair of keys.
    """
    from infra.settings import settings  # noqa: PLC0415 - reads the environment: only when asked

    known = settings()
    if not known.model_fields_set & {"store_url", "s3_endpoint_url"}:
        raise SettingsError(
            "no artifact store is named: `rlhf up` starts one on this machine; or set RLHF_STORE_URL to "
            "s3://bucket/prefix or file:///directory"
        )
    s3 = options_of(known) if known.store_url.startswith("s3://") else None
    return open_store(
        known.store_url,
        cache_dir=known.cache_dir,
        cache_limit_gb=known.cache_limit_gb,
        s3=s3,
        patient=patient,
        deadline_s=known.store_patience_s if in_run else None,
    )


def _parts(url: str) -> SplitResult:
    """Return the parts of an address; one that may hold a password is not shown."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets, in which only IPv6 may stand; its text shows the address
        raise StoreError("RLHF_STORE_URL cannot be read; set it to s3://bucket/prefix or file:///directory") from None
    if "@" in parts.netloc:
        raise StoreError(
            "the address of the artifact store (RLHF_STORE_URL) must not hold a user or password; keys are set in "
            "RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY"
        )
    return parts


def _open_bucket(url: str, options: S3Options, *, patient: bool, deadline_s: float | None) -> Backend:
    from infra.artifacts.s3 import S3Backend  # noqa: PLC0415
    from infra.artifacts.s3_requests import Patience  # noqa: PLC0415 - s3fs takes a second to import

    parts = urlsplit(url)
    return S3Backend(url, parts.netloc, parts.path.strip("/"), options, Patience.of(deadline_s, patient=patient))


class ArtifactStore:
    """Versions of artifacts, by reference, key and content; for several threads and processes at once."""

    def __init__(self, backend: Backend, cache_dir: Path, cache_limit_gb: float = LIMIT_GB) -> None:
        self._backend = backend
        place = hashlib.sha256(backend.url.encode()).hexdigest()[:16]
        self._catalog = Catalog(backend, cache_dir / "manifests" / place)
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
            The reference of the version. If an explicit version is there with the same files, it is that one. Without a
            version, it may be an older one with the same name, files, configuration and parents, if that one took the
            next free number too.

        Raises:
            VersionExistsError: if the explicit version is there with other files, or has been there: a number is
                given once.
            StoreError: if an argument cannot be stored, or the store cannot be written.
        """
        facts = {"key": key, "config": config, "metrics": metrics, "source_digest": source_digest, "flow_run": flow_run}
        draft, sources = self._draft(kind, name, files, parents, {**facts, "version": version or 0})
        return self._commit(draft, sources, is_next=version is None)

    def find(self, kind: str, key: str) -> Manifest | None:
        """Return what was made from the inputs that the key is a hash of, or None if nothing was."""
        return KeyIndex(self._backend, self._catalog).find(index_key(kind, key))

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

    def holds(self, reference: ArtifactRef) -> bool:
        """Whether a version is there, with the digest that the reference has."""
        return self._catalog.held(reference) is not None

    def latest(self, kind: str, name: str) -> Manifest | None:
        """Return the highest version, or None if there is none."""
        return self._catalog.latest(kind, name)

    def list(self, kind: str | None = None, name: str | None = None) -> builtins.list[Manifest]:
        """Return all manifests, or those of a kind or of one artifact, in order of kind, name and version."""
        return self._catalog.every(kind, name)

    def fetch(self, reference: str | ArtifactRef, directory: Path, *, keep: bool = True) -> Path:
        """Put an artifact's files into an empty directory, made if need be, and return it.

        Files larger than 1 MB are links to the local cache, if that is on the same file system. They are read-only:
        writing to one would alter the cache's file too. Smaller ones are copies, which may be edited.

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
            return self._cache.fetch(self._backend, manifest, directory)
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

    def recall(self, run: str, name: str) -> Answer | None:
        """Return what a run was told when it first asked this question, or None if it has not asked yet."""
        return plans.recall(self._backend, run, name)

    def record(self, run: str, name: str, question: str, answer: JsonValue) -> Answer:
        """Write down what a run is told, unless it was told already, and return what stands."""
        return plans.record(self._backend, run, name, question, answer)

    def plan(self, run: str) -> builtins.list[Answer]:
        """Return all that a run was told, in the order in which it asked."""
        return plans.recall_all(self._backend, run)

    def prune(self, kind: str, name: str, keep: int) -> builtins.list[int]:
        """Delete all but the newest versions of an artifact, and the blobs that only they reached.

        Where there is something to delete, all names of the store are listed twice, all aliases are read, and each
        manifest is read that this machine has not read before.

        Args:
            kind: of the artifact.
            name: of the artifact.
            keep: how many to keep; besides, all stay that an alias or a lease of any artifact reaches through parents.

        Returns:
            The versions that were deleted.

        Raises:
            StoreError: if all would go, or a later release has stored what this one does not see.
        """
        if keep < 1:
            raise StoreError(f"cannot prune {kind}/{name} to {keep} versions; keep at least 1")
        if len(self._catalog.versions(kind, name)) <= keep:
            return []
        manifests = every_manifest(self._backend, self._catalog)
        wanted = staying(self._backend, Claim(), manifests)
        own = [each for each in manifests if (each.kind, each.name) == (kind, name)]
        old = Retention({kind: keep}).retired(own, wanted)
        if not old:
            return []
        going = {each.uri for each in old}
        needed = {blob.sha256 for each in manifests if each.uri not in going for blob in each.blobs}
        return [each.version for each in delete_unreached(self._backend, self._catalog, old, needed=needed).versions]

    def lock(self, name: str) -> Lock:
        """Return the lock of a name: what one process, or one run, at a time does.

        Raises:
            StoreError: if no lock can have the name.
        """
        return Lock(self._backend, name)

    def lineage(self, reference: str | ArtifactRef) -> Lineage:
        """Return what an artifact came from, and what that came from, to the beginning."""
        return trace(self.resolve(reference), self._catalog.held)

    def descendants(self, reference: str | ArtifactRef) -> Descent:
        """Return what was made from an artifact, and what was made from that; all manifests are looked at."""
        root = self.resolve(reference)
        return descend(root, self._catalog.every())

    def diff(self, before: str | ArtifactRef, after: str | ArtifactRef) -> Difference:
        """Return what is different between two versions, of whatever kinds and names."""
        return compare(self.resolve(before), self.resolve(after))

    def verify(
        self,
        reference: str | ArtifactRef | None = None,
        *,
        quick: bool = False,
        progress: Progress | None = None,
    ) -> Verification:
        """Look for anything that is not as it should be.

        Args:
            reference: the version to be checked; None checks the whole store.
            quick: look at the sizes of blobs only, not at their content.
            progress: is told how many bytes were read since it was told last, and how many there are; from any
                thread.

        Returns:
            What was looked at; what is wrong stands in it, and is not raised.

        Raises:
            ReferenceNotFoundError: if the reference names nothing.
            StoreError: if the store cannot be reached.
        """
        told = progress or (lambda *_: None)
        if reference is None:
            return verify_store(self._backend, self._catalog, quick=quick, progress=told)
        return verify_version(self._backend, self._catalog, self.resolve(reference), quick=quick, progress=told)

    def collect(
        self,
        retention: Retention | None = None,
        *,
        delete: bool = False,
        grace: timedelta = LEAST_GRACE,
        least_grace: timedelta = LEAST_GRACE,
    ) -> Collection:
        """Look for what is not needed, and delete it in two phases.

        What nothing needs is listed in the store's trash; a later call deletes what was listed at least the grace
        time ago and is still not needed. What an alias or a lease reaches through parents always stays.

        Args:
            retention: how many versions are kept; None takes two training states of each name, and all others.
            delete: list and delete; otherwise nothing is written.
            grace: time between the two phases.
            least_grace: the shortest grace time that is accepted; only tests may do with less.

        Raises:
            StoreError: if the grace time is too short, or something in the store cannot be read, so that what it
                reaches is not known.
        """
        rules = retention or Retention()
        return collect(
            self._backend, self._catalog, retention=rules, grace=grace, delete=delete, least_grace=least_grace
        )

    def set_alias(
        self,
        reference: str | ArtifactRef,
        alias: str,
        *,
        why: str,
        who: str,
        expected: str | Unset | None = UNSET,
        facts: dict[str, JsonValue] | None = None,
    ) -> None:
        """Point an alias at a version; where it pointed, why it moved and by whom stays in its history.

        Args:
            reference: what it is to point at.
            alias: its name.
            why: the reason.
            who: the mover.
            expected: what `alias` returned when the move was decided; when it points elsewhere by now, it stays.
            facts: plain data that the history keeps with the move.

        Raises:
            StoreError: if it does not point at what was expected; the message names where it points.
        """
        move_alias(self._backend, self.resolve(reference), alias, why=why, who=who, expected=expected, facts=facts)

    def promote(self, reference: str | ArtifactRef, alias: str = CHAMPION, *, why: str, who: str) -> str | None:
        """Point an alias at a version unless it points there, and return where it pointed; arguments as above.

        Raises:
            StoreError: if it was moved by another meanwhile; it stays where that one put it.
        """
        target = self.resolve(reference)
        found = read_alias(self._backend, target.kind, target.name, alias)
        before = None if found is None else found.uri
        if found is None or found.ref != target.ref:
            move_alias(self._backend, target, alias, why=why, who=who, expected=before)
        return before

    def rollback(self, kind: str, name: str, alias: str = CHAMPION, *, why: str, who: str) -> Manifest:
        """Point an alias at the version before, as far as it is still there, and return it; the history stays.

        Raises:
            ReferenceNotFoundError: if there is no such alias.
            StoreError: if there is nothing to go back to, or another moved it meanwhile.
        """
        artifact = check_kind(kind), check_name(name)
        return roll_back(self._backend, self._catalog.held, artifact, alias, why=why, who=who)

    def alias(self, kind: str, name: str, alias: str) -> str | None:
        """Return the reference of the version that an alias points at, or None if there is no such alias."""
        found = read_alias(self._backend, kind, name, alias)
        return None if found is None else found.uri

    def aliases(self, kind: str, name: str) -> dict[str, Alias]:
        """Return every alias of an artifact, with its history."""
        return list_aliases(self._backend, kind, name)

    def _draft(
        self,
        kind: str,
        name: str,
        files: Mapping[str, Source] | Path,
        parents: Sequence[ArtifactRef | str],
        facts: Mapping[str, Any],
    ) -> tuple[Manifest, dict[str, Source]]:
        """Return a manifest that is not yet written, and where the bodies of its files are."""
        check_kind(kind)
        check_name(name)
        given = {fact: value for fact, value in facts.items() if value is not None}
        if "key" in given:
            check_key(given["key"])
        sources = gather_sources(files)
        pinned = tuple(self._pin(parent) for parent in parents)
        return Manifest.draft(describe_all(sources), kind=kind, name=name, parents=pinned, **given), sources

    def _commit(self, draft: Manifest, sources: Mapping[str, Source], *, is_next: bool) -> ArtifactRef:
        """Send what a manifest needs, and write it: under the next number, or under the one that it has."""
        backend, catalog = self._backend, self._catalog
        if is_next:
            highest = highest_version(backend, draft.kind, draft.name)
            number = Claim(onward=frozenset({version_uri(draft.kind, draft.name, highest + 1)}))
        else:
            numbered(backend, catalog, draft)  # before anything is sent
            number = Claim(versions=frozenset({draft.uri}))
        key = None if draft.key is None else index_key(draft.kind, draft.key)

        def write(held: Lease) -> Manifest:
            manifest = (write_next if is_next else write_numbered)(backend, catalog, draft, held)
            if key is not None:
                KeyIndex(backend, catalog).enter(manifest, key)
            return manifest

        claim = number.join(Claim(keys=frozenset(keys_of(draft))))
        manifest = commit(backend, draft, sources, claim, write)
        catalog.remember(manifest)
        return manifest.ref

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
