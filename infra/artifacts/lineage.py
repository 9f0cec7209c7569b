"""What an artifact came from, and what was made from it: as a graph of objects, and drawn as a tree of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from itertools import takewhile

from infra.artifacts.backend import in_parallel
from infra.artifacts.manifest import Manifest
from infra.artifacts.ref import ArtifactRef

SHOWN_OF_ROW = 3
"""Versions of one artifact, each made from the one before, that are drawn before the rest is gathered on a line."""
SHOWN_SIBLINGS = 4
"""Versions of one artifact that stand side by side, and lead nowhere, before they are gathered on a line."""
DEEPEST = 16
"""Generations that are drawn of what is not such a row: further right nobody can read."""


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


Node = Lineage | Descent


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


def branches(node: Node) -> tuple[Node, ...]:
    """Return what a tree shows under a node: its parents or its children."""
    return node.parents if isinstance(node, Lineage) else node.children


def walk(root: Node) -> list[Node]:
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


@dataclass(slots=True)
class _Level:
    """Siblings that are yet to be drawn."""

    rest: list[Node]
    indent: str
    row: int = 0
    """How many versions of one artifact stand above each other, down to the node that these are under."""
    of: str | None = None
    """What those are versions of."""


def draw(root: Node, *, width: int | None = None) -> list[str]:
    """Return a tree as lines of text; what was shown already is named without its own branches.

    A row of versions, each made from the one before, is drawn with its ends alone; the line between them says which
    are left out. If anything else is, the last line says how much, and how all of it is had.

    Args:
        root: of the tree.
        width: characters that a line should not have more of: digest and date make way.
    """
    lines: list[str] = []
    shown: set[ArtifactRef] = set()
    levels = [_Level([root], "")]
    while levels:
        level = levels[-1]
        if not level.rest:
            levels.pop()
            continue
        nodes = _next(level, shown)
        tip, onward = ("", "") if len(levels) == 1 else ("├── ", "│   ") if level.rest else ("└── ", "    ")
        text, below = _tell(nodes, level, shown)
        if below and len(levels) > DEEPEST:
            text, below = [f"{text[0]}  (goes on)", *text[1:]], ()
        lines.append(_fitted(f"{level.indent}{tip}", text, width))
        artifact = _artifact(nodes[0])
        row = level.row + 1 if artifact == level.of else 1
        levels.append(_Level(list(below), level.indent + onward, row, artifact))
    if missing := len(walk(root)) - len(shown):
        down = " --down" if isinstance(root, Descent) else ""
        lines.append(f"… and {missing} more: rlhf artifacts lineage {root.ref.uri}{down} --json names all")
    return lines


def _next(level: _Level, shown: set[ArtifactRef]) -> list[Node]:
    """Take what the next line is about: one node, or several versions of one artifact that lead nowhere new."""
    first = level.rest[0]
    was_shown, artifact = first.ref in shown, _artifact(first)

    def alike(node: Node) -> bool:
        ends = (node.ref in shown) if was_shown else not (node.ref in shown or branches(node))
        return ends and artifact is not None and _artifact(node) == artifact and node.manifest is not None

    nodes = list(takewhile(alike, level.rest))
    if len(nodes) <= (1 if was_shown else SHOWN_SIBLINGS):
        nodes = [first]
    del level.rest[: len(nodes)]
    return nodes


def _tell(nodes: Sequence[Node], level: _Level, shown: set[ArtifactRef]) -> tuple[list[str], Sequence[Node]]:
    """Return what the line of some nodes says, the dispensable last, and what is drawn under it."""
    node = nodes[0]
    if node.ref in shown:
        return [f"{_span(nodes)}  (above)"], ()
    row = list(_row(node, shown)) if level.row >= SHOWN_OF_ROW and _artifact(node) == level.of else []
    if len(row) > 2:  # noqa: PLR2004 - a line for one version is no shorter than the version's own
        *between, end = row
        shown.update(each.ref for each in between)
        return [f"… {_span(between)}"], (end,)
    shown.update(each.ref for each in nodes)
    return (_facts(node), branches(node)) if len(nodes) == 1 else ([_span(nodes)], ())


def _row(node: Node, shown: set[ArtifactRef]) -> Iterator[Node]:
    """Yield a version, the one of the same artifact that it leads to, and so on."""
    found: Node | None = node
    while found is not None:
        yield found
        ahead = (each for each in branches(found) if each.ref not in shown and _artifact(each) == _artifact(node))
        found = next(ahead, None)


def _artifact(node: Node) -> str | None:
    """Return what a node is a version of; None for what came from outside."""
    return None if node.ref.is_external else node.ref.uri.rpartition("@")[0]


def _span(nodes: Sequence[Node]) -> str:
    """Return the name of a version, or the first and the last of several with their number."""
    first, last = nodes[0].ref.uri, nodes[-1].ref.uri.rpartition("@")[2]
    return first if len(nodes) == 1 else f"{first} to @{last}, {len(nodes)} versions"


def _facts(node: Node) -> list[str]:
    """Return the reference of a node, and of what is in the store when it was made, and its digest."""
    if node.manifest is None:
        return [f"{node.ref.uri}  {'from outside' if node.ref.is_external else 'pruned since'}"]
    return [
        node.ref.uri,
        f"{node.manifest.created.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        node.ref.digest[:12],
    ]


def _fitted(tip: str, parts: Sequence[str], width: int | None) -> str:
    """Return a line, less what does not fit; its first part always stays."""
    line = tip + parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line
