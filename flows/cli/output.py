"""How verbs print: for people, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from rich.console import Console

Flag = Annotated[bool, Parameter(negative="")]
Json = Annotated[bool, Parameter(name="--json", negative="")]
PIPE_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """Return a console; without a terminal it is wide, so that references are not cut."""
    from rich.console import Console

    found = Console(highlight=False, stderr=stderr)
    return found if found.is_terminal else Console(highlight=False, stderr=stderr, width=PIPE_WIDTH)


def write_json(content: Any) -> None:
    """Print plain values as JSON."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def write_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, however wide the terminal is."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def print_rows(where: Console, rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells under each other, brackets as they are."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    with where.capture() as drawn:
        where.print(table)
    where.file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().removesuffix("\n").split("\n")))


def when(moment: datetime) -> str:
    """Return a time as people of several places read it."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def size(count: float) -> str:
    """Return a number of bytes as people read it."""
    thousand = 1000
    for unit in ("B", "kB", "MB", "GB"):
        if count < thousand:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= thousand
    return f"{count:.1f} TB"
