"""What comes of reading a set: its rows, and what of it was left out and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

T = TypeVar("T")
Role = Literal["problems", "prompts", "demonstrations", "preferences"]


@dataclass(frozen=True)
class RejectedRow:
    """A row that cannot be learnt from."""

    where: str
    """Names it, such as "row 3 of pairs.jsonl"."""
    reason: str
    """A category, the same for every row with this fault."""
    detail: str
    """The whole sentence: what was expected, what came, what to do."""


class SourceFacts(NamedTuple):
    """What one source of a set gave."""

    path: str
    """As the configuration has it."""
    files: tuple[str, ...]
    """What was read of it: files, objects, or the hub dataset's split."""
    form: str
    """The files' formats and the rows' form, such as "JSON lines of transcripts"."""
    rows: int
    """Rows read, the rejected ones included."""
    kept: int
    """Rows of it in the set."""
    weight: float | None


class NotShown(NamedTuple):
    """A further key of messages, such as `thinking`, that the model is not shown."""

    key: str
    messages: int
    """Messages that have it and are shown without it."""
    why: str

    def __str__(self) -> str:
        """Return it as one clause."""
        return f"{self.key!r} of {self.messages:,} {'message' if self.messages == 1 else 'messages'} ({self.why})"


@dataclass(frozen=True)
class ReadSet(Generic[T]):
    """The rows of one role, of all its sources."""

    rows: tuple[T, ...]
    rejected: tuple[RejectedRow, ...]
    duplicates: int
    """Rows that were left out because an earlier one says the same."""
    sources: tuple[SourceFacts, ...]
    digest: str
    """SHA-256 of all that was read, in order, with what the configuration makes of it."""
    not_shown: tuple[NotShown, ...] = ()
    """Keys of chat messages that are left out, the most frequent first."""


class Access(NamedTuple):
    """Where objects of `s3://` are kept, and how they are reached."""

    cache_dir: Path
    storage_options: Callable[[], Mapping[str, Any]] = dict
    """Returns the options of fsspec's S3 file system; called where an address of `s3://` is read, and nowhere else."""
