"""The forms that a row of each role may have, and which of them a file's rows are of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlhf_core.data.reading.rows import Row


class Form(NamedTuple):
    """One way to write a row."""

    name: str
    """What a file of such rows is called in facts."""
    needs: tuple[str, ...]
    """Fields without which a row is of another form."""
    may: tuple[str, ...]
    """Fields that are read where they are."""
    build: Callable[[Row], Any]
    """Makes a row of ours, or raises a RowError."""
    suits: Callable[[Mapping[str, Any]], bool] = lambda _: True
    """Whether a row that has the fields is meant for this: where the same field may hold two kinds of rows."""
    messages: tuple[str, ...] = ()
    """Which of the fields may hold messages: as a list, or as that list in JSON in a text."""

    @property
    def fields(self) -> tuple[str, ...]:
        """All that are read."""
        return self.needs + self.may

    def is_named_by(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the needed fields, be they null."""
        return all(name in row for name in self.needs)

    def is_had_by(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the needed fields, and is meant for this."""
        return all(row.get(name) is not None for name in self.needs) and self.suits(row)


def form_of(row: Mapping[str, Any], forms: Sequence[Form], columns: Iterable[str]) -> Form | None:
    """Return the first form all of whose fields a row has, and that reads all fields of a column map.

    A column that is null in this row still tells the form where nothing else does.
    """
    mapped = set(columns)
    usable = [form for form in forms if mapped <= set(form.fields)]
    whole = [form for form in usable if all(row.get(name) is not None for name in form.needs)]
    named = [form for form in usable if form.is_named_by(row)]
    return next(iter(whole + named), None)


def known_fields(forms: Sequence[Form]) -> list[str]:
    """Return the fields that any of the forms reads."""
    return list(dict.fromkeys(name for form in forms for name in form.fields))


def told(forms: Sequence[Form]) -> str:
    """Return the forms' fields for a sentence."""
    return " or ".join(dict.fromkeys("{" + ", ".join(form.needs) + "}" for form in forms))
