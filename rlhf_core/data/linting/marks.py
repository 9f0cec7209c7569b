"""Characters that do not belong into a text: another template's marks, markup that acts, bytes decoded wrongly."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlhf_core.data.linting.findings import Accused, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rlhf_core.data.linting.rows import LintSet

_TEMPLATE = re.compile(
    r"<\|[\w/ -]{1,40}\|>|<｜[^｜>\n]{1,40}｜>|\[/?INST\]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>"
    r"|^\#{2,3} ?(?:Instruction|Response|Input|Human|Assistant|User)\b:?",
    re.MULTILINE,
)
_MARKUP = re.compile(
    r"<\s*/?\s*(?:script|iframe|object|embed|form|meta|link|base|svg|style)\b[^<]{0,200}"
    r"|<[a-z][^<>]{0,200}\son[a-z]{3,20}\s*=\s*[^<>]{0,100}"
    r"|<img\b[^<>]{0,200}\bsrc\s*=\s*[\"']?\s*(?:https?:)?//[^<>]{0,100}"
    r"|!\[[^\]\n]{0,200}\]\(\s*(?:https?:)?//[^)\n]{0,100}",
    re.IGNORECASE,
)
_SCRIPT_LINK = re.compile(r"\b(?:java|vb)script\s*:\s*\S[^\s<>]{0,100}|\bdata:text/html\b[^\s<>]{0,100}", re.IGNORECASE)
_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u200b-\u200d\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
    "\U000e0000-\U000e007f]+"
)
_JOINERS = "\u200c\u200d\ufeff"
"""Letters of many scripts, and emoji, need them; between two of ASCII they hide something."""
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]+`", re.DOTALL)


def template(given: LintSet) -> Iterator[Accused]:
    """Yield the rows that hold the marks of a chat template, which a model's own template would write again."""
    return _searched(given, lambda text: _TEMPLATE.search(text) if _may_mark(text) else None, "the mark")


def _may_mark(text: str) -> bool:
    return "<" in text or "[" in text or "##" in text


def markup(given: LintSet) -> Iterator[Accused]:
    """Yield the rows that hold scripts or remote pictures outside of code, or characters that nobody sees."""
    return _searched(given, _acting, "the markup")


def _acting(text: str) -> re.Match[str] | None:
    unseen = next((found for found in _UNSEEN.finditer(text) if _hides(found)), None)
    if unseen is not None:
        return unseen
    shown = _CODE.sub("", text) if "`" in text else text
    found = _MARKUP.search(shown) if "<" in shown or "](" in shown else None
    return found or (_SCRIPT_LINK.search(shown) if ":" in shown and _names_script(shown) else None)


def _hides(found: re.Match[str]) -> bool:
    around = found.string[max(0, found.start() - 1) : found.start()] + found.string[found.end() : found.end() + 1]
    return found[0].strip(_JOINERS) != "" or around.isascii()


def _names_script(text: str) -> bool:
    folded = text.casefold()
    return "script" in folded or "data:text" in folded


_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]{2,}")


def encoding(given: LintSet) -> Iterator[Accused]:
    """Yield the rows that were decoded wrongly: their characters, taken as bytes, are UTF-8."""
    return _searched(given, wrongly_decoded, "the characters")


def wrongly_decoded(text: str) -> re.Match[str] | None:
    """Return the first characters that are UTF-8 read as Windows-1252 or Latin-1, or that stand for lost ones.

    Example:
        >>> wrongly_decoded("donâ€™t")[0], wrongly_decoded("naïve “été”")
        ('â€™', None)
    """
    if text.isascii():
        return None
    if "\ufffd" in text:
        return re.search("\ufffd+", text)
    return next((found for found in _BEYOND_ASCII.finditer(text) if _is_utf8(found[0])), None)


def _is_utf8(text: str) -> bool:
    try:
        b"".join(_byte(char) for char in text).decode("utf-8")
    except UnicodeError:
        return False
    return True


def _byte(char: str) -> bytes:
    """Return the byte that is read as a character; its Latin-1 byte where Windows-1252 has none."""
    try:
        return char.encode("cp1252")
    except UnicodeEncodeError:
        return char.encode("latin-1")


def _searched(given: LintSet, search: Callable[[str], re.Match[str] | None], what: str) -> Iterator[Accused]:
    for place, row in enumerate(given.rows):
        for name, text in row.texts():
            found = search(text)
            if found is not None:
                yield Accused(place, f"{name} holds {what} {quoted(found[0])}")
                break
