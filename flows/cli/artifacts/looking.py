"""Looking into the store: list, show, fetch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.artifacts.output import Json, console, print_rows, size, when, write_json, write_lines
from rlhf_core.counting import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from infra.artifacts import ArtifactStore, Manifest

GAP = "  "
_DISPENSABLE = ("digest", "files", "created", "size")
"""Columns of a list, the first to go first."""


def list_artifacts(what: str | None = None, /, *, as_json: Json = False) -> None:
    """List what the store holds.

    Args:
        what: a kind (`policy`) or an artifact (`policy/llama7b`); all when left out.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    manifests = _listed(store, what) if what else store.list()
    pointers = {artifact: store.aliases(*artifact) for artifact in {(m.kind, m.name) for m in manifests}}
    rows = [
        _summary(manifest)
        | {"aliases": [a for a, at in pointers[manifest.kind, manifest.name].items() if at.uri == manifest.uri]}
        for manifest in manifests
    ]
    if as_json:
        return write_json(rows)
    screen = console()
    if rows:
        print_list(screen, [(", ".join(row["aliases"]), m) for row, m in zip(rows, manifests, strict=True)])
    else:
        screen.print(f"{store.url} holds no artifact{f' of {what}' if what else ''}", markup=False)
    return None


def show(reference: str, /, *, as_json: Json = False) -> None:
    """Show one artifact: its files, parents, figures and configuration.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    manifest = store.resolve(reference)
    aliases = store.aliases(manifest.kind, manifest.name)
    here = {alias: found for alias, found in aliases.items() if found.uri == manifest.uri}
    if as_json:
        histories = {alias: found.model_dump(mode="json")["history"] for alias, found in here.items()}
        return write_json({"uri": manifest.uri} | manifest.model_dump(mode="json") | {"aliases": histories})
    screen = console()
    facts = {
        "aliases": ", ".join(f"{alias} (since {when(found.history[-1].when)})" for alias, found in here.items()),
        "digest": manifest.digest,
        "created": when(manifest.created),
        "parents": ", ".join(str(parent) for parent in manifest.parents),
        "key": manifest.key or "",
        "source": manifest.source_digest,
        "Prefect run": manifest.flow_run or "",
        "packages": ", ".join(f"{package} {version}" for package, version in manifest.packages.items()),
    }
    screen.print(manifest.uri, style="bold", markup=False)
    print_rows(screen, [(name, fact) for name, fact in facts.items() if fact])
    screen.print(f"\nfiles ({size(manifest.size)})", style="bold")
    print_rows(screen, [(entry.path, size(entry.size), entry.sha256[:12]) for entry in manifest.files])
    for alias, found in here.items():
        screen.print(f"\nhistory of {alias}", style="bold", markup=False)
        own = f"{manifest.kind}/{manifest.name}"
        moves = [(when(move.when), move.uri.removeprefix(own), move.who, move.why) for move in found.history]
        print_rows(screen, moves)
    for title, content in (("metrics", manifest.metrics), ("config", manifest.config)):
        if content:
            screen.print(f"\n{title}", style="bold")
            screen.print_json(data=content)
    return None


def fetch(reference: str, directory: Path, /, *, as_json: Json = False) -> None:
    """Put an artifact's files into a directory, each checked against its hash.

    Files larger than 1 MB are links to the local cache, and read-only: copy one before you change it.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        directory: an empty directory, or one with files of the same version; made if it is not there.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    manifest = store.resolve(reference)
    with console(stderr=True).status(f"fetching {manifest.uri}, {size(manifest.size)}"):
        store.fetch(manifest.ref, directory)
    if as_json:
        files = [entry.path for entry in manifest.files]
        return write_json({"uri": manifest.uri, "digest": manifest.digest, "directory": str(directory), "files": files})
    console().print(
        f"{manifest.uri}: {counted(len(manifest.files), 'file')}, {size(manifest.size)}, in {directory}", markup=False
    )
    return None


def _listed(store: ArtifactStore, what: str) -> list[Manifest]:
    """Return the versions of a kind or an artifact.

    Raises:
        ReferenceNotFoundError: if there is no such kind, or no such artifact in a store that holds others; or if
            that is a version.
    """
    from infra.artifacts import KINDS
    from infra.errors import ReferenceNotFoundError

    if "@" in what:
        raise ReferenceNotFoundError(
            f"{what!r} is one version, but a list is of a kind or of all versions of an artifact: "
            f"write rlhf artifacts show {what}, or rlhf artifacts list {what.partition('@')[0]}"
        )
    kind, _, name = what.partition("/")
    found = store.list(kind, name or None) if kind in KINDS else []
    if not found and (kind not in KINDS or (name and store.list())):
        store.resolve(what)  # says what there is instead
    return found


def _summary(manifest: Manifest) -> dict[str, Any]:
    plain = manifest.model_dump(mode="json", include={"kind", "name", "version", "digest", "created", "metrics"})
    return {"uri": manifest.uri} | plain | {"files": len(manifest.files), "size": manifest.size}


def print_list(screen: Console, rows: Sequence[tuple[str, Manifest]]) -> None:
    """Print a line for each version; into a narrow terminal less of them, and never a part of a name."""
    columns = {
        "reference": [manifest.uri for _, manifest in rows],
        "aliases": [aliases for aliases, _ in rows],
        "size": [size(manifest.size) for _, manifest in rows],
        "created": [when(manifest.created) for _, manifest in rows],
        "files": [str(len(manifest.files)) for _, manifest in rows],
        "digest": [manifest.digest[:12] for _, manifest in rows],
    }
    widths = {title: max(map(len, [title, *cells])) for title, cells in columns.items()}
    for dispensable in _DISPENSABLE:
        if screen.is_terminal and sum(widths.values()) + len(GAP) * (len(widths) - 1) > screen.width:
            del columns[dispensable], widths[dispensable]
    sides = [str.rjust if title in {"size", "files"} else str.ljust for title in columns]
    lines = [
        GAP.join(side(cell, width) for side, cell, width in zip(sides, line, widths.values(), strict=True)).rstrip()
        for line in zip(*([title, *cells] for title, cells in columns.items()), strict=True)
    ]
    screen.print(lines[0], style="bold", soft_wrap=True)
    write_lines(lines[1:])
