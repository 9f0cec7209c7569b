"""Responses that say nothing, or stop before their end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlhf_core.data.linting.findings import Accused, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.data.linting.rows import LintSet

_NOTHING = re.compile(r"[\s.,;:!?…\-_*\"'“”‘’()\[\]|]+")


def empty(given: LintSet) -> Iterator[Accused]:
    """Yield the rows of which a response is punctuation alone."""
    for place, row in enumerate(given.rows):
        for name, response in row.named_responses():
            if not response or _NOTHING.fullmatch(response):
                yield Accused(place, f"{name} is {quoted(response)}")
                break


MOSTLY = 0.8
"""Share of a set's longer responses that must end as sentences do, so that the others are taken for cut."""
_LONGER = 8
"""Words of a response that is long enough to be a sentence."""
_TAIL = 80
"""Characters that tell how a text ends."""
_LONE = 12
"""Words of a lone sentence that is too long to lack its full stop by habit."""
_ENDS = re.compile(r"[.!?…。！？؟।][\"'”’»)\]}*_~]*\s*$|[\"”»)\]}>*`|~]\s*$")
_OPEN = re.compile(r"[,;:(\[“\-–—]\s*$")
_SENTENCE_BEFORE = re.compile(r"[.!?][\"'”’)]*\s")
_ITEM = re.compile(r"\s*(?:[-*•>|]|\d+[.)])\s")
_LINK = re.compile(r"(?:https?://|www\.|\S+@)\S+$")
_LAST = re.compile(r"[^\W_]+(?:['’][^\W_]+)?$")
_JOINING = (
    "a an the and or but nor if of in to with from for by at as than that which who whose whom where when while "
    "because is are was were be been am has have had will would can could should may might must do does did not "
    "very really my your his her its our their these those this some any such into onto about between through "
    "during i we they he she i'm you're we're they're it's i'd you'd i'll you'll don't doesn't can't won't also "
    "so"
)
_NEVER_LAST = frozenset(_JOINING.split())
"""Words that end no English sentence, or seldom."""


def cut(given: LintSet) -> Iterator[Accused]:
    """Yield the rows of which a response stops in mid-sentence, in a set whose responses end as sentences do.

    Where both responses lack a full stop and nothing else, that is how their row is written.
    """
    longer = [text for row in given.rows for text in row.responses if text.count(" ") >= _LONGER - 1]
    if sum(1 for text in longer if _ENDS.search(text[-_TAIL:])) < MOSTLY * len(longer):
        return
    for place, row in enumerate(given.rows):
        bare = [ends_bare(response) for response in row.responses]
        for (name, response), is_bare in zip(row.named_responses(), bare, strict=True):
            if ends_open(response) or (is_bare and (len(bare) == 1 or not all(bare))):
                yield Accused(place, f"{name} ends with {quoted(response[-60:])}")
                break


def ends_open(text: str) -> bool:
    """Return whether a text ends with a sign or a word that joins what follows.

    Example:
        >>> ends_open("I would like a"), ends_open("Here is what you ask for:"), ends_open("It is.")
        (True, True, False)
    """
    text = text.rstrip()[-_TAIL:]
    if text.count(" ") < 2:  # noqa: PLR2004 - a word or two are no sentence
        return False
    last = _LAST.search(text)
    joins = last is not None and last[0].casefold().replace("’", "'") in _NEVER_LAST
    return joins or _OPEN.search(text) is not None


def ends_bare(text: str) -> bool:
    """Return whether a text lacks the full stop that its earlier sentences have, or that a long sentence has.

    Example:
        >>> ends_bare("It depends. I know it"), ends_bare("It depends. I know it."), ends_bare("See you")
        (True, False, False)
    """
    text = text.rstrip()
    if not _LAST.search(text[-_TAIL:]) or _LINK.search(text[-_TAIL:]):
        return False
    *before, line = text.splitlines() or [""]
    above = next((each for each in reversed(before) if each.strip()), ".")
    if _ITEM.match(line) or not (_ENDS.search(above[-_TAIL:]) or _OPEN.search(above[-_TAIL:])):
        return False
    alone = _SENTENCE_BEFORE.search(text) is None
    return not alone or (text.count(" ") >= _LONE - 1 and text[0].isupper())
