"""Lineage as a tree, line by line: each artifact with its own branches once, long rows of versions on one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from itertools import takewhile

from infra.artifacts.lineage import Descent, Lineage, branches, walk
from infra.artifacts.ref import ArtifactRef

SHOWN_OF_ROW = 3
"""Versions of one artifact, each made from the one before, that are drawn before the rest is gathered on a line."""
SHOWN_SIBLINGS = 4
"""Versions of one artifact that stand side by side, and lead nowhere, before they are gathered on a line."""
DEEPEST = 16
"""Generations that are drawn of what is not such a row: further right nobody can read."""

Node = Lineage | Descent


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
    return _printable(first) if len(nodes) == 1 else f"{_printable(first)} to @{last}, {len(nodes)} versions"


def _facts(node: Node) -> list[str]:
    """Return the reference of a node, and of what is in the store when it was made, and its digest."""
    if node.manifest is None:
        return [f"{_printable(node.ref.uri)}  {'from outside' if node.ref.is_external else 'pruned since'}"]
    return [
        _printable(node.ref.uri),
        f"{node.manifest.created.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        node.ref.digest[:12],
    ]


def _printable(uri: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in uri)


def _fitted(tip: str, parts: Sequence[str], width: int | None) -> str:
    """Return a line, less what does not fit; its first part always stays."""
    line = tip + parts[0]
    for part in parts[1:]:
        if width is not None and len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line
