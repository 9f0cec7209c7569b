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
    """Yield the rows of which a response stops in mid-sentence, in a set whose responses end as sentences do."""
    longer = [text for row in given.rows for text in row.responses if text.count(" ") >= _LONGER - 1]
    if sum(1 for text in longer if _ENDS.search(text)) < MOSTLY * len(longer):
        return
    for place, row in enumerate(given.rows):
        for name, response in row.named_responses():
            if stops_early(response):
                yield Accused(place, f"{name} ends with {quoted(response[-60:])}")
                break


def stops_early(text: str) -> bool:
    """Return whether a text stops in mid-sentence, as far as its last line and what comes before tell.

    Example:
        >>> stops_early("It depends. I would"), stops_early("I would like a"), stops_early("See you")
        (True, True, False)
    """
    text = text.rstrip()
    words = text.count(" ") + 1
    if not text or words <= 2 or _ENDS.search(text):  # noqa: PLR2004 - a word or two need no full stop
        return False
    if _OPEN.search(text):
        return True
    last = _LAST.search(text)
    if last is None or _LINK.search(text) or _ITEM.match(text.rpartition("\n")[2]):
        return False
    if last[0].casefold().replace("’", "'") in _NEVER_LAST:
        return True
    return _SENTENCE_BEFORE.search(text) is not None or (words >= _LONGER and text[0].isupper())
