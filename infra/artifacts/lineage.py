"""What an artifact came from, and what that came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import ArtifactRef

MAX_DEPTH = 200
"""Generations that are followed: a model retrained every night has one or two a night."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """An artifact and its parents. An ancestor reached on two ways is the same object on both."""

    ref: ArtifactRef
    manifest: Manifest | None
    """None for what came from outside the store, and for what has been pruned from it."""
    parents: tuple[Lineage, ...] = ()


def trace(root: Manifest, read: Callable[[ArtifactRef], Manifest | None]) -> Lineage:
    """Follow an artifact's parents; each version is read once.

    Args:
        root: where to begin.
        read: returns the manifest of a version, or None if the store does not hold it.
    """
    known: dict[ArtifactRef, Lineage] = {}

    def visit(ref: ArtifactRef, manifest: Manifest | None, depth: int) -> Lineage:
        parents: list[Lineage] = []
        for parent in manifest.parents if manifest and depth < MAX_DEPTH else ():
            if parent not in known:
                known[parent] = visit(parent, None if parent.is_external else read(parent), depth + 1)
            parents.append(known[parent])
        return Lineage(ref, manifest, tuple(parents))

    return visit(root.ref, root, 0)
