"""Reading an artifact: every byte is counted and hashed before anybody sees it under its name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.artifacts.backend import Backend, in_parallel
from infra.artifacts.cache import Cache
from infra.artifacts.download import Downloads, Wanted, damaged, flaw, inconsistent, stored_body
from infra.artifacts.manifest import FileEntry, Manifest
from infra.artifacts.ref import enumerate_names
from infra.artifacts.shared_files import discard_parts, is_inside, is_part, part_of, put_copy, put_link, target_of
from infra.errors import StoreError

COPIED_BYTES = 10**6
"""Files of at most this size are copied for their user, who may edit them: configurations, tokenizers."""


def checked_pieces(backend: Backend, manifest: Manifest, entry: FileEntry) -> Iterator[bytes]:
    """Yield a file's body; the end is reached only if size and hash are those of the manifest.

    Raises:
        StoreError: if the blob is missing, truncated or altered; the message names file and blob.
    """
    wanted, whole = Wanted(manifest, entry), hashlib.sha256()
    for blob in entry.pieces:
        digest = hashlib.sha256()
        for chunk in stored_body(backend, blob, wanted.blob(blob)):
            digest.update(chunk)
            whole.update(chunk)
            yield chunk
        if digest.hexdigest() != blob.sha256:
            raise damaged(wanted.blob(blob), digest.hexdigest())
    if whole.hexdigest() != entry.sha256:
        raise inconsistent(wanted)


def fetch_directly(backend: Backend, manifest: Manifest, directory: Path) -> Path:
    """Download an artifact's files into a directory, past the cache; each appears whole and checked.

    Raises:
        StoreError: as `fetch_through`.
    """
    with _filling(directory, manifest) as lacking, Downloads(backend) as downloads:

        def download(entry: FileEntry) -> None:
            target = target_of(directory, entry, manifest.uri)
            downloads.make(Wanted(manifest, entry), target, part_of(target, entry))

        downloads.each(download, lacking)
    return directory


def fetch_through(backend: Backend, manifest: Manifest, directory: Path, cache: Cache) -> Path:
    """Give a directory an artifact's files: links to those of the cache, or copies of the small ones.

    Raises:
        StoreError: if the directory holds other files, or some that were altered, or cannot be written; if a path
            leads out of it (through a link, say), or a blob is not what it should be.
    """
    with _filling(directory, manifest, is_mended=cache.has) as lacking:
        needed = manifest.model_copy(update={"files": tuple(lacking)})
        with cache.holding(backend, needed) as scratch:

            def put(entry: FileEntry) -> None:
                kept, target = cache.path(entry), target_of(directory, entry, manifest.uri)
                if entry.size <= COPIED_BYTES or not put_link(kept, target, scratch):
                    put_copy(kept, target, part_of(target, entry))

            in_parallel(put, lacking)
    return directory


@contextmanager
def _filling(
    directory: Path, manifest: Manifest, is_mended: Callable[[Path, FileEntry], bool] = lambda *_: False
) -> Iterator[list[FileEntry]]:
    """Prepare a directory for an artifact; where the disk gives out, nothing new stays in it.

    Args:
        directory: made if need be.
        manifest: of the artifact.
        is_mended: whether the cache mends a file that is there, should it be wrong.

    Yields:
        The files that are to be put there: those that are there already are left alone, if they are right.

    Raises:
        StoreError: if it holds other files, or some that were altered, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(directory, manifest)
        there = {entry.path for entry in manifest.files if os.path.lexists(directory / entry.path)}
        lacking = [each for each in manifest.files if each.path not in there or is_mended(directory / each.path, each)]
        _refuse_altered(directory, manifest, there.difference(entry.path for entry in lacking))
        try:
            yield lacking
        except OSError:
            for target in (directory / entry.path for entry in lacking if entry.path not in there):
                if is_inside(target, directory):
                    target.unlink(missing_ok=True)
            raise
        discard_parts(directory)
    except OSError as error:
        raise StoreError(f"cannot write {manifest.uri} to {directory}: {error.strerror or error}") from error


def _refuse_strangers(directory: Path, manifest: Manifest) -> None:
    known = {entry.path for entry in manifest.files}
    if unfinished := sorted(path for path in known if is_part(Path(path))):
        raise StoreError(
            f"{manifest.uri} has files that are called as unfinished ones are ({enumerate_names(unfinished)}), and "
            "cannot be fetched into a directory; commit it again without them"
        )
    files = (path for path in directory.rglob("*") if not path.is_dir() and not is_part(path))
    if strangers := sorted({path.relative_to(directory).as_posix() for path in files} - known):
        raise StoreError(
            f"{directory} holds files that are not of {manifest.uri} ({enumerate_names(strangers)}); "
            "fetch into an empty directory"
        )


def _refuse_altered(directory: Path, manifest: Manifest, there: set[str]) -> None:
    """Refuse files that would stay and are wrong: a user's edits are neither overwritten nor returned as fetched."""
    entries = [entry for entry in manifest.files if entry.path in there]
    flaws = in_parallel(lambda entry: flaw(directory / entry.path, entry), entries)
    if altered := [entry.path for entry, wrong in zip(entries, flaws, strict=True) if wrong is not None]:
        raise StoreError(
            f"{directory} holds files that are not as {manifest.uri} has them ({enumerate_names(altered)}); "
            "fetch into an empty directory, or remove them first"
        )
