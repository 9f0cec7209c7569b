"""Keeping the local cache within its limit: what was used least recently goes first, what is used never."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

from infra.artifacts.holds import HOLDS, names_in_use

log = logging.getLogger(__name__)

FILES, PARTS = "files", "parts"
_TREE = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Entry:
    """Something that may be removed."""

    used_at: float
    size: int
    remove: Callable[[], None]


@dataclass(slots=True)
class _Contents:
    """What a cache holds."""

    size: int = 0
    """Bytes of everything; a file with several names counts once."""
    entries: list[_Entry] = field(default_factory=list)


def evict(root: Path, limit_bytes: int, room_bytes: int = 0) -> None:
    """Remove what was used least recently until a cache is within its limit; nobody may begin to hold meanwhile.

    Args:
        root: of the cache.
        limit_bytes: how large it may be.
        room_bytes: how much has to be free on its disk.
    """
    contents = _look(root, names_in_use(root))
    size, removed = contents.size, 0
    for entry in sorted(contents.entries, key=lambda entry: entry.used_at):
        if size <= limit_bytes and shutil.disk_usage(root).free >= room_bytes:
            break
        with suppress(PermissionError):  # another user's
            entry.remove()
            size -= entry.size
            removed += 1
    if removed:
        log.info("removed %d of %d files from the cache %s", removed, len(contents.entries), root)


def _look(root: Path, used: set[str]) -> _Contents:
    """Return what a cache holds, and of that what nobody uses."""
    contents = _Contents()
    kept = {path.parent.name + path.name: found for path, found in _files_under(root / FILES)}
    inodes = {found.st_ino for found in kept.values()}
    trees: dict[int, list[Path]] = {}
    for tree in (path for path in root.glob("*") if _TREE.fullmatch(path.name)):
        found = [stat for _, stat in _files_under(tree)]
        for inode in {stat.st_ino for stat in found} & inodes:
            trees.setdefault(inode, []).append(tree)
        own = [stat for stat in found if stat.st_ino not in inodes]  # copies, where files cannot be linked
        if own:
            size, used_at = sum(stat.st_size for stat in own), max(stat.st_atime for stat in own)
            _add(contents, tree.name in used, _Entry(used_at, size, partial(_remove_trees, root, [tree])))
    for name, stat in kept.items():
        remove = partial(_remove_file, root, name, trees.get(stat.st_ino, []))
        _add(contents, name in used, _Entry(stat.st_atime, stat.st_size, remove))
    for path, stat in _files_under(root / PARTS):
        remove = partial(path.unlink, missing_ok=True)
        _add(contents, path.name in used, _Entry(stat.st_mtime, stat.st_blocks * _BLOCK_BYTES, remove))
    return contents


def _add(contents: _Contents, is_used: bool, entry: _Entry) -> None:
    contents.size += entry.size
    if not is_used:
        contents.entries.append(entry)


def _files_under(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, NotADirectoryError):  # it got its proper name since it was listed
            if not path.is_dir() or path.is_symlink():
                yield path, path.lstat()


def _remove_file(root: Path, name: str, trees: list[Path]) -> None:
    """Remove a file with the directories that have it too: with a name left, it would still take its place."""
    (root / FILES / name[:2] / name[2:]).unlink(missing_ok=True)
    _remove_trees(root, trees)


def _remove_trees(root: Path, trees: list[Path]) -> None:
    """Remove artifacts' directories, each at once for whoever looks."""
    for tree in trees:
        gone = root / HOLDS / uuid4().hex  # without a lock: another cleans it up should we be killed
        with suppress(FileNotFoundError):
            tree.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
