"""Stop strings: found in the text while it is decoded token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes the first bytes of a character to


@dataclass(slots=True)
class _Text:
    """One response, as far as it is read."""

    ids: list[int] = field(default_factory=list)
    context: int = 0
    """Tokens from here on are decoded again, so that spaces between tokens come out right."""
    read: int = 0
    """Tokens before this one are in `tail`."""
    tail: str = ""
    """The end of the text, as long as a stop string may reach back."""


class StopStrings:
    """Watches the responses of one batch.

    A token's text depends on the token before it (spaces), and a character may be spread over several tokens:
    so tokens are decoded with those just before them, and stay unread until their characters are whole. The
    cost of a token does not grow with the response.

    Args:
        strings: texts that end a response.
        tokenizer: reads tokens, special ones too.
        rows: number of responses.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any, rows: int) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._reach = max(map(len, strings)) - 1
        self._texts = [_Text() for _ in range(rows)]

    def completed_by(self, row: int, token: int) -> bool:
        """Return whether this next token of a row completes a stop string."""
        text = self._texts[row]
        text.ids.append(token)
        before = self._decode(text.ids[text.context : text.read])
        new = self._decode(text.ids[text.context :])[len(before) :]
        found = any(string in text.tail + new for string in self._strings)
        if not new.endswith(UNFINISHED):
            text.tail = (text.tail + new)[-self._reach :] if self._reach else ""
            text.context, text.read = text.read, len(text.ids)
        return found

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def watch(strings: Sequence[str], tokenizer: Any, *, rows: int) -> StopStrings | None:
    """Return a watch for these stop strings; None if there are none.

    Raises:
        ConfigError: if there are some, and no tokenizer to read the text with.
    """
    if not strings:
        return None
    if tokenizer is None:
        raise ConfigError(
            "stop_strings need the text of the responses, and the engine has no tokenizer to read it with; "
            "give make_engine one"
        )
    return StopStrings(strings, tokenizer, rows)
