"""The rows of one source: which roles they may have, and how each becomes a row of ours by its file's form."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rlhf_core.data.problems import Problem
from rlhf_core.data.reading.formats import wrapped_hint
from rlhf_core.data.reading.forms import ALIKE, APART, BLANK, EQUAL, FORMS, Form, form_of, in_words, known_fields
from rlhf_core.data.reading.messages import ViewedRow, with_messages
from rlhf_core.data.reading.places import find_parts
from rlhf_core.data.reading.rows import RejectedRow, Row, RowError
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from rlhf_core.config.data import SourceConfig
    from rlhf_core.data.reading.formats import Part
    from rlhf_core.data.reading.forms import Role
    from rlhf_core.data.reading.messages import MessageView
    from rlhf_core.data.reading.places import Access

_NEVER_REFUSED = {EQUAL, ALIKE, APART, BLANK}
"""Reasons for which every preference set has some rejected rows; they do not count against the set."""
_MOST_LOOKED_AT = 100
_ROLES: tuple[Role, ...] = ("preferences", "problems", "demonstrations", "prompts")
"""In the order of how much a row must say for them."""
_NEARLY = 0.8
"""How like one of ours a column's name is that was meant to be it, by difflib's ratio."""


def detect_role(source: SourceConfig, access: Access) -> Role:
    """Return the role of a source: the first of its possible roles.

    Raises:
        DataError: as `possible_roles`.
    """
    return possible_roles(source, access)[0]


def possible_roles(source: SourceConfig, access: Access, part: Part | None = None) -> list[Role]:
    """Return what a source's rows may be for, the role that says most first.

    A role is possible if the first row that has any known form names the fields of one of the role's forms, and one of
    the first hundred rows has a value in each of them. The values are not checked: reading the set says what is wrong
    with them. Rows whose responses or answers are null throughout are not taken for prompts.

    Args:
        source: the set.
        access: how it is reached.
        part: which of its files is looked at; None takes the first.

    Raises:
        DataError: if it cannot be read, or its rows are of no form of any role.
    """
    part = part or find_parts(source, access)[0]
    with closing(cast("Any", part.scan())) as scan:
        looked_at = list(islice(scan, _MOST_LOOKED_AT))
    found = [row for row in looked_at if isinstance(row, Row)]
    if not found:
        raise DataError(looked_at[0].detail)
    check_columns(source.columns, (name for row in found for name in row.fields), part.name)
    rows = [renamed(row, source.columns) for row in found]
    forms = {role: _usable(role, source) for role in _ROLES}
    every = [form for role in forms for form in forms[role]]
    first = next((row for row in rows if any(form.is_named_by(row.fields) for form in every)), None)
    if first is None:
        raise DataError(_of_no_role(found[0]))
    named = {role: [form for form in forms[role] if form.is_named_by(first.fields)] for role in _ROLES}
    whole = [role for role, those in named.items() if any(form.is_had_by(row.fields) for form in those for row in rows)]
    if whole != ["prompts"]:
        return whole or [role for role, those in named.items() if those]
    return [role for role in named if any(_is_null_throughout(form, rows) for form in named[role])] or whole


def _is_null_throughout(form: Form, rows: Sequence[Row]) -> bool:
    """Return whether no row has a value in each field that a form needs."""
    return not any(all(row.fields.get(name) is not None for name in form.needs) for row in rows)


def _usable(role: Role, source: SourceConfig) -> Sequence[Form]:
    return [form for form in FORMS[role]() if set(source.columns) <= set(form.fields)]


def _of_no_role(row: Row) -> str:
    return (
        f"{row.where} has neither 'question' and 'answer' (problems) nor 'chosen' and 'rejected' (preferences), "
        "nor 'messages', 'instruction' and 'output', or 'prompt' (demonstrations and prompts); it has "
        f"{', '.join(map(repr, row.fields)) or 'no fields'}{_meant(row)}; name its columns in a column map"
        f"{wrapped_hint(row.fields)}"
    )


def misspelt(unread: Iterable[str], columns: Collection[str]) -> dict[str, str]:
    """Return the columns that are nearly called as a field of ours which is not there, each with that field.

    A name that goes on after ours, such as `question_id`, is meant.

    Args:
        unread: columns that nothing is read from.
        columns: all that there are.

    Example:
        >>> misspelt(["Chosen", "question_id"], ["Chosen", "rejected", "question_id"])
        {'Chosen': 'chosen'}
    """
    known = [name for role in _ROLES for name in known_fields(FORMS[role]()) if name not in columns]
    found = {}
    for theirs in unread:
        near = difflib.get_close_matches(theirs.lower(), known, n=1, cutoff=_NEARLY)
        if near and not theirs.startswith(f"{near[0]}_"):
            found[theirs] = near[0]
    return found


def _meant(row: Row) -> str:
    """Return which fields of ours a row's columns may be meant for, to stand behind them."""
    found = " and ".join(map(repr, misspelt(row.fields, row.fields).values()))
    return f" (did you mean {found}?)" if found else ""


