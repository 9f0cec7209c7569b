"""What a linter has to say of a set: a rule, the rows that it accuses, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.counting import counted
from rlhf_core.escaping import one_line

if TYPE_CHECKING:
    from rlhf_core.config.lint import RowAction

MOST_NAMED = 1000
"""Accused rows that a stored report names; the others are counted."""
_QUOTED = 80
"""Characters of a text that a sentence quotes."""


class Accused(NamedTuple):
    """A row that seems to have a fault."""

    place: int
    """Of the row in its set, from 0."""
    detail: str
    """What is seen in it; what is quoted of the row is one visible line."""


@dataclass(frozen=True)
class Finding:
    """What one rule found in one set."""

    rule: str
    role: str
    """The set's key of the configuration."""
    action: RowAction
    says: str
    """What is wrong, in a sentence without its subject for rows, and with it for a set."""
    advice: str
    """What to do about it."""
    of: int
    """Rows of the set."""
    accused: tuple[Accused, ...]
    """In the order of the set; empty where the set as a whole is meant."""
    named: tuple[str, ...]
    """Where the accused rows are, such as "row 3 of pairs.jsonl"."""

    @property
    def sentence(self) -> str:
        """What is wrong, with figures, and where it is first seen."""
        if not self.accused:
            return self.says
        share = f"{len(self.accused):,} of {counted(self.of, 'row')}"
        return f"{share} of data.{self.role} {self.says}; first {self.example}"

    @property
    def example(self) -> str:
        """The first accused row, and what is seen in it; empty for a set."""
        return f"{self.named[0]}: {self.accused[0].detail}" if self.accused else ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, with so many of its rows as a report names."""
        return {
            "rule": self.rule,
            "role": self.role,
            "action": self.action,
            "says": self.says,
            "advice": self.advice,
            "rows": len(self.accused),
            "of": self.of,
            "sentence": self.sentence,
            "accused": [
                {"where": where, "detail": each.detail}
                for where, each in list(zip(self.named, self.accused, strict=True))[:MOST_NAMED]
            ],
        }


def quoted(text: str) -> str:
    """Return the beginning of somebody else's text for a sentence: one line, and nothing in it that is obeyed."""
    return f"'{one_line(text.strip(), _QUOTED)}'"
