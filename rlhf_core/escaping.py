"""The one place where text that somebody else wrote becomes harmless to show: a model's, a row's, a file's.

Shown, it is obeyed by nobody: on a terminal no character of it moves a cursor or turns the line around; in markdown it
is no picture, link, tag or further cell, whichever renderer reads it. Those differ in character references, in links
that they find in plain words, and in backslashes before a pipe within code. So what a person is to read as it is
stands in code, never behind references; and a cell holds no pipe at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from unicodedata import category

SHOWN_LENGTH = 300
"""Characters of a text that are shown; of a longer one its beginning and its end."""
PICTURE_LINE = re.compile(r"^!\[([^\]]*)\]\(([^)]+)\)$", re.MULTILINE)
"""A line that is a picture and nothing else: what it shows, and where it is."""
_NEWLINE = re.compile(r"\r\n|\r|\n")
_NEWLINES = re.compile(r"(?:\r\n|\r|\n)+")
_JOINERS = "\u200c\u200d"
"""They change the shape of letters in scripts of Asia, and make one emoji of several."""
_EMOJI = ("\U0001f000", "\U0001fbff")
"""Blocks that grow with every version of Unicode: Python's tables do not know the youngest of them."""
_PIPE_ALIKE = "│"
_ACTIVE = re.compile(r"[\\`*_\[\]<>&~]|^[#+\-=]|^\d+(?=[.)](?:\s|$))")
_LINK = re.compile(r"://|www\.|mailto:|xmpp:|@[\w-]+\.", re.IGNORECASE)
"""What a renderer makes a link of although nothing marks it as one."""


def visible(text: str) -> str:
    r"""Return text with what a terminal obeys, or nobody sees, written out; its lines, spaces and words as they are.

    >>> visible("ring \a, clear \x1b[2J, turn \u202e" + chr(10) + "naïve 数学　👩‍🔬")
    'ring \\x07, clear \\x1b[2J, turn \\u202e\nnaïve 数学\u3000👩\u200d🔬'
    """
    if text.isprintable():
        return text
    return "\n".join(map(_written_out, _NEWLINE.split(text.expandtabs())))


def one_line(text: str, limit: int | None = None) -> str:
    r"""Return visible text on one line, ⏎ for each line's end.

    >>> one_line("one\r\n\n\ttwo"), one_line("abcdefgh", limit=4)
    ('one ⏎⏎ \\ttwo', 'ab … 4 characters … gh')
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit - limit // 2]} … {len(text) - limit} characters … {text[-(limit // 2) :]}"
    return _written_out(_NEWLINES.sub(lambda ends: f" {'⏎' * len(_NEWLINE.findall(ends[0]))} ", text))


def prose(text: str, limit: int = SHOWN_LENGTH) -> str:
    r"""Return a name or a few words of markdown that read as they are; in code where a renderer would link them.

    >>> prose("a *b* [c](d)"), prose("see https://e.org")
    ('a \\*b\\* \\[c\\](d)', '`see https://e.org`')
    """
    shown = one_line(text.strip(), limit)
    if _LINK.search(shown):
        return code(text, limit)
    return _ACTIVE.sub(lambda active: f"\\{active[0]}" if not active[0].isdigit() else f"{active[0]}\\", shown)


def code(text: str, limit: int = SHOWN_LENGTH) -> str:
    """Return text as a code span on one line, so that tags, stars and backticks are shown and have no effect.

    >>> code("a ` b"), code("one" + chr(10) + "two"), code("abcdefgh", limit=4)
    ('``a ` b``', '`one ⏎ two`', '`ab … 4 characters … gh`')
    """
    shown = one_line(text, limit)
    if not shown.strip():
        return "(blank)" if text else "(empty)"
    fence = "`" * (_longest_run_of_backticks([shown]) + 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def block(lines: Iterable[str]) -> str:
    """Return lines as a block of code.

    >>> block(["a", "```"]).split(chr(10))
    ['````', 'a', '```', '````']
    """
    shown = [one_line(line) for line in lines]
    fence = "`" * max(3, _longest_run_of_backticks(shown) + 1)
    return "\n".join([fence, *shown, fence])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return a table of cells, each of them markdown; a pipe in one is shown as │, which ends no cell.

    A backslash before a pipe keeps it in its cell for some renderers and not for others.
    Columns that are empty in every row are left out, unless no row is there.

    >>> table(["norm"], [[code(r"\|x\|")]]).splitlines()[-1]
    '| `\\│x\\│` |'
    """
    rows = list(rows)
    kept = [at for at, _ in enumerate(header) if not rows or any(row[at] for row in rows)]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(line[at]) for at in kept) + " |" for line in lines)


def picture(alt: str, name: str) -> str:
    """Return a picture, to stand on a line of its own."""
    return f"![{alt}]({name})"


def _cell(markdown: str) -> str:
    return one_line(markdown).replace("|", _PIPE_ALIKE)


def _longest_run_of_backticks(lines: Iterable[str]) -> int:
    return max((len(run) for line in lines for run in re.findall("`+", line)), default=0)


def _written_out(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        char if _is_seen(char, before) else char.encode("unicode_escape", "backslashreplace").decode()
        for before, char in zip(f" {line}", line, strict=False)
    )


def _is_seen(char: str, before: str) -> bool:
    """Whether a character shows, as a space does, or shows in the letter or emoji before it."""
    if char in _JOINERS:
        return before > "\x7f" and before.isprintable()
    return char.isprintable() or category(char) == "Zs" or _EMOJI[0] <= char <= _EMOJI[1]
