"""Chat messages: their roles as anyone writes them, and what of a conversation is prompt or response."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.json_rows import json_value
from rlhf_core.data.reading.rows import RowError
from rlhf_core.data.transcripts import Message, continuation, transcript
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.data.reading.rows import Row

_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "system": "system",
}
UNUSABLE = "unusable messages"
_BEGINS_AS_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")


def read_messages(value: Any, where: str, name: str = "messages") -> tuple[Message, ...]:
    """Return messages with the roles user, assistant and system.

    Args:
        value: of the field: a list of {"role" or "from", "content" or "value"}, or that list as JSON, as CSV has it.
        where: names the row in an error.
        name: of the field.

    Raises:
        RowError: if it is something else.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json_value(value, f"{where}: {name!r}")
    if not isinstance(value, list) or not value:
        raise RowError(f"{where}: {name!r} must be a list of at least one message", UNUSABLE)
    return tuple(_message(message, where) for message in value)


def _message(message: Any, where: str) -> Message:
    role = message.get("role") or message.get("from") if isinstance(message, dict) else None
    content = message.get("content", message.get("value")) if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES or not isinstance(content, str):
        raise RowError(
            f"{where}: a message must have 'role' (or 'from': {', '.join(_ROLES)}) and a string 'content', "
            f"but is {message!r:.80}",
            UNUSABLE,
        )
    return {"role": _ROLES[role], "content": content}


def ends_with_assistant(row: Mapping[str, Any]) -> bool:
    """Return whether a row's messages end with a response; True where they cannot be read."""
    try:
        return read_messages(row.get("messages"), "the row")[-1]["role"] == "assistant"
    except RowError:
        return True


def prompt_of(messages: Sequence[Message], where: str) -> str:
    """Return messages that await the assistant as a prompt.

    Raises:
        RowError: if they do not, or cannot be told as a transcript.
    """
    try:
        return transcript(messages)
    except DataError as error:
        raise RowError(f"{where}: {error}", UNUSABLE) from error


def response_of(messages: Sequence[Message], where: str) -> str:
    """Return the assistant's message as a response; further turns follow it as a transcript has them.

    Raises:
        RowError: if the messages do not begin and end with the assistant's.
    """
    try:
        return continuation(messages)
    except DataError as error:
        raise RowError(f"{where}: {error}", UNUSABLE) from error


def with_messages(row: Row, names: Iterable[str]) -> Row:
    """Return a row with lists of messages where texts are such lists in JSON, as CSV has them.

    A text is one if its elements are objects with a role, the first of them with a role that we know: `[1, 2]` and
    `["a"]` are texts, and so is whatever goes on behind the list. The texts of a task's record are taken to the letter.

    Args:
        row: as the file has it.
        names: fields that may hold messages.

    Raises:
        RowError: if a text begins as messages do, and is not JSON.
    """
    if "entry" in names and row.fields.get("entry") is not None:
        return row
    lists = {name: _listed(row.fields.get(name), f"{row.where}: {name!r}") for name in names}
    return row._replace(fields=row.fields | {name: found for name, found in lists.items() if found is not None})


def _listed(text: Any, where: str) -> list[Any] | None:
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return None
    try:
        found: list[Any] = json_value(text, f"{where}, which begins as messages do,")
    except RowError as error:
        if _BEGINS_AS_MESSAGES.match(text) and getattr(error.__cause__, "msg", "") != "Extra data":
            raise
        return None
    roles = [isinstance(message, dict) and (message.get("role") or message.get("from")) for message in found]
    return found if roles and all(roles) and isinstance(roles[0], str) and roles[0] in _ROLES else None
