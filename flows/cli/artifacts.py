"""`rlhf artifacts`: look into the artifact store, and take things out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from flows.cli.artifact_changes import collect, promote, rollback
from flows.cli.output import Flag, Json, console, print_rows, when, write_json, write_lines
from rlhf_core.counting import counted
from tasks.report.cells import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from infra.artifacts import ArtifactRef, ArtifactStore, Descent, Difference, Lineage, Manifest, Verification
    from infra.artifacts.diff import Change, FileChange

app = App(name="artifacts", help="Look into the artifact store, take things out of it, and keep it in order.")
for verb in (promote, rollback, collect):
    app.command(verb)
GAP = "  "
_DISPENSABLE = ("digest", "files", "created", "size")
"""Columns of a list, the first to go first."""
LONGEST_VALUE = 60
"""Characters of a value that are shown; all of them stand in the JSON."""


@app.command(name="list")
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
        screen.print(f"{store.url} holds no artifact{f' of {what}' if what else ''}")
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


@app.command
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
    screen.print(manifest.uri, style="bold")
    print_rows(screen, [(name, fact) for name, fact in facts.items() if fact])
    screen.print(f"\nfiles ({size(manifest.size)})", style="bold")
    print_rows(screen, [(entry.path, size(entry.size), entry.sha256[:12]) for entry in manifest.files])
    for alias, found in here.items():
        screen.print(f"\nhistory of {alias}", style="bold")
        own = f"{manifest.kind}/{manifest.name}"
        moves = [(when(move.when), move.uri.removeprefix(own), move.who, move.why) for move in found.history]
        print_rows(screen, moves)
    for title, content in (("metrics", manifest.metrics), ("config", manifest.config)):
        if content:
            screen.print(f"\n{title}", style="bold")
            screen.print_json(data=content)
    return None


@app.command
def fetch(
    reference: str, directory: Path, /, *, merged: Flag = False, model: str | None = None, as_json: Json = False
) -> None:
    """Put an artifact's files into a directory, each checked against its hash.

    Files larger than 1 MB are links to the local cache, and read-only: copy one before you change it. Of a model that
    is adapters, all sets of them come joined to one, as `AutoPeftModelForCausalLM.from_pretrained` loads it: with the
    absolute path of its base, which lies in `base` beside it, if the store holds it.

    Args:
        reference: `kind/name` (the latest), `kind/name@version` or `kind/name@alias`.
        directory: an empty directory, or one with files of the same version of a whole model; made if it is not there.
        merged: of a model that is adapters, the whole model, as `AutoModelForCausalLM.from_pretrained` loads it.
        model: what adapters are over, where the store does not hold it and it has moved since they were trained.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store
    from infra.errors import StoreError
    from infra.settings import settings
    from tasks.export import export

    store = open_default_store()
    manifest = store.resolve(reference)
    if model is not None and not manifest.has_adapters:
        raise StoreError(f"{manifest.uri} is whole, not adapters over another model; leave --model out")
    with console(stderr=True).status(f"fetching {manifest.uri}, {size(manifest.size)}"):
        if manifest.has_adapters:
            export(store, settings(), manifest, directory, merged=merged, model=model)
        else:
            store.fetch(manifest.ref, directory)
    written = sorted(each for each in directory.rglob("*") if each.is_file())
    if as_json:
        files = [str(each.relative_to(directory)) for each in written]
        return write_json({"uri": manifest.uri, "digest": manifest.digest, "directory": str(directory), "files": files})
    total = size(sum(each.stat().st_size for each in written))
    console().print(f"{manifest.uri}: {counted(len(written), 'file')}, {total}, in {directory}")
    return None


@app.command
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


@app.command
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


@app.command
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
    screen.print(f"{found.before} → {found.after}", style="bold")
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
            screen.print(f"only in {only}: {len(left_out)}")


def _print_files(screen: Console, found: Difference) -> None:
    counts: dict[str, int] = {}
    for each in found.files:
        counts[each.what] = counts.get(each.what, 0) + 1
    told = ", ".join(counted(count, f"file {what}", f"files {what}") for what, count in sorted(counts.items()))
    screen.print(f"\nfiles ({told})", style="bold")
    print_rows(screen, [_file_row(each) for each in found.files if each.what != "same" and found.tells_of(each)])
    share = f" ({found.shared_bytes / found.after_bytes:.1%})" if found.after_bytes else ""
    sizes = f"{size(found.shared_bytes)} of {size(found.after_bytes)}{share}"
    screen.print(f"{sizes} of {found.after} are blobs of {found.before} too")


def _file_row(change: FileChange) -> tuple[str, ...]:
    sizes = {
        "changed": f"{size(change.before_bytes)} → {size(change.after_bytes)}",
        "added": size(change.after_bytes),
        "removed": size(change.before_bytes),
    }
    shared = f"{size(change.shared_bytes)} shared" if change.shared_bytes else ""
    return change.what, change.path, sizes[change.what], shared


def _value(value: Any) -> str:
    """Return a value on one line, the beginning of a long one; nothing where there is none."""
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


@app.command
def verify(reference: str | None = None, /, *, quick: Flag = False, as_json: Json = False) -> int:
    """Look for anything that is not as it should be: manifests, parents, aliases, keys, and every byte of the blobs.

    Each problem is a line. The exit status is 1 if there is one.

    Args:
        reference: check this version only; the whole store when left out.
        quick: look at the sizes of blobs only, not at their content.
        as_json: print JSON.
    """
    from infra.artifacts import open_default_store

    store = open_default_store()
    which = None if reference is None else store.resolve(reference).ref  # before a bar is there
    found = _verified(store, which, quick=quick)
    if as_json:
        facts = {"versions": found.versions, "blobs": found.blobs, "bytes": found.bytes, "quick": quick}
        facts |= {"removed_parents": found.removed_parents, "stale_keys": found.stale_keys}
        write_json(facts | {"problems": found.problems})
        return int(bool(found.problems))
    write_lines(found.problems)
    held = f"{counted(found.versions, 'version')}, {counted(found.blobs, 'blob')}, {size(found.bytes)}"
    depth = "of which only the sizes were looked at" if quick else "read and hashed"
    console().print(
        f"{which or store.url}: {held}, {depth}: "
        f"{counted(len(found.problems), 'problem') if found.problems else 'all is well'}",
    )
    if found.stale_keys:
        entries = counted(found.stale_keys, "entry", "entries")
        console().print(f"{entries} of the key index of versions that are gone: no problem")
    return int(bool(found.problems))


def _verified(store: ArtifactStore, which: ArtifactRef | None, *, quick: bool) -> Verification:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=None)
        return store.verify(
            which, quick=quick, progress=lambda read, total: bar.update(task, advance=read, total=total)
        )
