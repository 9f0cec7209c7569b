"""Cutting files into blobs: a large file is several, so that no blob is larger than a shard may be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from infra.artifacts.manifest import BlobEntry, FileEntry
from infra.errors import StoreError

Source = Path | bytes
PIECE_BYTES = 64 << 20
"""Size of the largest blob: the unit of sharing, parallelism, resumption and repair."""


def describe(path: str, source: Source) -> FileEntry:
    """Return size and hash of a file that is to be stored, and of the blobs that it is cut into.

    Args:
        path: of the file in its artifact.
        source: its body, or where it lies.

    Raises:
        StoreError: if the file cannot be read.
    """
    whole = hashlib.sha256()
    blobs: list[BlobEntry] = []
    for piece in _read_pieces(source):
        digest = hashlib.sha256(piece)
        if blobs:
            whole.update(piece)
        else:
            whole = digest.copy()  # it begins as the first blob's: most files are hashed once
        blobs.append(BlobEntry(size=len(piece), sha256=digest.hexdigest()))
    size = sum(blob.size for blob in blobs)
    return FileEntry(path=path, size=size, sha256=whole.hexdigest(), blobs=tuple(blobs) if len(blobs) > 1 else ())


def read_piece(source: Source, start: int, size: int) -> bytes:
    """Return the bytes of one blob of a file; fewer if the file has become shorter.

    Raises:
        StoreError: if the file cannot be read.
    """
    if isinstance(source, bytes):
        return source[start : start + size]
    with _opened(source) as file:
        file.seek(start)
        return file.read(size)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is to be stored."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise StoreError(f"cannot store {path}: {error.strerror or error}") from None


def _read_pieces(source: Source) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield from (source[start : start + PIECE_BYTES] for start in range(0, len(source), PIECE_BYTES))
        return
    with _opened(source) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
