"""Looking into the store: list, show, fetch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.cli.artifacts.output import Json, console, print_rows, size, when, write_json

if TYPE_CHECKING:
    from infra.artifacts import ArtifactStore, Manifest


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
        return write_json(rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("reference", overflow="fold")
    table.add_column("aliases")
    table.add_column("digest")
    table.add_column("files", justify="right")
    table.add_column("size", justify="right")
    table.add_column("created")
    for manifest, row in zip(manifests, rows, strict=True):
        cells = (str(row["files"]), size(manifest.size), when(manifest))
        table.add_row(manifest.uri, ", ".join(row["aliases"]), manifest.digest[:12], *cells)
    screen = console()
    screen.print(table if rows else f"{store.url} holds no artifact{f' of {what}' if what else ''}", markup=False)
    return None


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
        return write_json({"uri": manifest.uri} | manifest.model_dump(mode="json") | {"aliases": histories})
    screen = console()
    facts = {
        "aliases": ", ".join(
            f"{alias} (since {found.history[-1].when:%Y-%m-%d %H:%M} UTC)" for alias, found in here.items()
        ),
        "digest": manifest.digest,
        "created": when(manifest),
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
    for title, content in (("metrics", manifest.metrics), ("config", manifest.config)):
        if content:
            screen.print(f"\n{title}", style="bold")
            screen.print_json(data=content)
    for alias, found in here.items():
        screen.print(f"\nhistory of {alias}", style="bold", markup=False)
        moves = [(f"{move.when:%Y-%m-%d %H:%M} UTC", move.uri, move.who, move.why) for move in found.history]
        print_rows(screen, moves)
    return None


def fetch(reference: str, directory: Path, *, as_json: Json = False) -> None:
    """Put an artifact's files into a directory, each checked against its hash.

    Files larger than 1 MB are links to the local cache, and read-only: copy one before you change it.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        directory: an empty directory; made if it is not there.
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
    console().print(f"{manifest.uri}: {len(manifest.files)} files, {size(manifest.size)}, in {directory}", markup=False)
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


def _summary(manifest: Manifest) -> dict[str, Any]:
    plain = manifest.model_dump(mode="json", include={"kind", "name", "version", "digest", "created", "metrics"})
    return {"uri": manifest.uri} | plain | {"files": len(manifest.files), "size": manifest.size}
