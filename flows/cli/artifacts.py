"""`rlhf artifacts`: look into the artifact store, and take things out of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from infra.artifacts import ArtifactStore, Lineage, Manifest

app = App(name="artifacts", help="Look into the artifact store, and take things out of it.")
Json = Annotated[bool, Parameter(name="--json", negative="")]
PIPE_WIDTH = 160


@app.command(name="list")
def list_artifacts(what: str | None = None, *, as_json: Json = False) -> None:
    """List what the store holds.

    Args:
        what: a kind (`policy`) or an artifact (`policy/llama7b`); all when left out.
        as_json: print JSON.
    """
    from rich.table import Table

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
        return _write_json(rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("reference", overflow="fold")
    table.add_column("aliases")
    table.add_column("digest")
    table.add_column("files", justify="right")
    table.add_column("size", justify="right")
    table.add_column("created")
    for manifest, row in zip(manifests, rows, strict=True):
        cells = (str(row["files"]), _size(manifest.size), _when(manifest))
        table.add_row(manifest.uri, ", ".join(row["aliases"]), manifest.digest[:12], *cells)
    console = _console()
    console.print(table if rows else f"{store.url} holds no artifact{f' of {what}' if what else ''}", markup=False)
    return None


@app.command
def show(reference: str, *, as_json: Json = False) -> None:
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
        return _write_json({"uri": manifest.uri} | manifest.model_dump(mode="json") | {"aliases": histories})
    console = _console()
    facts = {
        "aliases": ", ".join(
            f"{alias} (since {found.history[-1].when:%Y-%m-%d %H:%M} UTC)" for alias, found in here.items()
        ),
        "digest": manifest.digest,
        "created": _when(manifest),
        "parents": ", ".join(str(parent) for parent in manifest.parents),
        "key": manifest.key or "",
        "source": manifest.source_digest,
        "Prefect run": manifest.flow_run or "",
        "packages": ", ".join(f"{package} {version}" for package, version in manifest.packages.items()),
    }
    console.print(manifest.uri, style="bold", markup=False)
    _print_rows(console, [(name, fact) for name, fact in facts.items() if fact])
    console.print(f"\nfiles ({_size(manifest.size)})", style="bold")
    _print_rows(console, [(entry.path, _size(entry.size), entry.sha256[:12]) for entry in manifest.files])
    for title, content in (("metrics", manifest.metrics), ("config", manifest.config)):
        if content:
            console.print(f"\n{title}", style="bold")
            console.print_json(data=content)
    return None


@app.command
def fetch(reference: str, directory: Path, *, as_json: Json = False) -> None:
    """Write an artifact's files into a directory, each checked against its hash.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        directory: an empty directory; made if it is not there.
        as_json: print JSON.
    """
    from rich.console import Console

    from infra.artifacts import open_default_store

    store = open_default_store()
    manifest = store.resolve(reference)
    with Console(stderr=True).status(f"fetching {manifest.uri}, {_size(manifest.size)}"):
        store.fetch(manifest.ref, directory)
    if as_json:
        files = [entry.path for entry in manifest.files]
        return _write_json(
            {"uri": manifest.uri, "digest": manifest.digest, "directory": str(directory), "files": files}
        )
    _console().print(
        f"{manifest.uri}: {len(manifest.files)} files, {_size(manifest.size)}, in {directory}", markup=False
    )
    return None


@app.command
def lineage(reference: str, *, as_json: Json = False) -> None:
    """Show what an artifact was made from, and what that was made from, to the beginning.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        as_json: print JSON.
    """
    from rich.text import Text
    from rich.tree import Tree

    from infra.artifacts import open_default_store

    origin = open_default_store().lineage(reference)
    if as_json:
        return _write_json(_lineage_json(origin, set()))
    tree = Tree(Text(_label(origin)))
    _grow(tree, origin, {origin.ref.uri})
    _console().print(tree)
    return None


def _listed(store: ArtifactStore, what: str) -> list[Manifest]:
    """Return the versions of a kind or an artifact.

    Raises:
        ReferenceNotFoundError: if there is no such kind, or no such artifact in a store that holds others.
    """
    from infra.artifacts import KINDS

    kind, _, name = what.partition("/")
    found = store.list(kind, name or None) if kind in KINDS else []
    if not found and (kind not in KINDS or (name and store.list())):
        store.resolve(what)  # says what there is instead
    return found


def _grow(tree: Tree, node: Lineage, shown: set[str]) -> None:
    """Add a node's parents; what was shown already is named without its own."""
    from rich.text import Text

    for parent in node.parents:
        repeated = parent.ref.uri in shown and bool(parent.parents)
        branch = tree.add(Text(f"{_label(parent)}{'  (parents above)' if repeated else ''}"))
        if not repeated:
            shown.add(parent.ref.uri)
            _grow(branch, parent, shown)


def _label(node: Lineage) -> str:
    if node.manifest is not None:
        return f"{node.ref.uri}  {node.ref.digest[:12]}  {_when(node.manifest)}"
    return f"{node.ref.uri}  {'from outside' if node.ref.is_external else 'pruned since'}"


def _lineage_json(node: Lineage, shown: set[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {"uri": node.ref.uri, "digest": node.ref.digest, "external": node.ref.is_external}
    facts["created"] = node.manifest.created.isoformat() if node.manifest else None
    if node.ref.uri in shown:
        return facts | {"repeated": True}
    shown.add(node.ref.uri)
    return facts | {"parents": [_lineage_json(parent, shown) for parent in node.parents]}


def _summary(manifest: Manifest) -> dict[str, Any]:
    plain = manifest.model_dump(mode="json", include={"kind", "name", "version", "digest", "created", "metrics"})
    return {"uri": manifest.uri} | plain | {"files": len(manifest.files), "size": manifest.size}


def _when(manifest: Manifest) -> str:
    return f"{manifest.created.astimezone():%Y-%m-%d %H:%M}"


def _size(count: float) -> str:
    """Return a number of bytes as people read it."""
    thousand = 1000
    for unit in ("B", "kB", "MB", "GB"):
        if count < thousand:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= thousand
    return f"{count:.1f} TB"


def _print_rows(console: Console, rows: list[tuple[str, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    console.print(table)


def _console() -> Console:
    """Return a console; without a terminal it is wide, so that references are not cut."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _write_json(content: Any) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
