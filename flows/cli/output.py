"""How verbs print: for people, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from rlhf_core.escaping import one_line

if TYPE_CHECKING:
    from rich.console import Console

Flag = Annotated[bool, Parameter(negative="")]
Json = Annotated[bool, Parameter(name="--json", negative="")]
PIPE_WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """Return a console; without a terminal it is wide, so that references are not cut, nor lines of a log file."""
    from flows.cli.screen import Screen

    found = Screen(stderr=stderr)
    return found if found.is_terminal else Screen(stderr=stderr, width=PIPE_WIDTH)


def write_json(content: Any) -> None:
    """Print plain values as JSON."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")


def write_lines(lines: Iterable[str]) -> None:
    """Print lines, however wide the terminal is."""
    sys.stdout.write("".join(f"{one_line(line)}\n" for line in lines))


def print_rows(where: Console, rows: Iterable[Sequence[str]]) -> None:
    """Print rows of cells under each other."""
    from rich.table import Table

    lines = list(rows)
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(max(map(len, lines), default=0)):
        table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    with where.capture() as drawn:
        where.print(table)
    where.file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().removesuffix("\n").split("\n")))


def when(moment: datetime) -> str:
    """Return a time as people of several places read it."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