ANNOTATORS = tuple(
    f"{who}{suffix}"
    for who in ("annotator", "worker", "labeler", "labeller", "rater", "judge", "author", "user")
    for suffix in ("_id", "")
)
"""Columns that may say who judged a row."""


class Origin(NamedTuple):
    """Where a row comes from."""

    where: str
    """Names it, such as "row 3 of pairs.jsonl"."""
    annotator: str | None
    """Who judged it; None where no column says so."""


@dataclass
class SourceRows:
    """What was read of one source."""

    built: list[Any] = field(default_factory=list)
    rejected: list[RejectedRow] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    """Of each row that was built."""
    misspelt: dict[str, str] = field(default_factory=dict)
    """Columns that nothing is read from, and the field of ours that each seems to be meant for."""
    raw: list[str] = field(default_factory=list)
    """Every row as JSON, for the digest; of a bad row its category."""
    files: list[str] = field(default_factory=list)
    forms: dict[str, None] = field(default_factory=dict)
    """Formats of files with forms of rows; the keys are an ordered set."""


def read_source(source: SourceConfig, role: Role, access: Access, view: MessageView) -> SourceRows:
    """Return all rows of a source, up to its limit.

    Raises:
        DataError: if it cannot be read, its column map does not fit, or no row of a file has a form of the role.
    """
    check_fields(source.columns, FORMS[role](), role)
    read = SourceRows()
    for part in find_parts(source, access):
        left = None if source.limit is None else source.limit - len(read.raw)
        if left == 0:
            break
        read_part(part, source, role, left, read, view)
    return read


def read_part(
    part: Part, source: SourceConfig, role: Role, limit: int | None, read: SourceRows, view: MessageView
) -> None:
    """Add the rows of a part of a source to what was read of it.

    Raises:
        DataError: as `read_source`.
    """
    scanned = list(islice(part.scan(), limit))
    rows = [row for row in scanned if isinstance(row, Row)]
    if rows:
        check_columns(source.columns, (name for row in rows for name in row.fields), part.name)
    forms = FORMS[role]()
    mapped = [renamed(row, source.columns) if isinstance(row, Row) else row for row in scanned]
    form = next(
        (found for row in mapped if isinstance(row, Row) and (found := form_of(row.fields, forms, source.columns))),
        None,
    )
    if form is None and rows:
        raise DataError(_of_no_form(rows[0], forms, source, role))
    columns = dict.fromkeys(name for row in mapped if isinstance(row, Row) for name in row.fields)
    judged_by = next((name for name in ANNOTATORS if name in columns), None)
    if form is not None:
        read.misspelt |= misspelt([name for name in columns if name not in form.fields], columns)
    for row in mapped:
        read.raw.append(row.reason if isinstance(row, RejectedRow) else _canonical(row))
        built = _built(row, form, view)
        if isinstance(built, RejectedRow):
            read.rejected.append(built)
        else:
            read.built.append(built)
            read.origins.append(Origin(row.where, _annotator(row, judged_by)))
    read.files.append(part.name)
    read.forms[f"{part.format}: {form.name}" if form else part.format] = None


def _of_no_form(row: Row, forms: Sequence[Form], source: SourceConfig, role: Role) -> str:
    mapped = f" (with the column map: {', '.join(renamed(row, source.columns).fields)})" if source.columns else ""
    return (
        f"{row.where} is none of {role}, which have {in_words(forms)}; it has "
        f"{', '.join(map(repr, row.fields)) or 'no fields'}{mapped}{_meant(row)}; name its columns in data.{role}'s "
        "column map"
        f"{wrapped_hint(row.fields)}"
    )


