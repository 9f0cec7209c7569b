"""Files on this machine: one, those of a directory, or those that a pattern names."""

from __future__ import annotations

import difflib
import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")
"""Names of data files end so."""
_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"}


def is_data_name(name: str) -> bool:
    """Return whether a file is called as data files are."""
    return name.lower().endswith(SUFFIXES)


def existing_file(path: str | Path) -> Path:
    """Return the path if it is a file.

    Raises:
        DataError: if it is not; the nearest name in its directory is offered.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{file} is a directory; give a file of JSON lines (.jsonl or .jsonl.gz) in it")
    if file.exists():
        return file
    raise DataError(missing(file))


def missing(file: Path) -> str:
    """Return the sentence on a file that is not there: whose link leads nowhere, else the nearest name beside it."""
    link = next((path for path in (file, *file.parents) if path.is_symlink() and not path.exists()), None)
    if link is not None:
        what = "is" if link == file else f"is under {link},"
        return f"data file {file} {what} a link that leads nowhere: there is no {link.readlink()}; correct the link"
    if not file.parent.is_dir():
        return f"data file {file} does not exist, nor does its directory {file.parent}"
    names = sorted(entry.name for entry in file.parent.iterdir())
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {file.parent / near[0]}?" if near else f"; {file.parent} holds {listed(names)}"
    return f"data file {file} does not exist{hint}"


def listed(names: list[str], most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    if not names:
        return "nothing"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def files_of_directory(directory: Path, split: str) -> list[Path]:
    """Return the data files of a directory, sorted; those of the split only where their names tell splits.

    Raises:
        DataError: if there are none.
    """
    files = _present(entry for entry in directory.iterdir() if is_data_name(entry.name))
    if not files:
        names = sorted(entry.name for entry in directory.iterdir())
        raise DataError(f"{directory} holds no data file ({', '.join(SUFFIXES[:5])}; also .gz), but {listed(names)}")
    return of_split(files, split, str(directory))


def _present(paths: Iterable[Path]) -> list[Path]:
    """Return those that are files, sorted.

    Raises:
        DataError: if one is a link that leads nowhere: its rows would be missed.
    """
    found = sorted(paths)
    shown = (path for path in found if not path.name.startswith("."))  # an editor's lock is such a link
    dangling = next((path for path in shown if path.is_symlink() and not path.exists()), None)
    if dangling is not None:
        raise DataError(missing(dangling))
    return [path for path in found if path.is_file()]


def of_split(files: list[Path], split: str, name: str) -> list[Path]:
    """Return the files of a split, if any file is named for one; else all.

    Otherwise the test set of a directory with train.jsonl and test.jsonl would be learnt.

    Raises:
        DataError: if files are named for other splits only.
    """
    named = {file: told for file in files if (told := _split_of(file.name))}
    if not named:
        return files
    chosen = [file for file in files if named.get(file) == _SPLITS.get(split, split)]
    if not chosen:
        splits = ", ".join(sorted(set(named.values())))
        raise DataError(
            f"the files of {name} are of the splits {splits}, and none of {split!r}; set the source's split, or give "
            "one of the files"
        )
    return chosen


def _split_of(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern (`*`, `?`, `[...]`, and `**` for directories at any depth)."""
    return glob.has_magic(path)


def files_of_pattern(pattern: str) -> list[Path]:
    """Return the files that a pattern names, sorted.

    Raises:
        DataError: if there are none.
    """
    found = sorted(path for each in glob.glob(str(Path(pattern).expanduser()), recursive=True) if (path := Path(each)))
    files = _present(found)
    if files:
        return files
    if found:
        raise DataError(f"{pattern} names directories only, such as {found[0]}; add /* to name the files in them")
    root = next(parent for parent in Path(pattern).expanduser().parents if not is_pattern(str(parent)))
    names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    holds = f"{root} holds {listed(names)}" if root.is_dir() else f"{root} does not exist"
    raise DataError(f"no file matches {pattern}; {holds}")
