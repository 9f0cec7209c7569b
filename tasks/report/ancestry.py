"""What a policy came from, laid out to be drawn: the oldest on the left, each arrow to what was made from it."""

from __future__ import annotations

from typing import Any

from infra.artifacts.lineage import Lineage, branches, walk

MOST_BOXES = 12
"""Artifacts that a picture still shows readably; the nearest are taken."""
_LONGEST_NAME = 26


def ancestry(root: Lineage) -> dict[str, Any]:
    """Return boxes and arrows.

    Args:
        root: whose ancestors are shown.

    Returns:
        `boxes` with `uri`, `name` (shortened), `told`, `column` and `row`, both from 0; `arrows` as pairs of places in
        `boxes`, from parent to child; and how many ancestors were `left_out`.
    """
    nodes = walk(root)
    shown = nodes[:MOST_BOXES]
    place = {node.ref: at for at, node in enumerate(shown)}
    parents = [[place[each.ref] for each in branches(node) if each.ref in place] for node in shown]
    depth = [0] * len(shown)
    for _ in shown:  # the longest way from the root, so that every arrow goes on to the right
        for child, those in enumerate(parents):
            for parent in those:
                depth[parent] = max(depth[parent], min(depth[child] + 1, len(shown)))
    deepest = max(depth)
    rows: dict[int, int] = {}
    boxes = []
    for node, at in zip(shown, depth, strict=True):
        rows[at] = rows.get(at, -1) + 1
        boxes.append(
            {
                "uri": node.ref.uri,
                "name": _short(node.ref.uri),
                "told": f"{node.manifest.created:%Y-%m-%d %H:%M} UTC" if node.manifest else _gone(node),
                "column": deepest - at,
                "row": rows[at],
            }
        )
    arrows = [[parent, child] for child, those in enumerate(parents) for parent in dict.fromkeys(those)]
    return {"boxes": boxes, "arrows": arrows, "left_out": len(nodes) - len(shown)}


def _gone(node: Any) -> str:
    return "from outside" if node.ref.is_external else "pruned since"


def _short(uri: str) -> str:
    """Return a name that fits a box; of a long one the beginning and the end, which has the version.

    >>> _short("policy/quickstart@12"), len(_short("policy/" + "a" * 63 + "@12345"))
    ('policy/quickstart@12', 26)
    """
    half = _LONGEST_NAME // 2
    return uri if len(uri) <= _LONGEST_NAME else f"{uri[:half]}…{uri[-(half - 1) :]}"
