"""Pieces of markdown that hold whatever a model may have written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

SHOWN_LENGTH = 300
"""Characters of a text that are shown; of a longer one its beginning and its end."""
PICTURE_LINE = re.compile(r"^!\[([^\]]*)\]\(([^)]+)\)$", re.MULTILINE)
"""A line that is a picture and nothing else: what it shows, and where it is."""
_NEWLINE = re.compile(r"\r\n|\r|\n")


def code(text: str, limit: int = SHOWN_LENGTH) -> str:
    """Return text as a code span on one line, so that tags, stars and backticks are shown and have no effect.

    >>> code("a ` b"), code("one" + chr(10) + "two"), code("abcdefgh", limit=4)
    ('``a ` b``', '`one ⏎ two`', '`ab … 4 characters … gh`')
    """
    shown = _printable(_cut(text, limit))
    if not shown.strip():
        return "(empty)" if not text else "(blank)"
    longest = max((len(list(run)) for char, run in groupby(shown) if char == "`"), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def block(lines: Sequence[str]) -> str:
    """Return lines as a block of code, each as it is.

    >>> block(["a", "```"]).split(chr(10))
    ['````', 'a', '```', '````']
    """
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, *lines, fence])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; a pipe in a cell, in code or not, does not end it.

    Columns that are empty in every row are left out, unless no row is there.
    """
    kept = [at for at, _ in enumerate(header) if not rows or any(row[at] for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line[at].replace("|", "\\|") for at in kept) + " |" for line in lines)


def picture(alt: str, name: str) -> str:
    """Return a picture, to stand on a line of its own."""
    return f"![{alt}]({name})"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit - limit // 2]} … {len(text) - limit} characters … {text[-(limit // 2) :]}"


def _printable(text: str) -> str:
    """Return text on one line, with what cannot be seen written out."""
    flat = _NEWLINE.sub(" ⏎ ", text)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode() for char in flat
    )
