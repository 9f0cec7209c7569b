"""What earlier nights have seen: files by content, rows by hash, and the nights that learnt them.

The ledger is a part of the night's dataset. It counts once that dataset counts as learnt (tasks/arrivals.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from rlhf_core.data.preferences import PreferencePair, pairs_from_jsonl, pairs_to_jsonl
from rlhf_core.data.problems import Problem, problems_from_jsonl, problems_to_jsonl

_MARK = np.dtype("<u8")


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class KnownFile(_Plain):
    """A file that a night has read, or left out as unreadable."""

    role: str
    name: str
    """Where it lay then."""
    digest: str
    """SHA-256 of its content; empty where not even its bytes could be read."""
    size: int
    """In bytes."""
    tag: str
    """With name and size, what says that a file is the same without reading it."""
    arrived: datetime
    """When it was written."""
    seen: datetime
    """Up to when the night looked that read it."""
    rows: int = 0
    """That it held."""
    fault: str | None = None
    """Why it is in quarantine; None if it was read. It is tried again when its content changes, or `read_as`."""
    read_as: str = ""
    """Hash of what the configuration says of reading it."""

    @property
    def told(self) -> str:
        """Why it is in quarantine, with its name."""
        fault = self.fault or ""
        return fault if self.name in fault else f"{self.name}: {fault}"


class PastNight(_Plain):
    """A night that counts as learnt."""

    dataset: str
    """Its reference."""
    digest: str
    as_of: datetime
    """Up to when it took what had arrived."""
    learnt: dict[str, int]
    """Rows that it was the first to learn, by role."""


class Ledger(_Plain):
    """All that earlier nights have seen and learnt, and what tonight adds."""

    version: int = 1
    as_of: datetime
    files: tuple[KnownFile, ...] = ()
    nights: tuple[PastNight, ...] = ()
    """The earlier ones, oldest first."""
    learnt: dict[str, int] = {}
    """By tonight, as of `PastNight`."""
    waiting: int = 0
    """Rows that tonight's splits had no place for: the next night's."""
    before: str | None = None
    """Reference of the dataset whose ledger this one goes on from."""

    @cached_property
    def known(self) -> set[tuple[str, str, int, str, str]]:
        """Files that need not be read to be known: role, name, size, tag; and how a bad one was read."""
        return {(each.role, each.name, each.size, each.tag, each.read_as if each.fault else "") for each in self.files}

    @cached_property
    def contents(self) -> set[tuple[str, str, str]]:
        """Contents by role; those in quarantine with what the configuration said of reading them."""
        return {(each.role, each.digest, each.read_as if each.fault else "") for each in self.files if each.digest}

    def goes_on_as(self, dataset: str, digest: str) -> tuple[PastNight, ...]:
        """Return the nights before the next one, if this ledger's is the dataset."""
        return (*self.nights, PastNight(dataset=dataset, digest=digest, as_of=self.as_of, learnt=self.learnt))


class RowMarks:
    """Which rows earlier nights have had: 8 bytes of a hash each, in the order in which they came."""

    def __init__(self, data: bytes = b"") -> None:
        self._before = np.frombuffer(data, dtype=_MARK)

    def __len__(self) -> int:
        return len(self._before)

    def are_known(self, marks: Sequence[int]) -> list[bool]:
        """Return of each mark whether an earlier night had it."""
        known: list[bool] = np.isin(np.array(marks, dtype=_MARK), self._before).tolist()
        return known

    def with_new(self, marks: Iterable[int]) -> bytes:
        """Return what is to be stored: earlier marks first, so that stores which cut files share what is the same."""
        new = np.fromiter(dict.fromkeys(marks), dtype=_MARK)
        return self._before.tobytes() + new[~np.isin(new, self._before)].tobytes()


def mark_of(role: str, row: Problem | PreferencePair) -> int:
    """Return what tells a row from others: prompt (without case and white space, but in pairs) and responses."""
    if isinstance(row, PreferencePair):
        words: tuple[str | None, ...] = (row.prompt, row.chosen, row.rejected)
    else:
        words = (row.key, row.answer, row.demonstration)
    said = "\0".join("" if word is None else f"+{word}" for word in (role, *words))
    return int.from_bytes(hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def rows_to_jsonl(role: str, rows: Iterable[Any]) -> bytes:
    """Return rows of a role as they are stored."""
    return pairs_to_jsonl(rows) if role == "preferences" else problems_to_jsonl(rows)


def rows_from_jsonl(role: str, data: bytes) -> list[Any]:
    """Return the rows that `rows_to_jsonl` wrote."""
    return list(pairs_from_jsonl(data) if role == "preferences" else problems_from_jsonl(data))
