"""Other people's names of columns in place of ours."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.forms import known_fields, told
from rlhf_core.data.reading.rows import Row
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.data.reading.forms import Form


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with the mapped columns under our names; columns that are not mapped keep theirs."""
    if not columns:
        return row
    taken = set(columns.values())
    kept: dict[str, Any] = {name: value for name, value in row.fields.items() if name not in taken}
    kept |= {ours: row.fields[theirs] for ours, theirs in columns.items() if theirs in row.fields}
    return row._replace(fields=kept)


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
            f"data.{role} maps {', '.join(columns)}, which no form of {role} has together; a row is {told(forms)}"
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
