"""What is different between two versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infra.artifacts.manifest import FileEntry, Manifest

SAME, CHANGED, ADDED, REMOVED = "same", "changed", "added", "removed"


@dataclass(frozen=True, slots=True)
class Change:
    """A value that differs, or that only one of the two has."""

    name: str
    """Dotted, as configuration overrides are written."""
    what: str
    """CHANGED, ADDED or REMOVED."""
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class FileChange:
    """What became of a file."""

    path: str
    what: str
    """SAME, CHANGED, ADDED or REMOVED."""
    before_bytes: int
    after_bytes: int
    shared_bytes: int
    """Of the blobs of the later one: those that are blobs of the earlier version too, of whichever file."""


@dataclass(frozen=True, slots=True)
class Difference:
    """From one version to another."""

    before: str
    after: str
    config: tuple[Change, ...]
    metrics: tuple[Change, ...]
    parents: tuple[Change, ...]
    packages: tuple[Change, ...]
    source: Change | None
    """Digest of the code; None when it is the same."""
    files: tuple[FileChange, ...]
    before_bytes: int
    after_bytes: int
    shared_bytes: int
    """Of the files of the later one: what is in blobs of the earlier too."""

    @property
    def is_of_two_kinds(self) -> bool:
        """Whether the two were made by different stages, so that each has figures and files of its own."""
        return self.before.partition("/")[0] != self.after.partition("/")[0]

    def tells_of(self, change: Change | FileChange) -> bool:
        """Whether a person is told of a change; not of one that only comes from two different kinds."""
        return not self.is_of_two_kinds or change.what not in {ADDED, REMOVED}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def compare(before: Manifest, after: Manifest) -> Difference:
    """Return what is different between two versions, of whatever kinds and names."""
    held = {blob.sha256 for blob in before.blobs}
    source = next(_changes({"": before.source_digest}, {"": after.source_digest}), None)
    return Difference(
        before=before.uri,
        after=after.uri,
        config=tuple(_changes(dict(flatten(before.config)), dict(flatten(after.config)))),
        metrics=tuple(_changes(dict(flatten(before.metrics)), dict(flatten(after.metrics)))),
        parents=tuple(_changes(_parents(before), _parents(after))),
        packages=tuple(_changes(before.packages, after.packages)),
        source=source,
        files=tuple(_files(before, after, held)),
        before_bytes=before.size,
        after_bytes=after.size,
        shared_bytes=sum(blob.size for blob in after.blobs if blob.sha256 in held),
    )


def flatten(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings and of lists that hold some, each under its dotted name.

    >>> dict(flatten({"ppo": {"lr": 0.1, "betas": [0.9, 0.95]}, "data": [{"path": "x"}]}))
    {'ppo.lr': 0.1, 'ppo.betas': [0.9, 0.95], 'data.0.path': 'x'}
    """
    if isinstance(content, list) and any(isinstance(each, dict | list) for each in content):
        content = {str(at): each for at, each in enumerate(content)}
    if isinstance(content, Mapping) and (content or not prefix):
        for name, each in content.items():
            yield from flatten(each, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, content


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield what is different, in the order of the names."""
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield Change(name, REMOVED, before[name], None)
        elif name not in before:
            yield Change(name, ADDED, None, after[name])
        elif before[name] != after[name]:
            yield Change(name, CHANGED, before[name], after[name])


def _parents(manifest: Manifest) -> dict[str, str]:
    """Return the versions of the parents by what they are versions of, and their digests where they are outside."""
    found: dict[str, list[str]] = {}
    for parent in manifest.parents:
        artifact, _, version = parent.uri.rpartition("@")
        if parent.is_external or not artifact:
            artifact, version = parent.uri, parent.digest[:12]
        found.setdefault(artifact, []).append(version)
    return {artifact: ", ".join(versions) for artifact, versions in found.items()}


def _files(before: Manifest, after: Manifest, held: set[str]) -> Iterator[FileChange]:
    old = {entry.path: entry for entry in before.files}
    new = {entry.path: entry for entry in after.files}
    for path in sorted(old.keys() | new.keys()):
        yield _file(path, old.get(path), new.get(path), held)


def _file(path: str, old: FileEntry | None, new: FileEntry | None, held: set[str]) -> FileChange:
    if new is None:
        return FileChange(path, REMOVED, old.size if old else 0, 0, 0)
    shared = sum(blob.size for blob in new.pieces if blob.sha256 in held)
    if old is None:
        return FileChange(path, ADDED, 0, new.size, shared)
    return FileChange(path, SAME if old.sha256 == new.sha256 else CHANGED, old.size, new.size, shared)
