"""What an artifact came from, what was made from it, and both as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from infra.artifacts.manifest import Manifest
from infra.artifacts.parallel import in_parallel
from infra.artifacts.ref import ArtifactRef

MAX_DEPTH = 200
"""Generations that are followed: a model retrained every night has one or two a night."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """An artifact and its parents. An ancestor reached on two ways is the same object on both."""

    ref: ArtifactRef
    manifest: Manifest | None
    """None for what came from outside the store, and for what has been removed from it."""
    parents: tuple[Lineage, ...] = ()


@dataclass(frozen=True, slots=True)
class Descent:
    """An artifact and what was made from it. A descendant reached on two ways is the same object on both."""

    ref: ArtifactRef
    manifest: Manifest
    children: tuple[Descent, ...] = ()


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


def draw(root: Lineage | Descent) -> list[str]:
    """Return a tree as lines of text; what was shown already is named without its own branches."""
    lines: list[str] = []
    shown: set[ArtifactRef] = set()
    pending: list[tuple[Lineage | Descent, str, str]] = [(root, "", "")]
    while pending:
        node, first, indent = pending.pop()
        below = branches(node)
        repeated = node.ref in shown and bool(below)
        shown.add(node.ref)
        what = "parents" if isinstance(node, Lineage) else "children"
        lines.append(f"{first}{label(node)}{f'  ({what} above)' if repeated else ''}")
        if below and not repeated:
            pending.append((below[-1], f"{indent}└── ", f"{indent}    "))
            pending += [(each, f"{indent}├── ", f"{indent}│   ") for each in reversed(below[:-1])]
    return lines


def label(node: Lineage | Descent) -> str:
    """Return a node on one line: reference, digest, and when it was made."""
    uri = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in node.ref.uri)
    if node.manifest is None:
        return f"{uri}  {'from outside' if node.ref.is_external else 'pruned since'}"
    unfollowed = isinstance(node, Lineage) and len(node.parents) < len(node.manifest.parents)
    created = f"{node.manifest.created.astimezone():%Y-%m-%d %H:%M}"
    return f"{uri}  {node.ref.digest[:12]}  {created}{'  (goes on)' if unfollowed else ''}"


def _follow(
    root: ArtifactRef, onward: Callable[[Sequence[ArtifactRef]], Sequence[Sequence[ArtifactRef]]]
) -> dict[ArtifactRef, list[ArtifactRef]]:
    """Return what each artifact leads to, generation by generation from the root."""
    steps: dict[ArtifactRef, Sequence[ArtifactRef]] = {}
    generation = [root]
    for _ in range(MAX_DEPTH + 1):
        steps |= zip(generation, onward(generation), strict=True)
        reached = dict.fromkeys(each for ref in generation for each in steps[ref])
        generation = [ref for ref in reached if ref not in steps]
        if not generation:
            break
    return {ref: [each for each in ahead if each in steps] for ref, ahead in steps.items()}


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
