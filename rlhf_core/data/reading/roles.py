"""What a set may be for, by the fields of its rows."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from rlhf_core.data.reading.formats import wrapped_hint
from rlhf_core.data.reading.places import find_parts
from rlhf_core.data.reading.rows import Row
from rlhf_core.data.reading.source_rows import FORMS, check_columns, renamed
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config.data import SourceConfig
    from rlhf_core.data.reading.forms import Form
    from rlhf_core.data.reading.results import Access, Role

MOST_LOOKED_AT = 100
_BY_WHAT_THEY_SAY: tuple[Role, ...] = ("preferences", "problems", "demonstrations", "prompts")


def possible_roles(source: SourceConfig, access: Access) -> list[Role]:
    """Return what a source's rows may be for, the role that says most first.

    They have a role's form if the first row of any form names the form's fields, and one of the first hundred has
    them all. What the fields hold is not looked at: a set that is wrong throughout is still of its role, and reading
    it says what is wrong. Nor are rows prompts of which a chosen or rejected response, a response or an answer is null
    throughout.

    Raises:
        DataError: if it cannot be read, or its rows are of no form of any role.
    """
    part = find_parts(source, access)[0]
    with closing(cast("Any", part.scan())) as scan:
        looked_at = list(islice(scan, MOST_LOOKED_AT))
    found = [row for row in looked_at if isinstance(row, Row)]
    if not found:
        raise DataError(looked_at[0].detail)
    check_columns(source.columns, (name for row in found for name in row.fields), part.name)
    rows = [renamed(row, source.columns) for row in found]
    forms = {role: _usable(role, source) for role in _BY_WHAT_THEY_SAY}
    every = [form for role in forms for form in forms[role]]
    first = next((row for row in rows if any(form.is_named_by(row.fields) for form in every)), None)
    if first is None:
        raise DataError(_formless(found[0]))
    named = {role: [form for form in forms[role] if form.is_named_by(first.fields)] for role in _BY_WHAT_THEY_SAY}
    whole = [role for role, those in named.items() if any(form.is_had_by(row.fields) for form in those for row in rows)]
    if whole != ["prompts"]:
        return whole or [role for role, those in named.items() if those]
    return [role for role in named if any(_is_null_throughout(form, rows) for form in named[role])] or whole


def _is_null_throughout(form: Form, rows: Sequence[Row]) -> bool:
    """Return whether no row has all fields that a form needs: more than not being meant for the form."""
    return not any(all(row.fields.get(name) is not None for name in form.needs) for row in rows)


def detect_role(source: SourceConfig, access: Access) -> Role:
    """Return what a source holds: of its possible roles the one that says most.

    Raises:
        DataError: as `possible_roles`.
    """
    return possible_roles(source, access)[0]


def _usable(role: Role, source: SourceConfig) -> Sequence[Form]:
    return [form for form in FORMS[role]() if set(source.columns) <= set(form.fields)]


def _formless(row: Row) -> str:
    return (
        f"{row.where} has neither 'question' and 'answer' (problems) nor 'chosen' and 'rejected' (preferences), "
        "nor 'messages', 'instruction' and 'output', or 'prompt' (demonstrations and prompts); it has "
        f"{', '.join(map(repr, row.fields)) or 'no fields'}; name its columns in a column map{wrapped_hint(row.fields)}"
    )
