"""The set of one role: the rows of all its sources, mixed into one order, without repetitions."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast, overload

from rlhf_core.data.preferences import PreferencePair
from rlhf_core.data.reading.messages import MessageView
from rlhf_core.data.reading.rows import RejectedRow
from rlhf_core.data.reading.sources import SourceRows, read_source, refuse_bad_rows, refuse_empty
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config.data import SourceConfig
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading.forms import Role
    from rlhf_core.data.reading.messages import NotShown
    from rlhf_core.data.reading.places import Access
    from rlhf_core.data.reading.sources import Origin
    from rlhf_core.data.template import PromptTemplate

T = TypeVar("T")


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
    origins: tuple[Origin, ...] = ()
    """Where each of the rows comes from."""
    order: tuple[int, ...] = ()
    """Which of the sources each of the rows is from."""
    misspelt: tuple[tuple[str, str], ...] = ()
    """Columns that nothing is read from, each with the field of ours that it seems to be meant for."""

    def without(self, faults: Mapping[int, tuple[str, str]]) -> ReadSet[T]:
        """Return the set less some of its rows, which count as rejected.

        Args:
            faults: by the row's place, from 0: the category of the fault, and the sentence.
        """
        kept = [place for place, _ in enumerate(self.rows) if place not in faults]
        named = [(self.origins[place].where if self.origins else f"row {place + 1}", place) for place in sorted(faults)]
        left = Counter(self.order[place] for place in kept) if self.order else Counter({0: len(kept)})
        return replace(
            self,
            rows=tuple(self.rows[place] for place in kept),
            rejected=self.rejected + tuple(RejectedRow(where, *faults[place]) for where, place in named),
            sources=tuple(each._replace(kept=left[number]) for number, each in enumerate(self.sources)),
            origins=tuple(self.origins[place] for place in kept if self.origins),
            order=tuple(self.order[place] for place in kept if self.order),
        )


BadRows = Literal["refuse", "drop"]


@overload
def read_set(
    sources: Sequence[SourceConfig],
    role: Literal["preferences"],
    *,
    access: Access,
    bad_rows: BadRows,
    template: PromptTemplate | None = None,
) -> ReadSet[PreferencePair]: ...


@overload
def read_set(
    sources: Sequence[SourceConfig],
    role: Literal["problems", "prompts", "demonstrations"],
    *,
    access: Access,
    bad_rows: BadRows,
    template: PromptTemplate | None = None,
) -> ReadSet[Problem]: ...


def read_set(
    sources: Sequence[SourceConfig],
    role: Role,
    *,
    access: Access,
    bad_rows: BadRows,
    template: PromptTemplate | None = None,
) -> ReadSet[Any]:
    """Return the rows of a role.

    Without weights the sources follow each other. With weights their rows alternate, so that every beginning has
    the weights' proportions, and end where a source has no row left when its turn comes. Within a source, rows
    keep the order of its files. A pair whose responses are equal, or whose transcripts have no common prompt, is
    always left out and counted: every preference set has some. Of chat messages, keys that the model is not shown
    are left out and counted, so rows that differ in nothing else are equal.

    Args:
        sources: at least one; all with a weight, or none.
        role: what the rows are for, which says what forms they may have.
        access: where objects of `s3://` are kept, and how they are reached.
        bad_rows: whether a row that cannot be read is an error, or left out and counted.
        template: of the model, which shows some further keys of chat messages; None keeps them all.

    Returns:
        At least one row; of rows with one prompt (pairs: with equal prompt and responses) the first.

    Raises:
        DataError: if a source is missing, damaged, empty or of no known form; if a column map does not fit; for
            the first bad row, unless they are dropped; or if no row is left.
    """
    if not sources:
        raise DataError(f"data.{role} names no source; give a path")
    reads, view = [], MessageView(template)
    for source in sources:
        read = read_source(source, role, access, view)
        if bad_rows == "refuse":
            refuse_bad_rows(read, source)
        refuse_empty(read, source)
        reads.append(read)
    unique, duplicates = _without_duplicates(reads)
    order = _order(sources, unique)
    taken = [iter(rows) for rows in unique]
    mixed = [next(taken[each]) for each in order]
    return ReadSet(
        rows=tuple(row for row, _ in mixed),
        rejected=tuple(row for read in reads for row in read.rejected),
        duplicates=duplicates,
        sources=_facts(sources, reads, order),
        digest=_digest(sources, role, reads),
        not_shown=view.not_shown(),
        origins=tuple(origin for _, origin in mixed),
        order=tuple(order),
        misspelt=tuple(pair for read in reads for pair in read.misspelt.items()),
    )


def _without_duplicates(reads: Sequence[SourceRows]) -> tuple[list[list[tuple[Any, Origin]]], int]:
    seen: set[Any] = set()
    unique: list[list[tuple[Any, Origin]]] = []
    for read in reads:
        fresh = []
        for row, origin in zip(read.built, read.origins, strict=True):
            key = _identity(row)
            if key not in seen:
                seen.add(key)
                fresh.append((row, origin))
        unique.append(fresh)
    return unique, sum(len(read.built) for read in reads) - len(seen)


def _identity(row: PreferencePair | Problem) -> Any:
    return (row.prompt, row.chosen, row.rejected) if isinstance(row, PreferencePair) else row.key


def _order(sources: Sequence[SourceConfig], rows: Sequence[Sequence[Any]]) -> list[int]:
    """Return which source gives each row."""
    sizes = [len(each) for each in rows]
    weights = [source.weight for source in sources]
    if any(weight is None for weight in weights):
        return [source for source, size in enumerate(sizes) for _ in range(size)]
    order = mixed_order(sizes, cast("list[float]", weights))
    if not order:
        first = sources[sizes.index(0)].path if 0 in sizes else sources[0].path
        raise DataError(f"the mixture has no row: {first} gives none that is not in an earlier source already")
    return order


def mixed_order(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the source of each row of a mixture, up to the first row whose source has none left.

    After every row, the number of rows of each source is within one of its proportion of all rows, and within 1/2 with
    two sources. Of the sources that lag behind, the one that would first lag too far comes next.

    Args:
        sizes: rows of each source.
        weights: proportions, greater than 0, of any sum.

    Source:
        Tijdeman 1980, The chairman assignment problem, Discrete Mathematics 32.

    Example:
        >>> mixed_order([10, 2], [3.0, 1.0])
        [0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    """
    if len(sizes) == 1:
        return [0] * sizes[0]
    exact = [Fraction(str(weight)) for weight in weights]
    parts = [weight / sum(exact) for weight in exact]
    slack = Fraction(1, 2 * len(sizes) - 2)
    taken = [0] * len(sizes)
    order: list[int] = []
    while True:
        lags = [part * (len(order) + 1) - count for part, count in zip(parts, taken, strict=True)]
        due = [source for source, lag in enumerate(lags) if lag >= slack]
        chosen = min(due, key=lambda source: (1 - slack - lags[source]) / parts[source])
        if taken[chosen] == sizes[chosen]:
            return order
        taken[chosen] += 1
        order.append(chosen)


def _facts(
    sources: Sequence[SourceConfig], reads: Sequence[SourceRows], order: Sequence[int]
) -> tuple[SourceFacts, ...]:
    kept = Counter(order)
    return tuple(
        SourceFacts(source.path, tuple(read.files), "; ".join(read.forms), len(read.raw), kept[number], source.weight)
        for number, (source, read) in enumerate(zip(sources, reads, strict=True))
    )


def _digest(sources: Sequence[SourceConfig], role: Role, reads: Sequence[SourceRows]) -> str:
    digest = hashlib.sha256(role.encode())
    for source, read in zip(sources, reads, strict=True):
        settings = {"weight": source.weight, "columns": source.columns, "limit": source.limit}
        for line in (json.dumps(settings, sort_keys=True), *read.raw):
            digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