def _built(row: Row | RejectedRow, form: Form | None, view: MessageView) -> Any:
    if isinstance(row, RejectedRow) or form is None:
        return row
    try:
        where, fields = with_messages(row, form.message_fields(row.fields))
        return _with_category(form.build(ViewedRow(where, fields, view)), fields)
    except RowError as error:
        return RejectedRow(row.where, error.reason, error.detail)


def _annotator(row: Row | RejectedRow, column: str | None) -> str | None:
    value = row.fields.get(column) if isinstance(row, Row) and column is not None else None
    return str(value) if isinstance(value, str | int) else None


def _with_category(built: Any, fields: Mapping[str, Any]) -> Any:
    """Return a problem with what its row says of its kind, if that is a text; anything else as it is."""
    category = fields.get("category")
    if not isinstance(built, Problem) or not isinstance(category, str) or not category.strip():
        return built
    return replace(built, category=category.strip())


def _canonical(row: Row) -> str:
    return json.dumps(row.fields, sort_keys=True, default=str)


def check_fields(columns: Mapping[str, str], forms: Sequence[Form], role: str) -> None:
    """Refuse a column map whose left sides are no fields of the role, or of no form of it together.

    Raises:
        DataError: naming the fields that there are.
    """
    known = known_fields(forms)
    for ours in columns:
        if ours not in known:
            near = _near(ours, known)
            raise DataError(
                f"data.{role} maps {ours!r}, which is no field of {role}{near}; its fields are {', '.join(known)}"
            )
    if columns and not any(set(columns) <= set(form.fields) for form in forms):
        raise DataError(
            f"data.{role} maps {', '.join(columns)}, which no form of {role} has together; a row is {in_words(forms)}"
        )


def check_columns(columns: Mapping[str, str], found: Iterable[str], name: str) -> None:
    """Refuse a column map that names a column which no row has.

    Raises:
        DataError: naming the columns that there are.
    """
    known = list(dict.fromkeys(found))
    for ours, theirs in columns.items():
        if theirs not in known:
            raise DataError(
                f"the column map takes {ours!r} from {theirs!r}, but {name} has no such column{_near(theirs, known)}; "
                f"its columns are {', '.join(map(repr, known)) or 'none'}"
            )


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), {each.lower(): each for each in known}, n=1)
    return f" (did you mean {next(each for each in known if each.lower() == near[0])!r}?)" if near else ""


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with the mapped columns under our names; columns that are not mapped keep theirs."""
    if not columns:
        return row
    taken = set(columns.values())
    kept: dict[str, Any] = {name: value for name, value in row.fields.items() if name not in taken}
    kept |= {ours: row.fields[theirs] for ours, theirs in columns.items() if theirs in row.fields}
    return row._replace(fields=kept)


def at_fault(rejected: Iterable[RejectedRow]) -> list[RejectedRow]:
    """Return the rejected rows that count against a set: all but those of which every preference set has some."""
    return [row for row in rejected if row.reason not in _NEVER_REFUSED]


def refuse_bad_rows(read: SourceRows, source: SourceConfig) -> None:
    """Raise a DataError for the first row that is at fault, unless it is of a kind that every set has some of."""
    bad = at_fault(read.rejected)
    if not bad:
        return
    others = f"; of the {len(read.raw)} rows of {source.path}, {len(bad) - 1} more are bad" if len(bad) > 1 else ""
    raise DataError(f"{bad[0].detail}{others} (data.bad_rows: drop leaves bad rows out)")


def refuse_empty(read: SourceRows, source: SourceConfig) -> None:
    """Raise a DataError if no row of a source is left, with the counts by reason."""
    if read.built:
        return
    counts = Counter(row.reason for row in read.rejected)
    if set(counts) == {EQUAL}:
        raise DataError(
            f"all {counts[EQUAL]} pairs of {source.path} are identical: chosen equals rejected in each, so there "
            "is nothing to prefer"
        )
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    raise DataError(
        f"no row of {source.path} can be used: {reasons}; the first: {read.rejected[0].detail}"
        if read.rejected
        else f"{source.path} holds no row"
    )
