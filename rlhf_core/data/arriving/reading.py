"""Reading what has arrived: files whose content no earlier night has had, one by one, so that a bad one harms no other.

A row that an earlier night had, in whatever file, is left out and counted.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhf_core.data.arriving.found import FoundFile, files_of
from rlhf_core.data.arriving.ledger import KnownFile, Ledger, RowMarks, mark_of
from rlhf_core.data.preparing import ROLES
from rlhf_core.data.reading.forms import FORMS
from rlhf_core.data.reading.messages import MessageView
from rlhf_core.data.reading.sources import SourceRows, check_fields, read_part, refuse_bad_rows, refuse_empty
from rlhf_core.errors import DataAwayError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from rlhf_core.config import ArrivalsConfig, DataConfig, SourceConfig
    from rlhf_core.data.reading import Access, NotShown, RejectedRow, Role
    from rlhf_core.data.template import PromptTemplate

ARRIVING: tuple[Role, ...] = ROLES
"""Keys of the configuration whose sources grow; a set for evaluation alone is read whole."""
_SHOWN_FILES = 3


@dataclass
class NewRows:
    """What has arrived for one role."""

    rows: list[Any] = field(default_factory=list)
    """That no earlier night had."""
    rejected: list[RejectedRow] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    forms: dict[str, None] = field(default_factory=dict)
    """The keys are an ordered set."""
    read: int = 0
    """Rows of the files, with all that was left out."""
    repeated: int = 0
    """Rows that stand twice in what has arrived."""
    known: int = 0
    """Rows that earlier nights had."""
    not_shown: tuple[NotShown, ...] = ()


@dataclass
class Arrived:
    """What has arrived since the last night."""

    roles: dict[str, NewRows] = field(default_factory=dict)
    files: list[KnownFile] = field(default_factory=list)
    """New ones, bad ones among them, and known contents under new names."""
    later: list[str] = field(default_factory=list)
    """Names of files that are left to the next night, because somebody may still write to them."""
    marks: list[int] = field(default_factory=list)
    """Of all rows that were read."""

    @property
    def new(self) -> list[KnownFile]:
        """Files of new content, bad ones among them."""
        return [each for each in self.files if each.rows or each.fault]

    @property
    def bad(self) -> list[KnownFile]:
        """Files in quarantine since tonight."""
        return [each for each in self.files if each.fault]


def is_anything_new(config: DataConfig, ledger: Ledger, access: Access, as_of: datetime) -> bool:
    """Return whether there is a file that the ledger does not know, without reading any.

    Raises:
        DataError: as `files_of`.
    """
    return next(_unknown(config, ledger, access, as_of, []), None) is not None


def read_new(
    config: DataConfig,
    ledger: Ledger,
    marks: RowMarks,
    access: Access,
    template: PromptTemplate | None,
    *,
    as_of: datetime,
) -> Arrived:
    """Return what has arrived up to a time, and no earlier night has had.

    Args:
        config: names the sources; a file with a row that cannot be read is bad as a whole, unless `bad_rows` drops it.
        ledger: of the last night.
        marks: of all rows that earlier nights had.
        access: how sources are reached.
        template: of the model that learns from them, as `read_set` takes it.
        as_of: what was written later is left to a later night.

    Raises:
        DataError: if a source itself cannot be reached, or its column map fits no form of its role.
    """
    arrived = Arrived({role: NewRows() for role in ARRIVING if getattr(config, role)})
    views = {role: MessageView(template) for role in arrived.roles}
    contents = set(ledger.contents)
    for role, source, found in _unknown(config, ledger, access, as_of, arrived.later):
        _read_file(arrived, contents, found, role, source, as_of, config.bad_rows, views[role])
    for name, new in arrived.roles.items():
        _leave_known_rows_out(name, new, marks, arrived.marks)
        new.not_shown = views[name].not_shown()
    return arrived


def _unknown(
    config: DataConfig, ledger: Ledger, access: Access, as_of: datetime, later: list[str]
) -> Iterator[tuple[Role, SourceConfig, FoundFile]]:
    """Yield files that name, size and tag do not tell to be known; add to `later` those that are too young."""
    settle = timedelta(seconds=config.arrivals.settle_s if config.arrivals is not None else 0)
    for role in ARRIVING:
        for source in getattr(config, role):
            check_fields(source.columns, FORMS[role](), role)
            read_as = _read_as(source, config.bad_rows)
            for found in files_of(source, access, as_of):
                mark = (role, found.name, found.size, found.tag)
                if found.arrived > as_of or {(*mark, ""), (*mark, read_as)} & ledger.known:
                    continue
                if found.looked_at is not None and as_of - found.arrived < settle:
                    later.append(found.name)
                    continue
                yield role, source, found


def _read_as(source: SourceConfig, bad_rows: str) -> str:
    said = json.dumps([source.columns, source.subset, source.split, bad_rows], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _read_file(
    arrived: Arrived,
    contents: set[tuple[str, str, str]],
    found: FoundFile,
    role: Role,
    source: SourceConfig,
    as_of: datetime,
    bad_rows: str,
    view: MessageView,
) -> None:
    """Read one file, or note why that cannot be."""
    digest, read, fault = "", SourceRows(), None
    read_as = _read_as(source, bad_rows)
    try:
        digest = found.digest()
        if {(role, digest, ""), (role, digest, read_as)} & contents:
            arrived.files.append(_known(found, role, digest, as_of))
            return
        read_part(found.part(), source, role, None, read, view)
        if bad_rows == "refuse":
            refuse_bad_rows(read, source)
        refuse_empty(read, source)
    except DataAwayError:
        raise
    except DataError as error:
        fault = str(error)
    if not found.is_as_found():
        arrived.later.append(found.name)
        return
    contents.add((role, digest, read_as if fault else ""))
    arrived.files.append(_known(found, role, digest, as_of, rows=len(read.raw), fault=fault, read_as=read_as))
    if fault is not None:
        return
    new = arrived.roles[role]
    new.rows += read.built
    new.rejected += read.rejected
    new.files.append(found.name)
    new.forms |= read.forms
    new.read += len(read.raw)


def _known(found: FoundFile, role: str, digest: str, as_of: datetime, **facts: Any) -> KnownFile:
    return KnownFile(
        role=role,
        name=found.name,
        digest=digest,
        size=found.size,
        tag=found.tag,
        arrived=found.arrived,
        seen=as_of,
        **facts,
    )


def _leave_known_rows_out(role: str, new: NewRows, marks: RowMarks, all_marks: list[int]) -> None:
    unique: dict[int, Any] = {}
    for row in new.rows:
        unique.setdefault(mark_of(role, row), row)
    new.repeated = len(new.rows) - len(unique)
    are_known = marks.are_known(list(unique))
    all_marks += unique
    new.rows = [row for row, is_known in zip(unique.values(), are_known, strict=True) if not is_known]
    new.known = len(unique) - len(new.rows)


def refuse_too_many_bad(arrived: Arrived, config: ArrivalsConfig) -> None:
    """Refuse what has arrived if more of the new files are bad than `max_bad_files` allows.

    Raises:
        DataError: they are.
    """
    bad, new = arrived.bad, arrived.new
    if not bad or len(bad) <= config.max_bad_files * len(new):
        return
    worst = max(bad, key=lambda each: each.size)
    others = f"; the others: {', '.join(each.name for each in bad if each is not worst)}" if len(bad) > 1 else ""
    raise DataError(
        f"{len(bad)} of {len(new)} new files cannot be read, more than data.arrivals.max_bad_files = "
        f"{config.max_bad_files:g} allows; the largest: {worst.told}{others}"
    )
