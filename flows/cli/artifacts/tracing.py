"""How artifacts came to be, and how two of them differ: lineage, plan, diff."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.artifacts.output import Json, console, print_rows, size, when, write_json, write_lines
from rlhf_core.counting import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from infra.artifacts import Descent, Difference, Lineage
    from infra.artifacts.diff import Change, FileChange

LONGEST_VALUE = 60
"""Characters of a value that are shown; all of them stand in the JSON."""


def lineage(
    reference: str, /, *, down: Annotated[bool, Parameter(name="--down", negative="")] = False, as_json: Json = False
) -> None:
    """Show what an artifact was made from, and what that was made from, to the beginning.

    Of a long row of versions, each made from the one before, the ends are shown; the JSON names all.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        down: show what was made from it instead, to the end; every manifest of the store is read for that.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store
    from infra.artifacts.lineage import draw

    store = open_default_store()
    root = store.descendants(reference) if down else store.lineage(reference)
    if as_json:
        return write_json(_plain(root, "children" if down else "parents"))
    screen = console()
    write_lines(draw(root, width=screen.width if screen.is_terminal else None))
    return None


def plan(run: str, /, *, as_json: Json = False) -> None:
    """Show what a run resolved when it first began, which it takes again whenever it is started again.

    Args:
        run: id of a flow run of Prefect's; `rlhf artifacts show` says which one made an artifact.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store
    from infra.errors import ReferenceNotFoundError

    store = open_default_store()
    found = store.plan(run)
    if not found:
        raise ReferenceNotFoundError(
            f"{store.url} holds nothing that a run {run} resolved; give the id of a flow run of this project, as the "
            "Prefect UI or `rlhf artifacts show` tells it"
        )
    if as_json:
        return write_json([answer.model_dump(mode="json") for answer in found])
    print_rows(console(), [(when(answer.when), answer.question, _value(answer.answer)) for answer in found])
    return None


def diff(before: str, after: str, /, *, as_json: Json = False) -> None:
    """Show what is different between two artifacts: configuration, figures, parents, files, code, packages.

    Of two kinds, such as an SFT model and a policy, what both have is compared; what one of them has is counted.

    Args:
        before: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        after: the other, of any kind and name.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    found = open_default_store().diff(before, after)
    if as_json:
        return write_json(found.as_dict())
    screen = console()
    screen.print(f"{found.before} → {found.after}", style="bold", markup=False)
    if found.is_of_two_kinds:
        screen.print("two kinds: what both have is compared, and what only one has is counted (--json names it)")
    for title, changes in (
        ("config", found.config),
        ("metrics", found.metrics),
        ("parents", found.parents),
        ("packages", found.packages),
    ):
        _print_changes(screen, title, changes, found)
    if found.source is not None:
        _print_changes(screen, "source", [found.source], found)
    _print_files(screen, found)
    return None


def _plain(root: Lineage | Descent, onward: str) -> list[dict[str, Any]]:
    """Return a tree as plain values: a list, its root first, as no JSON reader goes down a thousand levels."""
    from infra.artifacts.lineage import branches, walk

    return [
        {
            "uri": node.ref.uri,
            "digest": node.ref.digest,
            "external": node.ref.is_external,
            "created": node.manifest.created.isoformat() if node.manifest else None,
            onward: [{"uri": each.ref.uri, "digest": each.ref.digest} for each in branches(node)],
        }
        for node in walk(root)
    ]


def _print_changes(screen: Console, title: str, changes: Sequence[Change], found: Difference) -> None:
    if not changes:
        return
    screen.print(f"\n{title}", style="bold")
    print_rows(
        screen,
        [
            (change.name, _value(change.before), "→", _value(change.after))
            for change in changes
            if found.tells_of(change)
        ],
    )
    for what, only in (("removed", found.before), ("added", found.after)):
        left_out = [change for change in changes if change.what == what and not found.tells_of(change)]
        if left_out:
            screen.print(f"only in {only}: {len(left_out)}", markup=False)


def _value(value: Any) -> str:
    """Return a value on one line, the beginning of a long one; nothing where there is none."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _print_files(screen: Console, found: Difference) -> None:
    counts: dict[str, int] = {}
    for each in found.files:
        counts[each.what] = counts.get(each.what, 0) + 1
    told = ", ".join(counted(count, f"file {what}", f"files {what}") for what, count in sorted(counts.items()))
    screen.print(f"\nfiles ({told})", style="bold", markup=False)
    print_rows(screen, [_file_row(each) for each in found.files if each.what != "same" and found.tells_of(each)])
    share = f" ({found.shared_bytes / found.after_bytes:.1%})" if found.after_bytes else ""
    sizes = f"{size(found.shared_bytes)} of {size(found.after_bytes)}{share}"
    screen.print(f"{sizes} of {found.after} are blobs of {found.before} too", markup=False)


def _file_row(change: FileChange) -> tuple[str, ...]:
    sizes = {
        "changed": f"{size(change.before_bytes)} → {size(change.after_bytes)}",
        "added": size(change.after_bytes),
        "removed": size(change.before_bytes),
    }
    shared = f"{size(change.shared_bytes)} shared" if change.shared_bytes else ""
    return change.what, change.path, sizes[change.what], shared
