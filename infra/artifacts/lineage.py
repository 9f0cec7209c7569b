"""What an artifact came from, and what was made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from infra.artifacts.download import in_parallel
from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import ArtifactRef


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """An artifact and its parents. An ancestor reached on two ways is the same object on both."""

    ref: ArtifactRef
    manifest: Manifest | None
    """None for what came from outside the store, and for what has been removed from it."""
    parents: tuple[Lineage, ...] = field(default=(), repr=False)  # a long way back is no repr


@dataclass(frozen=True, slots=True, eq=False)
class Descent:
    """An artifact and what was made from it. A descendant reached on two ways is the same object on both."""

    ref: ArtifactRef
    manifest: Manifest
    children: tuple[Descent, ...] = field(default=(), repr=False)


def trace(root: Manifest, read: Callable[[ArtifactRef], Manifest | None]) -> Lineage:
    """Follow an artifact's parents; each version is read once, those of a generation in parallel.

    Args:
        root: where to begin.
        read: returns the manifest of a version, or None if the store does not hold it.
    """
    found: dict[ArtifactRef, Manifest | None] = {root.ref: root}

    def parents(refs: Sequence[ArtifactRef]) -> list[tuple[ArtifactRef, ...]]:
        stored = [ref for ref in refs if not ref.is_external and ref not in found]
        manifests = in_parallel(read, stored) if len(stored) > 1 else [read(ref) for ref in stored]
        found.update(zip(stored, manifests, strict=True))
        return [manifest.parents if (manifest := found.get(ref)) else () for ref in refs]

    edges = _follow(root.ref, parents)
    nodes: dict[ArtifactRef, Lineage] = {}
    for ref in _deepest_first(root.ref, edges):
        nodes[ref] = Lineage(ref, found.get(ref), tuple(nodes[each] for each in edges[ref] if each in nodes))
    return nodes[root.ref]


def descend(root: Manifest, manifests: Iterable[Manifest]) -> Descent:
    """Follow what was made from an artifact.

    Args:
        root: where to begin.
        manifests: all of the store; each is looked at once.
    """
    known = {root.ref: root}
    children: dict[ArtifactRef, list[ArtifactRef]] = {}
    for manifest in manifests:
        known[manifest.ref] = manifest
        for parent in dict.fromkeys(manifest.parents):
            children.setdefault(parent, []).append(manifest.ref)
    edges = _follow(root.ref, lambda refs: [children.get(ref, ()) for ref in refs])
    nodes: dict[ArtifactRef, Descent] = {}
    for ref in _deepest_first(root.ref, edges):
        nodes[ref] = Descent(ref, known[ref], tuple(nodes[each] for each in edges[ref] if each in nodes))
    return nodes[root.ref]


def branches(node: Lineage | Descent) -> tuple[Lineage | Descent, ...]:
    """Return what a tree shows under a node: its parents or its children."""
    return node.parents if isinstance(node, Lineage) else node.children


def walk(root: Lineage | Descent) -> list[Lineage | Descent]:
    """Return every node of a tree once, the root first, then generation by generation."""
    found = {root.ref: root}
    generation = [root]
    while generation:
        ahead = {each.ref: each for node in generation for each in branches(node) if each.ref not in found}
        found |= ahead
        generation = list(ahead.values())
    return list(found.values())


def _follow(
    root: ArtifactRef, onward: Callable[[Sequence[ArtifactRef]], Sequence[Sequence[ArtifactRef]]]
) -> dict[ArtifactRef, Sequence[ArtifactRef]]:
    """Return what each artifact leads to, generation by generation from the root."""
    steps: dict[ArtifactRef, Sequence[ArtifactRef]] = {}
    generation = [root]
    while generation:
        steps |= zip(generation, onward(generation), strict=True)
        reached = dict.fromkeys(each for ref in generation for each in steps[ref])
        generation = [ref for ref in reached if ref not in steps]
    return steps


def _deepest_first(root: ArtifactRef, edges: Mapping[ArtifactRef, Iterable[ArtifactRef]]) -> list[ArtifactRef]:
    """Return all that is reached from the root, each after what it leads to.

    A way that comes back to where it began, as only a store altered by hand can have one, is cut there.
    """
    order: list[ArtifactRef] = []
    begun = {root}
    pending = [(root, iter(edges[root]))]
    while pending:
        ref, rest = pending[-1]
        step = next((each for each in rest if each not in begun), None)
        if step is None:
            order.append(ref)
            pending.pop()
        else:
            begun.add(step)
            pending.append((step, iter(edges[step])))
    return order
